"""Measure the cost of an environment's answers in the generation of completions with several turns.

    python -m benchmarks.answers                  # 13 M parameters, answers of 8, 32 and 96 tokens
    python -m benchmarks.answers --size tiny      # takes seconds

One token in 16 ends a turn of the policy. The environment answers each turn without delay until the completion is full.
The command prints medians over the rounds: the seconds and CPU seconds of a generation, and the number of chunks of
decode steps. In each round, the lengths of answers take turns.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
import types
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import families, results
from benchmarks.iteration import one_device, random_params
from benchmarks.results import Figure
from jaxrl_llm.actor.episodes import Conversations
from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, EnvironmentsConfig, SamplingConfig
from jaxrl_llm.conversations.environment import Reply
from jaxrl_llm.learner import publish
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import rng
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.types import Example, PromptBatch

ANSWERS = (8, 32, 96)  # tokens of an answer
TURN = 16  # mean tokens of a turn of the policy
TURNS = 4  # turns that fit into a completion
SLOTS = {"medium": 16, "tiny": 4}
CHUNK = 8  # decode steps


class Parrot:
    """An environment in this process whose answers have a fixed number of tokens."""

    role = "user"
    has_reward = False
    is_shown = False

    def __init__(self, num_tokens: int):
        self._answer = [1 + i % 7 for i in range(num_tokens)]

    def begin(self) -> int:
        return 0

    def ask(self, *_) -> Future[Reply]:
        reply: Future[Reply] = Future()
        reply.set_result(Reply(self._answer))
        return reply

    def forget(self, episode: int) -> None:
        pass


class Contender:
    """Generation with answers of ``answer`` tokens."""

    def __init__(self, size_name: str, answer: int):
        size = families.SIZES[size_name]
        mesh = one_device()
        arch = families.family("llama", size)
        ends = tuple(range(0, arch.vocab_size, TURN))
        self._sampler = Sampler(
            Model(arch),
            mesh,
            SamplingConfig(max_completion_tokens=TURNS * (TURN + answer)),
            eos_ids=ends,
            num_prompts=2 * size.prompts,
            group_size=size.group,
            max_prompt_tokens=size.prompt,
            num_slots=SLOTS[size_name],
            chunk_steps=CHUNK,
            answer_tokens=answer,
        )
        self._run = compile_all(
            self._sampler.programs(publish.abstract_params(self._sampler.model, mesh)),
            mesh,
        )
        self._params = publish.sampler_form(random_params(self._sampler.model, mesh), arch)
        limits = EnvironmentsConfig(factory="here", max_turns=1000, max_answer_tokens=answer)
        config = dataclasses.replace(Config(), environments=limits, sampling=self._sampler.sampling)
        tokenizer = types.SimpleNamespace(decode=lambda ids: "", vocab_size=arch.vocab_size)
        self._conversations = Conversations(Parrot(answer), tokenizer, config)
        self._num_chunks = 0
        ids = np.random.default_rng(0).integers(0, arch.vocab_size, (2 * size.prompts, size.prompt), dtype=np.int32)
        numbers = np.arange(len(ids), dtype=np.int32)
        self._prompts = PromptBatch(
            ids,
            np.full(len(ids), size.prompt, np.int32),
            numbers,
            (Example("", {}),) * len(ids),
        )
        self.round()

    def _decode(self, *args):
        self._num_chunks += 1
        return self._run["decode"](*args)

    def round(self) -> tuple[float, float, int]:
        """Generate once. Return the seconds, the CPU seconds and the number of chunks."""
        generator = Generator(
            self._sampler,
            dict(self._run, decode=self._decode),
            lambda ids: "",
            conversations=self._conversations,
        )
        self._num_chunks = 0
        cpu_start = time.process_time()
        start = time.perf_counter()
        generator.generate(
            self._params,
            self._prompts,
            version=jnp.int32(0),
            key=rng.stream(0, "sample"),
        )
        rows = jax.block_until_ready(generator.take())
        num_drawn = (rows.policy_version >= 0).sum()
        num_tokens = (rows.length - rows.prompt_length).sum()
        self.share_drawn = float(num_drawn / num_tokens)
        return time.perf_counter() - start, time.process_time() - cpu_start, self._num_chunks


def measure(size: str, answers: list[int], rounds: int) -> list[Figure]:
    """Return the median figures of each length of answers."""
    contenders = {answer: Contender(size, answer) for answer in answers}
    measured: dict[int, list[tuple[float, float, int]]] = {answer: [] for answer in contenders}
    for _ in range(rounds):
        for answer, contender in contenders.items():
            measured[answer].append(contender.round())
    figures = []
    for answer, contender in contenders.items():
        seconds, cpu_seconds, chunks = zip(*measured[answer], strict=True)
        figures.append(Figure(f"{answer}/s", statistics.median(seconds), "s", "less"))
        figures.append(Figure(f"{answer}/cpu_s", statistics.median(cpu_seconds), "s", "less"))
        figures.append(Figure(f"{answer}/chunks", statistics.median(chunks), "", "less"))
        figures.append(Figure(f"{answer}/share_drawn", contender.share_drawn, ""))
    return figures


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.answers", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SLOTS, default="medium")
    parser.add_argument("--rounds", type=results.at_least(1), default=5)
    parser.add_argument(
        "--answers",
        nargs="+",
        type=results.at_least(1),
        default=ANSWERS,
        help="tokens of an answer",
    )
    options = parser.parse_args(arguments)
    for figure in measure(options.size, options.answers, options.rounds):
        print(f"{figure.name:20} {figure.value:10.3f} {figure.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
