"""Client of an OpenAI-compatible server: ``python -m jaxrl_llm.serve``, or any other.

Owns: one request, the environment variables that name a server. Does not know: the content of requests, deadlines (the
pools of rewards and environments have them).
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from jaxrl_llm.runtime import json_lines

URL = "http://127.0.0.1:8000/v1"


def reply_to(url: str, messages: list[dict[str, str]], token: str = "", **body: Any) -> str:
    """Return the model's reply to messages. ``body`` contains further fields of the request.

    Raises:
        OSError: the server cannot be reached, or it refused the request.
    """
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = json_lines.written({"messages": messages, **body}).encode()
    address = f"{url.rstrip('/')}/chat/completions"
    request = urllib.request.Request(address, data, headers)
    try:
        with urllib.request.urlopen(request) as response:
            choices = json.load(response)["choices"]
            return choices[0]["message"]["content"] or ""
    except urllib.error.HTTPError as error:
        reason = _reason(error.read())
        raise OSError(f"{address}: {error}: {reason}") from error


def _reason(body: bytes) -> str:
    """Return the error message in the body of a refusal."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]


def reply_of(name: str, text: str, **body: Any) -> str:
    """Return the reply of a configured server to one text.

    Environment variables configure the server: JAXRL_``name``_URL (default ``URL``), JAXRL_``name``_MODEL (default: the
    server's first model) and JAXRL_``name``_TOKEN, the bearer token (default: none).

    Raises:
        OSError: the server cannot be reached, or it refused the request.
    """
    url = os.environ.get(f"JAXRL_{name}_URL", "") or URL
    model = os.environ.get(f"JAXRL_{name}_MODEL", "")
    token = os.environ.get(f"JAXRL_{name}_TOKEN", "")
    if model:
        body["model"] = model
    message = {"role": "user", "content": text}
    return reply_to(url, [message], token, **body)


# Old names, which users' environments may import.
said = reply_to
said_by = reply_of
