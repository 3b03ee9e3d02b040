"""Requests as a replay sees them: which blocks, how long, when. `formats` reads them from files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOONCAKE_BLOCK_TOKENS: Final = 512
WHOLE_MAX: Final = 1 << 40
"""Largest number of tokens that a trace may name: sums of them stay below 2^63."""


@dataclass(frozen=True)
class Asked:
    """One request.

    run: its blocks, from the first; equal names mean equal prefixes. Below 2^63.
    ends: prompt tokens before each block, and up to the end of the last.
    tokens: of the prompt.
    useful: tokens of the prompt that a hit may spare at most; None: all of them. Where an engine's
        own rules are followed the last token never hits, as it is computed to get the first logits.
    time_s: when it arrives, from the trace's start.
    token_ids: of the prompt, int32, where the trace has them.
    """

    run: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int
    useful: int | None = None
    time_s: float = 0.0
    output_tokens: int = 0
    token_ids: NDArray[np.int32] | None = None

    def hit_tokens(self, blocks: int) -> int:
        """Prompt tokens that a hit of so many leading blocks spares."""
        end = self.ends[blocks]
        return end if self.useful is None else min(end, self.useful)


def ends_of(blocks: int, block_tokens: int, tokens: int) -> tuple[int, ...]:
    """`Asked.ends` of blocks that all have the same length, none of it beyond the prompt."""
    full = min(blocks, tokens // block_tokens)
    return (*range(0, full * block_tokens + 1, block_tokens), *(tokens,) * (blocks - full))


def read_trace(path: Path, block_tokens: int | None = None) -> list[Asked]:
    """All requests of a trace, in any format that `formats` knows.

    Raises ConfigError naming the first line that is none.
    """
    from kvstore.analysis.simulate.formats import open_trace

    with open_trace(str(path), block_tokens=block_tokens) as trace:
        return list(trace.requests)


def whole(row: dict[str, Any], name: str, default: int | None = None) -> int:
    """A field that is a whole number, 0 to WHOLE_MAX. Raises ValueError saying what is wrong."""
    value = row.get(name, default)
    if type(value) is not int or not 0 <= value <= WHOLE_MAX:
        raise ValueError(f"{name!r} is {short(value)}; a whole number from 0 to 2^40 is right")
    return value


def time_of(row: dict[str, Any], unit_s: float) -> float:
    """Its "timestamp", in units of so many seconds; 0.0 where there is none.

    Raises ValueError saying what is wrong.
    """
    value = row.get("timestamp", 0)
    try:
        seconds = math.nan if isinstance(value, (bool, str)) else float(value) * unit_s
    except (TypeError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"'timestamp' is {short(value)}; a number is right")
    return seconds


def short(value: Any) -> str:
    """A value as a message shows it: cut when it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
