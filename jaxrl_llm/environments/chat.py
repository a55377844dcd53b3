"""What a model says over an OpenAI-compatible server: ``python -m jaxrl_llm.serve``, or any other.

Owns: one request, and which settings of the environment name a server. Does not know: what is asked; deadlines, which
the pools of rewards and environments have.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from jaxrl_llm.runtime import json_lines

URL = "http://127.0.0.1:8000/v1"


def said(url: str, messages: list[dict[str, str]], token: str = "", **body: Any) -> str:
    """The answer to messages; ``body`` is what else the request has.

    Raises:
        OSError: there is no server, or it has refused.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = json_lines.written({"messages": messages, **body}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"] or ""
    except urllib.error.HTTPError as error:
        raise OSError(f"{request.full_url}: {error}: {_reason(error.read())}") from error


def _reason(body: bytes) -> str:
    """What a server that refuses says of it."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]


def said_by(name: str, text: str, **body: Any) -> str:
    """The answer to a text of the server at JAXRL_``name``_URL (``URL``), by its model JAXRL_``name``_MODEL (the
    server's first), with the bearer token JAXRL_``name``_TOKEN (none). Raises as ``said``.
    """
    own = lambda setting: os.environ.get(f"JAXRL_{name}_{setting}", "")
    body |= {"model": own("MODEL")} if own("MODEL") else {}
    return said(own("URL") or URL, [{"role": "user", "content": text}], own("TOKEN"), **body)
