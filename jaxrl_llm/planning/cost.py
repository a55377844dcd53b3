"""Cost model: least seconds of programs and of an iteration on a chip, and their price.

    seconds of a region = the longest of operations / peak, bytes / memory bandwidth, bytes sent / link bandwidth

The result is a lower bound, not a forecast. It assumes:

- The resources overlap fully within one iteration of a loop, and not at all between loops.
- A collective can use all links of its chips.
- All completions have full length, and every question is asked once.
- The device never waits for the host.

If the text does not contain a kernel's operations, they are computed from the model's shapes, as a further lower bound.

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
    """Least time of one call.

    Attributes:
        by: time of each resource alone.
        bound: the resource that limits most of the time.
    """

    total: float
    by: dict[str, float]
    bound: str


def seconds(counts: counting.Counts, chip: Chip) -> Seconds:
    """Return the least time of a program on a chip."""
    by = dict.fromkeys(RESOURCES, 0.0)
    bound = dict.fromkeys(RESOURCES, 0.0)
    for region in counts.regions:
        host_bytes = max(region.host_read_bytes, region.host_written_bytes)
        region_seconds = {
            "operations": region.turns * region.flops / (chip.tflops * 1e12),
            "memory": region.turns * region.hbm_bytes / (chip.hbm_gb * 1e9),
            "links": region.turns * sum(region.link_bytes.values()) / (chip.link_gb * 1e9),
            "host": region.turns * host_bytes / (chip.host_gb * 1e9),
        }
        for name in RESOURCES:
            by[name] += region_seconds[name]
        longest = _largest(region_seconds)
        bound[longest] += region_seconds[longest]
    return Seconds(sum(bound.values()), by, _largest(bound))


def _largest(values: Mapping[str, float]) -> str:
    """Return the name of the largest value, the first of equal ones."""
    return max(values, key=lambda name: values[name])


# Programs that an iteration calls once, if the run has them.
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
    """Return the decode steps of an iteration, if all rows have full length. With a lookahead no slot is ever idle."""
    rollouts = config.rollouts_per_iteration
    tokens = config.sampling.max_completion_tokens
    if config.rollout.lookahead_prompts:
        return -(-rollouts * tokens // config.num_slots)
    return -(-rollouts // config.num_slots) * tokens


def calls(run: Run, names: Mapping[str, object]) -> dict[str, int]:
    """Return how often an iteration calls each program. Programs that run only at start or end are called 0 times."""
    config = run.config
    counts = {
        **dict.fromkeys(ONCE, 1),
        "decode": -(-decode_steps(config) // config.rollout.chunk_steps),
        "read_group": config.rollout.prompts_per_iteration,
    }
    return {name: counts.get(name, 0) for name in names}


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Lower bound of an iteration.

    Attributes:
        parts: the seconds of each of ``PARTS``, and the least seconds of kernels that are not counted.
        mfu: model FLOPs utilisation. It counts the model's operations, without recomputation and attention.
    """

    seconds: float
    parts: dict[str, float]
    tokens_per_s_chip: float
    mfu: float
    model_flops: float

    def dollars(self, iterations: int, *, chips: int, price: float) -> float:
        """Return the cost in dollars. ``price`` is the price in dollars per chip and hour."""
        return iterations * self.seconds / 3600 * chips * price


def active_params(arch: Architecture) -> int:
    """Return the number of parameters that compute one token. Unused experts are left out."""
    idle = arch.num_experts - arch.experts_per_token
    return arch.num_params - arch.num_layers * 3 * arch.width * arch.ffn * idle


def reads_prompts(config: Config) -> bool:
    """Return whether a cross-entropy also covers prompts, from their second token on."""
    return any(entropy.facts.reads == "prompt_logp" for entropy in config.algorithm.cross_entropies)


def model_flops(config: Config, arch: Architecture) -> float:
    """Return the operations of an iteration, computed from the model's shapes.

    A weight costs, per token, 2 operations in a forward pass, 6 in training and 4 in the training of adapters, because
    frozen weights need no gradient. The head is computed for completions only. If a cross-entropy reads the prompts,
    the head also covers prompts from their second token on.
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
    """Return the lower bound of an iteration whose programs have these ``counts``, on the run's mesh of such chips."""
    config = run.config
    num_calls = calls(run, counts)
    program_seconds = {}
    for name, program_counts in counts.items():
        if num_calls[name]:
            program_seconds[name] = num_calls[name] * seconds(program_counts, chip).total
    if "decode" in program_seconds:  # the last chunk of steps ends early, with the last row
        program_seconds["decode"] *= decode_steps(config) / (num_calls["decode"] * config.rollout.chunk_steps)
    parts = {}
    for part, names in PARTS.items():
        parts[part] = sum(program_seconds.get(name, 0.0) for name in names)
    total = sum(parts.values())
    num_chips = run.mesh.size
    flops = model_flops(config, run.model.arch)
    least = flops / (num_chips * chip.tflops * 1e12)
    if least > total and any(counts[name].uncounted for name in program_seconds):
        parts["not counted"] = least - total
        total = least
    generated = config.rollouts_per_iteration * config.sampling.max_completion_tokens
    return Iteration(
        seconds=total,
        parts=parts,
        tokens_per_s_chip=generated / total / num_chips,
        mfu=least / total,
        model_flops=flops,
    )
