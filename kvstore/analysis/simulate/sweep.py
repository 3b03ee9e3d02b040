"""One trace through several replays at once, and what the best order of eviction would have hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from kvstore.analysis.simulate.optimal import Optimum
from kvstore.analysis.simulate.run import Replay, Shape
from kvstore.analysis.simulate.traces import Asked

REPLAYS_MAX: Final = 256
"""Replays of one sweep; each holds its caches in memory."""

Progress = Callable[[str, int, int | None], None]
"""Told what is done, how much of it, and of how much."""


class Requests(Protocol):
    """Requests, read once, and where they come from. `formats.Trace` is one."""

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def requests(self) -> Iterator[Asked]: ...


class Sweep:
    """Replays of several shapes over one trace, read once.

    optimum: also find the offline optimum of each total capacity.
    """

    def __init__(self, shapes: Sequence[Shape], *, optimum: bool = True) -> None:
        assert 0 < len(shapes) <= REPLAYS_MAX
        self.replays = [Replay(shape) for shape in shapes]
        self._optimum = Optimum() if optimum else None

    def run(
        self, trace: Requests, progress: Progress = lambda what, done, total: None
    ) -> list[dict[str, Any]]:
        """The figures of each shape, as JSON has them (`run.Replay.result`, and the optimum's)."""
        optimum, replays = self._optimum, self.replays
        for request in trace.requests:
            for replay in replays:
                replay.step(request)
            if optimum is not None:
                optimum.add(request)
        block_tokens = trace.block_tokens
        found = [replay.result(block_tokens) for replay in replays]
        best: dict[int | None, tuple[float, float]] = {}
        for replay, figures in zip(replays, found, strict=True):
            capacity = replay.shape.all_blocks(block_tokens)
            figures |= _facts(trace, replay.shape, capacity)
            if optimum is None:
                continue
            if capacity not in best:
                best[capacity] = optimum.hit_rates(
                    capacity, lambda done, total: progress("optimum", done, total)
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
        "prefetch": shape.prefetch,
        "engines": shape.engines,
    }


def _regret(figures: dict[str, Any], whole: float, half: float) -> dict[str, float]:
    return {
        "offline_optimal_hit_rate": whole,
        "offline_optimal_hit_rate_second_half": half,
        "regret": whole - figures["token_hit_rate"],
        "regret_second_half": half - figures["token_hit_rate_second_half"],
    }
