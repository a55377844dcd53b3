"""Parts of the OpenAI API that the server for agents (conversations.agents) and serve (serving.http) share.

Owns: which values of a request have no effect, and common parts of answers. Does not know: routes, models, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.runtime.json_server import Refused

# Fields of a request that have no effect with these values: allowed values by name, () = any value. Null is allowed for
# every field. A server that implements such a field removes it from the request first.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "stop": ([],),
    "seed": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "stream": (False,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (),
    "include_stop_str_in_output": (False,),
    "metadata": (),
    "user": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "cache_salt": (),
    "priority": (),
}
# Fields without effect in requests for token ids: the answer always has all ids and log-probs, and no text.
OF_TOKENS: dict[str, tuple[Any, ...]] = {
    "logprobs": (),
    "skip_special_tokens": (),
    "detokenize": (),
    "include_stop_str_in_output": (),
    "routed_experts_prompt_start": (),
}


def pass_over(
    fields: Mapping[str, Any],
    more: Mapping[str, tuple[Any, ...]],
    why: str = "is not a field of this server",
) -> None:
    """Check that the remaining fields of a request have no effect.

    Args:
        fields: fields of the request that the server does not implement, by name.
        more: values without effect, by name; they extend and override ``NEUTRAL``.
        why: error message for an unknown field, after its name and value.

    Raises:
        Refused: a field is unknown, or its value would have an effect (400).
    """
    neutral = {**NEUTRAL, **more}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in neutral:
            raise Refused(400, f"{name}={value!r:.100} {why}")
        if neutral[name] and value not in neutral[name]:
            raise Refused(
                400,
                f"{name}={value!r:.100} is not supported: it must be {neutral[name][0]!r}",
            )


def token_choice(ids: Sequence[int], logps: Sequence[float], why: str) -> dict[str, Any]:
    """Return the choice of an answer in token ids, in vLLM's format, with a log-prob for each token id."""
    content = [{"token": f"token_id:{i}", "logprob": logp} for i, logp in zip(ids, logps, strict=True)]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": why,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }
