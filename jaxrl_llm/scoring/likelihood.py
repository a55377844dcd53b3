"""Reward without labels or a judge: the likelihood of the question under a frozen model, given the completion.

    r = exp(1/n sum_t log p(x_t | asked, completion, x_<t))        x: the question's n tokens

Set ``rewards.functions=("jaxrl_llm.scoring.likelihood:reward",)``. JAXRL_LIKELIHOOD_MODEL names the model and
takes the values of ``--model=`` (default smollm2-135m-instruct). The reward process computes the likelihood on its CPU.
Choose a small model, and set ``rewards.timeout_s`` high enough for the first call, which loads and compiles.

Source: FoMo rewards: the likelihood of the instruction given the behaviour, under a frozen model. Differs: text instead
of video; the geometric mean over tokens, so that questions of all lengths have rewards on one scale.

Owns: the text that the model reads. Does not know: the policy.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from typing import Any

from jaxrl_llm.settings.schema import ConfigError

MODEL = "smollm2-135m-instruct"
ASKED = "A model was given a task, and this is its answer:\n\n{answer}\n\nWhat was the task?"


def reward(prompts: list, completions: list[str], **columns: Any) -> list[float | None]:
    """Return the geometric mean probability of the question's tokens, from 0 to 1.

    The reward is None if the question and the completion are longer than the model's maximum length.
    """
    logp_of = _scorer(os.environ.get("JAXRL_LIKELIHOOD_MODEL", MODEL))
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        logp = logp_of(ASKED.format(answer=completion), question)
        rewards.append(None if logp is None else math.exp(logp))
    return rewards


def _has_template(tokenizer: Any) -> bool:
    """Return whether the model has a chat template. A base model does not have one."""
    try:
        tokenizer.encode_prompt("", system_prompt="", chat_template=True)
    except ConfigError:
        return False
    return True


@functools.cache
def _scorer(path: str) -> Any:
    """Return a function ``(asked, question)``: the mean log-prob of the tokens of ``question``, given ``asked``.

    The log-prob is in nats. The function returns None if both texts together are too long.
    """
    import jax  # imported here because workers of other rewards must not load jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.config import MeshConfig
    from jaxrl_llm.models.files import pretrained
    from jaxrl_llm.models.row_logp import plain_logp
    from jaxrl_llm.models.transformer import Model
    from jaxrl_llm.runtime import row_files, sharding
    from jaxrl_llm.runtime.programs import Program, compile_all

    source = pretrained.resolve(path, setting="JAXRL_LIKELIHOOD_MODEL")
    tokenizer = source.tokenizer()
    has_template = _has_template(tokenizer)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    model = Model(source.architecture())
    params = source.load_params(model, mesh, seed=0)

    def mean_logp(params: Any, tokens: jax.Array, prompt_length: jax.Array, length: jax.Array) -> jax.Array:
        logp = plain_logp(model, params, tokens, prompt_length, length)
        return jnp.sum(logp, axis=1) / (length - prompt_length)

    @functools.cache
    def compiled(width: int) -> Any:
        tokens = sharding.rows(mesh, (1, width), jnp.int32)
        length = sharding.rows(mesh, (1,), jnp.int32)
        arguments = (model.abstract_params(mesh), tokens, length, length)
        program = Program(mean_logp, arguments, sharding.replicated(mesh, 0))
        return compile_all({"likelihood": program}, mesh)["likelihood"]

    def logp_of(asked: str, question: str) -> float | None:
        prompt_ids = tokenizer.encode_prompt(asked, system_prompt="", chat_template=has_template)
        question_ids = tokenizer.encode(question)
        size = len(prompt_ids) + len(question_ids)
        max_size = model.arch.max_positions
        if size > max_size:
            warnings.warn(
                f"question and completion have {size} tokens, and JAXRL_LIKELIHOOD_MODEL={path!r} takes {max_size}",
                stacklevel=2,
            )
            return None
        width = min(row_files.bucket(size), max_size)
        row = np.zeros((1, width), np.int32)
        row[0, :size] = prompt_ids + question_ids
        arrays = (
            row,
            np.array([len(prompt_ids)], np.int32),
            np.array([size], np.int32),
        )
        on_device = sharding.put(arrays, sharding.leading(mesh, arrays))
        logps = jax.device_get(compiled(width)(params, *on_device))
        return float(logps[0])

    return logp_of
