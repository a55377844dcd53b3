"""``python -m jaxrl_llm.export --checkpoint=DIR --output=HF_DIR``: a checkpoint as a Hugging Face folder.

Of adapters (model.lora) a folder in PEFT's format; with ``--merge`` a model's, their base with them in it.

Owns: the command. Does not know: either format.
"""

from __future__ import annotations

import jax
from absl import flags

from jaxrl_llm.config import ConfigError, MeshConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import peft, pretrained
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import cli, sharding, weights


def main() -> None:
    found = {}
    params, config = weights.restore_params(CHECKPOINT.value, check=found.update)
    source = pretrained.resolve(config.model.path)
    model = Model(source.architecture(), param_dtype=config.model.param_dtype, lora=config.model.lora)
    if MERGE.value:
        if not model.lora.rank:
            raise ConfigError(f"--merge: {CHECKPOINT.value} has no adapters (model.lora.rank=0)")
        base = source.load_params(model.base, sharding.make_mesh(MeshConfig()), seed=config.seed)
        lora.check_base(found, lora.identity(base), config.model.path)
        base = jax.tree.map(lambda x: x.astype("float32"), base)
        params, model = lora.merge(params, base, model.lora), model.base
    with cli.writing(OUTPUT.value):
        peft.export(params, model, source.tokenizer(), OUTPUT.value, config.model.path)
    print(f"exported {CHECKPOINT.value} to {OUTPUT.value}")


if __name__ == "__main__":
    CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir of a run, or its checkpoints folder.", required=True)
    OUTPUT = flags.DEFINE_string("output", None, "Folder to write.", required=True)
    MERGE = flags.DEFINE_bool("merge", False, "Adapters and their base as one model, not the adapters alone.")
    cli.run(main)
