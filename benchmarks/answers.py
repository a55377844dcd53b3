"""Generation of completions of several turns: what the tokens that an environment says cost.

    python -m benchmarks.answers                  # 13 M parameters, answers of 8, 32 and 96 tokens
    python -m benchmarks.answers --size tiny      # seconds

A turn of the policy's ends with one token in 16, and is answered until the completion is full; the
environment takes no time. Printed: medians over rounds of the seconds and CPU seconds of a generation, and chunks that
the sampler was asked for. Answers of each length take their turns in each round.
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

ANSWERS = (8, 32, 96)  # tokens
TURN = 16  # tokens of the policy's, on average
TURNS = 4  # for which a completion has room
SLOTS, CHUNK = {"medium": 16, "tiny": 4}, 8


class Parrot:
    """An environment in this process that says as many tokens as it is asked to."""

    role, has_reward, is_shown = "user", False, False

    def __init__(self, tokens: int):
        self._said = [1 + i % 7 for i in range(tokens)]

    def begin(self) -> int:
        return 0

    def ask(self, *_) -> Future[Reply]:
        reply: Future[Reply] = Future()
        reply.set_result(Reply(self._said))
        return reply

    def forget(self, episode: int) -> None:
        pass


class Contender:
    """Generation with answers of so many tokens; ``round`` gives its seconds, CPU seconds and chunks."""

    def __init__(self, size_name: str, answer: int):
        size, mesh, width = (
            families.SIZES[size_name],
            one_device(),
            TURNS * (TURN + answer),
        )
        arch = families.family("llama", size)
        ends = tuple(range(0, arch.vocab_size, TURN))
        self._sampler = Sampler(
            Model(arch),
            mesh,
            SamplingConfig(max_completion_tokens=width),
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
        self._talk, self._chunks = Conversations(Parrot(answer), tokenizer, config), 0
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
        self._chunks += 1
        return self._run["decode"](*args)

    def round(self) -> tuple[float, float, int]:
        generator = Generator(
            self._sampler,
            dict(self._run, decode=self._decode),
            lambda ids: "",
            conversations=self._talk,
        )
        self._chunks, cpu, start = 0, time.process_time(), time.perf_counter()
        generator.generate(
            self._params,
            self._prompts,
            version=jnp.int32(0),
            key=rng.stream(0, "sample"),
        )
        rows = jax.block_until_ready(generator.take())
        self.drawn = float((rows.policy_version >= 0).sum() / (rows.length - rows.prompt_length).sum())
        return time.perf_counter() - start, time.process_time() - cpu, self._chunks


def measure(size: str, answers: list[int], rounds: int) -> list[Figure]:
    contenders = {answer: Contender(size, answer) for answer in answers}
    seconds = [[one.round() for one in contenders.values()] for _ in range(rounds)]
    figures = []
    for i, answer in enumerate(contenders):
        medians = (statistics.median(values) for values in zip(*(x[i] for x in seconds), strict=True))
        for (name, unit), value in zip((("s", "s"), ("cpu_s", "s"), ("chunks", "")), medians, strict=True):
            figures.append(Figure(f"{answer}/{name}", value, unit, "less"))
        figures.append(Figure(f"{answer}/share_drawn", contenders[answer].drawn, ""))
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
        help="tokens of each",
    )
    options = parser.parse_args(arguments)
    for figure in measure(options.size, options.answers, options.rounds):
        print(f"{figure.name:20} {figure.value:10.3f} {figure.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
