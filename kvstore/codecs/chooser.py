"""Which codec the next block of a namespace gets in a tier: the one that brings it back soonest.

Pure: fed with what moves have cost, asked for a codec; no clock, no I/O. One chooser for each tier.

A run of blocks comes back through k readers, which share the medium and the CPU. The time that each
block adds to the run is what the busiest of the three takes:

    read s = max(S / B,  (S / b + R * d) / k,  R * d / c)

    S  stored bytes: R over the ratio this codec reaches on this namespace's blocks
    R  raw bytes of a block
    B  bytes a second the medium gives to all readers together
    b  bytes a second it gives to one reader that has it alone
    k  readers at work, on average
    d  CPU seconds to verify and decode a raw byte with this codec
    c  CPU cores of this process

With one reader that is S / b + R * d, the time of one block; with many it is their bottleneck:
the bounds of a closed queueing network (Denning and Buzen, "The Operational Analysis of Queueing
Network Models", 1978). A medium's delay that does not depend on the size counts as if it did. That
can favour a smaller block only where the delay is several times what decoding takes, so it is
never dear.

CPU seconds, not elapsed ones: they do not depend on how many blocks happen to be decoded at once,
so the choice does not chase its own effect.

Encoding costs the writer, not the reader, and writes happen behind the engine's back: it counts
only while writes cannot keep up, when blocks are about to be dropped, and a block that was dropped
comes back never. While the write queue is `crowded`, the codec is the one that clears it soonest:
the same formula with the writers' figures and the encoding's CPU seconds.

Until reads have been measured, a namespace gets what usually pays for its dtype (`codecs.AUTO`);
rates not yet measured are those of `PRIORS`. Of the first blocks a few go to each candidate; after
that one block in `RECHECK_BLOCKS` goes to another candidate than the chosen one. All of them are
frames like any other: trying costs no extra read, write or buffer. A change needs a gain of `GAIN`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore import codecs
from kvstore.codecs.base import Codec

TRIAL_BLOCKS: Final = 3
"""Blocks given to each candidate when a namespace is new."""
RECHECK_BLOCKS: Final = 256
"""One block in so many goes to a candidate that is not the chosen one."""
GAIN: Final = 0.1
"""Part of the time that a change must promise to save."""
MEASURED_READS: Final = 4
"""Reads (or writes) of a medium before its figures count."""
MEMORY_BLOCKS: Final = 64
"""Blocks over which figures are averaged: an older one counts less and less."""
MAX_NAMESPACES: Final = 256
"""Namespaces remembered; the first met go first."""
DIGEST_SHOWN: Final = 8
"""Hex digits of a namespace's digest in statistics."""
ALONE: Final = 1.25
"""Readers in the medium, on average over a read, up to which it counts as alone."""
SHORT: Final = 0.8
"""Part of what one alone gets, below which readers wait for one another."""
TICK_S: Final = 1e-9
"""What a clock that did not move is taken for."""

UNCOMPRESSED_ID: Final = "identity"
"""The codec of a block that is kept as it is."""

PRIORS: Final[dict[str, dict[str, tuple[float, float, float]]]] = {
    "float32": {"zstd": (1.07, 343e6, 472e6), "zstd-planes": (1.19, 427e6, 1170e6)},
    "bfloat16": {"zstd": (1.26, 800e6, 1200e6), "zstd-planes": (1.46, 650e6, 1301e6)},
    "float16": {"zstd": (1.07, 537e6, 872e6), "zstd-planes": (1.15, 650e6, 1126e6)},
    "fp8_e4m3": {"zstd": (1.18, 550e6, 834e6), "zstd-planes": (1.18, 375e6, 635e6)},
    "fp8_e5m2": {"zstd": (1.36, 431e6, 717e6), "zstd-planes": (1.36, 580e6, 852e6)},
    "int8": {"zstd": (1.28, 511e6, 746e6), "zstd-planes": (1.28, 484e6, 591e6)},
}
"""dtype, kind of codec: (ratio, bytes a second encoded, decoded), of real KV by bench/codecs.py."""
PRIOR_UNCOMPRESSED: Final = (1.0, 10e9, 10e9)
"""Of a block kept as it is: its checksum is all the work there is."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What moving one block has cost.

    codec: its name; of a write the one that was tried, also when it did not pay.
    tier_s: elapsed seconds inside the tier. codec_s: CPU seconds of encoding, or of decoding,
    checksums and all. move_s: elapsed seconds of both together.
    """

    codec: str
    raw_bytes: int
    stored_bytes: int
    tier_s: float
    codec_s: float
    move_s: float


