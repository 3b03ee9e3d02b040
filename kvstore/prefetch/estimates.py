"""What the adaptive policy has learnt: seconds to prefill, and seconds to load from each tier.

Fed with times that others measured; there is no clock here. Memory is bounded, and no single
strange time can turn an estimate: a prefill time moves its cell by a bounded factor unless the next
one agrees with it, a tier's line is the median of the slopes and offsets of its last times.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from statistics import median
from typing import Final

GAIN: Final = 0.3
"""Share of the way that a new prefill time moves its cell's estimate (of the logarithm)."""
STRANGE: Final = math.log(2.0)
"""A time further from its estimate counts as if it were so far, unless the last one was too."""
STEPS_SUMMED: Final = 64
"""Steps of a long prefill that are added one by one; beyond, they are taken to be alike."""
LOADS_KEPT: Final = 32
"""Times kept of each tier."""
GUESS: Final = 4.0
"""How far from the edge of a wide range a guess is made, and a belief is moved by one."""
TINY_S: Final = 1e-6
"""No load is taken to be shorter."""
TIGHT: Final = 0.15
"""An arrival seen within this share of its time counts as seen when it came."""


class _Cell:
    """Seconds a token of steps of about one size behind a context of about one length, and how many
    tokens they have in the mean."""

    __slots__ = ("log_s", "seen", "strange", "tokens")

    def __init__(self, log_s: float, tokens: int) -> None:
        self.log_s = log_s
        self.tokens = float(tokens)
        self.seen = 1
        self.strange = 0

    def add(self, log_s: float, tokens: int) -> None:
        change = log_s - self.log_s
        side = (change > STRANGE) - (change < -STRANGE)
        if side and side != self.strange:
            change = side * STRANGE
        self.strange = side
        self.seen += 1
        gain = max(1.0 / self.seen, GAIN)
        self.log_s += gain * change
        self.tokens += gain * (tokens - self.tokens)

    @property
    def seconds(self) -> float:
        """Of a step of the mean size."""
        return self.tokens * math.exp(self.log_s)


class PrefillTimes:
    """Seconds of a prefill step by its tokens and the tokens before it.

    A cell for each power of two of both; what has no cell yet is read from the nearest one. Longer
    steps than any seen are taken to go on as the two longest do: a step costs something however
    short it is.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._longest = 0

    @property
    def known(self) -> bool:
        """Some step was seen."""
        return bool(self._cells)

    @property
    def longest(self) -> int:
        """Tokens of the longest step seen."""
        return self._longest

    def add(self, start: int, tokens: int, seconds: float) -> None:
        """`tokens` tokens behind `start` others took one step of so many seconds."""
        if tokens < 1 or not TINY_S * TINY_S < seconds < math.inf:
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
        """To compute tokens start..end, in steps no longer than twice the longest seen."""
        total_s, steps = 0.0, 0
        while start < end:
            tokens = min(end - start, 2 * self._longest)
            step_s = self._step_s(start, tokens)
            if steps == STEPS_SUMMED:
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
            # How many tokens a step has says more about a token than what stands before them.
            return (2 * abs(where[0] - size) + abs(where[1] - context), -where[0], -where[1])

        return min(self._cells, key=distance)


class LoadTimes:
    """Seconds until n blocks of one tier have arrived: a line through the last times seen.

    The slope is the median of the slopes between any two times (Theil and Sen), so that up to a
    quarter of them may be anything.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=LOADS_KEPT)
        self._line: tuple[float, float] | None = None

    @property
    def known(self) -> bool:
        """Some arrival was seen."""
        return bool(self._seen)

    def add(self, blocks: int, low_s: float, high_s: float) -> None:
        """The last of so many blocks came later than low_s and no later than high_s.

        Whoever computes meanwhile looks rarely. Such a wide range says something only where the
        estimate lies outside it: then all times kept are moved along. Without an estimate, or below
        the old one, it is a guess on the short side: whoever waits too long is told so, and whoever
        does not wait learns nothing.
        """
        if blocks < 1 or not 0 <= low_s <= high_s:
            return
        if math.isfinite(high_s) and high_s - low_s <= TIGHT * high_s:
            self._keep(blocks, high_s)
        elif not self.known:
            if math.isfinite(high_s):
                self._keep(blocks, max(low_s, high_s / GUESS))
            elif low_s:
                self._keep(blocks, GUESS * low_s)
        else:
            believed_s = self.seconds(blocks)
            if believed_s > high_s:
                self._move(max(low_s, high_s / 2) / believed_s)
            elif believed_s < low_s:
                self._move(low_s / max(believed_s, TINY_S))

    def _keep(self, blocks: int, seconds: float) -> None:
        self._seen.append((blocks, seconds))
        self._line = None

    def _move(self, factor: float) -> None:
        """All times are so many times as long as believed; no single word moves them far."""
        factor = min(max(factor, 1 / GUESS), GUESS)
        moved = [(n, max(s, TINY_S) * factor) for n, s in self._seen]
        self._seen.clear()
        self._seen.extend(moved)
        self._line = None

    def seconds(self, blocks: float) -> float:
        """Until this many blocks of one load have arrived."""
        first_s, block_s = self.line
        return first_s + blocks * block_s if blocks > 0 else 0.0

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a load whatever its length, and seconds more of each block."""
        if self._line is None:
            slopes = [
                (b_s - a_s) / (b - a)
                for (a, a_s), (b, b_s) in combinations(self._seen, 2)
                if a != b
            ]
            most_s = median(s / n for n, s in self._seen)
            # Nothing is known of the offset while all loads were of one length.
            block_s = min(max(0.0, median(slopes)), most_s) if slopes else most_s
            first_s = median(s - n * block_s for n, s in self._seen)
            self._line = (max(0.0, first_s), block_s)
        return self._line
