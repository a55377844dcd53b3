"""``python -m jaxrl_llm.export --checkpoint=DIR --output=HF_DIR``: a checkpoint as a Hugging Face folder.

Owns: the command. Does not know: either format.
"""

from __future__ import annotations

from absl import flags

from jaxrl_llm.models.files import hf, pretrained
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import cli, weights


def main() -> None:
    params, config = weights.restore_params(CHECKPOINT.value)
    source = pretrained.resolve(config.model.path)
    with cli.writing(OUTPUT.value):
        hf.export(params, Model(source.architecture()), source.tokenizer(), OUTPUT.value)
    print(f"exported {CHECKPOINT.value} to {OUTPUT.value}")


if __name__ == "__main__":
    CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir of a run, or its checkpoints folder.", required=True)
    OUTPUT = flags.DEFINE_string("output", None, "Folder to write.", required=True)
    cli.run(main)
