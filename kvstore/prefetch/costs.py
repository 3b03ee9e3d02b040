"""The cost model of computing and loading: it answers whether offloading pays.

Pure functions of measured or given figures: no clock, no I/O. The planner, the simulator, the
break-even benchmark and the adaptive prefetch policy all use this model, so their results agree.

Loading a prefix pays if its tier delivers tokens faster than the engine computes them. For long
prefixes, that is if the bytes per second exceed bytes per token times the prefill rate
(`bandwidth_to_pay`). A compressing tier delivers raw bytes at `effective_bandwidth`. Computing the
first tokens while the others are loaded takes N / (Rc + Rl) for N tokens at the two rates
(`split_load_s`), at best half of the better of the two. If requests wait for saves as well as for
loads, the store pays only above a certain hit rate (`hit_rate_to_pay`).
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

MAX_TOKENS = 1 << 20
"""Maximum prefix length in the search for a break-even length."""


@dataclass(frozen=True)
class PrefillCurve:
    """Seconds to prefill a cold prompt, from measured points.

    points: (tokens, seconds) of cold prompts, with strictly increasing tokens.

    Between points, and from (0, 0) to the first, the curve is a straight line. Seconds that fall
    from one point to a longer one are noise: the earlier, larger ones are kept. Beyond the last
    point the curve continues as `a n + b n^2`, the linear part for the weights and the square for
    attention. A least-squares fit of the relative errors over the points gives a and b (neither
    below zero); the result is shifted to pass through the last point. A single point gives b = 0.

    Raises:
        ConfigError: no points; tokens or seconds that are not positive and finite; tokens that do
            not increase.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("a prefill curve needs at least one point of tokens and seconds")
        before = 0
        for tokens, seconds in self.points:
            if not tokens > before:
                raise ConfigError(
                    f"prefill curve: tokens must increase from 1 on (got {tokens} after {before})"
                )
            if not 0 < seconds < math.inf:
                raise ConfigError(
                    f"prefill curve: seconds must be above 0 (got {seconds} for {tokens} tokens)"
                )
            before = tokens

    @classmethod
    def at_rate(cls, tokens_per_s: float) -> PrefillCurve:
        """A linear curve. Raises ConfigError for a rate that is not positive and finite."""
        if not 0 < tokens_per_s < math.inf:
            raise ConfigError(
                f"prefill rate must be above 0 tokens per second (got {tokens_per_s})"
            )
        return cls(((1024, 1024 / tokens_per_s),))

    @classmethod
    def parse(cls, text: str, source: str) -> PrefillCurve:
        """The curve that a text describes; `source` names the text in messages.

        text: a number of tokens per second, or JSON
            `{"model": ..., "points": [{"tokens": 1024, "seconds": 0.07}, ...]}`, points in any
            order; other keys are ignored.

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
        """The curve of an option's value: tokens per second, or the path of a file for `parse`.

        Raises:
            ConfigError: like `parse`, or the file cannot be read.
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
        """Seconds to prefill a prompt without any cached block."""
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
        """Seconds to compute tokens start..end when those before start are cached."""
        return max(0.0, self.cold_s(end) - self.cold_s(start)) if end > start else 0.0

    @cached_property
    def _tables(self) -> tuple[list[int], list[float], tuple[float, float]]:
        """Lengths, non-decreasing seconds, and (a, b) of the part beyond the last point."""
        lengths = [0, *(tokens for tokens, _ in self.points)]
        seconds = [0.0, *accumulate((seconds for _, seconds in self.points), max)]
        return lengths, seconds, _fit(lengths[1:], seconds[1:])


_WANTED = 'use tokens per second, or JSON like {"points": [{"tokens": 1024, "seconds": 0.07}, ...]}'


def _point(point: Any, source: str) -> tuple[int, float]:
    tokens = point.get("tokens") if isinstance(point, dict) else None
    seconds = point.get("seconds") if isinstance(point, dict) else None
    wrong_seconds = isinstance(seconds, bool) or not isinstance(seconds, (int, float))
    if type(tokens) is not int or wrong_seconds:
        raise ConfigError(f"prefill rate {source}: {point!r} is not a valid point; {_WANTED}")
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
                f"tier {self.name!r}: bytes per second must be above 0 (got {self.bytes_per_s})"
            )
        if not (0 <= self.match_s < math.inf and 0 <= self.block_s < math.inf):
            raise ConfigError(
                f"tier {self.name!r}: match_s and block_s must be at least 0 and finite "
                f"(got {self.match_s} and {self.block_s})"
            )

    def seconds(self, nbytes: int, blocks: int) -> float:
        """Seconds until all blocks are in L2; 0 for no blocks."""
        if blocks <= 0:
            return 0.0
        return self.match_s + nbytes / self.bytes_per_s + blocks * self.block_s


@dataclass(frozen=True)
class Split:
    """The fastest split of a prefix: compute its first `compute` blocks while the rest is loaded.

    compute: 0: load all blocks; number of blocks: compute all.
    seconds, load_s, compute_s: seconds of this split, of loading all, of computing all; each
        includes the tokens after the prefix.
    """

    compute: int
    seconds: float
    load_s: float
    compute_s: float


