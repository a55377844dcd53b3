"""Measure step time and memory of each model family, with models of equal size, by turns on one device.

    python -m benchmarks.families                        # 13 M parameters, 200 s on 2 cores
    python -m benchmarks.families --size tiny            # takes seconds
    python -m benchmarks.families --only gemma3 --json FILE

All models have the same width, depth, heads, vocabulary and feed-forward width per token. They have random weights in
float32 and rows of one length. A round is a generation and one optimizer step of a family, and the same of Llama. The
command prints medians over the rounds, medians of the ratios to Llama's seconds of the same round, and the bytes of the
update by the compiler's count, arguments included.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import machine, results
from benchmarks.iteration import Iteration, random_params, random_prompts
from benchmarks.results import Figure
from jaxrl_llm.config import Config, freeze
from jaxrl_llm.models.architecture import Architecture, Delta, Layer
from jaxrl_llm.runtime.programs import memory


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    num_layers: int  # a multiple of 6, because Gemma 3 repeats a pattern of 6 layers
    ffn: int
    vocab_size: int
    window: int
    prompts: int
    group: int
    prompt: int
    completion: int
    micro_batch: int


SIZES = {
    "medium": Size(
        384,
        6,
        1024,
        8192,
        64,
        prompts=2,
        group=8,
        prompt=64,
        completion=32,
        micro_batch=16,
    ),
    "tiny": Size(32, 6, 64, 264, 8, prompts=2, group=4, prompt=16, completion=8, micro_batch=8),
}
SINKS = dict(sinks=True, qkv_bias=True, o_bias=True, experts_bias=True, glu_limit=7.0)
NORMS = dict(post_norm=True, qk_norm="head", norm_offset=1.0)


def family(name: str, size: Size) -> Architecture:
    """Return the shape of a family at a size. The kinds of layers are those of the published models."""
    n = size.num_layers
    window = Layer(window=size.window)
    no_rope = Layer(rope=-1)
    heads = size.width // 32 if size.width > 32 else 4
    head_size = size.width // heads
    # The two experts of a token are together as wide as the MLP of the other families.
    experts = dict(num_experts=8, experts_per_token=2, norm_topk=True, ffn=size.ffn // 2)
    of = {
        "llama": {},
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": "head"},
        "gemma3": {
            **NORMS,
            "activation": "gelu_tanh",
            "embedding_scale": size.width**0.5,
            "layers": tuple(Layer() if i % 6 == 5 else Layer(size.window, rope=1) for i in range(n)),
        },
        "olmo2": {"pre_norm": False, "post_norm": True, "qk_norm": "all"},
        "smollm3": {"layers": tuple(no_rope if i % 4 == 3 else Layer() for i in range(n))},
        "mistral_window": {"layers": (window,) * n},
        "qwen3_moe": {"qk_norm": "head", **experts},
        "gpt_oss": {**experts, **SINKS, "layers": (window, Layer()) * (n // 2)},
        "qwen3_5": {
            "qk_norm": "head",
            "norm_offset": 1.0,
            "output_gate": True,
            "delta": Delta(heads // 2, heads, head_size, head_size, 4, is_grouped=False),
            "layers": tuple(Layer(mixer="attention" if i % 4 == 3 else "delta_rule") for i in range(n)),
        },
    }[name]
    sizes = {"num_heads": heads, "num_kv_heads": heads // 2, "head_size": head_size}
    shared = {
        "vocab_size": size.vocab_size,
        "width": size.width,
        "num_layers": n,
        "ffn": size.ffn,
    }
    return Architecture(**shared | sizes | of)


FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "olmo2", "smollm3", "mistral_window")
FAMILIES += ("qwen3_moe", "gpt_oss", "qwen3_5")


def config_of(size: Size) -> Config:
    rows = size.prompts * size.group
    return freeze(
        {
            "prompts": {"max_tokens": size.prompt},
            "sampling": {"max_completion_tokens": size.completion},
            "rollout": {
                "prompts_per_iteration": size.prompts,
                "group_size": size.group,
            },
            "update": {"batch_size": rows, "micro_batch_size": size.micro_batch},
        }
    )


class Contender:
    """The run of one family."""

    def __init__(self, name: str, size: Size):
        self.arch = family(name, size)
        config = config_of(size)
        self._iteration = Iteration(config, self.arch, random_params, random_prompts(config, self.arch))
        self.update_bytes = memory(self._iteration.programs["update"]).peak
        self._rewards = np.arange(config.rollouts_per_iteration) % 2
        self.round()

    def round(self) -> tuple[float, float]:
        """Return the seconds of a generation and of an optimizer step."""
        start = time.perf_counter()
        rollout, _ = self._iteration.generate()
        middle = time.perf_counter()
        self._iteration.update(rollout, self._rewards)
        return middle - start, time.perf_counter() - middle


def measure(names: list[str], size: Size, rounds: int) -> Iterator[list[Figure]]:
    """Yield the figures of one family after the other. The first name is Llama, whose figures have no ratios."""
    llama = Contender(names[0], size)
    tokens = size.prompts * size.group * size.completion
    for name in names:
        contender = llama if name == names[0] else Contender(name, size)
        others = [] if contender is llama else [llama]
        # [rounds, contenders, (generation, update)]
        seconds = np.array([[one.round() for one in (contender, *others)] for _ in range(rounds)])
        generate, update = np.median(seconds[:, 0], axis=0)
        figures = [
            Figure(f"{name}/parameters", contender.arch.num_params, ""),
            Figure(f"{name}/generate_tokens_per_s", tokens / generate, "tokens/s", "more"),
            Figure(f"{name}/update_s", update, "s", "less"),
            Figure(f"{name}/update_bytes", contender.update_bytes, "bytes", "less"),
        ]
        for part, what in enumerate(("generate", "update")) if others else ():
            ratio = np.median(seconds[:, 0, part] / seconds[:, 1, part])
            figures.append(Figure(f"{name}/{what}_over_llama", ratio, "", "less"))
        yield figures


COLUMNS = "{:15} {:>10} {:>9} {:>8} {:>9} {:>8} {:>11}"


def row(figures: list[Figure]) -> str:
    """Return the table's line of a family."""
    name = figures[0].name.partition("/")[0]
    of = {figure.name.partition("/")[2]: figure.value for figure in figures}
    return COLUMNS.format(
        name,
        f"{of['parameters'] / 1e6:.2f} M",
        f"{of['generate_tokens_per_s']:.0f}",
        f"{of.get('generate_over_llama', 1.0):.2f}",
        f"{of['update_s']:.3f}",
        f"{of.get('update_over_llama', 1.0):.2f}",
        f"{of['update_bytes'] / 2**20:.1f}",
    )


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.families", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FAMILIES[1:],
        default=FAMILIES[1:],
        help="families to compare with Llama",
    )
    parser.add_argument("--rounds", type=results.at_least(1), default=5)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    figures = []
    print(
        COLUMNS.format(
            "family",
            "parameters",
            "tokens/s",
            "x Llama",
            "update s",
            "x Llama",
            "update MiB",
        )
    )
    for of_family in measure(["llama", *dict.fromkeys(options.only)], SIZES[options.size], options.rounds):
        print(row(of_family), flush=True)
        figures += of_family
    if options.json:
        settings = {
            "size": dataclasses.asdict(SIZES[options.size]),
            "rounds": options.rounds,
        }
        versions = machine.versions("jaxrl_llm", "jax", "jaxlib")
        results.write(options.json, "families", figures, versions=versions, settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
