"""Reads prompts from texts, from OpenAI requests and from logs of such requests.

A log has one JSON object per line: a request's body, or an object with the body under `body`,
`request` or `params`. These fields can be beside the body or in it:

    timestamp    when it was sent: seconds or milliseconds since 1970, or ISO 8601
    usage        the server's figures (also under `response`): prompt_tokens, cached tokens
    model, cache_salt, lora, tenant    what isolates requests from each other

kvstore's own form is the same, with `tokens` (token ids) instead of `messages` or `prompt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.analysis.diagnose.prompts import Prompt, clean_tokens
from kvstore.errors import ConfigError

LINE_CHARS_MAX: Final = 64 << 20
FILE_BYTES_MAX: Final = 256 << 20
"""Maximum size of a file that is read as one prompt."""
FILE_ENDINGS: Final = (".json", ".jsonl", ".txt", ".md")
"""A word with one of these suffixes names a file. If the file is missing, that is an error."""
OPAQUE_LINE: Final = 16
"""Token ids without a tokenizer are written as lines. A line ends at an id divisible by this, so
that equal content gives equal lines anywhere in a prompt."""

Parts = tuple[tuple[str, int], ...]

_BODIES = ("messages", "prompt", "tokens", "prompt_token_ids")
_HOLDERS = ("body", "request", "params")
_ISOLATION = ("model", "cache_salt", "lora", "tenant")
_TIMES = ("timestamp", "time", "ts", "created_at", "created")


class Tokenizing(Protocol):
    """The required part of a tokenizer (`engine.tokenizer.Tokenizer` has it)."""

    @property
    def facts(self) -> Any: ...
    def encode_spans(self, text: str, *, special: bool = True) -> tuple[list[int], list[int]]: ...
    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True) -> str: ...


class Reader:
    """Makes prompts. tokenizer: of the model. None: estimate tokens from text."""

    def __init__(self, tokenizer: Tokenizing | None = None) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str, where: str) -> Prompt:
        """Return a plain prompt."""
        return self._made(text, (("prompt", 0),), {"where": where}, special=True)

    def argument(self, given: str) -> Prompt:
        """Return a prompt from the command line: a file (text or a JSON request), or the text.

        Raises:
            ConfigError: the file is missing or cannot be read, or has not exactly one prompt.
        """
        path = Path(given)
        try:
            there = path.is_file()
        except (OSError, ValueError):
            there = False
        if not there:
            names_file = given.startswith(("/", "./", "../")) or given.endswith(FILE_ENDINGS)
            if names_file and not any(map(str.isspace, given)):
                raise ConfigError(f"file {given!r} not found; give a file or the prompt's text")
            return self.text(given, "text")
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                raise ConfigError(
                    f"{given!r} is larger than {FILE_BYTES_MAX:,} bytes; "
                    "use kvstore doctor log for a log"
                )
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {given!r}: {error}") from None
        if text.lstrip().startswith("{"):
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                return self.text(text, given)
            if isinstance(row, dict) and _body(row) is not None:
                found = self.request(row, given)
                if len(found) == 1:
                    return found[0]
                raise ConfigError(f"{given!r} must have exactly one prompt (got {len(found)})")
        return self.text(text, given)

    def log(self, path: Path) -> Iterator[Prompt]:
        """Yield the prompts of a log in order.

        Raises:
            ConfigError: the file cannot be read, or a line is not a request.
        """
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield from self._line(line, f"line {number}", path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read log {str(path)!r}: {error}") from None

    def _line(self, line: str, where: str, path: Path) -> list[Prompt]:
        wanted = 'expected a request like {"messages": [...]} or {"prompt": "..."}'
        if len(line) > LINE_CHARS_MAX:
            raise ConfigError(
                f"{where} of {str(path)!r} is longer than {LINE_CHARS_MAX:,} characters"
            )
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} of {str(path)!r} is invalid JSON; {wanted}") from None
        if not isinstance(row, dict) or _body(row) is None:
            raise ConfigError(f"{where} of {str(path)!r} is not a request; {wanted}")
        try:
            return self.request(row, where)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{where} of {str(path)!r}: {error}; {wanted}") from None

    def request(self, row: Mapping[str, Any], where: str) -> list[Prompt]:
        """Return the prompts of one request. The completions API allows several."""
        body = _body(row)
        assert body is not None
        fields = {
            "where": where,
            "isolation": tuple(
                (name, str(value))
                for name in _ISOLATION
                if (value := body.get(name) or row.get(name)) is not None
            ),
            "at_s": _time(row) if _time(row) is not None else _time(body),
            **_reported(row),
        }
        if body.get("messages") is not None:
            return [self._chat(body, fields)]
        given = next(body[name] for name in _BODIES[1:] if body.get(name) is not None)
        if isinstance(given, str):
            return [self._made(given, (("prompt", 0),), fields, special=True)]
        if not isinstance(given, list):
            raise ConfigError(f"{where}: a prompt must be text or token ids (got {given!r:.40})")
        if given and isinstance(given[0], int):
            return [self._ids(given, fields)]
        return [
            self._made(item, (("prompt", 0),), fields, special=True)
            if isinstance(item, str)
            else self._ids(item, fields)
            for item in given
        ]

    def _chat(self, body: Mapping[str, Any], fields: dict[str, Any]) -> Prompt:
        """Return a conversation as text. Tools come first, as in templates. Uses the tokenizer's
        chat template if it has one, else `role: content`."""
        messages = [_plain(message) for message in body["messages"]]
        tools = "".join(json.dumps(tool) + "\n" for tool in body.get("tools") or ())
        parts = [("tools", 0)] if tools else []
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.facts.chat_template is None:
            text = tools
            for number, message in enumerate(messages):
                parts.append((_name(message, number), len(text)))
                text += f"{message['role']}: {message['content']}\n"
            return self._made(text + "assistant:", tuple(parts), fields, special=tokenizer is None)
        text = tools + tokenizer.chat(messages)
        at = len(tools)
        for number, message in enumerate(messages):
            found = text.find(message["content"].strip(), at)
            if found >= 0:
                parts.append((_name(message, number), at if number == 0 else found))
                at = found + len(message["content"].strip())
        return self._made(text, tuple(parts), fields, special=False)

    def _made(
        self,
        text: str,
        parts: tuple[tuple[str, int], ...],
        fields: dict[str, Any],
        *,
        special: bool,
    ) -> Prompt:
        if self._tokenizer is None:
            return Prompt(text, parts, **fields)
        ids, ends = clean_tokens(*self._tokenizer.encode_spans(text, special=special))
        return Prompt(text, parts, ids, ends, **fields)

    def _ids(self, given: list[int], fields: dict[str, Any]) -> Prompt:
        if not all(type(token) is int and 0 <= token < 1 << 32 for token in given):
            raise ConfigError(f"{fields['where']}: token ids must be integers from 0 to 2^32 - 1")
        if self._tokenizer is None:
            words = [f"{token}\n" if token % OPAQUE_LINE == 0 else f"{token} " for token in given]
        else:
            words = [self._tokenizer.decode([token], special=True) for token in given]
        ends, at = [], 0
        for word in words:
            at += len(word)
            ends.append(at)
        opaque = self._tokenizer is None
        kept = clean_tokens(given, ends)
        return Prompt("".join(words), (("prompt", 0),), *kept, opaque=opaque, **fields)


def _body(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of a log's object that is the request."""
    for found in (row, *(row.get(name) for name in _HOLDERS)):
        if isinstance(found, Mapping) and any(found.get(name) is not None for name in _BODIES):
            return found
    return None


