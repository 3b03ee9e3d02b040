"""Chooses the codec with which a namespace's blocks load fastest from a tier.

Each tier has one chooser. It does no I/O and uses no clock: callers report the cost of transfers.

k readers load the blocks of a request. They share the medium and the CPU. The time that each block
adds is that of the bottleneck:

    read s = max(S / B,  (S / b + R * d) / k,  R * d / c)

    S  stored bytes: R over the compression ratio of the codec on this namespace's blocks
    R  raw bytes of a block
    B  bytes per second of the medium for all readers together
    b  bytes per second of the medium for a single reader
    k  average number of active readers
    d  CPU seconds to verify and decode one raw byte with this codec
    c  CPU cores of this process

With one reader this is S / b + R * d, the time of one block. With many readers it is their
bottleneck: the bounds of a closed queueing network (Denning and Buzen, "The Operational Analysis of
Queueing Network Models", 1978). The latency of a medium counts as if it grew with the size. This
can favour a smaller block only if the latency is several times the decoding time, and then costs
little.

The formula uses CPU seconds instead of elapsed seconds. They do not depend on the number of blocks
that are decoded at the same time, so the choice does not depend on its own effect.

Encoding costs the writer, not the reader, and the engine does not wait for writes. So it counts
only while the write queue is backlogged and blocks are about to be dropped, because a dropped block
can never be loaded. Then the chooser selects the codec that drains the queue fastest: by the same
formula with the writers' rates and the CPU seconds of encoding.

Until reads are measured, a namespace gets the default codec for its dtype (`codecs.AUTO`), and
`PRIORS` replace rates that are not yet measured. Each candidate gets some of the first blocks.
Later one block in `RECHECK_BLOCKS` goes to another candidate. These blocks are stored like any
other, so they cost no extra read, write or buffer. Changing the choice requires a gain of
`MIN_GAIN`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore import codecs
from kvstore.codecs.base import UNCOMPRESSED_ID, Codec
from kvstore.codecs.none import KIND as NONE

TRIAL_BLOCKS: Final = 3
"""Number of first blocks of a namespace for each candidate."""
RECHECK_BLOCKS: Final = 256
"""One block in this many goes to another candidate than the chosen one."""
MIN_GAIN: Final = 0.1
"""Fraction of the time that another codec must save to be chosen."""
MIN_SAMPLES: Final = 4
"""Number of reads (or writes) after which a medium counts as measured."""
AVERAGED_BLOCKS: Final = 64
"""Length in blocks of the exponential moving averages."""
MAX_NAMESPACES: Final = 256
"""Maximum number of namespaces with state; the oldest one is dropped."""
DIGEST_DIGITS: Final = 8
"""Hex digits of a namespace's digest in statistics."""
MAX_WORKERS_ALONE: Final = 1.25
"""A read counts as alone if its average number of concurrent readers is at most this."""
SATURATED_FRACTION: Final = 0.8
"""A medium counts as saturated if a reader gets less than this fraction of its rate alone."""
MIN_TIME_S: Final = 1e-9
"""Minimum duration, in case the clock did not advance."""

PRIORS: Final[dict[str, dict[str, tuple[float, float, float]]]] = {
    "float32": {"zstd": (1.07, 343e6, 472e6), "byteshuffle-zstd": (1.19, 427e6, 1170e6)},
    "bfloat16": {"zstd": (1.26, 800e6, 1200e6), "byteshuffle-zstd": (1.46, 650e6, 1301e6)},
    "float16": {"zstd": (1.07, 537e6, 872e6), "byteshuffle-zstd": (1.15, 650e6, 1126e6)},
    "fp8_e4m3": {"zstd": (1.18, 550e6, 834e6), "byteshuffle-zstd": (1.18, 375e6, 635e6)},
    "fp8_e5m2": {"zstd": (1.36, 431e6, 717e6), "byteshuffle-zstd": (1.36, 580e6, 852e6)},
    "int8": {"zstd": (1.28, 511e6, 746e6), "byteshuffle-zstd": (1.28, 484e6, 591e6)},
}
"""(compression ratio, bytes per second encoded, bytes per second decoded) by dtype and kind, of
real KV as measured by bench/codecs.py."""
PRIOR_UNCOMPRESSED: Final = (1.0, 10e9, 10e9)
"""The same for an uncompressed block, which takes only a checksum."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of reading or writing one block.

    frame_id: of its codec; for a write the codec that was tried, even if it did not pay. tier_s:
    elapsed seconds in the tier. codec_s: CPU seconds of encoding or decoding, including checksums.
    move_s: elapsed seconds of both.
    """

    frame_id: str
    raw_bytes: int
    stored_bytes: int
    tier_s: float
    codec_s: float
    move_s: float


