"""Estimates of the adaptive policy: seconds to prefill, and seconds to load from each tier.

The callers measure; there is no clock here. Memory is bounded, and no single outlier changes an
estimate much. A prefill time moves its cell by a bounded factor unless the next time confirms it. A
tier's line is the median of the slopes and offsets of its last times.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from statistics import median
from typing import Final

GAIN: Final = 0.3
"""Fraction of the difference by which a new prefill time moves its cell's estimate (logarithm)."""
OUTLIER_LOG: Final = math.log(2.0)
"""A larger difference from the estimate counts as this one, unless the last time had it too."""
MAX_STEPS_SUMMED: Final = 64
"""Maximum steps of a long prefill that are added one by one; the rest count like the last."""
LOADS_KEPT: Final = 32
"""Number of times kept per tier."""
GUESS_FACTOR: Final = 4.0
"""Factor between the bound of a wide range and the guessed time, and maximum factor by which one
observation moves an estimate."""
MIN_S: Final = 1e-6
"""Minimum duration of a load."""
EXACT_FRACTION: Final = 0.15
"""An arrival observed within this fraction of its time counts as exact."""


class _Cell:
    """Steps of about one size after a context of about one length: mean tokens, and the logarithm
    of the mean seconds per token."""

    __slots__ = ("log_s", "outlier_side", "seen", "tokens")

    def __init__(self, log_s: float, tokens: int) -> None:
        self.log_s = log_s
        self.tokens = float(tokens)
        self.seen = 1
        self.outlier_side = 0

    def add(self, log_s: float, tokens: int) -> None:
        change = log_s - self.log_s
        side = (change > OUTLIER_LOG) - (change < -OUTLIER_LOG)
        if side and side != self.outlier_side:
            change = side * OUTLIER_LOG
        self.outlier_side = side
        self.seen += 1
        gain = max(1.0 / self.seen, GAIN)
        self.log_s += gain * change
        self.tokens += gain * (tokens - self.tokens)

    @property
    def seconds(self) -> float:
        """Seconds of a step of the mean size."""
        return self.tokens * math.exp(self.log_s)


class PrefillTimes:
    """Seconds of a prefill step by its tokens and the tokens before it.

    There is one cell per power of two of both; the nearest cell stands for one without data. Steps
    longer than any seen are extrapolated from the two longest, because each step has a fixed cost.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._longest = 0

    @property
    def known(self) -> bool:
        """Whether any step was recorded."""
        return bool(self._cells)

    @property
    def longest(self) -> int:
        """Tokens of the longest recorded step."""
        return self._longest

    def add(self, start: int, tokens: int, seconds: float) -> None:
        """Record a step that computed `tokens` tokens after `start` others in `seconds`."""
        if tokens < 1 or not MIN_S * MIN_S < seconds < math.inf:
            return
        log_s = math.log(seconds / tokens)
        where = (tokens.bit_length(), start.bit_length())
        cell = self._cells.get(where)
        if cell is None:
            self._cells[where] = _Cell(log_s, tokens)
        else:
            cell.add(log_s, tokens)
        self._longest = max(self._longest, tokens)

    def seconds(self, start: int, end: int) -> float:
        """Seconds to compute tokens start..end, in steps of at most twice the longest recorded."""
        total_s, steps = 0.0, 0
        while start < end:
            tokens = min(end - start, 2 * self._longest)
            step_s = self._step_s(start, tokens)
            if steps == MAX_STEPS_SUMMED:
                return total_s + step_s * (end - start) / tokens
            total_s += step_s
            start += tokens
            steps += 1
        return total_s

    def _step_s(self, start: int, tokens: int) -> float:
        where = self._nearest(tokens.bit_length(), start.bit_length())
        cell = self._cells[where]
        size, context = where
        if tokens <= self._longest or tokens.bit_length() <= size:
            return tokens * math.exp(cell.log_s)
        shorter = [n for n, of in self._cells if of == context and n < size]
        if not shorter:
            return tokens * math.exp(cell.log_s)
        other = self._cells[(max(shorter), context)]
        slope_s = (cell.seconds - other.seconds) / max(1.0, cell.tokens - other.tokens)
        slope_s = min(max(0.0, slope_s), math.exp(cell.log_s))
        return cell.seconds + (tokens - cell.tokens) * slope_s

    def _nearest(self, size: int, context: int) -> tuple[int, int]:
        def distance(where: tuple[int, int]) -> tuple[int, int, int]:
            # The size of a step affects the time per token more than the context before it.
            return (2 * abs(where[0] - size) + abs(where[1] - context), -where[0], -where[1])

        return min(self._cells, key=distance)


class LoadTimes:
    """Seconds until n blocks of one tier have arrived: a line through the last times.

    The slope is the median of the slopes between any two times (Theil and Sen), so up to a quarter
    of the times may be outliers.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=LOADS_KEPT)
        self._line: tuple[float, float] | None = None

    @property
    def known(self) -> bool:
        """Whether any arrival was recorded."""
        return bool(self._seen)

    def add(self, blocks: int, low_s: float, high_s: float) -> None:
        """Record that block number `blocks` arrived after low_s and at most high_s seconds.

        An engine that computes meanwhile observes rarely, so the range may be wide. A wide range
        counts only if the estimate is outside it; then all recorded times are scaled. Without an
        estimate, or below the old one, a short time is guessed: a wait that is too long corrects
        the estimate, a load that was not tried does not.
        """
        if blocks < 1 or not 0 <= low_s <= high_s:
            return
        if math.isfinite(high_s) and high_s - low_s <= EXACT_FRACTION * high_s:
            self._keep(blocks, high_s)
        elif not self.known:
            if math.isfinite(high_s):
                self._keep(blocks, max(low_s, high_s / GUESS_FACTOR))
            elif low_s:
                self._keep(blocks, GUESS_FACTOR * low_s)
        else:
            believed_s = self.seconds(blocks)
            if believed_s > high_s:
                self._move(max(low_s, high_s / 2) / believed_s)
            elif believed_s < low_s:
                self._move(low_s / max(believed_s, MIN_S))

    def _keep(self, blocks: int, seconds: float) -> None:
        self._seen.append((blocks, seconds))
        self._line = None

    def _move(self, factor: float) -> None:
        """Scale all times by `factor`, limited to GUESS_FACTOR in both directions."""
        factor = min(max(factor, 1 / GUESS_FACTOR), GUESS_FACTOR)
        moved = [(n, max(s, MIN_S) * factor) for n, s in self._seen]
        self._seen.clear()
        self._seen.extend(moved)
        self._line = None

    def seconds(self, blocks: float) -> float:
        """Seconds until this many blocks of one load have arrived."""
        first_s, block_s = self.line
        return first_s + blocks * block_s if blocks > 0 else 0.0

    @property
    def line(self) -> tuple[float, float]:
        """(fixed seconds of a load, additional seconds per block)."""
        if self._line is None:
            slopes = [
                (b_s - a_s) / (b - a)
                for (a, a_s), (b, b_s) in combinations(self._seen, 2)
                if a != b
            ]
            most_s = median(s / n for n, s in self._seen)
            # While all loads had the same length, the offset is unknown.
            block_s = min(max(0.0, median(slopes)), most_s) if slopes else most_s
            first_s = median(s - n * block_s for n, s in self._seen)
            self._line = (max(0.0, first_s), block_s)
        return self._line
