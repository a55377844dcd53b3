"""One iteration of a run through the project's own programs: sample, insert, update; no rewards pool, no metrics.

Owns: the one place where benchmarks touch the project's seams (run, Generator, Learner). Does not know: clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.config import Config, MeshConfig
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import EncodedExample, batch_of
from jaxrl_llm.run import Run, assemble
from jaxrl_llm.runtime import rng, sharding
from jaxrl_llm.runtime.executables import keep_what_fits
from jaxrl_llm.runtime.programs import compile_all, memory_limit, release_freed
from jaxrl_llm.types import Example, Rewards, Rollout, ScoredRollouts

# (name, compiled program) -> the callable that replaces the program
Wrap = Callable[[str, Any], Any]
# Policy version of random rollouts. The learner compares log-probs of rollouts with its own versions, and skips these.
NO_POLICY = 2**30


def _unwrapped(name: str, program: Any) -> Any:
    return program


def one_device() -> jax.sharding.Mesh:
    """Return the mesh of every benchmark, which is the first device."""
    return sharding.make_mesh(MeshConfig(), jax.devices()[:1])


def random_params(model: Model, mesh: jax.sharding.Mesh) -> Any:
    """Return the float32 weights of an untrained model."""
    return model.init(jax.random.key(0), mesh)


def random_prompts(config: Config, arch: Architecture) -> list[EncodedExample]:
    """Return the prompts of an iteration, each with ``prompts.max_tokens`` random token ids."""
    draw = np.random.default_rng(0)
    shape = (config.rollout.prompts_per_iteration, config.prompts.max_tokens)
    rows = draw.integers(0, arch.vocab_size, shape, dtype=np.int32)
    return [EncodedExample(Example("", {}), row, len(row)) for row in rows]


class Iteration:
    """A compiled run with weights.

    The run uses one device. No token ends a completion, so each has ``sampling.max_completion_tokens`` tokens.

    Args:
        load_params: (model, mesh) -> float32 parameters.
        encoded: the questions of every iteration, ``rollout.prompts_per_iteration`` in number.
        wrap: wraps each compiled program, for instance to time it.
        sampler: whether to compile the sampler, which ``generate`` needs.
        learner: whether to compile the learner, which ``update`` needs.
    """

    def __init__(
        self,
        config: Config,
        arch: Architecture,
        load_params: Callable[[Model, jax.sharding.Mesh], Any],
        encoded: Sequence[EncodedExample],
        *,
        wrap: Wrap = _unwrapped,
        sampler: bool = True,
        learner: bool = True,
    ):
        self.config = config
        self.encoded = encoded
        self.mesh = one_device()
        self.run: Run = assemble(config, arch, (), self.mesh)
        self.programs: Mapping[str, Any] = self._compiled(wrap, sampler, learner)
        self.sample_key = self.put(rng.stream(0, "sample"))
        self.generator = Generator(self.run.sampler, self.programs, lambda ids: "") if sampler else None
        params = load_params(self.run.model, self.mesh)
        self.index = 0
        if learner:
            reference = jax.tree.map(jnp.copy, params) if self.run.learner.loads_reference else None
            self.learner = Learner(self.run.learner, self.programs, Ledger(), reference=reference)
            self.learner.start(params)
        else:
            self.sampler_params = self.programs["publish"](params)

    def _compiled(self, wrap: Wrap, sampler: bool, learner: bool) -> dict[str, Any]:
        """Return the wrapped compiled programs of the parts of the run that are used."""
        programs = self.run.learner.programs()
        if not learner:
            programs = {"publish": programs["publish"]}
        if sampler:
            programs = programs | self.run.sampler.programs(self.run.sampler_params)
        compiled = compile_all(programs, self.mesh)
        if learner:
            compiled = keep_what_fits(self.run, compiled, memory_limit(self.mesh))
        return {name: wrap(name, program) for name, program in compiled.items()}

    def put(self, tree: Any) -> Any:
        """Put arrays on every device of the mesh."""
        return jax.device_put(tree, sharding.replicated(self.mesh, tree))

    def generate(self) -> tuple[Rollout, list[FinishedGroup]]:
        """Return the completions of every question, on the device, and their groups. Wait for the last token."""
        if hasattr(self, "learner"):
            params = self.learner.publish()
            version = self.learner.version
        else:
            params = self.sampler_params
            version = self.put(np.int32(0))
        wanted = self.generator.prompts_wanted()
        prompts = batch_of(self.encoded[:wanted], range(self.index * wanted, (self.index + 1) * wanted))
        groups = self.generator.generate(params, prompts, version=version, key=self.sample_key)
        del params
        release_freed()
        return self.generator.take(), groups

    def random_rollout(self, *, ragged: bool = False) -> Rollout:
        """Return rows with random tokens, in the form of ``generate``.

        Args:
            ragged: whether lengths are random, with at least 4 tokens. By default, all rows have full length.
        """
        shapes = self.run.learner.abstract_rollout
        rows = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        draw = np.random.default_rng(0)
        rows = rows.replace(
            tokens=draw.integers(0, self.run.model.arch.vocab_size, rows.tokens.shape, dtype=np.int32),
            policy_version=rows.policy_version + NO_POLICY,
            prompt_length=rows.prompt_length + self.config.prompts.max_tokens,
            length=rows.length + self.config.row_tokens,
        )
        if ragged:
            longest = self.config.prompts.max_tokens
            group = self.config.rollout.group_size
            prompt = draw.integers(longest // 2, longest + 1, len(rows.length) // group, dtype=np.int32)
            own = draw.integers(
                4,
                self.config.sampling.max_completion_tokens + 1,
                len(rows.length),
                dtype=np.int32,
            )
            prompt = np.repeat(prompt, group)
            rows = rows.replace(prompt_length=prompt, length=prompt + own)
        return jax.device_put(rows, jax.tree.map(lambda x: x.sharding, shapes))

    def update(self, rollout: Rollout, rewards: np.ndarray) -> dict[str, Any]:
        """Insert rows, take ``updates_per_iteration`` optimizer steps, and return the sums of both.

        The method returns when the steps have ended.
        """
        scored = Rewards(rewards.astype(np.float32), {}, np.zeros(len(rewards), np.int8))
        questions = list(range(len(rewards) // self.config.rollout.group_size))
        sums, _ = self.learner.learn(ScoredRollouts(rollout, scored, questions), self.index)
        self.index += 1
        return sums