def _name(message: Mapping[str, Any], number: int) -> str:
    return f"message {number + 1} ({message['role']})"


def _plain(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a message with its content as one text. Content that is not text becomes JSON."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            part["text"]
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else json.dumps(part)
            for part in content
        )
    text = str(content or "")
    if message.get("tool_calls"):
        text += "".join(json.dumps(call) for call in message["tool_calls"])
    return {"role": str(message.get("role", "user")), "content": text}


def _time(row: Mapping[str, Any]) -> float | None:
    """Return seconds. Numbers over 1e11 are milliseconds (seconds would be in the year 5138)."""
    for name in _TIMES:
        value = row.get(name)
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, (int, float)):
            return value / 1e3 if value > 1e11 else float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
            except ValueError:
                continue
    return None


def _reported(row: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the token counts that the server reported."""
    usage: Any = row.get("usage")
    for name in ("response", "body"):
        inner = row.get(name)
        inner = inner.get("body", inner) if isinstance(inner, Mapping) else None
        if usage is None and isinstance(inner, Mapping):
            usage = inner.get("usage")
    if not isinstance(usage, Mapping):
        return {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    prompt = usage.get("prompt_tokens")
    return {
        "prompt_tokens": prompt if isinstance(prompt, int) else None,
        "cached_tokens": cached if isinstance(cached, int) else None,
    }
