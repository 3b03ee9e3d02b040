"""What computing and loading cost: the arithmetic behind every answer to "does offloading pay?".

Pure functions of measured or given figures: no clock, no I/O. The planner, the simulator, the
break-even benchmark and the adaptive prefetch policy all ask this one model, so that what is
promised, replayed, measured and decided are the same thing.

Loading a run pays when its tier brings tokens sooner than the engine computes them: for long runs,
when bytes per second exceed bytes per token times the prefill rate (`bandwidth_to_pay`). A
compressing tier brings raw bytes at `effective_bandwidth`. Computing the front of a run while its
rest is loaded takes N / (Rc + Rl) for N tokens at the two rates (`two_ended_s`), at best half of
the better of the two. A store that is waited for on both ways pays only above a hit rate
(`hit_rate_to_pay`).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

TOKENS_MAX = 1 << 20
"""Longest run a break-even length is looked for."""


@dataclass(frozen=True)
class PrefillCurve:
    """Seconds to prefill a cold prompt, from measured points.

    points: (tokens, seconds) of cold prompts, by strictly growing tokens.

    Between points, and from nothing at 0 tokens to the first, the curve is a straight line. Seconds
    that fall from one point to a longer one are noise: the earlier, larger ones are kept. Beyond
    the last point it goes on by `a n + b n^2`, the linear part for the weights and the square for
    attention, as the least squares of relative errors over the points give a and b (neither below
    zero), moved to pass through the last point. A single point gives b = 0.

    Raises:
        ConfigError: no points, or tokens or seconds that are not positive and finite, or in the
            wrong order.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("a prefill curve needs at least one point of tokens and seconds")
        before = 0
        for tokens, seconds in self.points:
            if not tokens > before:
                raise ConfigError(
                    f"a prefill curve has {tokens} tokens after {before}; they must grow from 1 on"
                )
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{tokens} tokens are prefilled in {seconds} s; it must be more")
            before = tokens

    @classmethod
    def at_rate(cls, tokens_per_s: float) -> PrefillCurve:
        """A straight curve. Raises ConfigError for a rate that is not positive and finite."""
        if not 0 < tokens_per_s < math.inf:
            raise ConfigError(f"prefill rate is {tokens_per_s}; tokens a second above 0 are right")
        return cls(((1024, 1024 / tokens_per_s),))

    @classmethod
    def parse(cls, text: str, source: str) -> PrefillCurve:
        """The curve that a text describes; `source` names it in messages.

        text: a number of tokens a second, or JSON
            `{"model": ..., "points": [{"tokens": 1024, "seconds": 0.07}, ...]}`, points in any
            order; other keys are left alone.

        Raises:
            ConfigError: neither of the two, or figures that no prefill can have.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"prefill rate {source}: {_WANTED}") from None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return cls.at_rate(value)
        points = value.get("points") if isinstance(value, dict) else None
        if not isinstance(points, list):
            raise ConfigError(f"prefill rate {source}: {_WANTED}")
        return cls(tuple(sorted(_point(point, source) for point in points)))

    @classmethod
    def read(cls, rate_or_file: str) -> PrefillCurve:
        """The curve of an option's value: tokens a second, or the path of a file for `parse`.

        Raises:
            ConfigError: what `parse` says, or the file cannot be read.
        """
        try:
            return cls.at_rate(float(rate_or_file))
        except ValueError:
            pass
        try:
            text = Path(rate_or_file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"prefill rate {rate_or_file!r}: {reason}; {_WANTED}") from None
        return cls.parse(text, rate_or_file)

    def cold_s(self, tokens: int) -> float:
        """Seconds to prefill a prompt of which nothing is there."""
        if tokens <= 0:
            return 0.0
        lengths, seconds, (linear, square) = self._tables
        if tokens > lengths[-1]:
            last = lengths[-1]
            return seconds[-1] + (tokens - last) * (linear + square * (tokens + last))
        index = max(1, bisect_left(lengths, tokens))
        low, high = lengths[index - 1], lengths[index]
        part = (tokens - low) / (high - low)
        return seconds[index - 1] + part * (seconds[index] - seconds[index - 1])

    def seconds(self, start: int, end: int) -> float:
        """Seconds to compute tokens start..end when those before start are there."""
        return max(0.0, self.cold_s(end) - self.cold_s(start)) if end > start else 0.0

    @cached_property
    def _tables(self) -> tuple[list[int], list[float], tuple[float, float]]:
        """Lengths, never falling seconds, and (a, b) of the part beyond them."""
        lengths = [0, *(tokens for tokens, _ in self.points)]
        seconds = [0.0, *accumulate((seconds for _, seconds in self.points), max)]
        return lengths, seconds, _fit(lengths[1:], seconds[1:])


_WANTED = 'write tokens a second, or JSON like {"points": [{"tokens": 1024, "seconds": 0.07}, ...]}'


def _point(point: Any, source: str) -> tuple[int, float]:
    tokens = point.get("tokens") if isinstance(point, dict) else None
    seconds = point.get("seconds") if isinstance(point, dict) else None
    wrong_seconds = isinstance(seconds, bool) or not isinstance(seconds, (int, float))
    if type(tokens) is not int or wrong_seconds:
        raise ConfigError(f"prefill rate {source}: {point!r} is no point; {_WANTED}")
    assert isinstance(seconds, (int, float))
    return tokens, float(seconds)


def _fit(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """a, b >= 0 of a n + b n^2 with the least squares of relative errors."""
    pairs = [(n / s, n * n / s) for n, s in zip(lengths, seconds, strict=True)]
    xx = sum(x * x for x, _ in pairs)
    xy = sum(x * y for x, y in pairs)
    yy = sum(y * y for _, y in pairs)
    x1, y1 = sum(x for x, _ in pairs), sum(y for _, y in pairs)
    determinant = xx * yy - xy * xy
    if len(pairs) > 1 and determinant > 1e-12 * xx * yy:
        linear = (x1 * yy - y1 * xy) / determinant
        square = (y1 * xx - x1 * xy) / determinant
        if linear >= 0 and square >= 0:
            return linear, square
        if linear < 0:
            return 0.0, y1 / yy
    return x1 / xx, 0.0


@dataclass(frozen=True)
class TierSpeed:
    """Loading n bytes in b blocks from a tier takes `match_s + n / bytes_per_s + b * block_s`."""

    name: str
    bytes_per_s: float
    match_s: float = 0.0
    block_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(
                f"tier {self.name!r} reads {self.bytes_per_s} bytes a second; it must be more"
            )
        if not (0 <= self.match_s < math.inf and 0 <= self.block_s < math.inf):
            raise ConfigError(f"tier {self.name!r} has a time that is negative or not finite")

    def seconds(self, nbytes: int, blocks: int) -> float:
        """Seconds until all of it lies in L2; nothing takes no time."""
        if blocks <= 0:
            return 0.0
        return self.match_s + nbytes / self.bytes_per_s + blocks * self.block_s


@dataclass(frozen=True)
class Split:
    """How to have a run soonest: compute its first `compute` blocks while the rest is loaded.

    compute: 0 is loading all of it, the whole run is computing all of it.
    seconds, load_s, compute_s: of this split, of loading all, of computing all, each with what
        follows the run.
    """

    compute: int
    seconds: float
    load_s: float
    compute_s: float


@dataclass(frozen=True)
class CostModel:
    """One engine over some tiers.

    block_bytes: of one block as it lies in L2; `TierSpeed.bytes_per_s` is in these bytes.
    """

    prefill: PrefillCurve
    tiers: tuple[TierSpeed, ...]
    block_bytes: int
    block_tokens: int

    def tier(self, name: str) -> TierSpeed:
        """The tier of this name. Raises ConfigError where there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.tiers) or "none"
        raise ConfigError(f"no tier {name!r} in the cost model; it has {known}")

    def compute_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens start..end after those before start."""
        return self.prefill.seconds(start, end)

    def load_s(self, tier: str, blocks: int) -> float:
        """Seconds to load this many blocks from one tier."""
        return self.tier(tier).seconds(blocks * self.block_bytes, blocks)

    def run_load_s(self, tiers: Sequence[str]) -> float:
        """Seconds to load blocks that lie in these tiers: tiers work side by side."""
        counts = {name: len(list(group)) for name, group in groupby(sorted(tiers))}
        return max((self.load_s(name, blocks) for name, blocks in counts.items()), default=0.0)

    def break_even_tokens(self, tier: str, limit: int = TOKENS_MAX) -> int | None:
        """The shortest run, in whole blocks, from which on loading beats computing.

        Every longer run of up to `limit` tokens is sooner loaded as well. None: at `limit` tokens
        computing is still no slower.
        """
        blocks_max = limit // self.block_tokens
        if blocks_max < 1 or self._lead_s(tier, blocks_max) <= 0:
            return None
        for low, high in self._pieces(blocks_max):
            # Within a piece the lead is convex, so the lengths at which it is lost are in one row.
            worst = _lowest(lambda n: self._lead_s(tier, n), low, high)
            if self._lead_s(tier, worst) > 0:
                continue
            while high - worst > 1:
                middle = (worst + high) // 2
                if self._lead_s(tier, middle) > 0:
                    high = middle
                else:
                    worst = middle
            lost = high if self._lead_s(tier, high) <= 0 else worst
            return (lost + 1) * self.block_tokens
        return self.block_tokens

    def split(self, tiers: Sequence[str], first_block: int = 0, end: int = 0) -> Split:
        """How many leading blocks to compute while the others are loaded, for the soonest end.

        tiers: where each block of the run lies. first_block: blocks before the run, which are
        there. end: tokens to have in the end; those behind the run are computed after it.

        The best split is where the two meet: computing only grows and loading only shrinks with
        each block moved over.
        """
        size, blocks = self.block_tokens, len(tiers)
        start, stop = first_block * size, (first_block + blocks) * size
        rest_s = self.compute_s(stop, end)

        def computing_s(compute: int) -> float:
            return self.compute_s(start, start + compute * size)

        def loading_s(compute: int) -> float:
            return self.run_load_s(tiers[compute:])

        best, best_s = meet(blocks, computing_s, loading_s)
        load_s, compute_s = loading_s(0), computing_s(blocks)
        return Split(best, best_s + rest_s, load_s + rest_s, compute_s + rest_s)

    def _lead_s(self, tier: str, blocks: int) -> float:
        """Seconds by which loading a run from the start is sooner than computing it."""
        return self.compute_s(0, blocks * self.block_tokens) - self.load_s(tier, blocks)

    def _pieces(self, blocks_max: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks, both ends in, in each of which the curve has no kink; longest first."""
        size = self.block_tokens
        edges = [tokens for tokens, _ in self.prefill.points if tokens < blocks_max * size]
        high = blocks_max
        for edge in [*reversed(edges), 0]:
            low = max(1, -(-edge // size))
            if low <= high:
                yield low, high
            high = min(high, edge // size)


def _lowest(value: Callable[[int], float], low: int, high: int) -> int:
    """Where a convex function of the integers low..high is lowest; the last such place."""
    while low < high:
        middle = (low + high) // 2
        if value(middle + 1) <= value(middle):
            low = middle + 1
        else:
            high = middle
    return low


def meet(
    blocks: int, computing_s: Callable[[int], float], loading_s: Callable[[int], float]
) -> tuple[int, float]:
    """How many leading blocks of a run to compute while the others are loaded, and how long both
    take.

    computing_s(n): seconds to compute the first n blocks, never falling with n.
    loading_s(n): seconds to load all but the first n, never growing with n.
    """
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        if computing_s(middle) < loading_s(middle):
            low = middle + 1
        else:
            high = middle
    choices = ((n, max(computing_s(n), loading_s(n))) for n in (low - 1, low) if n >= 0)
    return min(choices, key=lambda choice: choice[1])


def bandwidth_to_pay(bytes_per_token: int, prefill_tokens_per_s: float) -> float:
    """Bytes a second above which a tier brings tokens sooner than they are computed.

    131,072 bytes a token at 15,000 tokens a second: 1.97 GB/s.
    """
    return bytes_per_token * prefill_tokens_per_s


def effective_bandwidth(
    tier_bytes_per_s: float, ratio: float, cores: float, decode_bytes_per_s: float
) -> float:
    """Raw bytes a second from a tier whose frames are compressed.

    ratio: raw over stored bytes. cores: that decode at once. decode_bytes_per_s: raw bytes a
    second of one core; infinite where nothing is decoded.
    """
    return min(ratio * tier_bytes_per_s, cores * decode_bytes_per_s)


def two_ended_s(tokens: float, compute_per_s: float, load_per_s: float) -> float:
    """Seconds to have tokens computed from one end and loaded from the other: N / (Rc + Rl)."""
    return tokens / (compute_per_s + load_per_s)


def hit_rate_to_pay(cold_s: float, pure_s: float, warm_s: float) -> float:
    """Hit rate above which a store that is waited for on both ways pays.

    cold_s: a request that misses and waits for its save. pure_s: one without any store. warm_s: one
    that hits. The mean `h warm + (1 - h) cold` is below `pure` for h above
    (cold - pure) / (cold - warm); 1.0 where hits are no quicker than having no store. Saving behind
    the answer makes cold equal pure, and the rate 0.
    """
    if warm_s >= pure_s:
        return 1.0
    return max(0.0, (cold_s - pure_s) / (cold_s - warm_s)) if cold_s > warm_s else 0.0


def gpu_seconds_saved(computing_s: float, loading_s: float = 0.0) -> float:
    """GPU seconds that hits spare: what computing them would have taken, less what the device is
    kept busy by taking them in."""
    return computing_s - loading_s


def dollars_per_million_tokens(gpu_s: float, tokens: int, dollars_per_gpu_hour: float) -> float:
    """Cost of GPU seconds per million tokens served; 0.0 where none were."""
    return gpu_s * dollars_per_gpu_hour / 3600.0 * 1e6 / tokens if tokens else 0.0
