"""Analyzes a log of requests: the reuse of an unlimited cache, and what prevents more, by cause.

Each request is compared with the earlier request that has most of its text in any position, found
by an index of lines and sentences. The reusable tokens follow from the earlier request with the
longest common prefix, its neighbour in sorted order. The difference of the two is what the request
lost.
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
"""Number of earlier requests with shared text that are compared in detail."""
DAY_S: Final = 86_400.0
MIN_SPAN_S: Final = 60.0
"""Minimum length of a log for figures per day, in seconds."""


@dataclass
class Cause:
    """All differences of one kind in one part of the prompt. worst: the most expensive one."""

    kind: str
    part: str
    requests: int = 0
    tokens: int = 0
    worst: Comparison | None = None

    def add(self, seen: Comparison, lost: int) -> None:
        """Count one more request."""
        self.requests += 1
        self.tokens += lost
        if self.worst is None or lost > self.worst.lost:
            self.worst = seen


@dataclass
class LogAnalyzer:
    """Takes a log's requests in order. The results are in its fields, in tokens.

    tokens: of all prompts. reusable: in full blocks of an unlimited cache. partial: shared at the
    start, but in partial blocks. lost: cost of the causes.
    """

    block_tokens: int = 16
    requests: int = 0
    tokens: int = 0
    reusable: int = 0
    partial: int = 0
    reported_tokens: int = 0
    cached_tokens: int = 0
    causes: dict[tuple[str, str], Cause] = field(default_factory=dict)
    _prompts: list[Prompt] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)
    _sorted: dict[Any, list[tuple[Any, int]]] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)

    def add(self, prompt: Prompt) -> None:
        """Add the next request."""
        number = self.requests
        near = self._nearest(prompt)
        shared = max((common_tokens(self._prompts[n], prompt) for n in near), default=0)
        reused = reusable_tokens(shared, prompt.tokens, self.block_tokens)
        self.requests += 1
        self.tokens += prompt.tokens
        self.reusable += reused
        self.partial += max(0, min(shared, prompt.tokens - 1) - reused)
        if prompt.prompt_tokens is not None and prompt.cached_tokens is not None:
            self.reported_tokens += prompt.prompt_tokens
            self.cached_tokens += prompt.cached_tokens
        if prompt.at_s is not None:
            self._times.append(prompt.at_s)
        if prompt.tokens - reused >= self.block_tokens:
            self._diagnose(prompt, [*near, *self._most_similar(prompt)], reused)
        self._keep(prompt, number)

    @property
    def lost(self) -> int:
        """Return the tokens computed again although an earlier prompt had them."""
        return sum(cause.tokens for cause in self.causes.values())

    @property
    def span_s(self) -> float:
        """Return the seconds from the first request to the last. 0.0: the log has no times."""
        return max(self._times) - min(self._times) if len(self._times) == self.requests > 0 else 0.0

    def per_day(self, tokens: int, requests_per_day: float | None = None) -> float | None:
        """Return tokens per day, by the given rate or the log's own. None: neither is known."""
        if requests_per_day is None:
            if self.span_s < MIN_SPAN_S:
                return None
            requests_per_day = self.requests / self.span_s * DAY_S
        return tokens / max(1, self.requests) * requests_per_day

    def worst_first(self) -> list[Cause]:
        """Return the causes, the most expensive first."""
        return sorted(self.causes.values(), key=lambda cause: -cause.tokens)

    def _nearest(self, prompt: Prompt) -> list[int]:
        """Return the requests with the longest common prefix: neighbours in sorted order."""
        row = self._sorted.get(self._isolation_key(prompt), [])
        place = bisect.bisect_left(row, (prompt.key, self.requests))
        return [row[n][1] for n in (place - 1, place) if 0 <= n < len(row)]

    def _most_similar(self, prompt: Prompt) -> list[int]:
        """Return the earlier requests with most of its pieces. Of equal ones, the later first."""
        weights: Counter[int] = Counter()
        for piece, length in zip(prompt.index.hashes, prompt.index.lengths, strict=True):
            earlier = self._last.get(piece)
            if earlier is not None:
                weights[earlier] += length
        ranked = sorted(weights, key=lambda n: (-weights[n], -n))
        return ranked[:CANDIDATES]

    def _diagnose(self, prompt: Prompt, candidates: Sequence[int], reused: int) -> None:
        """Find what prevents the request from reusing blocks of earlier ones."""
        best, earlier = Overlap(0, 0, 0, 0), -1
        for number in dict.fromkeys(candidates):
            seen = overlap(self._prompts[number], prompt, self.block_tokens)
            if (seen.reused + seen.lost, seen.reused) > (best.reused + best.lost, best.reused):
                best, earlier = seen, number
        lost = best.reused + best.lost - reused
        if lost >= self.block_tokens:
            found = compare(self._prompts[earlier], prompt, self.block_tokens)
            key = (found.diagnosis.kind, found.part)
            self.causes.setdefault(key, Cause(*key)).add(found, lost)

    def _keep(self, prompt: Prompt, number: int) -> None:
        self._prompts.append(prompt)
        for piece in prompt.index.hashes:
            self._last[piece] = number
        row = self._sorted.setdefault(self._isolation_key(prompt), [])
        bisect.insort(row, (prompt.key, number))

    @staticmethod
    def _isolation_key(prompt: Prompt) -> tuple[object, bool]:
        return prompt.isolation, prompt.ids is None
