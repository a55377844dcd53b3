"""Export: the weights of a checkpoint, or of a model in another format, as a Hugging Face folder.

    python -m jaxrl_llm.export --checkpoint=DIR [--model=PATH] --output=HF_DIR [--dtype=bfloat16]
    python -m jaxrl_llm.export --model=PATH --output=HF_DIR [--dtype=bfloat16]

A checkpoint's model is where ``model.path`` of its run says, or where ``--model`` says it is by now. Each tensor has
the dtype that it has in that model's own Hugging Face folder, or float32 where it comes from none, or ``--dtype``;
tokenizer, chat template and generation_config.json are copied byte for byte, but for ends of a text that the last lacks
and the tokenizer, its chat template or the run's ``sampling.stop_tokens`` have.

Of a run's adapters (model.lora) a folder in PEFT's format; with ``--merge``, and of a folder of adapters, a model's,
their base with them in it.

Owns: the command. Does not know: either format.
"""

from __future__ import annotations

import os
from typing import Any

import jax
from absl import flags

from jaxrl_llm.config import ConfigError, MeshConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import hf, peft, pretrained, run_models
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import cli, sharding, weights
from jaxrl_llm.runtime.checkpoint_files import by_name

FLAGS = flags.FLAGS


def export(checkpoint: str, path: str, output: str, dtype: str = "", *, merge: bool = False) -> None:
    """The command's work; see the module's text.

    Raises:
        ConfigError: nothing to export, a model that is not there or is none of the checkpoint's, an unknown dtype.
    """
    if not checkpoint and weights.is_run(path):
        checkpoint, path = path, ""
    if not checkpoint and not path:
        raise ConfigError("give --checkpoint=DIR, --model=PATH, or both")
    if dtype not in ("", *hf.numpy_dtypes()):
        raise ConfigError(f"--dtype={dtype!r} must be one of {', '.join(hf.numpy_dtypes())}; left out, as the model's")
    if not output or not output.isprintable() or "://" in output:
        raise ConfigError(f"--output={output!r:.200} must name a folder, in printable text, and no URL")
    if os.path.exists(output) and not os.path.isdir(output):
        raise ConfigError(f"--output={output} is no folder")
    hf.check_output(output, "--output")
    if checkpoint:
        found: dict[str, Any] = {}
        params, config = weights.restore_params(checkpoint, check=found.update)
        source = run_models.base_of(checkpoint, config, pretrained.resolve, path)
        model = Model(source.architecture(), param_dtype=config.model.param_dtype, lora=config.model.lora)
        _check_shapes(params, model, f"{checkpoint} and {path or config.model.path}")
        tokenizer = source.tokenizer().ending_at(config.sampling.stop_tokens)
    else:
        source = pretrained.resolve(path, setting="--model")
        model, mesh = Model(source.architecture()), sharding.make_mesh(MeshConfig())
        params, tokenizer = source.load_params(model, mesh, seed=0), source.tokenizer()
    is_merged = not checkpoint and peft.is_adapter(path)  # a model of such a folder has them in it
    if merge and not is_merged:
        if not model.lora.rank:
            raise ConfigError(f"--merge: {checkpoint or path} has no adapters (model.lora.rank=0)")
        base = source.load_params(model.base, sharding.make_mesh(MeshConfig()), seed=config.seed)
        lora.check_frozen(found, lora.identity(base), path or config.model.path)
        base = jax.tree.map(lambda x: x.astype("float32"), base)
        params, model = lora.merge(params, base, model.lora), model.base
    with cli.writing(output):
        of = path or config.model.path
        peft.export(params, model, tokenizer, output, of, like=source.folder, dtype=dtype)


def _check_shapes(params: Any, model: Model, both: str) -> None:
    mesh = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    learned = lora.split(model.abstract_params(mesh))[0]
    have, want = ({k: tuple(v.shape) for k, v in by_name(x).items()} for x in (params, learned))
    for key in sorted({*have, *want}, key=str):
        if have.get(key) != want.get(key):
            raise ConfigError(f"{both} are not of one model: {key} is {have.get(key)} and {want.get(key)}")


def main() -> None:
    """Run the command with the values of its flags."""
    export(FLAGS.checkpoint, FLAGS.model, FLAGS.output, FLAGS.dtype, merge=FLAGS.merge)
    print(f"exported {FLAGS.checkpoint or FLAGS.model} to {FLAGS.output}")


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("checkpoint", "", "Workdir of a run, its checkpoints folder, or one of these.")
    flags.DEFINE_string("model", "", "What to export; with --checkpoint: where its run's model.path is now.")
    flags.DEFINE_string("output", None, "Folder to write.", required=True)
    flags.DEFINE_string("dtype", "", "Of the weights: float32, bfloat16 or float16; left out, as the model's.")
    flags.DEFINE_bool("merge", False, "Adapters and their base as one model, not the adapters alone.")


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
