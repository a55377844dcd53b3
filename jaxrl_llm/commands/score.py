"""Score: log-probabilities of given completions, as the learner computes them.

    python -m jaxrl_llm.score --model=PATH --input=FILE.jsonl --output=FILE.jsonl

Rows have ``prompt_ids`` and ``completion_ids``; each output row is the input row with ``logp``, one number in nats
per completion token, at temperature 1.

Owns: this command. Does not know: sampling.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxrl_llm.config import Config, ConfigError, MeshConfig
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.row_logp import PLAIN, row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import cli, json_lines, row_files, sharding
from jaxrl_llm.runtime.programs import Program, compile_all, use_cache

FLAGS = flags.FLAGS

CHUNK_POSITIONS = 16  # of each row; logits of batch_size * this many positions are live at once


def score(source: Source, path: str, *, batch_size: int, compute_dtype: str) -> list[dict[str, Any]]:
    """The input rows of ``path`` with ``logp``, in their order.

    Raises:
        ConfigError: a row without token ids of this model, or longer than it allows.
    """
    arch = source.architecture()
    table, pairs = [], []
    for where, row in json_lines.objects(path):
        prompt = row_files.token_ids(where, row, "prompt_ids", arch.vocab_size, minimum=1)
        completion = row_files.token_ids(where, row, "completion_ids", arch.vocab_size, minimum=0)
        row_files.check_positions(where, len(prompt) + len(completion), arch.max_positions)
        table.append(row)
        pairs.append((prompt, completion))
    buckets = collections.defaultdict(list)
    for index, (prompt, completion) in enumerate(pairs):
        buckets[min(row_files.bucket(len(prompt) + len(completion)), arch.max_positions)].append(index)

    use_cache(Config().compilation_cache)
    mesh = sharding.make_mesh(MeshConfig())
    model = Model(arch, compute_dtype)
    params = source.load_params(model, mesh, seed=0)
    for width, members in sorted(buckets.items()):
        shards = sharding.num_data_shards(mesh)
        at_once = -(-min(batch_size, len(members)) // shards) * shards

        def logp(params, tokens, prompt_length, length, width=width):
            return row_logp(
                model,
                params,
                tokens,
                prompt_length,
                length,
                sampling=PLAIN,
                completion_width=width,
                chunk_positions=CHUNK_POSITIONS,
            ).logp

        shapes = [sharding.rows(mesh, s, jnp.int32) for s in ((at_once, width), (at_once,), (at_once,))]
        whole = sharding.replicated(mesh, 0)
        program = Program(logp, (model.abstract_params(mesh), *shapes), whole)
        run = compile_all({"logp": program}, mesh)["logp"]
        for start in range(0, len(members), at_once):
            chosen = members[start : start + at_once]
            padded = chosen + [chosen[-1]] * (at_once - len(chosen))
            both = [prompt + completion for prompt, completion in (pairs[i] for i in padded)]
            arrays = (
                np.asarray([ids + [0] * (width - len(ids)) for ids in both], np.int32),
                np.asarray([len(pairs[i][0]) for i in padded], np.int32),
                np.asarray([len(ids) for ids in both], np.int32),
            )
            values = jax.device_get(run(params, *sharding.put(arrays, sharding.leading(mesh, arrays))))
            for j, i in enumerate(chosen):
                first = len(pairs[i][0])
                table[i] = table[i] | {"logp": [float(x) for x in values[j, first : first + len(pairs[i][1])]]}
    return table


def main() -> None:
    """Run the command with the values of its flags."""
    if FLAGS.batch_size < 1:
        raise ConfigError(f"--batch_size={FLAGS.batch_size} must be at least 1")
    if FLAGS.compute_dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--compute_dtype={FLAGS.compute_dtype!r} is not one of 'float32', 'bfloat16'")
    row_files.check_output(FLAGS.output)
    source = pretrained.resolve(FLAGS.model, adapter=FLAGS.adapter)
    output = score(source, FLAGS.input, batch_size=FLAGS.batch_size, compute_dtype=FLAGS.compute_dtype)
    row_files.write(FLAGS.output, output)
    tokens = sum(len(row["logp"]) for row in output)
    mean = sum(sum(row["logp"]) for row in output) / max(1, tokens)
    print(json_lines.written({"rows": len(output), "tokens": tokens, "mean_logp_nats": mean, "output": FLAGS.output}))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("model", None, pretrained.SOME)
    flags.DEFINE_string("adapter", "", "Folder of adapters (PEFT) over --model.")
    flags.DEFINE_string("input", None, "JSONL with `prompt_ids` and `completion_ids` per row.")
    flags.DEFINE_string("output", None, "JSONL to write.")
    flags.DEFINE_integer("batch_size", 16, "Rows in one forward pass.")
    flags.DEFINE_string("compute_dtype", "float32", "float32 or bfloat16.")
    flags.mark_flags_as_required(["model", "input", "output"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
