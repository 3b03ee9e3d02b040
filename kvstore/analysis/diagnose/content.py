"""Finds text that two prompts share anywhere, by lines and sentences ("pieces")."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PIECE_CHARS: Final = 16
"""Minimum length of a piece. Shorter ones are equal by chance."""
RESYNC_CHARS: Final = 32
"""Equal characters in a row that count as the same text continuing."""
WINDOW_CHARS: Final = 2048
"""Characters after a difference in which the same text is searched for, in both."""
FOUND_CHARS: Final = 48
"""Length of the text that is searched for as a whole after a difference."""

_PIECE = re.compile(r"[^\n.!?]*(?:[.!?](?=\s)|\n|$|[.!?])\s*")


def pieces(text: str, start: int = 0) -> Iterator[str]:
    """Yield the lines and sentences from `start` on, stripped, that are not too short."""
    for found in _PIECE.finditer(text, start):
        piece = found[0].strip()
        if len(piece) >= PIECE_CHARS:
            yield piece


@dataclass(frozen=True)
class TextIndex:
    """Pieces of a text in order: start, length and hash of each."""

    starts: array[int]
    lengths: array[int]
    hashes: array[int]

    @classmethod
    def of(cls, text: str) -> TextIndex:
        """Index a text."""
        index = cls(array("I"), array("I"), array("q"))
        for found in _PIECE.finditer(text):
            piece = found[0].strip()
            if len(piece) >= PIECE_CHARS:
                index.starts.append(found.start())
                index.lengths.append(len(piece))
                index.hashes.append(hash(piece))
        return index


def shared_after(a: TextIndex, b: TextIndex, at: int) -> int:
    """Return the characters of `b` after `at` that `a` also has after `at`, in any order."""
    theirs = set(a.hashes[bisect_left(a.starts, at) :])
    start = bisect_left(b.starts, at)
    pairs = zip(b.lengths[start:], b.hashes[start:], strict=True)
    return sum(length for length, piece in pairs if piece in theirs)


def resync(a: str, b: str, at: int) -> tuple[int, int] | None:
    """Find the nearest place after a difference where both texts continue alike.

    Returns the characters before it in `a` and in `b`, or None if there is no such place nearby.
    """
    end = at + WINDOW_CHARS + RESYNC_CHARS
    window_a, window_b = a[at:end], b[at:end]
    places: dict[str, int] = {}
    for place in range(len(window_b) - RESYNC_CHARS + 1):
        places.setdefault(window_b[place : place + RESYNC_CHARS], place)
    best: tuple[int, int] | None = None
    for place in range(len(window_a) - RESYNC_CHARS + 1):
        if best is not None and place >= sum(best):
            break
        other = places.get(window_a[place : place + RESYNC_CHARS])
        if other is not None and (best is None or place + other < sum(best)):
            best = (place, other)
    return best or _same_ends(window_a, window_b)


def _same_ends(a: str, b: str) -> tuple[int, int] | None:
    """As `resync`, for texts that end soon: returns where their common ending starts."""
    if len(a) >= WINDOW_CHARS or len(b) >= WINDOW_CHARS:
        return None
    same = 0
    while same < min(len(a), len(b)) and a[-1 - same] == b[-1 - same]:
        same += 1
    return (len(a) - same, len(b) - same) if same >= min(4, len(a), len(b)) else None


def find_continuation(text: str, other: str, at: int) -> int | None:
    """Return where in `other`, after `at`, the text at `at` occurs. None: nowhere."""
    wanted = text[at : at + FOUND_CHARS]
    if len(wanted.strip()) < PIECE_CHARS:
        return None
    found = other.find(wanted, at)
    return None if found < 0 else found
