"""Evaluation on held-out questions: pass@1, pass@k, majority vote and completion length.

Owns: the estimators, the sampler and the questions of an evaluation. Does not know: training.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import limits
from jaxrl_llm.actor import stop_strings
from jaxrl_llm.actor.episodes import Conversations
from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, PromptsConfig
from jaxrl_llm.conversations import environment
from jaxrl_llm.conversations.agents import prompt_shown
from jaxrl_llm.conversations.environment import Environment
from jaxrl_llm.questions import stream as prompts_lib
from jaxrl_llm.questions import tasks
from jaxrl_llm.reports.metric_table import evaluation_values
from jaxrl_llm.runtime import hosts, json_lines, rng, sharding
from jaxrl_llm.scoring.answers import vote
from jaxrl_llm.scoring.rewards import RewardPool
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, OUTCOME_TIMEOUT, PromptBatch

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

    The first completion with that answer decides whether it passes. ``answers.vote`` says which answers are the same.
    Programs are the same if their texts are.
    """
    answers = [text.strip() if are_programs else vote(text) for text in completions]
    winner = collections.Counter(answers).most_common(1)[0][0]
    return passes[answers.index(winner)]


def filled_batches(rows: Sequence[prompts_lib.EncodedExample], size: int) -> Iterator[PromptBatch]:
    """Yield all rows in order, ``size`` per batch, with ids from 0. The last row pads the last batch."""
    for start in range(0, len(rows), size):
        ids = range(start, start + size)
        yield prompts_lib.batch_of([rows[min(i, len(rows) - 1)] for i in ids], ids)


def evaluate(
    generator: Generator,
    params: Any,
    held_out: list[prompts_lib.EncodedExample],
    pool: RewardPool,
    decode: Any,
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
    tickets, groups, texts, answers = [], [], [], []
    for batch in filled_batches(held_out, generator.sampler.num_prompts):
        done = generator.generate(params, batch, version=version, key=key)
        generator.take()
        generator.draws.clear()  # an evaluation does not report these sums
        for group in done[: len(held_out) - len(groups)]:
            is_own = group.completions is not None
            groups.append(group)
            texts.append([decode(c) for c in group.completions] if is_own else None)
            answers.append(group.played.last_turns() if group.played else texts[-1])
            tickets.append(pool.submit(group.example, texts[-1], group.played) if is_own else None)
    rewards, texts, answers = pool.collect(tickets), hosts.complete(texts), hosts.complete(answers)
    num_samples = generator.sampler.group_size
    total = rewards.total.reshape(-1, num_samples)
    scored = (rewards.outcome == OUTCOME_SCORE).reshape(-1, num_samples)
    passed = scored & (np.where(scored, total, -np.inf) >= threshold)
    whole = scored.all(axis=1)  # pass@k and maj@k need all samples of a question
    wins = functools.partial(majority_passes, are_programs=are_programs)
    ks = sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})
    mean = lambda values: float(np.mean(values)) if len(values) else None
    return {
        "num_prompts": len(groups),
        "num_samples": num_samples,
        "pass_rate": mean(passed[scored]),
        "reward_mean": mean(total[scored]),
        "pass_at_k": {str(k): mean([pass_at_k(num_samples, int(row.sum()), k) for row in passed[whole]]) for k in ks},
        f"maj_at_{num_samples}": mean([wins(answers[i], passed[i].tolist()) for i in np.flatnonzero(whole)]),
        "completion_length_tokens": mean([size for group in groups for size in group.lengths]),
        "timeout_count": int((rewards.outcome == OUTCOME_TIMEOUT).sum()),
        "error_count": int((rewards.outcome == OUTCOME_ERROR).sum()),
        "samples": [
            {"prompt": prompt, "completion": text, "reward": float(total[i, j]) if scored[i, j] else None}
            for i, prompt in enumerate(prompt_shown(group.example.prompt, decode) for group in groups)
            for j, text in enumerate(texts[i])
        ],
    }


