"""Turns generated tokens into text: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PieceStream(Protocol):
    """A tokenizer's stream: returns text as it becomes complete."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """Text of one request's tokens, up to the first stop string.

    Text that could start a stop string is kept back until it is known not to, so that no returned
    text must be withdrawn.
    """

    def __init__(self, pieces: PieceStream | None, stop: Sequence[str] = ()) -> None:
        """pieces: None: a model without a tokenizer; all text is empty and nothing stops."""
        self._pieces = pieces
        self._stop = tuple(stop)
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return new text. Sets `stopped` if a stop string was found."""
        if self._pieces is None:
            return ""
        return self._take(self._pieces.push(token))

    def finish(self) -> str:
        """Return the pending text: half a character, or the start of a stop string."""
        if self._pieces is None or self.stopped:
            return ""
        text = self._take(self._pieces.finish())
        rest, self._pending = ("" if self.stopped else self._pending), ""
        return text + rest

    def _take(self, piece: str) -> str:
        if not self._stop or not piece:
            return piece
        text = self._pending + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._pending = ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that starts `stop`, without all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
