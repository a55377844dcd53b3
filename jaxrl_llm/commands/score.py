"""Score: log-probabilities of given completions, as the learner computes them.

    python -m jaxrl_llm.score --model=PATH --input=FILE.jsonl --output=FILE.jsonl

Rows have ``prompt_ids`` and ``completion_ids``. Each output row is the input row with ``logp``: one number in nats per
completion token, at temperature 1.

Owns: this command. Does not know: sampling.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError, MeshConfig
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.row_logp import plain_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import cli, json_lines, row_files, sharding
from jaxrl_llm.runtime.programs import Program, compile_all, use_cache

FLAGS = flags.FLAGS

Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its completion


def score(source: Source, path: str, *, batch_size: int, compute_dtype: str) -> list[dict[str, Any]]:
    """Return the input rows of ``path`` with their log-probs ``logp``, in the order of the file.

    Args:
        source: the model, from ``pretrained.resolve``.
        batch_size: rows in one forward pass.

    Raises:
        ConfigError: a row has no token ids of this model, or is longer than the model allows.
    """
    arch = source.architecture()
    table, pairs, buckets = _read_pairs(path, arch)
    use_cache(Config().compilation_cache)
    mesh = sharding.make_mesh(MeshConfig())
    model = Model(arch, compute_dtype)
    params = source.load_params(model, mesh, seed=0)
    for width, members in sorted(buckets.items()):
        shards = sharding.num_data_shards(mesh)
        num_rows = -(-min(batch_size, len(members)) // shards) * shards
        run = compile_all({"logp": _program(model, mesh, num_rows, width)}, mesh)["logp"]
        for start in range(0, len(members), num_rows):
            chosen = members[start : start + num_rows]
            padded = chosen + [chosen[-1]] * (num_rows - len(chosen))
            arrays = _batch([pairs[i] for i in padded], width)
            placed = sharding.put(arrays, sharding.leading(mesh, arrays))
            values = jax.device_get(run(params, *placed))
            for j, i in enumerate(chosen):
                prompt, completion = pairs[i]
                begin = len(prompt)
                logp = values[j, begin : begin + len(completion)]
                table[i] = table[i] | {"logp": [float(x) for x in logp]}
    return table


def _read_pairs(
    path: str,
    arch: Architecture,
) -> tuple[list[dict[str, Any]], list[Pair], dict[int, list[int]]]:
    """Read the input file.

    Returns:
        The rows, their token ids, and the numbers of the rows by the width that rows are padded to.
    """
    table = []
    pairs = []
    buckets: dict[int, list[int]] = collections.defaultdict(list)
    for index, (where, row) in enumerate(json_lines.objects(path)):
        prompt = row_files.token_ids(where, row, "prompt_ids", arch.vocab_size, minimum=1)
        completion = row_files.token_ids(where, row, "completion_ids", arch.vocab_size, minimum=0)
        length = len(prompt) + len(completion)
        row_files.check_positions(where, length, arch.max_positions)
        table.append(row)
        pairs.append((prompt, completion))
        buckets[min(row_files.bucket(length), arch.max_positions)].append(index)
    return table, pairs, buckets


def _program(model: Model, mesh: Mesh, num_rows: int, width: int) -> Program:
    """Return the program that computes the log-probs of a batch of rows of this width."""

    def logp(params: Any, tokens: jax.Array, prompt_length: jax.Array, length: jax.Array) -> jax.Array:
        return plain_logp(model, params, tokens, prompt_length, length)

    tokens = sharding.rows(mesh, (num_rows, width), jnp.int32)
    lengths = sharding.rows(mesh, (num_rows,), jnp.int32)
    arguments = (model.abstract_params(mesh), tokens, lengths, lengths)
    return Program(logp, arguments, sharding.replicated(mesh, 0))


def _batch(pairs: list[Pair], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens, padded with 0, the lengths of the prompts and the lengths of the rows."""
    rows = [prompt + completion for prompt, completion in pairs]
    tokens = np.zeros((len(rows), width), np.int32)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)] = ids
    prompt_length = np.asarray([len(prompt) for prompt, _ in pairs], np.int32)
    length = np.asarray([len(ids) for ids in rows], np.int32)
    return tokens, prompt_length, length


def main() -> None:
    """Run the command with the values of its flags."""
    if FLAGS.batch_size < 1:
        raise ConfigError(f"--batch_size={FLAGS.batch_size} must be at least 1")
    if FLAGS.compute_dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--compute_dtype={FLAGS.compute_dtype!r} must be 'float32' or 'bfloat16'")
    row_files.check_output(FLAGS.output)
    source = pretrained.resolve(FLAGS.model, adapter=FLAGS.adapter)
    output = score(
        source,
        FLAGS.input,
        batch_size=FLAGS.batch_size,
        compute_dtype=FLAGS.compute_dtype,
    )
    row_files.write(FLAGS.output, output)
    num_tokens = sum(len(row["logp"]) for row in output)
    total = sum(sum(row["logp"]) for row in output)
    summary = {
        "rows": len(output),
        "tokens": num_tokens,
        "mean_logp_nats": total / max(1, num_tokens),
        "output": FLAGS.output,
    }
    print(json_lines.written(summary))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("model", None, pretrained.SOME)
    flags.DEFINE_string("adapter", "", "Folder of adapters (PEFT) for --model.")
    flags.DEFINE_string("input", None, "JSONL with `prompt_ids` and `completion_ids` per row.")
    flags.DEFINE_string("output", None, "JSONL to write.")
    flags.DEFINE_integer("batch_size", 16, "Rows in one forward pass.")
    flags.DEFINE_string("compute_dtype", "float32", "float32 or bfloat16.")
    flags.mark_flags_as_required(["model", "input", "output"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