@dataclass(frozen=True)
class CostModel:
    """One engine over some tiers.

    block_bytes: size of a block in L2; `TierSpeed.bytes_per_s` counts these bytes.
    """

    prefill: PrefillCurve
    tiers: tuple[TierSpeed, ...]
    block_bytes: int
    block_tokens: int

    def tier(self, name: str) -> TierSpeed:
        """The tier of this name. Raises ConfigError for an unknown name."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.tiers) or "none"
        raise ConfigError(f"no tier {name!r} in the cost model; known tiers: {known}")

    def compute_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens start..end after those before start."""
        return self.prefill.seconds(start, end)

    def load_s(self, tier: str, blocks: int) -> float:
        """Seconds to load this many blocks from one tier."""
        return self.tier(tier).seconds(blocks * self.block_bytes, blocks)

    def prefix_load_s(self, tiers: Sequence[str]) -> float:
        """Seconds to load one block from each of these tiers; tiers work in parallel."""
        counts = {name: len(list(group)) for name, group in groupby(sorted(tiers))}
        return max((self.load_s(name, blocks) for name, blocks in counts.items()), default=0.0)

    def break_even_tokens(self, tier: str, limit: int = MAX_TOKENS) -> int | None:
        """The shortest prefix, in tokens of whole blocks, that is loaded faster than computed.

        All longer prefixes of up to `limit` tokens are loaded faster as well. None: at `limit`
        tokens, loading is not faster.
        """
        blocks_max = limit // self.block_tokens
        if blocks_max < 1 or self._lead_s(tier, blocks_max) <= 0:
            return None
        for low, high in self._ranges(blocks_max):
            # Within a range the lead is convex, so the lengths without a lead are contiguous.
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
        """How many leading blocks to compute while the others are loaded, to finish first.

        tiers: the tier of each block. first_block: number of cached blocks before them. end: tokens
        of the whole prompt; those after the blocks are computed last.

        The best split is where the two times meet: each block moved over adds computing time and
        removes loading time.
        """
        size, blocks = self.block_tokens, len(tiers)
        start, stop = first_block * size, (first_block + blocks) * size
        rest_s = self.compute_s(stop, end)

        def computing_s(compute: int) -> float:
            return self.compute_s(start, start + compute * size)

        def loading_s(compute: int) -> float:
            return self.prefix_load_s(tiers[compute:])

        best, best_s = meet(blocks, computing_s, loading_s)
        load_s, compute_s = loading_s(0), computing_s(blocks)
        return Split(best, best_s + rest_s, load_s + rest_s, compute_s + rest_s)

    def _lead_s(self, tier: str, blocks: int) -> float:
        """Seconds by which loading a prefix is faster than computing it."""
        return self.compute_s(0, blocks * self.block_tokens) - self.load_s(tier, blocks)

    def _ranges(self, blocks_max: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks, ends included, without a kink of the curve; longest first."""
        size = self.block_tokens
        edges = [tokens for tokens, _ in self.prefill.points if tokens < blocks_max * size]
        high = blocks_max
        for edge in [*reversed(edges), 0]:
            low = max(1, -(-edge // size))
            if low <= high:
                yield low, high
            high = min(high, edge // size)


def _lowest(value: Callable[[int], float], low: int, high: int) -> int:
    """The argument at which a convex function of the integers low..high is lowest; the last one."""
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
    """Number of leading blocks to compute while the others are loaded, and the seconds of both.

    computing_s(n): seconds to compute the first n blocks; must not decrease with n.
    loading_s(n): seconds to load all but the first n blocks; must not increase with n.
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
    """Bytes per second above which a tier delivers tokens faster than they are computed.

    131,072 bytes per token at 15,000 tokens per second: 1.97 GB/s.
    """
    return bytes_per_token * prefill_tokens_per_s


def effective_bandwidth(
    tier_bytes_per_s: float, ratio: float, cores: float, decode_bytes_per_s: float
) -> float:
    """Raw bytes per second from a tier with compressed frames.

    ratio: raw bytes per stored byte. cores: number of cores that decode. decode_bytes_per_s: raw
    bytes per second of one core; infinite without decoding.
    """
    return min(ratio * tier_bytes_per_s, cores * decode_bytes_per_s)


def split_load_s(tokens: float, compute_per_s: float, load_per_s: float) -> float:
    """Seconds to compute tokens from one end and load them from the other: N / (Rc + Rl)."""
    return tokens / (compute_per_s + load_per_s)


def hit_rate_to_pay(cold_s: float, pure_s: float, warm_s: float) -> float:
    """Hit rate above which a store pays if requests wait for both loads and saves.

    cold_s: seconds of a request that misses and waits for its save. pure_s: of one without a store.
    warm_s: of one that hits. The mean `h warm + (1 - h) cold` is below `pure` for h above
    (cold - pure) / (cold - warm). The result is 1.0 if hits are not faster than no store. If saves
    run after the response, cold equals pure and the rate is 0.
    """
    if warm_s >= pure_s:
        return 1.0
    return max(0.0, (cold_s - pure_s) / (cold_s - warm_s)) if cold_s > warm_s else 0.0


def gpu_seconds_saved(computing_s: float, loading_s: float = 0.0) -> float:
    """GPU seconds saved by hits: seconds of computing the tokens, less seconds of loading them."""
    return computing_s - loading_s


def dollars_per_million_tokens(gpu_s: float, tokens: int, dollars_per_gpu_hour: float) -> float:
    """Cost of GPU seconds per million tokens; 0.0 for no tokens."""
    return gpu_s * dollars_per_gpu_hour / 3600.0 * 1e6 / tokens if tokens else 0.0
