"""Models: the public models whose shapes are known by name, and the memory that they need.

    python -m jaxrl_llm.models [--filter=qwen3] [--json]

``plan --preset=`` takes the name. The weights come from a folder or a hub id of the family (``model.path``). The table
shows the memory of the whole model in a run's learner and sampler, over all devices: weights, their gradient, the
optimizer's moments and the sampler's copy. ``plan`` also computes the memory of a batch.

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

# Name of a column -> (bytes per parameter, the settings). The bytes count the weights, their gradient, two moments and
# the sampler's copy (model.compute_dtype=bfloat16).
SETTINGS = {
    "float32": (
        4 + 4 + 8 + 2,
        "weights and moments of float32, model.compute_dtype=bfloat16",
    ),
    "bfloat16": (
        2 + 2 + 4 + 2,
        "model.param_dtype=bfloat16 and optimizer.moment_dtype=bfloat16",
    ),
    "offload": (
        2 + 2 + 0 + 2,
        "the settings of bfloat16, and optimizer.offload=True (moments in the host's memory)",
    ),
}


def rows(pattern: str = "") -> list[dict[str, Any]]:
    """Return a row for each preset whose name contains ``pattern``: sizes, bytes by setting, features of its layers.

    Raises:
        ConfigError: no name contains the pattern.
    """
    chosen = {name: arch for name, arch in PRESETS.items() if pattern.lower() in name}
    if not chosen:
        raise ConfigError(f"--filter={pattern!r} must be part of a preset's name: {', '.join(PRESETS)}")
    return [_row(name, arch) for name, arch in chosen.items()]


def _row(name: str, arch: Architecture) -> dict[str, Any]:
    """Return the row of one preset."""
    return {
        "preset": name,
        "family": arch.family,
        "parameters": arch.num_params,
        "layers": arch.num_layers,
        "width": arch.width,
        "vocabulary": arch.vocab_size,
        "positions": arch.max_positions,
        "bytes": {setting: size * arch.num_params for setting, (size, _) in SETTINGS.items()},
        "layers_have": layers_have(arch),
    }


def layers_have(arch: Architecture) -> list[str]:
    """Return the features of an architecture that Llama does not have, as text."""
    windows = sorted({layer.window for layer in arch.by_layer if layer.window})
    num_delta_layers = sum(layer.mixer == "delta_rule" for layer in arch.by_layer)
    features = {
        "tied": arch.tied,
        "qkv biases": arch.qkv_bias,
        "qk norms": arch.qk_norm,
        f"windows of {', '.join(map(str, windows))}": windows,
        f"{arch.num_experts} experts, {arch.experts_per_token} a token": arch.num_experts,
        "layers without rope": any(layer.rope < 0 for layer in arch.by_layer),
        "post-norms": arch.post_norm,
        f"a gated delta rule in {num_delta_layers} layers": arch.delta,
        "sinks": arch.sinks,
    }
    return [feature for feature, is_present in features.items() if is_present]


def table(presets: list[dict[str, Any]]) -> Table:
    """Return the rows as a table for a terminal."""
    columns = Table("preset", "family", caption_justify="left", row_styles=("", "dim"))
    for name in (
        "parameters",
        "layers",
        "width",
        "positions",
        *(f"{setting}, GB" for setting in SETTINGS),
    ):
        columns.add_column(name, justify="right")
    columns.add_column("beyond Llama")
    for row in presets:
        memory = [f"{row['bytes'][setting] / 1e9:.1f}" for setting in SETTINGS]
        sizes = [str(row[name]) for name in ("layers", "width", "positions")]
        features = "; ".join(row["layers_have"])
        columns.add_row(
            row["preset"],
            row["family"],
            _count(row["parameters"]),
            *sizes,
            *memory,
            features,
        )
    notes = [f"{setting}: {size} bytes per parameter, {text}" for setting, (size, text) in SETTINGS.items()]
    notes.append("plan --preset=NAME --topology=CHIPS computes the memory of a whole run.")
    columns.caption = "\n".join(notes)
    return columns


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


def main() -> None:
    """Run the command with the values of its flags."""
    presets = rows(FLAGS.filter)
    if FLAGS.json:
        sizes = {name: size for name, (size, _) in SETTINGS.items()}
        print(json_lines.written({"bytes_per_parameter": sizes, "models": presets}))
        return
    console = Console()
    if not console.is_terminal:  # rich cannot measure the width of a pipe
        console = Console(width=160)
    console.print(table(presets))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("filter", "", "Show the models whose name contains this text.")
    flags.DEFINE_bool("json", False, "Print one JSON object, with bytes and whole numbers.")


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
