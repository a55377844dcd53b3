"""Parts of the OpenAI API that our two servers share: the agents' (actor.agents) and serve's (serving.http).

Owns: which values of a request ask for nothing, and common parts of answers. Does not know: routes, models, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.runtime.json_server import Refused

# What a request may say that asks for nothing: by name the values, () any. Null asks for nothing, whatever its name.
# A server that hears one of these takes it out of a request first.
NEUTRAL: dict[str, tuple[Any, ...]] = {"n": (1,), "best_of": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
NEUTRAL |= {"repetition_penalty": (1,), "length_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,)}
NEUTRAL |= {"min_tokens": (0,), "ignore_eos": (False,), "use_beam_search": (False,), "stop": ([],), "seed": ()}
NEUTRAL |= {"logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "stream": (False,), "echo": (False,)}
NEUTRAL |= {"response_format": ({"type": "text"},), "modalities": (["text"],), "parallel_tool_calls": (True,)}
NEUTRAL |= {"service_tier": ("auto", "default"), "store": (False,), "skip_special_tokens": (True,)}
NEUTRAL |= {"spaces_between_special_tokens": (), "include_stop_str_in_output": (False,), "metadata": (), "user": ()}
NEUTRAL |= {"safety_identifier": (), "prompt_cache_key": (), "cache_salt": (), "priority": ()}
# Where the answer is token ids: it has them all with their log-probs, and no text.
OF_TOKENS: dict[str, tuple[Any, ...]] = {"logprobs": (), "skip_special_tokens": (), "detokenize": ()}
OF_TOKENS |= {"include_stop_str_in_output": (), "routed_experts_prompt_start": ()}


def pass_over(asked: Mapping[str, Any], more: Mapping[str, tuple[Any, ...]], why: str = "is not known here") -> None:
    """Refused where one of these asks for something.

    Args:
        asked: by name, what a server has not heard of a request.
        more: what asks for nothing besides ``NEUTRAL``, or in its place.
        why: what is said of a name in neither.
    """
    neutral = {**NEUTRAL, **more}
    for name, value in asked.items():
        if value is None:
            continue
        if name not in neutral:
            raise Refused(400, f"{name} {why}")
        if neutral[name] and value not in neutral[name]:
            raise Refused(400, f"{name}={value!r:.100} is not there: only {neutral[name][0]!r}")


def token_choice(ids: Sequence[int], logps: Sequence[float], why: str) -> dict[str, Any]:
    """The answer to a request of tokens: vLLM's, and log-probs under each token's id."""
    content = [{"token": f"token_id:{i}", "logprob": logp} for i, logp in zip(ids, logps, strict=True)]
    return {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": why}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
