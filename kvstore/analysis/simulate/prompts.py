"""Requests that are prompts: token ids or text. The store's own hasher names the blocks.

Token ids: `[1, 2, 3]`, or an object with such a list under "token_ids", "prompt_token_ids",
"input_ids", "tokens" or "prompt". Text: an object with "prompt", "text", or "messages" as in
OpenAI's chat API. A message becomes its role, a newline, its content and a newline (no chat
template). The request body may be under "body", as in OpenAI's batch files. Each row may also have
"timestamp" (milliseconds), "output_length" and "cache_salt".

As in an engine, only full blocks are kept and the last token never hits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.analysis.simulate.traces import TraceRequest, int_field, shorten, time_of
from kvstore.blocks.hashing import BlockHasher
from kvstore.errors import ConfigError

PROMPT_BLOCK_TOKENS: Final = 16
ID_FIELDS: Final = ("token_ids", "prompt_token_ids", "input_ids", "tokens")
TEXT_FIELDS: Final = ("prompt", "text", "messages")
TOKEN_ID_MAX: Final = 2**31 - 1
TEXT_TOKEN_BYTES: Final = 4
"""Bytes of UTF-8 that count as one token if there is no tokenizer. English text has about as many
per token with the vocabularies of today's models."""
NAME_BITS: Final = 63

Encode = Callable[[str], Any]


class PromptRows:
    """Reader of rows that are prompts, all token ids or all text.

    encode: returns the token ids of a text. None: TEXT_TOKEN_BYTES bytes of UTF-8 are one token.
    """

    def __init__(
        self, first: Any, wanted: int | None, encode: Encode | None, *, keep_ids: bool
    ) -> None:
        self.format = "token ids" if _ids_of(_body(first)) is not None else "text"
        self.block_tokens = wanted or PROMPT_BLOCK_TOKENS
        self._encode = encode or bytes_as_tokens
        self._keep_ids = keep_ids

    def take(self, row: Any) -> Iterable[TraceRequest]:
        """Return the request of a row. Raises ValueError if the row is invalid."""
        body = _body(row)
        found = _ids_of(body)
        ids = _as_ids(found) if found is not None else _as_ids(self._encode(_text_of(body)))
        told = body if isinstance(body, dict) else {}
        salt = told.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise ValueError(f"'cache_salt' must be text (got {shorten(salt)})")
        size, tokens = self.block_tokens, len(ids)
        hashes = BlockHasher(block_tokens=size, cache_salt=salt).feed(ids)
        outer = row if isinstance(row, dict) else {}
        yield TraceRequest(
            tuple(map(name_of, hashes)),
            tuple(range(0, len(hashes) * size + 1, size)),
            tokens,
            useful=max(0, tokens - 1) // size * size,
            time_s=time_of(outer, 1e-3),
            output_tokens=int_field(outer, "output_length", 0),
            token_ids=ids if self._keep_ids else None,
        )

    def finish(self) -> Iterable[TraceRequest]:
        """Return nothing: every row is complete."""
        return ()


def name_of(digest: bytes) -> int:
    """Return a block's id in a replay: 63 bits of its hash.

    Among ten million blocks, the probability of a collision is 5 in a million.
    """
    return int.from_bytes(digest[-8:], "big") >> (64 - NAME_BITS)


def is_prompt(row: Any) -> bool:
    """Return whether a row looks like a prompt."""
    body = _body(row)
    if isinstance(body, list):
        return not body or type(body[0]) is int
    return isinstance(body, dict) and any(name in body for name in (*ID_FIELDS, *TEXT_FIELDS))


def bytes_as_tokens(text: str) -> NDArray[np.int32]:
    """Return a text's tokens without a tokenizer: one per TEXT_TOKEN_BYTES bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    raw += bytes(-len(raw) % TEXT_TOKEN_BYTES)
    return (np.frombuffer(raw, "<u4") & np.uint32(TOKEN_ID_MAX)).astype(np.int32)


def load_tokenizer(path: Path) -> Encode:
    """Load a Hugging Face tokenizer.json, given as a file or its folder.

    Raises ConfigError: the file is missing or invalid. ModuleNotFoundError: `tokenizers` is not
    installed.
    """
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {str(path)!r}: expected a tokenizer.json or its folder")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises Exception itself.
        raise ConfigError(f"{str(file)!r} is not a valid tokenizer.json: {error}") from None
    return lambda text: inner.encode(text).ids


def _body(row: Any) -> Any:
    body = row.get("body") if isinstance(row, dict) else None
    return body if isinstance(body, dict) else row


def _ids_of(body: Any) -> Any:
    """Return the value in the place of token ids, or None if the body has text."""
    if isinstance(body, list):
        return body
    if isinstance(body, dict):
        for name in ID_FIELDS:
            if name in body:
                return body[name]
        if isinstance(body.get("prompt"), list):
            return body["prompt"]
    return None


def _as_ids(found: Any) -> NDArray[np.int32]:
    try:
        ids = np.asarray(found)
    except (ValueError, OverflowError):
        ids = np.array([0.5])
    if ids.size == 0 and isinstance(found, list | np.ndarray):
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > TOKEN_ID_MAX:
        raise ValueError(f"token ids must be integers from 0 to 2^31 - 1 (got {shorten(found)})")
    return ids.astype(np.int32)


def _text_of(body: Any) -> str:
    if isinstance(body, dict):
        for name in ("prompt", "text"):
            if isinstance(body.get(name), str):
                return str(body[name])
        if isinstance(body.get("messages"), list):
            return "".join(_message(message) for message in body["messages"])
    raise ValueError(
        f"{shorten(body)} is not a request; expected token ids, or an object with "
        f"{', '.join(ID_FIELDS[:2])}, prompt, text or messages"
    )


def _message(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(
            f'{shorten(message)} is not a message; expected {{"role": ..., "content": ...}}'
        )
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in parts if isinstance(text, str))
    return f"{message['role']}\n{content if isinstance(content, str) else ''}\n"