@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of one evaluation: metrics (None if no completion got a score) and a line to print."""

    values: dict[str, float | None]
    line: str


class Evaluation:
    """The evaluation of a run on its held-out questions, for repeated use.

    Args:
        run: a ``Run`` with an ``eval_sampler``.
        compiled: the compiled programs of the run by name.
        tokenizer: of the model.
        held_out: the held-out questions.
        pool: scores the completions.
        environment: the environment that answers turns; None means that each completion has one turn.
    """

    def __init__(
        self,
        run: Any,
        compiled: Any,
        tokenizer: Any,
        held_out: list[Any],
        pool: RewardPool,
        environment: Environment | None,
    ):
        evals = {name.removeprefix("eval_"): p for name, p in compiled.items() if name.startswith("eval_")}
        talk = Conversations(environment, tokenizer, run.config) if environment else None
        self._generator = Generator(run.eval_sampler, evals, tokenizer.decode, check=pool.check, talk=talk)
        self._how = {"threshold": run.config.rewards.pass_threshold}
        self._how["are_programs"] = run.config.prompts.source in OF_PROGRAMS
        self._how["key"] = sharding.put(rng.stream(run.config.seed, "eval"), sharding.replicated(run.mesh, 0))
        self._given = held_out, pool, tokenizer.decode

    def result(self, params: Any, version: jax.Array) -> dict[str, Any]:
        """Return the result of ``evaluate`` for these published weights."""
        return evaluate(self._generator, params, *self._given, version=version, **self._how)

    def measure(self, path: pathlib.Path, params: Any, version: jax.Array) -> Measured:
        """Evaluate the weights, write the full result to ``path`` with suffix .json, and return the metrics."""
        result = self.result(params, version)
        if hosts.is_first():
            path.with_suffix(".json").write_text(json_lines.written(result, indent=1))
        rate, count = result["pass_rate"], result["num_prompts"]
        failures = {f"eval/{kind}_count": result[f"{kind}_count"] for kind in ("timeout", "error")}
        line = f"held-out pass rate {'-' if rate is None else format(rate, '.3f')} over {count} questions ({path.name})"
        if failed := sum(failures.values()):
            line += f"; without the {failed} of {count * result['num_samples']} completions whose reward failed"
        return Measured(evaluation_values(result) | failures, line)


def sampler_of(config: Config, sampler: Sampler) -> Sampler:
    """Return a sampler for held-out questions with at most ``eval.slots`` slots.

    If ``eval.slots`` is 0, the limit is the number of slots for training. The limit is rounded up to a multiple of the
    shards. The sampler runs as many questions at a time as fill the slots.
    """
    shards, samples = sampler.shards, config.eval.num_samples
    whole = lambda count: -(-count // shards) * shards
    slots = whole(config.eval.slots or config.num_slots)
    at_once = whole(min(config.eval.num_prompts, -(-slots // samples)))
    return dataclasses.replace(
        sampler,
        sampling=dataclasses.replace(config.sampling, temperature=config.eval.temperature),
        num_prompts=at_once,
        group_size=samples,
        num_slots=min(at_once * samples, slots),
        lookahead=0,
        slack=0,
        stale_cache="",
        keeps_support=False,
        keeps_entropy=False,
        keeps_old_logp=False,
        keeps_experts=False,
        branches=(0, 0),
    )


def questions(config: Config, tokenizer: Any) -> tuple[list[Any], list[Any], list[str]]:
    """Load and tokenise the training questions and the held-out questions.

    If ``eval.name`` is set, the held-out questions come from this separate source. Held-out questions that are also
    training questions stay in both sets, and a warning counts them.

    Returns:
        (training questions, held-out questions, one message per skipped row for ``first_skipped``).

    Raises:
        ConfigError: among others, if no training question or no held-out question is left.
    """

    def loaded_from(prompts: PromptsConfig) -> tasks.Loaded:
        loaded = tasks.load(prompts, seed=config.seed)
        if not (config.environments.factory and prompts.source in HIDING):
            return loaded
        hiding = (dataclasses.replace(x, hidden=json.dumps(x.columns, default=str)) for x in loaded.examples)
        return dataclasses.replace(loaded, examples=tuple(hiding))

    stop_strings.check(config.sampling.stop_strings, tokenizer)
    loaded = loaded_from(config.prompts)
    examples, held_out, messages = loaded.examples, (), list(loaded.bad_rows)
    if config.eval.num_prompts:
        if config.eval.name:
            is_file = config.prompts.source in limits.FILE_SOURCES
            size = 0 if is_file else max(config.prompts.size, config.eval.num_prompts)
            other = dataclasses.replace(config.prompts, name=config.eval.name, size=size)
            try:
                more = loaded_from(other)
            except ConfigError as error:
                raise ConfigError(str(error).replace("prompts.name=", "eval.name=")) from error
            held_out = more.examples[: config.eval.num_prompts]
            messages += more.bad_rows
        else:
            examples, held_out = prompts_lib.split_held_out(examples, config.eval.num_prompts, seed=config.seed)
    prompts, examples = config.prompts, loaded.laddered(examples)
    if config.environments.factory:
        prompts, (examples, held_out), bad = environment.shown(config, tokenizer, examples, held_out)
        messages += bad
        if bad and not (examples and (held_out or not config.eval.num_prompts)):
            raise ConfigError(f"no question {'to train on' if not examples else 'held out'} can be begun: {bad[0]}")
    train, long_train = prompts_lib.encode_examples(examples, tokenizer, prompts)
    held, long_held = prompts_lib.encode_examples(held_out, tokenizer, prompts) if held_out else ([], [])
    return _apart(config, train, held), held, messages + long_train + long_held


def _apart(config: Config, train: list[Any], held_out: list[Any]) -> list[Any]:
    """Return the training questions whose tokens differ from the tokens of every held-out question.

    A training question can have another text but the same tokens as a held-out question, because a chat template can
    trim text. A warning counts the questions that are left out. There are two exceptions:

    - If ``eval.name`` is set, all training questions stay. A warning counts the held-out questions in the training set.
    - If ``environments.factory`` is set and the source is not in ``HIDING``, all training questions stay. An agent may
      start all its episodes with the same prompt.
    """
    key = lambda row: (row.tokens.tobytes(), row.example.hidden)
    of_train, of_held = map(key, train), set(map(key, held_out))
    if config.eval.name:
        trained = set(of_train)
        said = f"{sum(key(row) in trained for row in held_out)} of the {len(held_out)} held-out questions of eval.name="
        said += f"{config.eval.name!r} are trained on too (prompts.name={config.prompts.name!r})"
    elif config.environments.factory and config.prompts.source not in HIDING:
        return train  # an agent may start all its episodes with the same prompt
    else:
        before, train = len(train), [row for row, own in zip(train, of_train, strict=True) if own not in of_held]
        said = f"{before - len(train)} training questions are left out: held-out ones have the same tokens"
        if not train:
            raise ConfigError(f"no question is left to train on, for {said}")
    if not said.startswith("0 ") and hosts.is_first():
        print(f"warning: {said}", file=sys.stderr)
    return train


def first_skipped(messages: list[str]) -> list[str]:
    """Return one line for each of the first ten skipped rows, and a line with the number of further skipped rows."""
    lines = [f"skipped {message}" for message in messages[:10]]
    return lines + ([f"skipped ... and {len(messages) - 10} more"] if len(messages) > 10 else [])


def report_skipped(messages: list[str]) -> None:
    """Print the lines of ``first_skipped`` to stderr on the first host."""
    if messages and hosts.is_first():
        print(*first_skipped(messages), sep="\n", file=sys.stderr)
