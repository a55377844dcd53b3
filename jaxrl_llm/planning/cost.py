"""Cost: seconds that a chip takes at the least, from what its programs do; of an iteration, and in money.

    seconds of a region = the longest of operations / peak, bytes / memory bandwidth, bytes sent / link bandwidth

as if the three overlapped fully within a loop's turn and not at all between loops, and as if a collective had all links
of its chips. All completions are taken to be of full length, every question to be asked once, and the host to be never
waited for: a bound, not a forecast. Where the text does not tell what a kernel computes, the model's algebra bounds the
iteration too.

Owns: rooflines, how often an iteration calls each program. Does not know: HLO text, compilers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_llm.config import Config
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.planning import counting
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.run import Run

RESOURCES = ("operations", "memory", "links", "host")


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of one call of a program. ``by``: what each resource would take alone; ``bound``: that of most of the time."""

    total: float
    by: dict[str, float]
    bound: str


def seconds(counts: counting.Counts, chip: Chip) -> Seconds:
    by, bound = dict.fromkeys(RESOURCES, 0.0), dict.fromkeys(RESOURCES, 0.0)
    for region in counts.regions:
        each = dict(
            zip(
                RESOURCES,
                (
                    region.turns * region.flops / (chip.tflops * 1e12),
                    region.turns * region.hbm_bytes / (chip.hbm_gb * 1e9),
                    region.turns * sum(region.link_bytes.values()) / (chip.link_gb * 1e9),
                    region.turns * max(region.host_read_bytes, region.host_written_bytes) / (chip.host_gb * 1e9),
                ),
                strict=True,
            )
        )
        by = {name: by[name] + each[name] for name in RESOURCES}
        longest = max(each, key=each.get)
        bound[longest] += each[longest]
    return Seconds(sum(bound.values()), by, max(bound, key=bound.get))


# What an iteration calls once, where the run has it.
ONCE = ("publish", "prefill", "reread", "collect", "join", "score_open", "annotate", "insert", "update")
# The parts of an iteration, in their order.
PARTS = {
    "publish": ("publish",),
    "prefill": ("prefill", "reread"),
    "decode": ("decode",),
    "annotate": ("annotate", "score_open", "join"),
    "update": ("update",),
    "rest": ("read_group", "collect", "insert"),
}


def decode_steps(config: Config) -> int:
    """Of an iteration: slots take one row after another, all of full length; with a lookahead none is idle."""
    rollouts, tokens = config.rollouts_per_iteration, config.sampling.max_completion_tokens
    if config.rollout.lookahead_prompts:
        return -(-rollouts * tokens // config.num_slots)
    return -(-rollouts // config.num_slots) * tokens


def calls(run: Run, names: Mapping[str, object]) -> dict[str, int]:
    """How often an iteration calls each of the programs; 0 for those at its start, its end or never."""
    config = run.config
    often = {
        **dict.fromkeys(ONCE, 1),
        "decode": -(-decode_steps(config) // config.rollout.chunk_steps),
        "read_group": config.rollout.prompts_per_iteration,
    }
    return {name: often.get(name, 0) for name in names}


@dataclasses.dataclass(frozen=True)
class Iteration:
    """An iteration at its bound. ``mfu``: of the model's operations alone, without recomputing and attention.

    ``parts``: seconds of each of ``PARTS``, and of what kernels that are not counted take at the least.
    """

    seconds: float
    parts: dict[str, float]
    tokens_per_s_chip: float
    mfu: float
    model_flops: float

    def dollars(self, iterations: int, *, chips: int, price: float) -> float:
        """``price``: dollars of a chip for an hour."""
        return iterations * self.seconds / 3600 * chips * price


def active_params(arch: Architecture) -> int:
    """Those that a token is computed by: of the experts, its own."""
    idle = arch.num_experts - arch.experts_per_token
    return arch.num_params - arch.num_layers * 3 * arch.width * arch.ffn * idle


def reads_prompts(config: Config) -> bool:
    """Whether a cross-entropy is of prompts too, from their second token on."""
    return any(one.fact("reads") == "prompt_logp" for one in config.algorithm.cross_entropies)


def model_flops(config: Config, arch: Architecture) -> float:
    """Operations of an iteration by the model's algebra.

    2 a weight and token forward, 6 where it learns, 4 where adapters do: its own gradient is left out. The head is of
    completions alone, but where a cross-entropy reads the prompts, from their second token on.
    """
    head = arch.vocab_size * arch.width
    body = active_params(arch) - (head if arch.tied else 2 * head)
    generated = config.rollouts_per_iteration * config.sampling.max_completion_tokens
    prompts = config.rollout.prompts_per_iteration * config.prompts.max_tokens
    draws = config.update.updates_per_iteration * config.update.batch_size // config.rows_per_draw
    unread = 1 if reads_prompts(config) else config.prompts.max_tokens
    learning = 4.0 if config.model.lora.rank else 6.0
    learned = draws * (body * config.draw_tokens + head * (config.draw_tokens - unread))
    return 2.0 * (body * (generated + prompts) + head * generated) + learning * learned


def iteration(run: Run, chip: Chip, counts: Mapping[str, counting.Counts]) -> Iteration:
    """Of a run whose programs do what ``counts`` says, on its mesh of such chips."""
    often, config = calls(run, counts), run.config
    each = {name: often[name] * seconds(of, chip).total for name, of in counts.items() if often[name]}
    if "decode" in each:  # a chunk of steps ends with the last row
        each["decode"] *= decode_steps(config) / (often["decode"] * config.rollout.chunk_steps)
    parts = {part: sum(each.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    total, chips = sum(parts.values()), run.mesh.size
    flops = model_flops(config, run.model.arch)
    least = flops / (chips * chip.tflops * 1e12)
    if least > total and any(counts[name].uncounted for name in each):
        parts["not counted"], total = least - total, least
    generated = config.rollouts_per_iteration * config.sampling.max_completion_tokens
    return Iteration(total, parts, generated / total / chips, least / total, flops)
