"""The contract of a tier: where blocks lie outside the slab.

Who calls: worker threads of the store (`store.py`), several at once, each blocking in the call.
A tier is therefore thread-safe and synchronous; it has no event loop, no queue and no retry of its
own. Retry, deadline, rate limit, breaker and injected faults are wrappers with the same verbs
(`tiers/limits.py`).

What it moves: a *frame* is one header page of 4,096 bytes and a payload that is a whole number of
4,096-byte pages (the real length stands in the header). Both come in buffers that are 4 KiB
aligned, so that direct I/O needs no copy. A tier does not look inside: `frame.py` packs and
verifies, `codecs/` encode. Nothing a tier returns is trusted before it is verified above.

What is true after `write` returns: any reader sees all of the frame or none of it, and it survives
a kill of this process. Writing an existing key is success and changes nothing.

A miss is an answer, not an exception. Exceptions are `TierUnavailable` (try later), `TierFull`, or
`TierError` (permanent for this call); everything foreign is mapped to one of them inside the tier.

A tier is one file whose module offers `Config` (a pydantic model that forbids unknown fields) and
`open(config: Config) -> Tier`. `kind` in the configuration names the module; a dotted kind is
somebody else's. It may offer `check(config: Config)` too, which raises ConfigError for what can be
seen to be wrong before anything is opened or made.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvstore.blocks.key import Key

PAGE_BYTES = 4096
"""Alignment of frames and buffers: the sector size direct I/O asks for."""


class Judgement(enum.Enum):
    """What a foreign error says of the tier."""

    UNAVAILABLE = "unavailable"
    """The tier is away: mark it down, try again later."""
    PERMANENT = "permanent"
    """This call can never succeed: do not retry it."""


class Tier(abc.ABC):
    """One place that keeps frames. See the module's text for who calls and what holds."""

    name: str
    """The tier's name in locations, metrics and usage: "disk", "redis", ..."""

    workers_read: int = 2
    """Reads that are worth having in flight at once."""
    workers_write: int = 1
    """Writes that are worth having in flight at once."""
    local_index: ClassVar[bool] = False
    """`contains` answers from this process's memory: no disk, no network, microseconds."""
    sole_writer: ClassVar[bool] = False
    """Nothing comes to be in it but what this process writes, and it can list what was there when
    it was opened: what neither knows of is not there."""
    max_payload_bytes: ClassVar[int] = 1 << 30
    """Largest payload this tier takes."""

    @abc.abstractmethod
    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """For each key, whether a read would probably find it; one round trip for all."""

    @abc.abstractmethod
    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """Fill `header` (4,096 bytes) and the front of `payload`; return payload bytes read.

        Returns 0 for a miss (no frame has an empty payload). A frame that does not fit in
        `payload` is FrameTooLarge. Both views are 4 KiB aligned, payload's length is a multiple of
        4,096. What lies in the buffers after a miss or an exception is undefined.
        """

    @abc.abstractmethod
    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Keep a frame. `payload` is whole pages, zero padded. Raises TierFull when out of room."""

    @abc.abstractmethod
    def delete(self, keys: Sequence[Key]) -> None:
        """Forget these keys; unknown keys are no error."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush what was acknowledged and let go of every resource; later calls raise TierError."""

    def usage(self) -> Iterator[tuple[Key, int]]:
        """Every key held, with the bytes it takes there (its header included).

        The most recently used first, where the tier knows. Only for tiers that can list; the
        others raise NotImplementedError.
        """
        raise NotImplementedError(f"tier {self.name} cannot list its keys")

    def keys(self) -> Iterator[Key]:
        """Every key held, in the order of `usage`."""
        return (key for key, _ in self.usage())

    def clear(self) -> None:
        """Delete everything."""
        self.delete(list(self.keys()))

    def flush(self) -> None:  # noqa: B027 - a tier without a cache has nothing to do
        """Return when every write that has returned is durable."""

    def stats(self) -> dict[str, int | float | str]:
        """Occupancy and counters: at least bytes_used, bytes_capacity, blocks, evictions."""
        return {}

    def judge(self, error: BaseException) -> Judgement:
        """What a foreign error means for this tier."""
        return Judgement.UNAVAILABLE if isinstance(error, OSError) else Judgement.PERMANENT
