"""The choice between three modes of getting a prefix: load all of it, compute all of it, or both
from the two ends.

Estimates of the parts leave things out: the fixed cost of a step, the copy into the pages, and the
slowdown of a load when computing uses the same cores. So the measured durations of whole prefixes
count, per mode. Estimates are used only for modes that have not been tried. The median of the last
durations counts, so one delayed load changes nothing. A mode that is not used is not measured. So a
mode that might be the fastest is tried from time to time, and again at once if it was. No clock.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Final

DURATIONS_KEPT: Final = 7
"""Number of durations kept per mode and length class."""
MIN_TRIALS: Final = 2
"""Number of uses of a mode that might be the fastest before it is judged."""
COMPUTE_GAIN_MIN: Final = 0.1
"""Fraction of the time that mode BOTH must save; below it the simpler mode LOAD is used. Half of it
if BOTH was the fastest before, 1.5 times if it was not, so that noise does not change the mode."""
LOAD_GAIN_MIN: Final = 0.03
"""Fraction of the time that a load must save to be started."""
TRIAL_INTERVAL: Final = 16
"""Number of loads between two trials of a mode that might be the fastest."""
TRIAL_INTERVAL_TRIED: Final = 32
"""The same for a mode that was tried and did not become the fastest."""
POOR_TRIAL_FACTOR: Final = 1.5
"""A trial this many times slower than the fastest mode doubles the interval of its mode."""
TRIAL_INTERVAL_MAX: Final = 128
"""Maximum number of loads between two trials."""


class LoadMode(enum.Enum):
    """How to get a prefix: load it, compute it, or both from its two ends."""

    LOAD = "load"
    BOTH = "both"
    COMPUTE = "compute"


TRIAL_LIMIT: Final = {LoadMode.LOAD: 2.0, LoadMode.BOTH: 1.5, LoadMode.COMPUTE: 1.2}
"""A mode is tried if it may take at most this many times as long as the fastest. The less the use
of other modes tells about a mode, the larger its factor. Arrivals are observed exactly only while
the engine does not compute; a faster tier is noticed first while it computes."""


class _LengthClass:
    """Measurements of loads of one length class.

    took_s: seconds per block. due: number of the load (of `choices`) from which on a mode is tried.
    gap: loads between two trials. best, best_s: fastest mode at the last choice, seconds per block.
    """

    def __init__(self, like: _LengthClass | None) -> None:
        self.took_s: dict[LoadMode, deque[float]] = {
            mode: deque(maxlen=DURATIONS_KEPT) for mode in LoadMode
        }
        self.uses = dict.fromkeys(LoadMode, 0)
        self.due = dict.fromkeys(LoadMode, 0)
        self.gap = dict.fromkeys(LoadMode, TRIAL_INTERVAL)
        self.choices = 0
        self.best, self.best_s = LoadMode.BOTH, 0.0
        if like is not None:
            for mode, took_s in like.took_s.items():
                self.took_s[mode].extend(took_s)

    def median_s(self, mode: LoadMode) -> float | None:
        """Median seconds per block of this mode; None if it is not measured."""
        return median_low(self.took_s[mode]) if self.took_s[mode] else None


class LoadModes:
    """One length class per power of two of the number of blocks. A new class starts with the
    measurements of the nearest one."""

    def __init__(self) -> None:
        self._classes: dict[int, _LengthClass] = {}

    def record_duration(self, mode: LoadMode, blocks: int, took_s: float) -> None:
        """Record that a prefix of this many blocks took took_s seconds in this mode."""
        length = self._length_class(blocks)
        length.took_s[mode].append(took_s / blocks)
        best_s = length.best_s
        if mode is length.best:
            return
        if took_s / blocks < best_s:
            length.due[mode] = 0
            length.gap[mode] = TRIAL_INTERVAL
        elif took_s / blocks > POOR_TRIAL_FACTOR * best_s:
            length.gap[mode] = min(2 * length.gap[mode], TRIAL_INTERVAL_MAX)

    def choose(
        self,
        blocks: int,
        estimate_s: Mapping[LoadMode, float],
        best_case_s: Mapping[LoadMode, float],
    ) -> tuple[LoadMode, float, bool]:
        """(mode, expected seconds, is_trial) for a prefix of this many blocks.

        estimate_s: estimated seconds by mode. best_case_s: optimistic seconds by mode. is_trial:
        the mode is chosen only to measure it.
        """
        length = self._length_class(blocks)
        takes_s = dict(estimate_s)
        for mode in LoadMode:
            median_s = length.median_s(mode)
            if median_s is not None:
                takes_s[mode] = median_s * blocks
        best = LoadMode.LOAD
        gain = COMPUTE_GAIN_MIN * (0.5 if length.best is LoadMode.BOTH else 1.5)
        if takes_s[LoadMode.BOTH] * (1 + gain) < takes_s[best]:
            best = LoadMode.BOTH
        if takes_s[LoadMode.COMPUTE] <= takes_s[best] * (1 + LOAD_GAIN_MIN):
            best = LoadMode.COMPUTE
        length.choices += 1
        length.best, length.best_s = best, takes_s[best] / blocks
        length.uses[best] += 1
        length.gap[best] = TRIAL_INTERVAL
        length.due[best] = length.choices + TRIAL_INTERVAL
        for mode in LoadMode:
            optimistic_s = min(best_case_s[mode], takes_s[mode])
            if (
                length.due[mode] < length.choices
                and optimistic_s <= TRIAL_LIMIT[mode] * takes_s[best]
            ):
                length.uses[mode] += 1
                if length.uses[mode] >= MIN_TRIALS:
                    length.due[mode] = length.choices + length.gap[mode]
                    length.gap[mode] = max(length.gap[mode], TRIAL_INTERVAL_TRIED)
                # Do not wait much longer for a trial than the fastest mode takes.
                return mode, min(takes_s[mode], takes_s[best]), True
        return best, takes_s[best], False

    def _length_class(self, blocks: int) -> _LengthClass:
        bits = blocks.bit_length()
        length = self._classes.get(bits)
        if length is None:
            nearest = min(self._classes, key=lambda n: abs(n - bits), default=None)
            like = None if nearest is None else self._classes[nearest]
            length = self._classes[bits] = _LengthClass(like)
        return length
