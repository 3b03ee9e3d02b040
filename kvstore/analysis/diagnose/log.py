"""A log of requests: what an endless cache would reuse, and what stands in its way, by cause.

Each request is compared with the earlier one that it shares most text with, wherever the text lies
in it, found by an index of lines and sentences; what could be reused follows from the earlier one
with the longest common beginning, its neighbour in sorted order. What a request lost is the
difference.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.analysis.diagnose.compare import Comparison, Overlap, compare, overlap
from kvstore.analysis.diagnose.prompts import Prompt, common_tokens, reusable_tokens

CANDIDATES: Final = 3
"""So many earlier requests that share text are looked at closely."""
DAY_S: Final = 86_400.0
MIN_SPAN_S: Final = 60.0
"""A log of less says nothing about a day."""


@dataclass
class Cause:
    """All differences of one kind in one part of the prompt. worst: the one that lost most."""

    kind: str
    part: str
    requests: int = 0
    tokens: int = 0
    worst: Comparison | None = None

    def add(self, seen: Comparison, lost: int) -> None:
        """One more request."""
        self.requests += 1
        self.tokens += lost
        if self.worst is None or lost > self.worst.lost:
            self.worst = seen


@dataclass
class LogDoctor:
    """Takes a log's requests in order; what it found is in its fields, in tokens.

    tokens: of all prompts. reusable: what full blocks of an endless cache spare. partial: what is
    shared in front besides, in parts of blocks. lost: what the causes cost.
    """

    block_tokens: int = 16
    requests: int = 0
    tokens: int = 0
    reusable: int = 0
    partial: int = 0
    told_tokens: int = 0
    cached_tokens: int = 0
    causes: dict[tuple[str, str], Cause] = field(default_factory=dict)
    _prompts: list[Prompt] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)
    _sorted: dict[Any, list[tuple[Any, int]]] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)

    def add(self, prompt: Prompt) -> None:
        """The next request."""
        number = self.requests
        near = self._nearest(prompt)
        shared = max((common_tokens(self._prompts[n], prompt) for n in near), default=0)
        reused = reusable_tokens(shared, prompt.tokens, self.block_tokens)
        self.requests += 1
        self.tokens += prompt.tokens
        self.reusable += reused
        self.partial += max(0, min(shared, prompt.tokens - 1) - reused)
        if prompt.told_tokens is not None and prompt.cached_tokens is not None:
            self.told_tokens += prompt.told_tokens
            self.cached_tokens += prompt.cached_tokens
        if prompt.at_s is not None:
            self._times.append(prompt.at_s)
        if prompt.tokens - reused >= self.block_tokens:
            self._diagnose(prompt, [*near, *self._alike(prompt)], reused)
        self._keep(prompt, number)

    @property
    def lost(self) -> int:
        """Tokens computed again although an earlier prompt had them."""
        return sum(cause.tokens for cause in self.causes.values())

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last; 0.0 where the log does not say."""
        return max(self._times) - min(self._times) if len(self._times) == self.requests > 0 else 0.0

    def per_day(self, tokens: int, requests_per_day: float | None = None) -> float | None:
        """Tokens a day, from the rate given or the log's own; None where neither is known."""
        if requests_per_day is None:
            if self.span_s < MIN_SPAN_S:
                return None
            requests_per_day = self.requests / self.span_s * DAY_S
        return tokens / max(1, self.requests) * requests_per_day

    def worst_first(self) -> list[Cause]:
        """The causes, the dearest first."""
        return sorted(self.causes.values(), key=lambda cause: -cause.tokens)

    def _nearest(self, prompt: Prompt) -> list[int]:
        """The earlier requests with the longest common beginning: neighbours in sorted order."""
        row = self._sorted.get(self._drawer(prompt), [])
        place = bisect.bisect_left(row, (prompt.key, self.requests))
        return [row[n][1] for n in (place - 1, place) if 0 <= n < len(row)]

    def _alike(self, prompt: Prompt) -> list[int]:
        """Earlier requests that have most of its pieces, most first; later ones before others."""
        weights: Counter[int] = Counter()
        for piece, length in zip(prompt.held.hashes, prompt.held.lengths, strict=True):
            earlier = self._last.get(piece)
            if earlier is not None:
                weights[earlier] += length
        ranked = sorted(weights, key=lambda n: (-weights[n], -n))
        return ranked[:CANDIDATES]

    def _diagnose(self, prompt: Prompt, candidates: Sequence[int], reused: int) -> None:
        """Find what keeps the request from reusing what earlier ones have."""
        best, earlier = Overlap(0, 0, 0, 0), -1
        for number in dict.fromkeys(candidates):
            seen = overlap(self._prompts[number], prompt, self.block_tokens)
            if (seen.reused + seen.lost, seen.reused) > (best.reused + best.lost, best.reused):
                best, earlier = seen, number
        lost = best.reused + best.lost - reused
        if lost >= self.block_tokens:
            found = compare(self._prompts[earlier], prompt, self.block_tokens)
            key = (found.verdict.kind, found.part)
            self.causes.setdefault(key, Cause(*key)).add(found, lost)

    def _keep(self, prompt: Prompt, number: int) -> None:
        self._prompts.append(prompt)
        for piece in prompt.held.hashes:
            self._last[piece] = number
        bisect.insort(self._sorted.setdefault(self._drawer(prompt), []), (prompt.key, number))

    @staticmethod
    def _drawer(prompt: Prompt) -> tuple[object, bool]:
        return prompt.apart, prompt.ids is None
