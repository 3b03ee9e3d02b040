"""Bodies of the OpenAI-compatible API: parsing into engine requests, and building responses.

A field that is not supported and would change the result is rejected, never ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict

from kvstore.engine.request import Output
from kvstore.errors import ConfigError

MAX_PROMPTS = 256
"""Maximum prompts in one completions call."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "response_format": (None, {"type": "text"}),
}
"""Fields of the API that are not supported, with the values that have no effect."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Body(BaseModel):
    """Fields of both endpoints. A LoRA adapter is selected by its name as `model`.

    cache_salt, top_k, ignore_eos, stop_token_ids: extensions, named as in vLLM.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def check_supported(self) -> None:
        """Raise ConfigError for a field with a value that the engine does not support."""
        for name, allowed in NEUTRAL.items():
            value = getattr(self, name, None)
            if not any(value == one and type(value) is type(one) for one in allowed):
                raise ConfigError(
                    f"{name}={value!r} is not supported; omit it or set it to {allowed[-1]!r}"
                )
        if self.stream_options is not None and not self.stream:
            raise ConfigError("stream_options requires stream=true")

    def request_fields(self) -> dict[str, Any]:
        """Return the fields of `engine.request.Request` that this body sets."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(0, self.top_k or 0),
            "seed": self.seed,
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "cache_salt": self.cache_salt or "",
        }

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Body):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ConfigError("prompt must have at least 1 token (got an empty prompt)")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise ConfigError(f"prompt must have at most {MAX_PROMPTS} (got {len(self.prompt)})")
        return list(self.prompt)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message with its content as one string. Raises ConfigError unless text."""
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            parts = []
            for part in self.content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ConfigError(f"content of type {part.get('type')!r} is not supported")
                parts.append(part["text"])
            fields["content"] = "".join(parts)
        else:
            fields["content"] = self.content or ""
        return fields


class ChatBody(Body):
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """Maximum tokens to generate. None: as many as fit."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def plain_chat(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as text, for models without a chat template."""
    turns = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(turns) + "assistant:"


def usage_of(outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the usage of all outputs of one call.

    prompt_tokens_details: cached_tokens is the sum of cached_tokens_by_tier.
    kvstore: queue_ms and ttft_ms of the slowest prompt, from its arrival in the engine.
    """
    by_tier: dict[str, int] = {}
    for output in outputs:
        for tier, tokens in output.cached.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
    prompt_tokens = sum(output.prompt_tokens for output in outputs)
    made = sum(len(output.tokens) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(by_tier.values()),
            "cached_tokens_by_tier": by_tier,
        },
        "kvstore": {
            "queue_ms": round(max(output.times.queue_ms for output in outputs), 3),
            "ttft_ms": round(max(output.times.ttft_ms for output in outputs), 3),
        },
    }


def error_body(message: str, status: int, *, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


def validation_message(error: RequestValidationError, known: Sequence[str]) -> str:
    """Return the first error of a body in one line, with the closest name for an unknown field."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    name = where[0] if where else "body"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown field {'.'.join(where)!r}{hint}"
    if name == "prompt" and first["type"] != "missing":
        return "prompt must be a string, a list of strings, token ids, or a list of those"
    if first["type"] == "missing":
        return f"missing field {'.'.join(where)!r}"
    return f"field {'.'.join(where) or 'body'!r}: {' '.join(str(first['msg']).split())}"
