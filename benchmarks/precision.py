"""Difference between sampler and learner on the tokens that the sampler drew, for each precision.

    python -m benchmarks.precision                                # SmolLM2-135M, its answers to sums
    python -m benchmarks.precision --model llama qwen3 gemma3     # random models of benchmarks.families, medium size

A way to compute has three parts:

- the dtype of the arithmetic: float32 or bfloat16;
- the sampler's weights: full, int8, fp8 or fp4;
- the learner's weights: full, or rounded like the sampler's.

The gap of a token is |learner's log-prob - sampler's log-prob| in nats. For each way, the command prints the mean, the
99th and 99.9th percentile, and the largest gap over all tokens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import families, machine, results
from benchmarks.iteration import Iteration, random_prompts
from benchmarks.results import Figure
from jaxrl_llm.actor.evaluation import questions
from jaxrl_llm.config import Config, freeze
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.runtime.programs import Program, compile_all

# (dtype of the arithmetic, rollout.weights, update.weights)
WEIGHTS = [
    ("compute", "full"),
    ("int8", "full"),
    ("int8", "rollout"),
    ("fp8", "full"),
    ("fp8", "rollout"),
    ("fp4", "full"),
    ("fp4", "rollout"),
]
WAYS = [(dtype, *weights) for dtype in ("float32", "bfloat16") for weights in WEIGHTS]


def config_of(way: tuple[str, str, str], *, prompts: int, completion: int) -> Config:
    dtype, rollout, update = way
    return freeze(
        {
            "model": {"compute_dtype": dtype},
            "prompts": {"source": "arithmetic", "max_tokens": 48, "size": 64},
            "sampling": {"max_completion_tokens": completion},
            "rollout": {
                "prompts_per_iteration": prompts,
                "group_size": 8,
                "weights": rollout,
            },
            "update": {
                "batch_size": prompts * 8,
                "micro_batch_size": 8,
                "weights": update,
            },
        }
    )


def spread(model, mesh):
    """Return random weights that keep the size of activations, so that logits differ as in a trained model."""
    draw = np.random.default_rng(0)

    def one(path, leaf):
        name = path[-1].key
        if "bias" in name:
            return np.zeros(leaf.shape, np.float32)
        if "norm" in name:
            return np.full(leaf.shape, 1.0 - model.arch.norm_offset, np.float32)
        return (draw.normal(size=leaf.shape) / np.sqrt(model.arch.width)).astype(np.float32)

    shapes = model.abstract_params(mesh)
    return jax.device_put(
        jax.tree_util.tree_map_with_path(one, shapes),
        jax.tree.map(lambda x: x.sharding, shapes),
    )


def gaps(name: str, way: tuple[str, str, str], *, prompts: int, completion: int) -> np.ndarray:
    """Return the absolute difference for every token that the sampler drew, in nats."""
    config = config_of(way, prompts=prompts, completion=completion)
    if name in families.FAMILIES:
        arch = families.family(name, families.SIZES["medium"])
        load = spread
        encoded = random_prompts(config, arch)
    else:
        source = pretrained.resolve(name)
        arch = source.architecture()
        load = functools.partial(source.load_params, seed=0)
        encoded = questions(config, source.tokenizer())[0]
    iteration = Iteration(config, arch, load, encoded, learner=False)
    rollout, _ = iteration.generate()
    learner = iteration.run.learner
    program = Program(learner.annotation.logp, (learner.params, learner.sampled))
    logp = compile_all({"logp": program}, iteration.mesh)["logp"](load(learner.model, iteration.mesh), rollout)
    mask = completion_mask(rollout.prompt_length, rollout.length, rollout.tokens.shape[1])
    return np.abs(np.asarray(logp) - np.asarray(rollout.behaviour_logp))[np.asarray(mask)]


def measure(names: list[str], *, prompts: int, completion: int) -> Iterator[Figure]:
    for name in names:
        for way in WAYS:
            found = gaps(name, way, prompts=prompts, completion=completion)
            statistics = {
                "mean": found.mean(),
                "p99": np.quantile(found, 0.99),
                "p999": np.quantile(found, 0.999),
                "max": found.max(),
            }
            for statistic, value in statistics.items():
                yield Figure(f"{name}/{'/'.join(way)}/{statistic}", float(value), "nats", "less")


def main(arguments: list[str]) -> int:
    parser = results.Arguments(prog="python -m benchmarks.precision", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        nargs="+",
        default=["smollm2-135m-instruct"],
        help="paths or families of models",
    )
    parser.add_argument("--prompts", type=results.at_least(1), default=8, help="number of prompts, with 8 answers each")
    parser.add_argument(
        "--completion",
        type=results.at_least(2),
        default=32,
        help="most tokens of an answer",
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    figures = []
    for figure in measure(options.model, prompts=options.prompts, completion=options.completion):
        figures.append(figure)
        print(f"{figure.name:60} {figure.value:.2e}", flush=True)
    shown = Table(
        "model",
        "arithmetic",
        "sampler",
        "learner",
        "mean",
        "p99",
        "p99.9",
        "largest",
        title="Gap in nats",
    )
    for i in range(0, len(figures), 4):
        *name, _ = figures[i].name.rsplit("/", 4)
        shown.add_row(*name, *(f"{figure.value:.1e}" for figure in figures[i : i + 4]))
    Console(width=120).print(shown)
    if options.json:
        settings = {"prompts": options.prompts, "completion": options.completion}
        versions = machine.versions("jaxrl_llm", "jax", "jaxlib", "qwix")
        results.write(options.json, "precision", figures, versions=versions, settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
