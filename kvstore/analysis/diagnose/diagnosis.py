"""The result of a classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHOWN_CHARS: Final = 40


@dataclass(frozen=True)
class Diagnosis:
    """kind: one word. looks: what the difference looks like. advice: what to change."""

    kind: str
    looks: str
    advice: str


def shown(text: str, limit: int = SHOWN_CHARS) -> str:
    """Return a text in quotes, in one line, cut to `limit` characters."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
