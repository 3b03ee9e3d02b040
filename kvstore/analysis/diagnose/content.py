"""What two texts share anywhere, by pieces of it: lines and sentences."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PIECE_CHARS: Final = 16
"""Shorter pieces are alike by chance."""
RESYNC_CHARS: Final = 32
"""So many equal characters in a row are taken for the same text going on."""
WINDOW_CHARS: Final = 2048
"""How far after a difference the same text is looked for, in both."""
FOUND_CHARS: Final = 48
"""Length of text that is looked for as a whole anywhere behind a difference."""

_PIECE = re.compile(r"[^\n.!?]*(?:[.!?](?=\s)|\n|$|[.!?])\s*")


def pieces(text: str, start: int = 0) -> Iterator[str]:
    """Lines and sentences of the text from `start` on that are long enough to mean something,
    without the space around them."""
    for found in _PIECE.finditer(text, start):
        piece = found[0].strip()
        if len(piece) >= PIECE_CHARS:
            yield piece


@dataclass(frozen=True)
class Held:
    """A text's pieces, in order: where each starts, how long it is, its hash."""

    starts: array[int]
    lengths: array[int]
    hashes: array[int]

    @classmethod
    def of(cls, text: str) -> Held:
        """The pieces of a text."""
        held = cls(array("I"), array("I"), array("q"))
        for found in _PIECE.finditer(text):
            piece = found[0].strip()
            if len(piece) >= PIECE_CHARS:
                held.starts.append(found.start())
                held.lengths.append(len(piece))
                held.hashes.append(hash(piece))
        return held


def shared_after(a: Held, b: Held, at: int) -> int:
    """Characters of `b` behind `at` that `a` has behind `at` too, in whatever order."""
    theirs = set(a.hashes[bisect_left(a.starts, at) :])
    start = bisect_left(b.starts, at)
    pairs = zip(b.lengths[start:], b.hashes[start:], strict=True)
    return sum(length for length, piece in pairs if piece in theirs)


def resync(a: str, b: str, at: int) -> tuple[int, int] | None:
    """The nearest place behind a difference where both go on alike: (characters of `a`, of `b`) in
    between; None where there is none near."""
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
    """As `resync`, where the texts end before that many equal characters: both end alike."""
    if len(a) >= WINDOW_CHARS or len(b) >= WINDOW_CHARS:
        return None
    same = 0
    while same < min(len(a), len(b)) and a[-1 - same] == b[-1 - same]:
        same += 1
    return (len(a) - same, len(b) - same) if same >= min(4, len(a), len(b)) else None


def goes_on_at(text: str, other: str, at: int) -> int | None:
    """Where in `other`, behind `at`, the text goes on as it does from `at`; None: nowhere."""
    wanted = text[at : at + FOUND_CHARS]
    if len(wanted.strip()) < PIECE_CHARS:
        return None
    found = other.find(wanted, at)
    return None if found < 0 else found
