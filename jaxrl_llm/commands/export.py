"""Export: write the weights of a checkpoint, or of a model in another format, as a Hugging Face folder.

    python -m jaxrl_llm.export --checkpoint=DIR [--model=PATH] --output=HF_DIR [--dtype=bfloat16]
    python -m jaxrl_llm.export --model=PATH --output=HF_DIR [--dtype=bfloat16]

The model of a checkpoint is ``model.path`` of its run. If it has moved, ``--model`` names its new place.

- Weights: each tensor has the dtype of ``--dtype``, else the dtype that it has in the model's own Hugging Face folder,
  else float32.
- Tokenizer, chat template and generation_config.json are copied byte for byte. End tokens of the tokenizer, of its chat
  template or of the run's ``sampling.stop_tokens`` that generation_config.json lacks are added to it.
- Adapters (model.lora): the folder is in PEFT's format. With ``--merge`` the folder is a model, the base with the
  adapters merged into it. The export of a folder of adapters is always such a model.

Owns: the command. Does not know: the two formats.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
from absl import flags

from jaxrl_llm.config import ConfigError, MeshConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import hf, peft, pretrained, run_models
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import cli, sharding, weights
from jaxrl_llm.runtime.checkpoint_files import by_name

FLAGS = flags.FLAGS


def export(checkpoint: str, path: str, output: str, dtype: str = "", *, merge: bool = False) -> None:
    """Write the weights of a checkpoint or of a model as a Hugging Face folder.

    Args:
        checkpoint: workdir of a run, its folder of checkpoints, or one checkpoint; "" = export the model ``path``.
        path: the model to export. With a checkpoint: the present place of the run's ``model.path``; "" = the same.
        output: the folder to write.
        dtype: dtype of the weights; "" = as in the model's own folder.
        merge: write adapters and their base as one model.

    Raises:
        ConfigError: nothing to export, a missing model, a model that does not fit the checkpoint, an unknown dtype.
    """
    if not checkpoint and weights.is_run(path):
        checkpoint = path
        path = ""
    if not checkpoint and not path:
        raise ConfigError("give --checkpoint=DIR, --model=PATH, or both")
    if dtype not in ("", *hf.numpy_dtypes()):
        raise ConfigError(f"--dtype={dtype!r} must be one of {', '.join(hf.numpy_dtypes())}. Without it: the model's")
    _check_output(output)
    trained = _read_checkpoint(checkpoint, path) if checkpoint else _read_model(path)
    # The folder of adapters as a model: they are merged when it is loaded.
    is_merged = not checkpoint and peft.is_adapter(path)
    if merge and not is_merged:
        if not trained.model.lora.rank:
            raise ConfigError(f"--merge=True needs adapters, but {checkpoint or path} has none: leave out --merge")
        trained = _merged(trained)
    with cli.writing(output):
        peft.export(
            trained.params,
            trained.model,
            trained.tokenizer,
            output,
            trained.path,
            like=trained.source.folder,
            dtype=dtype,
        )


@dataclasses.dataclass(frozen=True)
class _Trained:
    """Weights to export.

    Attributes:
        source: the model that the weights come from.
        path: where the source is.
        host: host state of the checkpoint; {} without one.
        seed: the run's seed, which a randomly initialised base needs.
    """

    params: Any
    model: Model
    tokenizer: Any
    source: Source
    path: str
    host: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0


def _check_output(output: str) -> None:
    """Raise a ``ConfigError`` if ``output`` cannot be the folder to write."""
    if not output or not output.isprintable() or "://" in output:
        raise ConfigError(f"--output={output!r:.200} must name a folder, in printable text, and no URL")
    if os.path.exists(output) and not os.path.isdir(output):
        raise ConfigError(f"--output={output} is not a folder. Name another folder")
    hf.check_output(output, "--output")


def _read_checkpoint(checkpoint: str, path: str) -> _Trained:
    """Read the weights of a checkpoint. ``path`` is the present place of its model, or ""."""
    host: dict[str, Any] = {}
    params, config = weights.restore_params(checkpoint, check=host.update)
    source = run_models.base_of(checkpoint, config, pretrained.resolve, path)
    model = Model(
        source.architecture(),
        param_dtype=config.model.param_dtype,
        lora=config.model.lora,
    )
    path = path or config.model.path
    _check_shapes(params, model, f"{checkpoint} and {path}")
    tokenizer = source.tokenizer().ending_at(config.sampling.stop_tokens)
    return _Trained(params, model, tokenizer, source, path, host, config.seed)


def _read_model(path: str) -> _Trained:
    """Read the weights of a model."""
    source = pretrained.resolve(path, setting="--model")
    model = Model(source.architecture())
    params = source.load_params(model, sharding.make_mesh(MeshConfig()), seed=0)
    return _Trained(params, model, source.tokenizer(), source, path)


def _merged(trained: _Trained) -> _Trained:
    """Return the model with the adapters merged into its base, in float32."""
    model = trained.model
    base = trained.source.load_params(model.base, sharding.make_mesh(MeshConfig()), seed=trained.seed)
    lora.check_frozen(trained.host, lora.identity(base), trained.path)
    base = jax.tree.map(lambda x: x.astype("float32"), base)
    return dataclasses.replace(trained, params=lora.merge(trained.params, base, model.lora), model=model.base)


def _check_shapes(params: Any, model: Model, names: str) -> None:
    """Raise a ``ConfigError`` if the arrays of a checkpoint do not have the shapes of a model.

    Args:
        names: the checkpoint and the model, for the error message.
    """
    mesh = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    learned = lora.split(model.abstract_params(mesh))[0]
    saved = {key: tuple(array.shape) for key, array in by_name(params).items()}
    wanted = {key: tuple(array.shape) for key, array in by_name(learned).items()}
    for key in sorted({*saved, *wanted}, key=str):
        if saved.get(key) != wanted.get(key):
            raise ConfigError(f"{names} are not of one model: {key} is {saved.get(key)} and {wanted.get(key)}")


def main() -> None:
    """Run the command with the values of its flags."""
    export(FLAGS.checkpoint, FLAGS.model, FLAGS.output, FLAGS.dtype, merge=FLAGS.merge)
    print(f"exported {FLAGS.checkpoint or FLAGS.model} to {FLAGS.output}")


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string(
        "checkpoint",
        "",
        "Workdir of a run, its folder of checkpoints, or one checkpoint.",
    )
    flags.DEFINE_string(
        "model",
        "",
        "Model to export; with --checkpoint: the present place of its run's model.path.",
    )
    flags.DEFINE_string("output", None, "Folder to write.", required=True)
    flags.DEFINE_string(
        "dtype",
        "",
        "Dtype of the weights: float32, bfloat16 or float16; default: the model's.",
    )
    flags.DEFINE_bool(
        "merge",
        False,
        "Write adapters and their base as one model, not the adapters alone.",
    )


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
