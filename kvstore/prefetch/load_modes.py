"""Which of three ways to have a run is the soonest, as they have turned out: load all of it,
compute all of it, or both from the two ends.

What estimates of parts promise leaves things out: a step's fixed cost, the copy into the pages,
computing that slows a load because both want the same cores. So what counts is how long whole runs
took each way; promises are for ways not tried yet. Of the last runs the middle one counts, so one
that was held up turns nothing. A way that is not taken teaches nothing about itself, so one that
might be the best is tried now and then, and again at once if it was. No clock here.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Final

RUNS_KEPT: Final = 7
"""Runs of one way and about one length that count."""
TRIES: Final = 2
"""Runs of a way that might be the best before it is judged."""
COMPUTE_GAIN_MIN: Final = 0.1
"""What computing beside a load must spare: on a tie the simpler, all of it loaded. Half of it where
it was the best before, and half as much again where it was not: noise is to turn nothing."""
LOAD_GAIN_MIN: Final = 0.03
"""What a load must spare to be asked for."""
EXPLORE_EVERY: Final = 16
"""A way that might be the best is tried once in so many runs, ..."""
EXPLORE_SELDOM: Final = 32
"""... and in so many once it was tried without becoming the best."""


POOR: Final = 1.5
"""A try that took so many times what the best way takes makes the next one come later, ..."""
EXPLORE_RARELY: Final = 128
"""... and in the end once in so many runs."""


class Way(enum.Enum):
    """How a run is had."""

    LOAD = "load"
    BOTH = "both"
    COMPUTE = "compute"


HOPE: Final = {Way.LOAD: 2.0, Way.BOTH: 1.5, Way.COMPUTE: 1.2}
"""A way is tried when it may take no more than so many times what the best one takes: the less is
known of it while others are taken, the more. Arrivals are seen exactly only while nothing is
computed; that a tier became fast is seen beside computing first."""


class _Length:
    """What is known of runs of about one length. took_s: seconds a block. due: the run in which a
    way is next tried, of `runs`. gap: runs between two tries of it. best, best_s: the best way of
    the last run, and seconds a block."""

    def __init__(self, like: _Length | None) -> None:
        self.took_s: dict[Way, deque[float]] = {way: deque(maxlen=RUNS_KEPT) for way in Way}
        self.tries = dict.fromkeys(Way, 0)
        self.due = dict.fromkeys(Way, 0)
        self.gap = dict.fromkeys(Way, EXPLORE_EVERY)
        self.runs = 0
        self.best, self.best_s = Way.BOTH, 0.0
        if like is not None:
            for way, took_s in like.took_s.items():
                self.took_s[way].extend(took_s)

    def usual_s(self, way: Way) -> float | None:
        """Seconds a block."""
        return median_low(self.took_s[way]) if self.took_s[way] else None


class Ways:
    """For each power of two of a run's blocks; a new length begins with the nearest one's."""

    def __init__(self) -> None:
        self._lengths: dict[int, _Length] = {}

    def ended(self, way: Way, blocks: int, took_s: float) -> None:
        """A run of so many blocks was had this way."""
        length = self._length(blocks)
        length.took_s[way].append(took_s / blocks)
        best_s = length.best_s
        if way is length.best:
            return
        if took_s / blocks < best_s:
            length.due[way] = 0
            length.gap[way] = EXPLORE_EVERY
        elif took_s / blocks > POOR * best_s:
            length.gap[way] = min(2 * length.gap[way], EXPLORE_RARELY)

    def pick(
        self, blocks: int, promised_s: Mapping[Way, float], hoped_s: Mapping[Way, float]
    ) -> tuple[Way, float, bool]:
        """The way for a run of so many blocks, in how many seconds, and whether it is taken only to
        see how long it takes.

        promised_s: what the estimates say. hoped_s: what may be true instead.
        """
        length = self._length(blocks)
        takes_s = dict(promised_s)
        for way in Way:
            usual_s = length.usual_s(way)
            if usual_s is not None:
                takes_s[way] = usual_s * blocks
        best = Way.LOAD
        gain = COMPUTE_GAIN_MIN * (0.5 if length.best is Way.BOTH else 1.5)
        if takes_s[Way.BOTH] * (1 + gain) < takes_s[best]:
            best = Way.BOTH
        if takes_s[Way.COMPUTE] <= takes_s[best] * (1 + LOAD_GAIN_MIN):
            best = Way.COMPUTE
        length.runs += 1
        length.best, length.best_s = best, takes_s[best] / blocks
        length.tries[best] += 1
        length.gap[best] = EXPLORE_EVERY
        length.due[best] = length.runs + EXPLORE_EVERY
        for way in Way:
            hope_s = min(hoped_s[way], takes_s[way])
            if length.due[way] < length.runs and hope_s <= HOPE[way] * takes_s[best]:
                length.tries[way] += 1
                if length.tries[way] >= TRIES:
                    length.due[way] = length.runs + length.gap[way]
                    length.gap[way] = max(length.gap[way], EXPLORE_SELDOM)
                # A load is not waited for much longer than what else there is.
                return way, min(takes_s[way], takes_s[best]), True
        return best, takes_s[best], False

    def _length(self, blocks: int) -> _Length:
        bits = blocks.bit_length()
        length = self._lengths.get(bits)
        if length is None:
            nearest = min(self._lengths, key=lambda n: abs(n - bits), default=None)
            like = None if nearest is None else self._lengths[nearest]
            length = self._lengths[bits] = _Length(like)
        return length