@dataclass(slots=True)
class _Mean:
    """A ratio of two sums, older parts of which count less."""

    above: float = 0.0
    below: float = 0.0
    samples: int = 0

    def add(self, above: float, below: float) -> None:
        keep = 1 - 1 / MEMORY_BLOCKS if self.samples else 0.0
        self.above = self.above * keep + above
        self.below = self.below * keep + below
        self.samples += 1

    def value(self, otherwise: float) -> float:
        return self.above / self.below if self.below > 0 else otherwise


@dataclass(slots=True)
class _Medium:
    """One direction of a tier: B, b and k of the module's text.

    B is seen only while the medium is what its users wait for: those figures are kept apart, and
    until there are any it is taken to give each of them as much as one that has it alone.
    """

    seen: _Mean = field(default_factory=_Mean)
    short: _Mean = field(default_factory=_Mean)
    alone: _Mean = field(default_factory=_Mean)
    workers: _Mean = field(default_factory=_Mean)

    def add(self, cost: Cost, sharing: float) -> None:
        """sharing: workers at the same work, on average while it lasted."""
        tier_s = max(cost.tier_s, TICK_S)
        # The others are in the medium for as large a part of their time as this one was.
        inside = 1 + (sharing - 1) * tier_s / max(cost.move_s, tier_s)
        self.workers.add(sharing, 1)
        self.seen.add(cost.stored_bytes * inside, tier_s)
        if inside <= ALONE:
            self.alone.add(cost.stored_bytes, tier_s)
        elif cost.stored_bytes / tier_s < SHORT * self.alone.value(float("inf")):
            self.short.add(cost.stored_bytes * inside, tier_s)

    @property
    def measured(self) -> bool:
        return self.seen.samples >= MEASURED_READS

    @property
    def total(self) -> float:
        """B, bytes a second; 0 before anything is known."""
        seen = self.seen.value(0.0)
        return max(seen, self.short.value(self.workers.value(1.0) * self.alone.value(0.0)))

    def block_s(self, stored_bytes: float, cpu_s: float, cores: int) -> float:
        """The formula of the module's text. Only once it is measured."""
        total, workers = self.total, self.workers.value(1.0)
        alone = self.alone.value(total / workers)
        return max(stored_bytes / total, (stored_bytes / alone + cpu_s) / workers, cpu_s / cores)


class _Candidate:
    """One codec on one namespace's blocks."""

    def __init__(self, kind: str, dtype: str) -> None:
        self.codec: Codec = codecs.codec_by_frame_id(codecs.codec_for(kind, dtype).frame_id)
        prior = PRIOR_UNCOMPRESSED if kind == UNCOMPRESSED_ID else PRIORS[dtype].get(kind, PRIOR_UNCOMPRESSED)
        self._prior = prior
        self.given = 0
        """Blocks given to it."""
        self.ratio = _Mean()
        self.encode = _Mean()
        self.decode = _Mean()

    def ratio_now(self) -> float:
        return self.ratio.value(self._prior[0])

    def encode_rate(self) -> float:
        """Raw bytes a CPU second."""
        return self.encode.value(self._prior[1])

    def decode_rate(self) -> float:
        return self.decode.value(self._prior[2])


class _Namespace:
    """What is known of one namespace's blocks."""

    def __init__(self, kinds: Sequence[str], default: str, dtype: str) -> None:
        self.candidates = {c.codec.frame_id: c for c in (_Candidate(kind, dtype) for kind in kinds)}
        self.chosen = codecs.codec_for(default, dtype).frame_id
        self.blocks = 0
        self.changes = 0

    def to_try(self) -> str | None:
        """A candidate whose turn it is to be looked at, if any."""
        others = sorted(self.candidates.values(), key=lambda candidate: candidate.given)
        if others[0].given < TRIAL_BLOCKS:
            return others[0].codec.frame_id
        if self.blocks % RECHECK_BLOCKS == 0:
            return next((c.codec.frame_id for c in others if c.codec.frame_id != self.chosen), None)
        return None


