"""The OpenAI-compatible bodies, and what becomes of them: requests for the engine, and answers.

Fields that would change the result and are not supported are refused, never ignored.
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
"""Prompts in one completions call."""

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
"""Fields of the API that are not supported, with the values that ask for nothing."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Body(BaseModel):
    """What both endpoints take. `lora` is chosen by naming the adapter as `model`.

    cache_salt, top_k, ignore_eos, stop_token_ids: extensions, under the names vLLM gives them.
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
        """Raises ConfigError for a field that asks for something the engine does not do."""
        for name, allowed in NEUTRAL.items():
            value = getattr(self, name, None)
            if not any(value == one and type(value) is type(one) for one in allowed):
                raise ConfigError(
                    f"{name}={value!r} is not supported; leave it out or set it to {allowed[-1]!r}"
                )
        if self.stream_options is not None and not self.stream:
            raise ConfigError("stream_options is for stream=true only")

    def request_fields(self) -> dict[str, Any]:
        """Fields of `engine.request.Request` that this body names."""
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
        """A stream shall end with usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Body):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ConfigError("the prompt is empty; it must have at least 1 token")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise ConfigError(f"{len(self.prompt)} prompts; at most {MAX_PROMPTS} are right")
        return list(self.prompt)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """The message with its content as one string; parts other than text are refused."""
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
        """Tokens to make at most; None: as many as fit."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def plain_chat(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as text, for models without a template of their own."""
    turns = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(turns) + "assistant:"


def usage_of(outputs: Sequence[Output]) -> dict[str, Any]:
    """Usage over the whole outputs of one call.

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
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


def validation_message(error: RequestValidationError, known: Sequence[str]) -> str:
    """The first fault of a body, in one line, with the nearest field for an unknown one."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    name = where[0] if where else "body"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; {near[0]!r} may be meant" if near else ""
        return f"unknown field {'.'.join(where)!r}{hint}"
    if name == "prompt" and first["type"] != "missing":
        return "prompt must be a string, a list of strings, token ids, or a list of those"
    if first["type"] == "missing":
        return f"field {'.'.join(where)!r} is missing"
    return f"field {'.'.join(where) or 'body'!r}: {' '.join(str(first['msg']).split())}"
