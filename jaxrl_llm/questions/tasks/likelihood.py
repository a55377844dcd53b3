"""A reward without labels or a judge: how likely a frozen model finds the question, given the completion.

    r = exp(1/n sum_t log p(x_t | asked, completion, x_<t))        x: the question's n tokens

``rewards.functions=("jaxrl_llm.questions.tasks.likelihood:reward",)``; the model is JAXRL_LIKELIHOOD_MODEL, whatever
``--model=`` takes (smollm2-135m-instruct). It is computed in the process of the reward, on its CPU: give
``rewards.timeout_s`` time for loading and compiling at first, and take a small model.

Source: FoMo rewards: the likelihood of the instruction given what was done, under a frozen model. Differs: text for
video; the geometric mean over tokens, so that questions of all lengths have rewards of one scale.

Owns: what the model reads. Does not know: who wrote the completion.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from typing import Any

MODEL = "smollm2-135m-instruct"
ASKED = "A model was given a task, and this is its answer:\n\n{answer}\n\nWhat was the task?"
CHUNK_POSITIONS = 16


def reward(prompts: list, completions: list[str], **columns: Any) -> list[float | None]:
    """From 0 to 1, the question's mean probability by token (geometric).

    None, no reward, where question and completion are longer than the model takes.
    """
    logp_of = _scorer(os.environ.get("JAXRL_LIKELIHOOD_MODEL", MODEL))
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in prompts]
    logps = [logp_of(ASKED.format(answer=said), question) for question, said in zip(texts, completions, strict=True)]
    return [None if logp is None else math.exp(logp) for logp in logps]


@functools.cache
def _scorer(path: str) -> Any:
    """A function of (what is asked, what is said to it) that gives the mean log-prob of the latter's tokens, nats.

    It gives None where both are too long.
    """
    import jax  # here, for workers of other rewards must not pay for it
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.config import ConfigError, MeshConfig
    from jaxrl_llm.models.files import pretrained
    from jaxrl_llm.models.row_logp import PLAIN, row_logp
    from jaxrl_llm.models.transformer import Model
    from jaxrl_llm.questions import jsonl
    from jaxrl_llm.runtime import sharding
    from jaxrl_llm.runtime.programs import Program, compile_all

    source = pretrained.resolve(path, setting="JAXRL_LIKELIHOOD_MODEL")
    tokenizer, mesh = source.tokenizer(), sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    model = Model(source.architecture())
    params = source.load_params(model, mesh, seed=0)
    how = {"system_prompt": "", "chat_template": True}
    try:
        tokenizer.encode_prompt("", **how)
    except ConfigError:  # a base model's has none
        how["chat_template"] = False

    @functools.cache
    def compiled(width: int) -> Any:
        def mean(params: Any, tokens: jax.Array, prompt_length: jax.Array, length: jax.Array) -> jax.Array:
            sizes = {"completion_width": width, "chunk_positions": CHUNK_POSITIONS}
            values = row_logp(model, params, tokens, prompt_length, length, sampling=PLAIN, **sizes)
            return jnp.sum(values.logp, axis=1) / (length - prompt_length)

        shapes = [sharding.rows(mesh, s, jnp.int32) for s in ((1, width), (1,), (1,))]
        program = Program(mean, (model.abstract_params(mesh), *shapes), sharding.replicated(mesh, 0))
        return compile_all({"likelihood": program}, mesh)["likelihood"]

    def logp_of(asked: str, said: str) -> float | None:
        prompt, answer = tokenizer.encode_prompt(asked, **how), tokenizer.encode(said)
        if (size := len(prompt) + len(answer)) > (most := model.arch.max_positions):
            said = f"{size} tokens of question and completion; JAXRL_LIKELIHOOD_MODEL={path!r} takes {most}"
            warnings.warn(said, stacklevel=2)
            return None
        width = min(jsonl.bucket(size), most)
        row = np.zeros((1, width), np.int32)
        row[0, :size] = prompt + answer
        arrays = row, np.array([len(prompt)], np.int32), np.array([size], np.int32)
        return float(jax.device_get(compiled(width)(params, *sharding.put(arrays, sharding.leading(mesh, arrays))))[0])

    return logp_of