class Chooser:
    """The codecs of one tier. See the module's text; any thread may call.

    kind: "auto", or the one kind that the configuration names: then there is no choice, only
    statistics. cores: CPU cores that decoding may use.

    Raises ConfigError for an unknown kind.
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
        self._namespaces: dict[str, _Namespace] = {}

    def next(self, namespace: str, dtype: str, *, raw_bytes: int, crowded: bool = False) -> Codec:
        """The codec for the next block.

        namespace: its digest. dtype: one of `blocks.DTYPE_BYTES`. crowded: writes cannot keep up.
        """
        with self._lock:
            state = self._namespace(namespace, dtype)
            state.blocks += 1
            name = self._soonest_written(state, raw_bytes) if crowded else state.to_try()
            if name is None:
                self._settle(state, raw_bytes)
                name = state.chosen
            candidate = state.candidates[name]
            candidate.given += 1
            return candidate.codec

    def keeps_raw(self, namespace: str) -> bool:
        """Whether blocks of this namespace mostly lie in the tier as they are."""
        with self._lock:
            state = self._namespaces.get(namespace)
            return self._kinds == [UNCOMPRESSED_ID] or (state is not None and state.chosen == UNCOMPRESSED_ID)

    def wrote(self, namespace: str, cost: Cost, sharing: float) -> None:
        """A block of the namespace was written. sharing: writers at work, on average."""
        with self._lock:
            self._writes.add(cost, sharing)
            candidate = self._candidate(namespace, cost)
            if candidate is not None:
                candidate.ratio.add(cost.raw_bytes, cost.stored_bytes)
                candidate.encode.add(cost.raw_bytes, max(cost.codec_s, TICK_S))

    def read(self, namespace: str, cost: Cost, sharing: float) -> None:
        """A block of the namespace was read. sharing: readers at work, on average."""
        with self._lock:
            self._reads.add(cost, sharing)
            candidate = self._candidate(namespace, cost)
            if candidate is not None:
                candidate.decode.add(cost.raw_bytes, max(cost.codec_s, TICK_S))

    def stats(self) -> dict[str, dict[str, int | float | str]]:
        """For each namespace, by the first digits of its digest: the chosen codec's `name`,
        `ratio`, `encode_rate` and `decode_rate` (raw bytes a CPU second), how often it `changed`,
        and `read_rate` of the tier (bytes a second, all readers together; 0 before it is known)."""
        with self._lock:
            read_rate = self._reads.total
            shown: dict[str, dict[str, int | float | str]] = {}
            for digest, state in self._namespaces.items():
                chosen = state.candidates[state.chosen]
                shown[digest[:DIGEST_SHOWN]] = {
                    "name": state.chosen,
                    "ratio": round(chosen.ratio_now(), 3),
                    "encode_rate": round(chosen.encode_rate()),
                    "decode_rate": round(chosen.decode_rate()),
                    "read_rate": round(read_rate),
                    "changed": state.changes,
                }
            return shown

    def _namespace(self, digest: str, dtype: str) -> _Namespace:
        state = self._namespaces.get(digest)
        if state is None:
            state = self._namespaces[digest] = _Namespace(self._kinds, self._default, dtype)
            if len(self._namespaces) > MAX_NAMESPACES:
                del self._namespaces[next(iter(self._namespaces))]
        return state

    def _candidate(self, namespace: str, cost: Cost) -> _Candidate | None:
        state = self._namespaces.get(namespace)
        return None if state is None else state.candidates.get(cost.codec)

    def _settle(self, state: _Namespace, raw_bytes: int) -> None:
        """Change the chosen codec where another brings blocks back sooner by `GAIN`."""
        if len(state.candidates) == 1 or not self._reads.measured:
            return
        times = {
            name: self._reads.block_s(
                raw_bytes / candidate.ratio_now(), raw_bytes / candidate.decode_rate(), self._cores
            )
            for name, candidate in state.candidates.items()
        }
        best = min(times, key=times.__getitem__)
        if times[best] < times[state.chosen] * (1 - GAIN):
            state.chosen = best
            state.changes += 1

    def _soonest_written(self, state: _Namespace, raw_bytes: int) -> str | None:
        """The codec that clears the write queue soonest; None before writes are measured."""
        if not self._writes.measured:
            return None
        return min(
            state.candidates.values(),
            key=lambda candidate: self._writes.block_s(
                raw_bytes / candidate.ratio_now(), raw_bytes / candidate.encode_rate(), self._cores
            ),
        ).codec.frame_id
