"""Requests of a trace as a replay reads them: blocks, tokens, arrival time.

`formats` reads them from files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOONCAKE_BLOCK_TOKENS: Final = 512
WHOLE_MAX: Final = 1 << 40
"""Maximum number of tokens in a field of a trace. It keeps sums below 2^63."""


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    run: ids of the prompt's blocks, in order. Equal ids mean equal prefixes. Below 2^63.
    ends: prompt tokens before each block, then the tokens up to the end of the last block.
    tokens: length of the prompt.
    useful: maximum number of prompt tokens that a hit can save. None: all of them. By an engine's
        rules the last token never hits, because the engine computes it to get the first logits.
    time_s: arrival time, in seconds from the start of the trace.
    token_ids: the prompt's tokens, int32. None: the trace does not have them.
    """

    block_ids: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int
    useful: int | None = None
    time_s: float = 0.0
    output_tokens: int = 0
    token_ids: NDArray[np.int32] | None = None

    def hit_tokens(self, blocks: int) -> int:
        """Return the number of prompt tokens that a hit of this many leading blocks saves."""
        end = self.ends[blocks]
        return end if self.useful is None else min(end, self.useful)


def ends_of(blocks: int, block_tokens: int, tokens: int) -> tuple[int, ...]:
    """Return `TraceRequest.ends` for blocks of equal length. No end is beyond the prompt."""
    full = min(blocks, tokens // block_tokens)
    return (*range(0, full * block_tokens + 1, block_tokens), *(tokens,) * (blocks - full))


def int_field(row: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return an integer field, from 0 to WHOLE_MAX. Raises ValueError with the reason."""
    value = row.get(name, default)
    if type(value) is not int or not 0 <= value <= WHOLE_MAX:
        raise ValueError(f"{name!r} must be an integer from 0 to 2^40 (got {shorten(value)})")
    return value


def time_of(row: dict[str, Any], unit_s: float) -> float:
    """Return the row's "timestamp" in seconds, or 0.0 if it has none. unit_s: its unit.

    Raises ValueError with the reason.
    """
    value = row.get("timestamp", 0)
    try:
        seconds = math.nan if isinstance(value, (bool, str)) else float(value) * unit_s
    except (TypeError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"'timestamp' must be a number (got {shorten(value)})")
    return seconds


def shorten(value: Any) -> str:
    """Return a value as a message shows it, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