@dataclass(slots=True)
class _RunningRatio:
    """The ratio of two exponentially decaying sums."""

    numerator: float = 0.0
    denominator: float = 0.0
    samples: int = 0

    def add(self, numerator: float, denominator: float) -> None:
        keep = 1 - 1 / AVERAGED_BLOCKS if self.samples else 0.0
        self.numerator = self.numerator * keep + numerator
        self.denominator = self.denominator * keep + denominator
        self.samples += 1

    def value(self, default: float) -> float:
        return self.numerator / self.denominator if self.denominator > 0 else default


@dataclass(slots=True)
class _Medium:
    """The rates of one direction of a tier: B, b and k of the formula above.

    B can be measured only while the medium is the bottleneck, so those samples are kept apart
    (`saturated`). Before there are any, each worker is assumed to get the rate of a single one.
    """

    observed: _RunningRatio = field(default_factory=_RunningRatio)
    saturated: _RunningRatio = field(default_factory=_RunningRatio)
    alone: _RunningRatio = field(default_factory=_RunningRatio)
    workers: _RunningRatio = field(default_factory=_RunningRatio)

    def add(self, cost: Cost, workers: float) -> None:
        """Record a transfer. workers: average number of active workers during it."""
        tier_s = max(cost.tier_s, MIN_TIME_S)
        # Assume that the others spend the same fraction of their time in the medium.
        concurrency = 1 + (workers - 1) * tier_s / max(cost.move_s, tier_s)
        self.workers.add(workers, 1)
        self.observed.add(cost.stored_bytes * concurrency, tier_s)
        if concurrency <= MAX_WORKERS_ALONE:
            self.alone.add(cost.stored_bytes, tier_s)
        elif cost.stored_bytes / tier_s < SATURATED_FRACTION * self.alone.value(float("inf")):
            self.saturated.add(cost.stored_bytes * concurrency, tier_s)

    @property
    def is_measured(self) -> bool:
        return self.observed.samples >= MIN_SAMPLES

    @property
    def total_rate(self) -> float:
        """B in bytes per second; 0.0 before the first transfer."""
        seen = self.observed.value(0.0)
        return max(seen, self.saturated.value(self.workers.value(1.0) * self.alone.value(0.0)))

    def block_s(self, stored_bytes: float, cpu_s: float, cores: int) -> float:
        """The formula above. Requires `is_measured`."""
        total, workers = self.total_rate, self.workers.value(1.0)
        alone = self.alone.value(total / workers)
        return max(stored_bytes / total, (stored_bytes / alone + cpu_s) / workers, cpu_s / cores)


class _Candidate:
    """One codec and its figures for one namespace."""

    def __init__(self, kind: str, dtype: str) -> None:
        self.codec: Codec = codecs.codec_by_frame_id(codecs.codec_for(kind, dtype).frame_id)
        self._prior = PRIORS[dtype].get(kind, PRIOR_UNCOMPRESSED)
        self.blocks = 0
        """Number of blocks encoded with it."""
        self.ratio = _RunningRatio()
        self.encode = _RunningRatio()
        self.decode = _RunningRatio()

    def current_ratio(self) -> float:
        return self.ratio.value(self._prior[0])

    def encode_rate(self) -> float:
        """Raw bytes per CPU second."""
        return self.encode.value(self._prior[1])

    def decode_rate(self) -> float:
        return self.decode.value(self._prior[2])


class _NamespaceState:
    """The candidates of one namespace, by frame ID, and the choice."""

    def __init__(self, kinds: Sequence[str], default: str, dtype: str) -> None:
        candidates = sorted(
            (_Candidate(kind, dtype) for kind in kinds),
            key=lambda candidate: candidate.codec.frame_id,
        )
        self.candidates = {candidate.codec.frame_id: candidate for candidate in candidates}
        self.chosen_id = codecs.codec_for(default, dtype).frame_id
        self.blocks = 0
        self.changes = 0

    def candidate_to_try(self) -> str | None:
        """The frame ID of a candidate to measure with the next block, or None."""
        others = sorted(self.candidates.values(), key=lambda candidate: candidate.blocks)
        if others[0].blocks < TRIAL_BLOCKS:
            return others[0].codec.frame_id
        if self.blocks % RECHECK_BLOCKS == 0:
            return next(
                (c.codec.frame_id for c in others if c.codec.frame_id != self.chosen_id), None
            )
        return None


