"""Made tokens as text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PieceStream(Protocol):
    """A tokenizer's stream: text that becomes whole with each token."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """Text of one request's tokens, up to the first stop string.

    Text that could be the beginning of a stop string is held back until it is clear that it is
    not, so that nothing shown has to be taken back.
    """

    def __init__(self, pieces: PieceStream | None, stop: Sequence[str] = ()) -> None:
        """pieces: None for a model without a tokenizer: all text is empty, nothing stops."""
        self._pieces = pieces
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """New text to show. `stopped` tells afterwards whether a stop string was met."""
        if self._pieces is None:
            return ""
        return self._take(self._pieces.push(token))

    def finish(self) -> str:
        """What is still held back: half a character, or the beginning of a stop string."""
        if self._pieces is None or self.stopped:
            return ""
        text = self._take(self._pieces.finish())
        rest, self._held = ("" if self.stopped else self._held), ""
        return text + rest

    def _take(self, piece: str) -> str:
        if not self._stop or not piece:
            return piece
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop` itself."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
