"""One OpenAI-compatible server, asked by streaming calls whose every wait has a bound."""

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
"""Longest wait for a connection."""
LINE_BYTES_MAX: Final = 1 << 20
"""Longest line of a stream."""
REASON_BYTES: Final = 300
"""How much of a refusal's text is kept."""
APIS: Final = ("chat", "completions")


class EndpointUnusable(KVStoreError):
    """The server does not answer as an OpenAI-compatible one does."""


@dataclass(frozen=True)
class Usage:
    """What a server says of one request. cached_tokens: None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    cached_by_tier: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """One request that has ended.

    fault: "" for a whole answer, else its kind in a word or two, and detail what was said.
    ttft_s: from sending to the first token; latency_s: to the end. usage: None where not told.
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
    """How to ask. silence_s: longest silence of a stream; request_s: longest request."""

    model: str = ""
    api: str = "chat"
    max_tokens: int = 32
    ignore_eos: bool = False
    silence_s: float = 30.0
    request_s: float = 300.0
    api_key: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class _Fault(Exception):
    """A request that failed: its kind, and what was said."""


class Endpoint:
    """A server at `url`, which ends in the API's version (http://host:8000/v1). Thread-safe.

    Raises ConfigError: the URL is none, or an unknown API.
    """

    def __init__(self, url: str, options: Options, connections: int = 1) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL of a server; http://127.0.0.1:8000/v1 is right")
        if options.api not in APIS:
            raise ConfigError(f"unknown API {options.api!r}; one of {', '.join(APIS)} is right")
        self.url = url.rstrip("/")
        self.options = options
        headers = dict(options.headers)
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(options.silence_s, connect=min(CONNECT_S, options.silence_s)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )

    def close(self) -> None:
        """Ends what is under way, too."""
        self._client.close()

    def models(self) -> list[dict[str, Any]]:
        """What the server offers, the default first.

        Raises EndpointUnusable: no answer, a refusal, or an answer of another kind.
        """
        url = f"{self.url}/models"
        try:
            answer = self._client.get(url)
        except httpx.HTTPError as error:
            raise EndpointUnusable(f"no server at {url}: {_words(error)}") from None
        if answer.status_code != 200:
            raise EndpointUnusable(f"{url} answers {answer.status_code}: {_reason(answer.content)}")
        try:
            found = [dict(model) for model in answer.json()["data"]]
            if all(isinstance(model["id"], str) for model in found) and found:
                return found
        except (ValueError, KeyError, TypeError):
            pass
        raise EndpointUnusable(f"{url} lists no models; is this the API's address (.../v1)?")

    def ask(
        self,
        messages: Sequence[Message],
        *,
        workload: str = "",
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> Outcome:
        """One streamed request; what goes wrong is in the outcome."""
        start_s = time.perf_counter()
        seen = _Seen(start_s)
        fault = detail = ""
        try:
            for part in self._parts(self._body(messages, temperature, max_tokens), start_s):
                seen.take(part)
            if seen.ttft_s is None:
                raise _Fault("no tokens", "the stream ended without one")
        except _Fault as error:
            fault, detail = error.args
        except httpx.ConnectError as error:
            fault, detail = "unreachable", _words(error)
        except httpx.TimeoutException as error:
            fault = "stalled"
            detail = f"{_words(error)} after {self.options.silence_s:g} s of silence"
        except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
            # RuntimeError: the client was closed under the call, at the run's end.
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
        """The events of one answer, up to its mark of the end."""
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
                    raise _Fault("no event stream", repr(data[:80])) from None
                if not isinstance(part, dict):
                    raise _Fault("no event stream", repr(data[:80]))
                if part.get("error"):
                    raise _Fault("failed in the stream", _message(part))
                yield part
        raise _Fault("cut off", "the stream ended before its [DONE]")

    def _lines(self, answer: httpx.Response, start_s: float) -> Iterator[bytes]:
        """Lines as they come; a fault when the whole takes too long."""
        held = b""
        for data in answer.iter_bytes():
            if time.perf_counter() - start_s > self.options.request_s:
                raise _Fault("too slow", f"not done after {self.options.request_s:g} s")
            *lines, held = (held + data).split(b"\n")
            yield from lines
            if len(held) > LINE_BYTES_MAX:
                raise _Fault("no event stream", f"a line of more than {LINE_BYTES_MAX:,} bytes")
        if held:
            yield held


class _Seen:
    """What the events of one answer amount to."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.ttft_s: float | None = None
        self.text = ""
        self.usage: Usage | None = None

    def take(self, part: dict[str, Any]) -> None:
        for choice in part.get("choices") or ():
            delta = choice.get("delta")
            if delta is None:
                token, text = True, choice.get("text") or ""
            else:
                text = delta.get("content") or ""
                # A chat's first event may only open the turn: a role, and no token yet.
                reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                token = "role" not in delta or bool(text or reasoning or delta.get("tool_calls"))
            if token and self.ttft_s is None:
                self.ttft_s = time.perf_counter() - self._start_s
            self.text += text
        if isinstance(part.get("usage"), dict):
            self.usage = usage_of(part["usage"])


def usage_of(told: dict[str, Any]) -> Usage:
    """What a server's `usage` says; what it does not say of cached tokens is None."""
    details = told.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    cached = details.get("cached_tokens")
    by_tier = details.get("cached_tokens_by_tier") or {}
    return Usage(
        int(told.get("prompt_tokens") or 0),
        int(told.get("completion_tokens") or 0),
        cached if isinstance(cached, int) else None,
        {str(tier): int(tokens) for tier, tokens in by_tier.items()},
    )


def _some(answer: httpx.Response) -> bytes:
    """The beginning of a refusal's body."""
    data = b""
    for part in answer.iter_bytes():
        data += part
        if len(data) > LINE_BYTES_MAX:
            break
    return data


def _reason(data: bytes) -> str:
    """A refusal's own words, in one line."""
    try:
        return _message(json.loads(data))
    except ValueError:
        return " ".join(data.decode(errors="replace").split())[:REASON_BYTES] or "(no text)"


def _message(told: Any) -> str:
    error = told.get("error", told) if isinstance(told, dict) else told
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(message or told).split())[:REASON_BYTES]


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
