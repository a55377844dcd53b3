"""Generate: completions of prompts in a file.

    python -m jaxrl_llm.generate --model=PATH --prompts=FILE.jsonl --output=FILE.jsonl

A row has ``prompt`` (text or messages), ``messages`` or ``prompt_ids``. Its other fields are copied to the output. Each
output row has:

    prompt_ids, completion_ids   token ids
    completion                   text
    logp                         nats, one per completion token, of the distribution that was sampled; with --greedy, of
                                 the model at temperature 1
    stop_reason                  why the completion ended

Owns: this command. Does not know: training.
"""

from __future__ import annotations

import collections
import json
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from jaxrl_llm.actor import stop_strings
from jaxrl_llm.actor.generator import FinishedGroup, Generator
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, MeshConfig, PromptsConfig, SamplingConfig, freeze
from jaxrl_llm.learner import publish
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.questions.stream import EncodedExample, batch_of
from jaxrl_llm.questions.tasks.files import prompt_of
from jaxrl_llm.runtime import cli, hosts, json_lines, rng, row_files, sharding
from jaxrl_llm.runtime.programs import compile_all, use_cache
from jaxrl_llm.types import STOP_NAMES, Example

FLAGS = flags.FLAGS


def generate(
    source: Source,
    path: str,
    *,
    sampling: SamplingConfig,
    ignore_eos: bool,
    batch_size: int,
    seed: int,
    compute_dtype: str,
    encoding: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the output rows for the input rows of ``path``, in the order of the file.

    Args:
        source: the model, from ``pretrained.resolve``.
        ignore_eos: continue after the model's own end tokens, up to ``sampling.max_completion_tokens`` or to a stop of
            ``sampling``.
        batch_size: rows decoded side by side.
        encoding: how prompts are encoded (``PromptsConfig.encoding``); None = by the default settings.

    Raises:
        ConfigError: a row has no valid prompt, or a prompt is longer than the model allows.
    """
    arch = source.architecture()
    tokenizer = source.tokenizer().ending_at(sampling.stop_tokens)
    stop_strings.check(sampling.stop_strings, tokenizer, "--stop", "--stop_token")
    if encoding is None:
        encoding = PromptsConfig().encoding
    table, prompts, buckets = _read_prompts(path, arch, tokenizer, sampling.max_completion_tokens, encoding)
    stop_ids = tuple(tokenizer.encode(text, special_tokens=True)[0] for text in sampling.stop_tokens)

    use_cache(Config().compilation_cache)
    mesh = sharding.make_mesh(MeshConfig())
    model = Model(arch, compute_dtype)
    # Loaded before anything is compiled, because the files may be wrong.
    params = source.load_params(model, mesh, seed=seed)
    params = compile_all(publish.programs(model, mesh, mesh), mesh)["publish"](params)
    shapes = publish.abstract_params(model, mesh)
    replicated = sharding.replicated(mesh, 0)
    version = sharding.put(np.int32(0), replicated)
    key = sharding.put(rng.stream(seed, "sample"), replicated)
    output: list[dict[str, Any] | None] = [None] * len(table)
    for width, members in sorted(buckets.items()):
        shards = sharding.num_data_shards(mesh)
        num_rows = -(-min(batch_size, len(members)) // shards) * shards
        eos_ids = stop_ids if ignore_eos else tokenizer.eos_ids
        sampler = _sampler(model, mesh, sampling, eos_ids, num_rows, width)
        generator = Generator(sampler, compile_all(sampler.programs(shapes), mesh), tokenizer.decode)
        for start in range(0, len(members), num_rows):
            chosen = members[start : start + num_rows]
            groups, logp = _complete(generator, params, prompts, chosen, version=version, key=key)
            for j, i in enumerate(chosen):
                completions = groups[j].completions
                if completions is None or j not in logp:
                    continue  # another host has this row
                reason = groups[j].stop_reasons[0]
                output[i] = table[i] | _result(prompts[i], completions[0], logp[j], reason, tokenizer)
    return [row for row in hosts.complete(output) if row is not None]


def _sampler(
    model: Model,
    mesh: Mesh,
    sampling: SamplingConfig,
    eos_ids: tuple[int, ...],
    num_rows: int,
    width: int,
) -> Sampler:
    """Return a sampler that completes ``num_rows`` prompts of at most ``width`` tokens side by side, once each."""
    return Sampler(
        model=model,
        mesh=mesh,
        sampling=sampling,
        eos_ids=eos_ids,
        num_prompts=num_rows,
        group_size=1,
        max_prompt_tokens=width,
        num_slots=num_rows,
        chunk_steps=16,
        keeps_support=False,
    )


def _complete(
    generator: Generator,
    params: Any,
    prompts: list[list[int]],
    chosen: list[int],
    *,
    version: jax.Array,
    key: jax.Array,
) -> tuple[list[FinishedGroup], dict[int, np.ndarray]]:
    """Return the completions of the chosen prompts, and the log-probs of the rows on this host by place in the batch.

    Args:
        prompts: token ids of all prompts.
        chosen: rows of the file. The row's place in the file determines its sampling noise.
    """
    sampler = generator.sampler
    num_missing = sampler.num_prompts - len(chosen)
    padded = chosen + [chosen[-1]] * num_missing
    rows = []
    for i in padded:
        ids = np.asarray(prompts[i], np.int32)
        rows.append(EncodedExample(Example("", {}), ids, sampler.max_prompt_tokens))
    groups = generator.generate(params, batch_of(rows, padded), version=version, key=key)
    return groups, sharding.own_rows(generator.take().behaviour_logp)


def _read_prompts(
    path: str,
    arch: Architecture,
    tokenizer: Any,
    max_completion_tokens: int,
    encoding: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[list[int]], dict[int, list[int]]]:
    """Read the input file.

    Returns:
        The rows, the token ids of their prompts, and the numbers of the rows by the width that prompts are padded to.
    """
    table = []
    prompts = []
    buckets: dict[int, list[int]] = collections.defaultdict(list)
    for index, (where, row) in enumerate(json_lines.objects(path)):
        ids = _prompt_ids(where, row, tokenizer, arch.vocab_size, encoding)
        lengths = f"{where}: prompt and --max_tokens={max_completion_tokens}"
        row_files.check_positions(lengths, len(ids) + max_completion_tokens, arch.max_positions)
        table.append(row)
        prompts.append(ids)
        width = min(row_files.bucket(len(ids)), arch.max_positions - max_completion_tokens)
        buckets[width].append(index)
    return table, prompts, buckets


def _result(prompt: list[int], ids: list[int], logp: np.ndarray, reason: int, tokenizer: Any) -> dict[str, Any]:
    """Return the output fields of a row.

    Args:
        prompt, ids: token ids of the prompt and of the completion.
        logp: [row tokens], log-probs of the prompt's and the completion's tokens.
        reason: why the completion ended (``types.STOP_*``).
    """
    return {
        "prompt_ids": prompt,
        "completion_ids": ids,
        "completion": tokenizer.decode(ids),
        "logp": [float(x) for x in logp[len(prompt) : len(prompt) + len(ids)]],
        "stop_reason": STOP_NAMES[reason],
    }


def _prompt_ids(
    where: str,
    row: dict[str, Any],
    tokenizer: Any,
    vocab_size: int,
    encoding: dict[str, Any],
) -> list[int]:
    """Return the token ids of a row's prompt. ``where`` names the row in error messages."""
    if "prompt_ids" in row:
        return row_files.token_ids(where, row, "prompt_ids", vocab_size, minimum=1)
    try:
        ids = tokenizer.encode_prompt(prompt_of(row), **encoding)
    except (json_lines.BadRowError, ConfigError) as error:
        # The error names settings. This command has a flag for each of them.
        message = str(error).replace("prompts.", "--")
        raise ConfigError(f"{where}: without `prompt_ids`: {message}") from error
    if not ids:
        raise ConfigError(f"{where}: without `prompt_ids`: the prompt has no tokens")
    return ids


def _settings() -> Config:
    """Return the settings that the flags set. The checks of the config apply to the flags too.

    Raises:
        ConfigError: a flag has a value that is not allowed.
    """
    try:
        template_kwargs = json.loads(FLAGS.chat_template_kwargs)
    except ValueError as error:
        text = FLAGS.chat_template_kwargs
        raise ConfigError(f"--chat_template_kwargs={text!r:.200} must be JSON ({error})") from error
    if FLAGS.temperature == 0 and not FLAGS.greedy:
        raise ConfigError("--temperature=0 must be at least 0.01; --greedy takes the most likely token")
    return freeze(
        {
            "sampling": {
                "temperature": 1.0 if FLAGS.greedy else FLAGS.temperature,
                "top_k": FLAGS.top_k,
                "top_p": FLAGS.top_p,
                "min_p": FLAGS.min_p,
                "max_completion_tokens": FLAGS.max_tokens,
                "stop_strings": FLAGS.stop,
                "stop_tokens": FLAGS.stop_token,
            },
            "prompts": {
                "chat_template": FLAGS.chat_template,
                "chat_template_kwargs": template_kwargs,
                "system_prompt": FLAGS.system_prompt,
                "special_tokens": FLAGS.special_tokens,
            },
            "model": {"compute_dtype": FLAGS.compute_dtype},
            "seed": FLAGS.seed,
        }
    )


def main() -> None:
    """Run the command with the values of its flags."""
    if FLAGS.batch_size < 1:
        raise ConfigError(f"--batch_size={FLAGS.batch_size} must be at least 1")
    config = _settings()
    sampling = config.sampling
    if FLAGS.greedy:
        sampling = SamplingConfig(
            temperature=0.0,
            max_completion_tokens=sampling.max_completion_tokens,
            stop_strings=sampling.stop_strings,
            stop_tokens=sampling.stop_tokens,
        )
    row_files.check_output(FLAGS.output)
    output = generate(
        pretrained.resolve(FLAGS.model, adapter=FLAGS.adapter),
        FLAGS.prompts,
        sampling=sampling,
        ignore_eos=FLAGS.ignore_eos,
        batch_size=FLAGS.batch_size,
        seed=FLAGS.seed,
        compute_dtype=FLAGS.compute_dtype,
        encoding=config.prompts.encoding,
    )
    row_files.write(FLAGS.output, output)
    num_tokens = sum(len(row["completion_ids"]) for row in output)
    summary = {"rows": len(output), "completion_tokens": num_tokens, "output": FLAGS.output}
    print(json_lines.written(summary))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("model", None, pretrained.SOME)
    flags.DEFINE_string("adapter", "", "Folder of adapters (PEFT) for --model.")
    flags.DEFINE_string("prompts", None, "JSONL with `prompt`, `messages` or `prompt_ids` per row.")
    flags.DEFINE_string("output", None, "JSONL to write.")
    flags.DEFINE_bool(
        "greedy",
        False,
        "Take the most likely token. The other sampling flags have no effect.",
    )
    flags.DEFINE_bool("ignore_eos", False, "Continue to --max_tokens, or to a --stop or --stop_token.")
    flags.DEFINE_integer("max_tokens", 64, "Most tokens of a completion.")
    flags.DEFINE_float("temperature", 1.0, "Softmax temperature.")
    flags.DEFINE_integer("top_k", 0, "Keep the k most likely tokens; 0 = all.")
    flags.DEFINE_float("top_p", 1.0, "Keep the smallest set of tokens with this probability mass.")
    flags.DEFINE_float("min_p", 0.0, "Keep tokens at least this fraction as likely as the best.")
    flags.DEFINE_multi_string("stop", [], "Text that ends a completion. The flag may be repeated.")
    flags.DEFINE_integer("seed", 0, "Seed of the sampling noise.")
    flags.DEFINE_integer("batch_size", 64, "Rows decoded side by side.")
    flags.DEFINE_string("compute_dtype", "float32", "float32 or bfloat16.")
    flags.DEFINE_string("system_prompt", "", "System message before prompts that have none.")
    flags.DEFINE_multi_string("stop_token", [], "Token that ends a completion. The flag may be repeated.")
    flags.DEFINE_bool(
        "chat_template",
        True,
        "Wrap prompts in the model's chat template; false for a base model.",
    )
    flags.DEFINE_string(
        "chat_template_kwargs",
        "{}",
        'Arguments of the chat template, as JSON: {"enable_thinking": false}.',
    )
    flags.DEFINE_bool("special_tokens", False, "Encode the text of a special token as that token.")
    flags.mark_flags_as_required(["model", "prompts", "output"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
