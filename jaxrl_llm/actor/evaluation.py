"""Evaluation on held-out questions: pass@1, pass@k, majority vote and completion length.

Owns: the estimators, the sampler and the questions of an evaluation. Does not know: training.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import limits
from jaxrl_llm.actor import stop_strings
from jaxrl_llm.actor.episodes import Conversations
from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, PromptsConfig
from jaxrl_llm.conversations import environment
from jaxrl_llm.conversations.agents import prompt_shown
from jaxrl_llm.conversations.environment import Environment
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.questions import stream as prompts_lib
from jaxrl_llm.questions import tasks
from jaxrl_llm.reports.metric_table import evaluation_values
from jaxrl_llm.runtime import hosts, json_lines, rng, sharding
from jaxrl_llm.scoring.answers import vote
from jaxrl_llm.scoring.rewards import RewardPool
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, Example, PromptBatch

# Sources whose columns can hold data for the environment that the prompt does not show, such as the word of Wordle.
HIDING = ("jsonl", "parquet", "maze")
OF_PROGRAMS = ("code", "grids", "kolmogorov")  # sources whose answers are programs


def pass_at_k(num_samples: int, num_passes: int, k: int) -> float:
    """Return the probability that at least one of k samples passes. The k samples are drawn without replacement.

    n is ``num_samples``, the number of samples to draw from. c is ``num_passes``, the number of samples that pass.

        1 - C(n-c, k) / C(n, k)

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    return 1.0 - math.comb(num_samples - num_passes, k) / math.comb(num_samples, k)


def majority_passes(completions: list[str], passes: list[bool], *, are_programs: bool = False) -> bool:
    """Return whether the most frequent answer passes; the earliest wins a tie.

    The first completion with that answer decides whether it passes. ``answers.vote`` decides which answers are equal.
    Two programs are equal if their texts are equal.
    """
    answers = [text.strip() if are_programs else vote(text) for text in completions]
    winner = collections.Counter(answers).most_common(1)[0][0]
    return passes[answers.index(winner)]


def filled_batches(rows: Sequence[prompts_lib.EncodedExample], size: int) -> Iterator[PromptBatch]:
    """Yield all rows in order, ``size`` per batch, with ids from 0. The last row pads the last batch."""
    for start in range(0, len(rows), size):
        ids = range(start, start + size)
        filled = [rows[min(i, len(rows) - 1)] for i in ids]
        yield prompts_lib.batch_of(filled, ids)


def evaluate(
    generator: Generator,
    params: Any,
    held_out: list[prompts_lib.EncodedExample],
    pool: RewardPool,
    decode: Callable[[list[int]], str],
    *,
    version: jax.Array,
    key: jax.Array,
    threshold: float,
    are_programs: bool = False,
) -> dict[str, Any]:
    """Score ``group_size`` completions of every held-out question.

    Args:
        generator: generates the completions, ``num_prompts`` questions of its sampler at a time.
        params: sampler weights.
        held_out: the questions.
        pool: scores the completions.
        decode: converts token ids to text.
        version: [] i32 policy version of the weights.
        key: stream key of the noise.
        threshold: a completion passes if its reward is at least this value.
        are_programs: see ``majority_passes``.

    Returns:
        Rates, counts and all completions, as plain JSON. Rates ignore completions without a score. A rate is None if no
        completion counts.
    """
    asked = _Asked()
    for batch in filled_batches(held_out, generator.sampler.num_prompts):
        groups = generator.generate(params, batch, version=version, key=key)
        generator.take()
        generator.draws.clear()  # an evaluation does not report these sums
        num_left = len(held_out) - len(asked.groups)
        for group in groups[:num_left]:
            asked.add(group, pool, decode)
    rewards = pool.collect(asked.tickets)
    all_texts = hosts.complete(asked.texts)
    all_answers = hosts.complete(asked.answers)
    num_samples = generator.sampler.group_size
    total = rewards.total.reshape(-1, num_samples)
    scored = (rewards.outcome == OUTCOME_SCORE).reshape(-1, num_samples)
    passed = scored & (np.where(scored, total, -np.inf) >= threshold)
    whole = scored.all(axis=1)  # pass@k and maj@k need all samples of a question
    votes = []
    for i in np.flatnonzero(whole):
        votes.append(majority_passes(all_answers[i] or [], passed[i].tolist(), are_programs=are_programs))
    return {
        "num_prompts": len(asked.groups),
        "num_samples": num_samples,
        "pass_rate": _mean(passed[scored]),
        "reward_mean": _mean(total[scored]),
        "pass_at_k": _pass_at_ks(num_samples, passed[whole]),
        f"maj_at_{num_samples}": _mean(votes),
        "completion_length_tokens": _mean(asked.lengths()),
        "timeout_count": int((rewards.outcome == OUTCOME_TIMEOUT).sum()),
        "error_count": int((rewards.outcome == OUTCOME_ERROR).sum()),
        "samples": _samples(asked.groups, all_texts, total, scored, decode),
    }


