"""One OpenAI-compatible server, called with streaming requests. Every wait has a timeout."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from kvstore.analysis.loadgen.workloads import Message
from kvstore.errors import ConfigError, KVStoreError

CONNECT_S: Final = 10.0
"""Maximum seconds to connect."""
LINE_BYTES_MAX: Final = 1 << 20
"""Maximum length of a line of a stream."""
REASON_BYTES: Final = 300
"""Maximum length of an error text that is kept."""
APIS: Final = ("chat", "completions")


class EndpointUnusable(KVStoreError):
    """The server does not respond like an OpenAI-compatible server."""


@dataclass(frozen=True)
class Usage:
    """A server's usage figures for one request. cached_tokens: None if not reported."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    cached_by_tier: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """Result of one request.

    fault: "" for a complete response, else the kind of failure. detail: the error text. ttft_s:
    seconds from sending to the first token. latency_s: seconds to the end. usage: None if not
    reported.
    """

    workload: str
    start_s: float
    latency_s: float
    ttft_s: float | None = None
    usage: Usage | None = None
    text: str = ""
    fault: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Options:
    """Request options. idle_timeout_s: maximum time between two parts of a stream.
    request_timeout_s: maximum time of a request."""

    model: str = ""
    api: str = "chat"
    max_tokens: int = 32
    ignore_eos: bool = False
    idle_timeout_s: float = 30.0
    request_timeout_s: float = 300.0
    api_key: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class _Fault(Exception):
    """A failed request: kind and error text."""


class Endpoint:
    """A server at `url`, which ends in the API's version (http://host:8000/v1). Thread-safe.

    Raises ConfigError: the URL is invalid, or the API is unknown.
    """

    def __init__(self, url: str, options: Options, connections: int = 1) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"invalid server URL {url!r}: use one like http://127.0.0.1:8000/v1")
        if options.api not in APIS:
            raise ConfigError(f"unknown API {options.api!r}; use {' or '.join(APIS)}")
        self.url = url.rstrip("/")
        self.options = options
        headers = dict(options.headers)
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(
                options.idle_timeout_s, connect=min(CONNECT_S, options.idle_timeout_s)
            ),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections. Requests in progress fail."""
        self._client.close()

    def models(self) -> list[dict[str, Any]]:
        """Return the server's models, the default first.

        Raises EndpointUnusable: no response, an error response, or an invalid one.
        """
        url = f"{self.url}/models"
        try:
            answer = self._client.get(url)
        except httpx.HTTPError as error:
            raise EndpointUnusable(f"no server at {url}: {_words(error)}") from None
        if answer.status_code != 200:
            raise EndpointUnusable(
                f"{url} returned {answer.status_code}: {_reason(answer.content)}"
            )
        try:
            found = [dict(model) for model in answer.json()["data"]]
            if all(isinstance(model["id"], str) for model in found) and found:
                return found
        except (ValueError, KeyError, TypeError):
            pass
        raise EndpointUnusable(f"{url} lists no models; check that the URL ends in /v1")

    def send(
        self,
        messages: Sequence[Message],
        *,
        workload: str = "",
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> Outcome:
        """Send one streaming request. A failure is in the outcome."""
        start_s = time.perf_counter()
        seen = _Seen(start_s)
        fault = detail = ""
        try:
            for part in self._parts(self._body(messages, temperature, max_tokens), start_s):
                seen.add(part)
            if seen.ttft_s is None:
                raise _Fault("no tokens", "the stream ended before the first token")
        except _Fault as error:
            fault, detail = error.args
        except httpx.ConnectError as error:
            fault, detail = "unreachable", _words(error)
        except httpx.TimeoutException as error:
            fault = "stalled"
            detail = f"{_words(error)} after {self.options.idle_timeout_s:g} s without data"
        except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
            # RuntimeError: the client was closed during the call, at the end of the run.
            fault, detail = "cut off", _words(error)
        return Outcome(
            workload,
            start_s,
            time.perf_counter() - start_s,
            seen.ttft_s,
            seen.usage,
            seen.text,
            fault,
            detail,
        )

    def _body(
        self, messages: Sequence[Message], temperature: float, max_tokens: int | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.options.model,
            "max_tokens": max_tokens or self.options.max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.options.ignore_eos:
            body["ignore_eos"] = True
        if self.options.api == "chat":
            body["messages"] = [dict(message) for message in messages]
        else:
            body["prompt"] = "\n\n".join(message["content"] for message in messages)
        return body

    def _parts(self, body: dict[str, Any], start_s: float) -> Iterator[dict[str, Any]]:
        """Yield the events of one response, up to its end marker."""
        path = "chat/completions" if self.options.api == "chat" else "completions"
        with self._client.stream("POST", f"{self.url}/{path}", json=body) as answer:
            if answer.status_code != 200:
                reason = _reason(_some(answer))
                raise _Fault(f"HTTP {answer.status_code}", reason)
            for line in self._lines(answer, start_s):
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    return
                try:
                    part = json.loads(data)
                except ValueError:
                    raise _Fault("invalid event stream", repr(data[:80])) from None
                if not isinstance(part, dict):
                    raise _Fault("invalid event stream", repr(data[:80]))
                if part.get("error"):
                    raise _Fault("error in stream", _message(part))
                yield part
        raise _Fault("cut off", "the stream ended before [DONE]")

    def _lines(self, answer: httpx.Response, start_s: float) -> Iterator[bytes]:
        """Yield lines as they arrive. Raises _Fault after request_timeout_s."""
        pending = b""
        for data in answer.iter_bytes():
            if time.perf_counter() - start_s > self.options.request_timeout_s:
                raise _Fault("too slow", f"not done after {self.options.request_timeout_s:g} s")
            *lines, pending = (pending + data).split(b"\n")
            yield from lines
            if len(pending) > LINE_BYTES_MAX:
                raise _Fault("invalid event stream", f"line longer than {LINE_BYTES_MAX:,} bytes")
        if pending:
            yield pending


class _Seen:
    """Text, first token time and usage from the events of one response."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.ttft_s: float | None = None
        self.text = ""
        self.usage: Usage | None = None

    def add(self, part: dict[str, Any]) -> None:
        for choice in part.get("choices") or ():
            delta = choice.get("delta")
            if delta is None:
                token, text = True, choice.get("text") or ""
            else:
                text = delta.get("content") or ""
                # A chat's first event can have only a role, and no token yet.
                reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                token = "role" not in delta or bool(text or reasoning or delta.get("tool_calls"))
            if token and self.ttft_s is None:
                self.ttft_s = time.perf_counter() - self._start_s
            self.text += text
        if isinstance(part.get("usage"), dict):
            self.usage = usage_of(part["usage"])


def usage_of(reported: dict[str, Any]) -> Usage:
    """Parse a server's `usage`. cached_tokens is None if it is not reported."""
    details = reported.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    cached = details.get("cached_tokens")
    by_tier = details.get("cached_tokens_by_tier") or {}
    return Usage(
        int(reported.get("prompt_tokens") or 0),
        int(reported.get("completion_tokens") or 0),
        cached if isinstance(cached, int) else None,
        {str(tier): int(tokens) for tier, tokens in by_tier.items()},
    )


def _some(answer: httpx.Response) -> bytes:
    """Return the beginning of an error response."""
    data = b""
    for part in answer.iter_bytes():
        data += part
        if len(data) > LINE_BYTES_MAX:
            break
    return data


def _reason(data: bytes) -> str:
    """Return the text of an error response, in one line."""
    try:
        return _message(json.loads(data))
    except ValueError:
        return " ".join(data.decode(errors="replace").split())[:REASON_BYTES] or "(no text)"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(message or body).split())[:REASON_BYTES]


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
