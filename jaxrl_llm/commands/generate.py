"""Generate: completions of prompts in a file.

    python -m jaxrl_llm.generate --model=PATH --prompts=FILE.jsonl --output=FILE.jsonl

A row gives ``prompt`` (text or messages), ``messages`` or ``prompt_ids``; its other fields are passed on. Each output
row has ``prompt_ids``, ``completion_ids``, ``completion``, ``logp`` (nats, one per completion token, of the
distribution that was sampled; with --greedy, of the model at temperature 1) and ``stop_reason``.

Owns: this command. Does not know: training.
"""

from __future__ import annotations

import collections
import json
from typing import Any

import numpy as np
from absl import flags

from jaxrl_llm.actor import stop_strings
from jaxrl_llm.actor.generator import Generator
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, MeshConfig, PromptsConfig, SamplingConfig, freeze
from jaxrl_llm.learner import publish
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
    """Output rows for the input rows of ``path``, in their order.

    ``encoding``: of their prompts, as ``PromptsConfig.encoding`` has it; None: that of the default settings.

    Raises:
        ConfigError: a row that is no prompt, or a prompt longer than the model allows.
    """
    arch, tokenizer = source.architecture(), source.tokenizer().ending_at(sampling.stop_tokens)
    stop_strings.check(sampling.stop_strings, tokenizer, "--stop", "--stop_token")
    asked = [tokenizer.encode(text, special_tokens=True)[0] for text in sampling.stop_tokens]
    table, prompts, buckets = [], [], collections.defaultdict(list)
    how = PromptsConfig().encoding if encoding is None else encoding
    for index, (where, row) in enumerate(json_lines.objects(path)):
        ids = _prompt_ids(where, row, tokenizer, arch.vocab_size, how)
        both = f"{where}: prompt and --max_tokens={sampling.max_completion_tokens}"
        row_files.check_positions(both, len(ids) + sampling.max_completion_tokens, arch.max_positions)
        table.append(row)
        prompts.append(ids)
        buckets[min(row_files.bucket(len(ids)), arch.max_positions - sampling.max_completion_tokens)].append(index)

    use_cache(Config().compilation_cache)
    mesh = sharding.make_mesh(MeshConfig())
    model = Model(arch, compute_dtype)
    params = source.load_params(model, mesh, seed=seed)  # which may be wrong, before anything is compiled
    params = compile_all(publish.programs(model, mesh, mesh), mesh)["publish"](params)
    shapes = publish.abstract_params(model, mesh)
    version, key = sharding.put((np.int32(0), rng.stream(seed, "sample")), sharding.replicated(mesh, (0, 0)))
    output: list[Any] = [None] * len(table)
    for width, members in sorted(buckets.items()):
        shards = sharding.num_data_shards(mesh)
        at_once = -(-min(batch_size, len(members)) // shards) * shards
        sampler = Sampler(
            model=model,
            mesh=mesh,
            sampling=sampling,
            eos_ids=tuple(asked) if ignore_eos else tokenizer.eos_ids,
            num_prompts=at_once,
            group_size=1,
            max_prompt_tokens=width,
            num_slots=at_once,
            chunk_steps=16,
            keeps_support=False,
        )
        generator = Generator(sampler, compile_all(sampler.programs(shapes), mesh), tokenizer.decode)
        for start in range(0, len(members), at_once):
            chosen = members[start : start + at_once]
            padded = chosen + [chosen[-1]] * (at_once - len(chosen))
            rows = [EncodedExample(Example("", {}), np.asarray(prompts[i], np.int32), width) for i in padded]
            batch = batch_of(rows, padded)  # the row's place in the file keys its noise
            groups = generator.generate(params, batch, version=version, key=key)
            logp = sharding.own_rows(generator.take().behaviour_logp)
            for j, i in ((j, i) for j, i in enumerate(chosen) if j in logp):
                ids = groups[j].completions[0]
                output[i] = table[i] | {
                    "prompt_ids": prompts[i],
                    "completion_ids": ids,
                    "completion": tokenizer.decode(ids),
                    "logp": [float(x) for x in logp[j][len(prompts[i]) : len(prompts[i]) + len(ids)]],
                    "stop_reason": STOP_NAMES[groups[j].stop_reasons[0]],
                }
    return hosts.complete(output)


def _prompt_ids(where: str, row: dict[str, Any], tokenizer: Any, vocab_size: int, how: dict[str, Any]) -> list[int]:
    if "prompt_ids" in row:
        return row_files.token_ids(where, row, "prompt_ids", vocab_size, minimum=1)
    try:
        if ids := tokenizer.encode_prompt(prompt_of(row), **how):
            return ids
        raise ConfigError("it has no token")
    except (json_lines.BadRowError, ConfigError) as error:
        said = str(error).replace("prompts.", "--")  # the settings are flags here
        raise ConfigError(f"{where}: without `prompt_ids`: {said}") from error


def main() -> None:
    """Run the command with the values of its flags."""
    if FLAGS.batch_size < 1:
        raise ConfigError(f"--batch_size={FLAGS.batch_size} must be at least 1")
    try:
        told = json.loads(FLAGS.chat_template_kwargs)
    except ValueError as error:
        raise ConfigError(
            f"--chat_template_kwargs={FLAGS.chat_template_kwargs!r:.200} must be JSON ({error})"
        ) from error
    if FLAGS.temperature == 0 and not FLAGS.greedy:
        raise ConfigError("--temperature=0 must be at least 0.01; --greedy takes the most likely token")
    # Through the config's own checks, so that a flag has the bounds of the setting it stands for.
    config = freeze(
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
                "chat_template_kwargs": told,
                "system_prompt": FLAGS.system_prompt,
                "special_tokens": FLAGS.special_tokens,
            },
            "model": {"compute_dtype": FLAGS.compute_dtype},
            "seed": FLAGS.seed,
        }
    )
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
    tokens = sum(len(row["completion_ids"]) for row in output)
    print(json_lines.written({"rows": len(output), "completion_tokens": tokens, "output": FLAGS.output}))


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("model", None, pretrained.SOME)
    flags.DEFINE_string("adapter", "", "Folder of adapters (PEFT) over --model.")
    flags.DEFINE_string("prompts", None, "JSONL with `prompt`, `messages` or `prompt_ids` per row.")
    flags.DEFINE_string("output", None, "JSONL to write.")
    flags.DEFINE_bool("greedy", False, "Take the most likely token; the other sampling flags have no say.")
    flags.DEFINE_bool("ignore_eos", False, "Go on to --max_tokens, or to a --stop or --stop_token.")
    flags.DEFINE_integer("max_tokens", 64, "Longest completion.")
    flags.DEFINE_float("temperature", 1.0, "Softmax temperature.")
    flags.DEFINE_integer("top_k", 0, "Keep the k most likely tokens; 0 = all.")
    flags.DEFINE_float("top_p", 1.0, "Keep the smallest set with this mass.")
    flags.DEFINE_float("min_p", 0.0, "Keep tokens at least this fraction as likely as the best.")
    flags.DEFINE_multi_string("stop", [], "Text that ends a completion; may be given more than once.")
    flags.DEFINE_integer("seed", 0, "Root of the sampling noise.")
    flags.DEFINE_integer("batch_size", 64, "Rows decoded side by side.")
    flags.DEFINE_string("compute_dtype", "float32", "float32 or bfloat16.")
    flags.DEFINE_string("system_prompt", "", "System message before prompts that have none.")
    flags.DEFINE_multi_string("stop_token", [], "Token that ends a completion; may be given repeatedly.")
    flags.DEFINE_bool("chat_template", True, "Wrap prompts in the model's; false for a base model.")
    flags.DEFINE_string("chat_template_kwargs", "{}", 'JSON for it: {"enable_thinking": false}.')
    flags.DEFINE_bool("special_tokens", False, "Read what looks like a special token as that token.")
    flags.mark_flags_as_required(["model", "prompts", "output"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