@dataclasses.dataclass
class _Asked:
    """The groups of an evaluation, one list element per question.

    Attributes:
        tickets: tickets of the pool; None if the rows are on another host.
        texts: the completions of a group; None if the rows are on another host.
        answers: the texts that majority vote compares; None if the rows are on another host.
    """

    groups: list[FinishedGroup] = dataclasses.field(default_factory=list)
    tickets: list[Any] = dataclasses.field(default_factory=list)
    texts: list[list[str] | None] = dataclasses.field(default_factory=list)
    answers: list[list[str] | None] = dataclasses.field(default_factory=list)

    def lengths(self) -> list[int]:
        """Return the number of tokens of every completion."""
        lengths: list[int] = []
        for group in self.groups:
            lengths += group.lengths
        return lengths

    def add(self, group: FinishedGroup, pool: RewardPool, decode: Callable[[list[int]], str]) -> None:
        """Add a finished group, and queue it for scoring if its rows are on this host."""
        self.groups.append(group)
        if group.completions is None:
            self.tickets.append(None)
            self.texts.append(None)
            self.answers.append(None)
            return
        texts = [decode(ids) for ids in group.completions]
        self.tickets.append(pool.submit(group.example, texts, group.played))
        self.texts.append(texts)
        self.answers.append(group.played.last_turns() if group.played else texts)