class Chooser:
    """Chooses codecs for one tier. Thread-safe.

    kind: "auto", or the configured kind, which is then always chosen. cores: number of CPU cores
    for decoding.

    Raises ConfigError: the kind is unknown.
    """

    def __init__(self, kind: str = codecs.AUTO, *, cores: int = 1) -> None:
        codecs.codec_for(kind, "bfloat16")
        assert cores >= 1, cores
        self._kinds = codecs.kinds() if kind == codecs.AUTO else [kind]
        self._default = kind
        self._cores = cores
        self._lock = threading.Lock()
        self._reads = _Medium()
        self._writes = _Medium()
        self._namespaces: dict[str, _NamespaceState] = {}

    def choose(
        self, namespace: str, dtype: str, *, raw_bytes: int, backlogged: bool = False
    ) -> Codec:
        """Choose the codec for the next block.

        namespace: its digest. dtype: a key of `DTYPE_BYTES`. backlogged: writes cannot keep up.
        """
        with self._lock:
            state = self._state_of(namespace, dtype)
            state.blocks += 1
            frame_id = (
                self._fastest_to_write(state, raw_bytes) if backlogged else state.candidate_to_try()
            )
            if frame_id is None:
                self._update_choice(state, raw_bytes)
                frame_id = state.chosen_id
            candidate = state.candidates[frame_id]
            candidate.blocks += 1
            return candidate.codec

    def prefers_uncompressed(self, namespace: str) -> bool:
        """Whether most blocks of this namespace are stored uncompressed."""
        with self._lock:
            state = self._namespaces.get(namespace)
            return self._kinds == [NONE] or (
                state is not None and state.chosen_id == UNCOMPRESSED_ID
            )

    def record_write(self, namespace: str, cost: Cost, workers: float) -> None:
        """Record a written block. workers: average number of active writers."""
        with self._lock:
            self._writes.add(cost, workers)
            candidate = self._candidate_of(namespace, cost)
            if candidate is not None:
                candidate.ratio.add(cost.raw_bytes, cost.stored_bytes)
                candidate.encode.add(cost.raw_bytes, max(cost.codec_s, MIN_TIME_S))

    def record_read(self, namespace: str, cost: Cost, workers: float) -> None:
        """Record a read block. workers: average number of active readers."""
        with self._lock:
            self._reads.add(cost, workers)
            candidate = self._candidate_of(namespace, cost)
            if candidate is not None:
                candidate.decode.add(cost.raw_bytes, max(cost.codec_s, MIN_TIME_S))

    def stats(self) -> dict[str, dict[str, int | float | str]]:
        """Statistics of the chosen codec by namespace (the first digits of its digest).

        `name` is the codec's kind, `ratio` the compression ratio, `encode_rate` and `decode_rate`
        are raw bytes per CPU second, and `changed` counts changes of the choice. `read_rate` is the
        rate of the tier for all readers in bytes per second; 0: not measured.
        """
        with self._lock:
            read_rate = self._reads.total_rate
            shown: dict[str, dict[str, int | float | str]] = {}
            for digest, state in self._namespaces.items():
                chosen = state.candidates[state.chosen_id]
                shown[digest[:DIGEST_DIGITS]] = {
                    "name": chosen.codec.kind,
                    "ratio": round(chosen.current_ratio(), 3),
                    "encode_rate": round(chosen.encode_rate()),
                    "decode_rate": round(chosen.decode_rate()),
                    "read_rate": round(read_rate),
                    "changed": state.changes,
                }
            return shown

    def _state_of(self, digest: str, dtype: str) -> _NamespaceState:
        state = self._namespaces.get(digest)
        if state is None:
            state = self._namespaces[digest] = _NamespaceState(self._kinds, self._default, dtype)
            if len(self._namespaces) > MAX_NAMESPACES:
                del self._namespaces[next(iter(self._namespaces))]
        return state

    def _candidate_of(self, namespace: str, cost: Cost) -> _Candidate | None:
        state = self._namespaces.get(namespace)
        return None if state is None else state.candidates.get(cost.frame_id)

    def _update_choice(self, state: _NamespaceState, raw_bytes: int) -> None:
        """Choose another codec if blocks load faster with it by `MIN_GAIN`."""
        if len(state.candidates) == 1 or not self._reads.is_measured:
            return
        times = {
            frame_id: self._reads.block_s(
                raw_bytes / candidate.current_ratio(),
                raw_bytes / candidate.decode_rate(),
                self._cores,
            )
            for frame_id, candidate in state.candidates.items()
        }
        best = min(times, key=times.__getitem__)
        if times[best] < times[state.chosen_id] * (1 - MIN_GAIN):
            state.chosen_id = best
            state.changes += 1

    def _fastest_to_write(self, state: _NamespaceState, raw_bytes: int) -> str | None:
        """The frame ID of the codec that drains the write queue fastest; None before writes are
        measured."""
        if not self._writes.is_measured:
            return None
        return min(
            state.candidates.values(),
            key=lambda candidate: self._writes.block_s(
                raw_bytes / candidate.current_ratio(),
                raw_bytes / candidate.encode_rate(),
                self._cores,
            ),
        ).codec.frame_id
