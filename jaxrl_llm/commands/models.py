"""Models: public models whose shapes are known here by name, and what they need.

    python -m jaxrl_llm.models [--filter=qwen3] [--json]

The name is what ``plan --preset=`` takes; the weights come from a folder or hub id of the family (``model.path``).
Memory is of the whole model in a run's learner and sampler, over all devices: weights, their gradient, the optimizer's
moments and the sampler's copy. What a batch needs beside is what ``plan`` tells.

Owns: the table. Does not know: the shapes (presets), how they are computed.
"""

from __future__ import annotations

from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.presets import PRESETS
from jaxrl_llm.runtime import cli, json_lines

FLAGS = flags.FLAGS

# Bytes per parameter: weights, gradient, two moments, and the sampler's copy (model.compute_dtype=bfloat16).
SETTINGS = {
    "float32": (4 + 4 + 8 + 2, "weights and moments of float32, model.compute_dtype=bfloat16"),
    "bfloat16": (2 + 2 + 4 + 2, "model.param_dtype=bfloat16 and optimizer.moment_dtype=bfloat16"),
    "offload": (2 + 2 + 0 + 2, "the latter, and optimizer.offload=True (moments in the host's memory)"),
}


def rows(pattern: str = "") -> list[dict[str, Any]]:
    """A row of each preset whose name ``pattern`` is found in: sizes, bytes by setting, what its layers have.

    Raises:
        ConfigError: none is.
    """
    chosen = {name: arch for name, arch in PRESETS.items() if pattern.lower() in name}
    if not chosen:
        raise ConfigError(f"--filter={pattern!r}: no such preset; known: {', '.join(PRESETS)}")
    return [
        {
            "preset": name,
            "family": arch.family,
            "parameters": arch.num_params,
            "layers": arch.num_layers,
            "width": arch.width,
            "vocabulary": arch.vocab_size,
            "positions": arch.max_positions,
            "bytes": {setting: per * arch.num_params for setting, (per, _) in SETTINGS.items()},
            "layers_have": layers_have(arch),
        }
        for name, arch in chosen.items()
    ]


def layers_have(arch: Architecture) -> list[str]:
    """What there is to an architecture beyond Llama's, in words."""
    windows = {layer.window for layer in arch.by_layer if layer.window}
    there = {
        "tied": arch.tied,
        "qkv biases": arch.qkv_bias,
        "qk norms": arch.qk_norm,
        f"windows of {', '.join(map(str, sorted(windows)))}": windows,
        f"{arch.num_experts} experts, {arch.experts_per_token} a token": arch.num_experts,
        "layers without rope": any(layer.rope < 0 for layer in arch.by_layer),
        "post-norms": arch.post_norm,
        f"a gated delta rule in {sum(layer.mixer == 'delta_rule' for layer in arch.by_layer)} layers": arch.delta,
        "sinks": arch.sinks,
    }
    return [what for what, is_there in there.items() if is_there]


def table(found: list[dict[str, Any]]) -> Table:
    made = Table("preset", "family", caption_justify="left", row_styles=("", "dim"))
    for name in ("parameters", "layers", "width", "positions", *(f"{x}, GB" for x in SETTINGS)):
        made.add_column(name, justify="right")
    made.add_column("beyond Llama")
    for row in found:
        size = f"{row['parameters'] / 1e9:.2f} B" if row["parameters"] >= 1e9 else f"{row['parameters'] / 1e6:.0f} M"
        memory = [f"{row['bytes'][setting] / 1e9:.1f}" for setting in SETTINGS]
        sizes = [str(row[name]) for name in ("layers", "width", "positions")]
        made.add_row(row["preset"], row["family"], size, *sizes, *memory, "; ".join(row["layers_have"]))
    said = [f"{setting}: {per} bytes per parameter, {what}" for setting, (per, what) in SETTINGS.items()]
    made.caption = "\n".join([*said, "plan --preset=NAME --topology=CHIPS tells what a run needs beside."])
    return made


def main() -> None:
    """Run the command with the values of its flags."""
    found = rows(FLAGS.filter)
    if FLAGS.json:
        sizes = {name: size for name, (size, _) in SETTINGS.items()}
        print(json_lines.written({"bytes_per_parameter": sizes, "models": found}))
        return
    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own
        console = Console(width=160)
    console.print(table(found))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("filter", "", "Those whose name has this in it.")
    flags.DEFINE_bool("json", False, "One JSON object, of bytes and whole numbers.")


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