def _samples(
    groups: list[FinishedGroup],
    texts: list[list[str] | None],
    total: np.ndarray,
    scored: np.ndarray,
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """Return every completion with its prompt and its reward; the reward is None without a score.

    Args:
        texts: the completions of each group.
        total, scored: [groups, num_samples] rewards, and whether a completion has a score.
    """
    samples = []
    for i, group in enumerate(groups):
        prompt = prompt_shown(group.example.prompt, decode)
        for j, text in enumerate(texts[i] or []):
            reward = float(total[i, j]) if scored[i, j] else None
            samples.append({"prompt": prompt, "completion": text, "reward": reward})
    return samples


def _mean(values: Any) -> float | None:
    """Return the mean of the values, or None without values."""
    return float(np.mean(values)) if len(values) else None


def _pass_at_ks(num_samples: int, passed: np.ndarray) -> dict[str, float | None]:
    """Return pass@k for all powers of two k up to ``num_samples``, and for ``num_samples``.

    Args:
        passed: [questions, num_samples] bool.
    """
    powers = {2**i for i in range(num_samples.bit_length())}
    num_passes = [int(row.sum()) for row in passed]
    rates = {}
    for k in sorted(powers | {num_samples}):
        rates[str(k)] = _mean([pass_at_k(num_samples, count, k) for count in num_passes])
    return rates


@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of one evaluation: metrics (None if no completion got a score) and a line to print."""

    values: dict[str, float | None]
    line: str


class EvaluationParts(Protocol):
    """The static parts of a run that its evaluation uses. A ``Run`` has these parts."""

    @property
    def config(self) -> Config: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def eval_sampler(self) -> Sampler | None: ...


class Evaluation:
    """The evaluation of a run on its held-out questions, for repeated use.

    Args:
        run: a ``Run`` with an ``eval_sampler``.
        compiled: the compiled programs of the run by name.
        tokenizer: the model's tokenizer.
        held_out: the held-out questions.
        pool: scores the completions.
        environment: the environment that answers turns; None means that each completion has one turn.
    """

    def __init__(
        self,
        run: EvaluationParts,
        compiled: Mapping[str, Callable[..., Any]],
        tokenizer: Tokenizer,
        held_out: list[prompts_lib.EncodedExample],
        pool: RewardPool,
        environment: Environment | None,
    ):
        sampler = run.eval_sampler
        assert sampler is not None, "eval.num_prompts is 0"
        programs = {}
        for name, program in compiled.items():
            if name.startswith("eval_"):
                programs[name.removeprefix("eval_")] = program
        self._config = run.config
        self._decode = tokenizer.decode
        self._held_out = held_out
        self._pool = pool
        self._key = sharding.put(rng.stream(run.config.seed, "eval"), sharding.replicated(run.mesh, 0))
        conversations = Conversations(environment, tokenizer, run.config) if environment else None
        self._generator = Generator(
            sampler,
            programs,
            tokenizer.decode,
            check=pool.check,
            conversations=conversations,
        )

    def result(self, params: Any, version: jax.Array) -> dict[str, Any]:
        """Return the result of ``evaluate`` for these published weights."""
        return evaluate(
            self._generator,
            params,
            self._held_out,
            self._pool,
            self._decode,
            version=version,
            key=self._key,
            threshold=self._config.rewards.pass_threshold,
            are_programs=self._config.prompts.source in OF_PROGRAMS,
        )

    def measure(self, path: pathlib.Path, params: Any, version: jax.Array) -> Measured:
        """Evaluate the weights, write the full result to ``path`` with suffix .json, and return the metrics."""
        result = self.result(params, version)
        if hosts.is_first():
            path.with_suffix(".json").write_text(json_lines.written(result, indent=1))
        failures = {f"eval/{kind}_count": result[f"{kind}_count"] for kind in ("timeout", "error")}
        rate = "-" if result["pass_rate"] is None else f"{result['pass_rate']:.3f}"
        num_prompts = result["num_prompts"]
        line = f"held-out pass rate {rate} over {num_prompts} questions ({path.name})"
        num_failed = sum(failures.values())
        if num_failed:
            num_completions = num_prompts * result["num_samples"]
            line += f"; without the {num_failed} of {num_completions} completions whose reward failed"
        return Measured(evaluation_values(result) | failures, line)


def sampler_of(config: Config, sampler: Sampler) -> Sampler:
    """Return a sampler for held-out questions with at most ``eval.slots`` slots.

    If ``eval.slots`` is 0, the limit is the number of slots for training. The limit is rounded up to a multiple of the
    shards. The sampler runs as many questions at a time as fill the slots.
    """
    num_samples = config.eval.num_samples
    slots = _whole_shards(config.eval.slots or config.num_slots, sampler.shards)
    filling = -(-slots // num_samples)  # questions that fill the slots, rounded up
    num_prompts = _whole_shards(min(config.eval.num_prompts, filling), sampler.shards)
    return dataclasses.replace(
        sampler,
        sampling=dataclasses.replace(config.sampling, temperature=config.eval.temperature),
        num_prompts=num_prompts,
        group_size=num_samples,
        num_slots=min(num_prompts * num_samples, slots),
        lookahead=0,
        slack=0,
        stale_cache="",
        keeps_support=False,
        keeps_entropy=False,
        keeps_old_logp=False,
        keeps_experts=False,
        branches=(0, 0),
    )


def _whole_shards(count: int, shards: int) -> int:
    """Return ``count``, rounded up to a multiple of the shards."""
    return -(-count // shards) * shards


def questions(
    config: Config, tokenizer: Tokenizer
) -> tuple[list[prompts_lib.EncodedExample], list[prompts_lib.EncodedExample], list[str]]:
    """Load and tokenise the training questions and the held-out questions.

    If ``eval.name`` is set, the held-out questions come from this separate source. Held-out questions that are also
    training questions stay in both sets, and a warning counts them.

    Returns:
        (training questions, held-out questions, one message per skipped row for ``first_skipped``).

    Raises:
        ConfigError: among others, if no training question or no held-out question is left.
    """
    stop_strings.check(config.sampling.stop_strings, tokenizer)
    loaded = _load(config, config.prompts)
    examples = loaded.examples
    held_out: Sequence[Example] = ()
    messages = list(loaded.bad_rows)
    if config.eval.num_prompts and config.eval.name:
        held_out, bad_rows = _load_held_out(config)
        messages += bad_rows
    elif config.eval.num_prompts:
        examples, held_out = prompts_lib.split_held_out(examples, config.eval.num_prompts, seed=config.seed)
    prompts = config.prompts
    examples = loaded.laddered(examples)
    if config.environments.factory:
        prompts, (examples, held_out), failures = environment.shown(config, tokenizer, examples, held_out)
        messages += failures
        _check_begun(config, examples, held_out, failures)
    train, long_train = prompts_lib.encode_examples(examples, tokenizer, prompts)
    held: list[prompts_lib.EncodedExample] = []
    long_held: list[str] = []
    if held_out:
        held, long_held = prompts_lib.encode_examples(held_out, tokenizer, prompts)
    return _apart(config, train, held), held, messages + long_train + long_held


def _load(config: Config, prompts: PromptsConfig) -> tasks.Loaded:
    """Load the questions of a source. Questions that differ only for their environment get different hidden texts."""
    loaded = tasks.load(prompts, seed=config.seed)
    if not (config.environments.factory and prompts.source in HIDING):
        return loaded
    examples = []
    for example in loaded.examples:
        hidden = json.dumps(example.columns, default=str)
        examples.append(dataclasses.replace(example, hidden=hidden))
    return dataclasses.replace(loaded, examples=tuple(examples))


def _load_held_out(config: Config) -> tuple[Sequence[Example], Sequence[str]]:
    """Return the held-out questions of the source ``eval.name``, and messages about its skipped rows."""
    is_file = config.prompts.source in limits.FILE_SOURCES
    size = 0 if is_file else max(config.prompts.size, config.eval.num_prompts)
    prompts = dataclasses.replace(config.prompts, name=config.eval.name, size=size)
    try:
        loaded = _load(config, prompts)
    except ConfigError as error:
        raise ConfigError(str(error).replace("prompts.name=", "eval.name=")) from error
    return loaded.examples[: config.eval.num_prompts], loaded.bad_rows


def _check_begun(
    config: Config, examples: Sequence[Example], held_out: Sequence[Example], failures: Sequence[str]
) -> None:
    """Raise a ``ConfigError`` if the environment failed for all training questions or for all held-out questions."""
    lacks_held_out = config.eval.num_prompts > 0 and not held_out
    if failures and (not examples or lacks_held_out):
        purpose = "held out" if examples else "to train on"
        raise ConfigError(
            f"environments.factory={config.environments.factory!r:.200}: no question {purpose} can be begun: "
            f"{failures[0]}"
        )


def _apart(
    config: Config,
    train: list[prompts_lib.EncodedExample],
    held_out: list[prompts_lib.EncodedExample],
) -> list[prompts_lib.EncodedExample]:
    """Return the training questions whose tokens differ from the tokens of every held-out question.

    A training question can have another text but the same tokens as a held-out question, because a chat template can
    trim text. A warning counts the questions that are left out. There are two exceptions:

    - If ``eval.name`` is set, all training questions stay. A warning counts the held-out questions in the training set.
    - If ``environments.factory`` is set and the source keeps no hidden data (``HIDING``), all training questions stay.
      An agent may start all its episodes with the same prompt.
    """
    if config.eval.name:
        trained = {_identity(row) for row in train}
        num_shared = sum(_identity(row) in trained for row in held_out)
        if num_shared:
            _warn(
                f"{num_shared} of the {len(held_out)} held-out questions of eval.name={config.eval.name!r} are also "
                f"training questions (prompts.name={config.prompts.name!r})"
            )
        return train
    if config.environments.factory and config.prompts.source not in HIDING:
        return train
    reserved = {_identity(row) for row in held_out}
    kept = [row for row in train if _identity(row) not in reserved]
    num_left_out = len(train) - len(kept)
    if not kept:
        raise ConfigError(
            f"no training question is left: all {num_left_out} of prompts.source={config.prompts.source!r} have the "
            "same tokens as a held-out question. Reduce eval.num_prompts or use more questions."
        )
    if num_left_out:
        _warn(f"{num_left_out} training questions are left out: held-out questions have the same tokens")
    return kept


def _identity(row: prompts_lib.EncodedExample) -> tuple[bytes, str]:
    """Return the tokens and the hidden text of a question. Questions are the same if both are equal."""
    return row.tokens.tobytes(), row.example.hidden


def _warn(text: str) -> None:
    """Print a warning to stderr on the first host."""
    if hosts.is_first():
        print(f"warning: {text}", file=sys.stderr)


def first_skipped(messages: list[str]) -> list[str]:
    """Return one line for each of the first ten skipped rows, and a line with the number of further skipped rows."""
    lines = [f"skipped {message}" for message in messages[:10]]
    if len(messages) > 10:
        lines.append(f"skipped ... and {len(messages) - 10} more")
    return lines


def report_skipped(messages: list[str]) -> None:
    """Print the lines of ``first_skipped`` to stderr on the first host."""
    if messages and hosts.is_first():
        print(*first_skipped(messages), sep="\n", file=sys.stderr)
