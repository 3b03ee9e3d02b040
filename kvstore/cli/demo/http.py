"""HTTP with the standard library: JSON calls, and a streaming completion."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from kvstore.errors import KVStoreError

TIMEOUT_S: Final = 120.0
"""Maximum time without data from the server."""
LINE_BYTES_MAX: Final = 1 << 20


class CallFailed(KVStoreError):
    """A call failed, or its response is invalid."""


@dataclass(frozen=True)
class Completion:
    """A finished completion. ttft_ms: from sending the call to the first part with text."""

    text: str
    prompt_tokens: int
    cached_by_tier: dict[str, int]
    ttft_ms: float


def call(url: str, method: str = "GET", body: Any = None) -> Any:
    """Send one request and return the JSON response. None: an empty response.

    Raises:
        CallFailed: no response, or a status that is not 2xx.
    """
    connection, response = _send(url, method, body)
    try:
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise CallFailed(f"{method} {url}: {error}") from error
    finally:
        connection.close()
    return json.loads(data) if data.strip().startswith((b"{", b"[")) else None


def complete(base_url: str, model: str, prompt: str, max_tokens: int) -> Completion:
    """Stream one greedy completion from an OpenAI-compatible server.

    Raises:
        CallFailed: no response, an error response, or a stream that ends early.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{base_url}/completions"
    start_s = time.perf_counter()
    connection, response = _send(url, "POST", body)
    text, usage, ttft_ms = "", None, None
    try:
        while (line := response.readline(LINE_BYTES_MAX)).strip() != b"data: [DONE]":
            if not line:
                raise CallFailed(f"{url}: the stream ended early")
            if not line.startswith(b"data: "):
                continue
            part = json.loads(line[len(b"data: ") :])
            if "error" in part:
                raise CallFailed(f"{url}: {part['error']['message']}")
            if part["choices"] and ttft_ms is None:
                ttft_ms = (time.perf_counter() - start_s) * 1e3
            text += "".join(choice["text"] for choice in part["choices"])
            usage = part.get("usage") or usage
    except (OSError, http.client.HTTPException) as error:
        raise CallFailed(f"{url}: {error}") from error
    finally:
        connection.close()
    if usage is None or ttft_ms is None:
        raise CallFailed(f"{url}: the stream has no text or no usage")
    details = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    by_tier = {tier: tokens for tier, tokens in details.items() if tokens}
    return Completion(text, usage["prompt_tokens"], by_tier, ttft_ms)


def _send(
    url: str, method: str, body: Any
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(
        where.hostname or "localhost", where.port, timeout=TIMEOUT_S
    )
    payload = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"} if payload else {}
    try:
        path = where.path + (f"?{where.query}" if where.query else "")
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        if not 200 <= response.status < 300:
            reason = response.read(LINE_BYTES_MAX).decode(errors="replace")
            raise CallFailed(f"{method} {url}: {response.status} {reason}")
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise CallFailed(f"{method} {url}: {error}") from error
    except CallFailed:
        connection.close()
        raise
    return connection, response
