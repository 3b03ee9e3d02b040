"""Runs one trace through several replays at once, and computes the offline-optimal hit rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from kvstore.analysis.simulate.optimal import OfflineOptimal
from kvstore.analysis.simulate.run import Replay, Shape
from kvstore.analysis.simulate.traces import TraceRequest

REPLAYS_MAX: Final = 256
"""Maximum number of replays in a sweep. Each keeps its caches in memory."""

Progress = Callable[[str, int, int | None], None]
"""Called with the task, the amount done and the total."""


class Requests(Protocol):
    """A source of requests that are read once. `formats.Trace` is one."""

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def requests(self) -> Iterator[TraceRequest]: ...


class Sweep:
    """Replays of several shapes over one trace, which is read once.

    offline_optimal: also compute the offline-optimal hit rate of each total capacity.
    """

    def __init__(self, shapes: Sequence[Shape], *, offline_optimal: bool = True) -> None:
        assert 0 < len(shapes) <= REPLAYS_MAX
        self.replays = [Replay(shape) for shape in shapes]
        self._offline_optimal = OfflineOptimal() if offline_optimal else None

    def run(
        self, trace: Requests, progress: Progress = lambda what, done, total: None
    ) -> list[dict[str, Any]]:
        """Return the figures of each shape for JSON (`Replay.result` and the optimal rates)."""
        optimal, replays = self._offline_optimal, self.replays
        for request in trace.requests:
            for replay in replays:
                replay.step(request)
            if optimal is not None:
                optimal.add(request)
        block_tokens = trace.block_tokens
        found = [replay.result(block_tokens) for replay in replays]
        best: dict[int | None, tuple[float, float]] = {}
        for replay, figures in zip(replays, found, strict=True):
            capacity = replay.shape.all_blocks(block_tokens)
            figures |= _facts(trace, replay.shape, capacity)
            if optimal is None:
                continue
            if capacity not in best:
                best[capacity] = optimal.hit_rates(
                    capacity, lambda done, total: progress("offline optimal", done, total)
                )
            figures |= _regret(figures, *best[capacity])
        return found


def _facts(trace: Requests, shape: Shape, capacity: int | None) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "format": trace.format,
        "block_tokens": trace.block_tokens,
        "bytes_per_token": shape.bytes_per_token,
        "capacity_blocks": capacity,
        "eviction": shape.eviction,
        "l3_eviction": shape.l3_eviction,
        "write": shape.write,
        "load_policy": shape.load_policy,
        "concurrency": shape.concurrency,
    }


def _regret(figures: dict[str, Any], whole: float, half: float) -> dict[str, float]:
    return {
        "offline_optimal_hit_rate": whole,
        "offline_optimal_hit_rate_second_half": half,
        "regret": whole - figures["token_hit_rate"],
        "regret_second_half": half - figures["token_hit_rate_second_half"],
    }
