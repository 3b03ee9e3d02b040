"""The contract of a tier: a store of blocks outside L2, such as a disk, Redis or S3.

The store's worker threads (`store/tier_workers.py`) call a tier. Several threads call at the same
time, and each blocks until its call returns. A tier is therefore thread-safe and synchronous. It
needs no event loop, no queue and no retries: wrappers with the same methods add retries, timeouts,
rate limits, the circuit breaker and injected faults (`tiers/wrappers.py`).

A tier stores *frames*. A frame is a header of 4,096 bytes and a payload whose length is a multiple
of 4,096 bytes. The header records the payload's real length. The caller passes both parts in
buffers aligned to 4,096 bytes, so direct I/O needs no copy. A tier does not interpret a frame:
`blocks/frame.py` packs and verifies it, and `codecs/` encode the payload. The caller verifies every
frame that a tier returns. Other releases may use the same tier, now or later. A tier therefore
never deletes or replaces what a later release may have written (docs/formats.md). To this release
it is a miss, or FrameUnsupported.

After `write` returns, a reader sees the complete frame or no frame at all, and the frame survives a
kill of this process. Writing a key that the tier already contains succeeds and changes nothing.

A miss is a return value, not an exception. A tier raises one of three exceptions, and maps every
other exception to one of them:

    TierUnavailable    the tier is unreachable or failing; a later call may succeed
    TierFull           the tier has no room for this frame
    TierError          this call can never succeed

To add a tier, write a module with a `Config` (a pydantic model that forbids unknown fields) and a
function `open(config: Config) -> Tier`. The key `kind` of the configuration names the module. A
kind with a dot is the import path of a module outside kvstore. The module may also define
`check(config: Config)`. It raises ConfigError for every mistake that it can find without opening or
creating anything.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvstore.blocks.key import Key

IO_ALIGNMENT = 4096
"""Alignment of buffers and of every length in a frame: the sector size that direct I/O requires."""


class ErrorClass(enum.Enum):
    """What an unmapped exception means for the tier."""

    UNAVAILABLE = "unavailable"
    """The tier is unreachable or failing: count it as a failure of the tier, and retry later."""
    PERMANENT = "permanent"
    """This call can never succeed: do not retry it."""


class Tier(abc.ABC):
    """A store of frames. The module's docstring states the rules for threads and errors."""

    name: str
    """Name in locations, metrics and statistics: "disk", "redis", ..."""

    workers_read: int = 2
    """Number of reads to run concurrently. Each uses one worker thread of the store."""
    workers_write: int = 1
    """Number of writes to run concurrently. Each uses one worker thread of the store."""
    local_index: ClassVar[bool] = False
    """True if `contains` reads this process's memory only, without disk or network I/O."""
    sole_writer: ClassVar[bool] = False
    """True if only this process writes to the tier and the tier can list its keys. The store then
    treats a key as absent if the listing at start and this process's writes do not contain it."""
    max_payload_bytes: ClassVar[int] = 1 << 30
    """Maximum payload in bytes."""

    @abc.abstractmethod
    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """For each key, whether a read would probably hit. Takes one round trip for all keys."""

    @abc.abstractmethod
    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """Read a frame into `header` (4,096 bytes) and the front of `payload`.

        Returns the number of payload bytes, or 0 for a miss (no frame has an empty payload). Both
        views are aligned to 4,096 bytes, and the length of `payload` is a multiple of 4,096. After
        a miss or an exception the contents of both views are undefined.

        Raises FrameTooLarge: the frame does not fit into `payload`, which may be empty; `header` is
        then the frame's header. (The caller does not delete a frame whose header is zeros.)
        """

    @abc.abstractmethod
    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Store a frame. `payload` is padded with zeros to a multiple of 4,096 bytes.

        Raises TierFull: the tier has no room.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[Key]) -> None:
        """Delete these keys. Keys that the tier does not contain are ignored."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush acknowledged writes and release every resource. Later calls raise TierError."""

    def usage(self) -> Iterator[tuple[Key, int]]:
        """Every key in the tier with the size of its frame in bytes, header included.

        Most recently used keys come first if the tier records the order of use.

        Raises NotImplementedError: the tier cannot list its keys.
        """
        raise NotImplementedError(f"tier {self.name} cannot list its keys")

    def keys(self) -> Iterator[Key]:
        """Every key in the tier, in the order of `usage`."""
        return (key for key, _ in self.usage())

    def clear(self) -> None:
        """Delete everything."""
        self.delete(list(self.keys()))

    def flush(self) -> None:  # noqa: B027 - a tier without a cache has nothing to do
        """Wait until every write that has returned is on stable storage."""

    def stats(self) -> dict[str, int | float | str]:
        """Counters and sizes, at least bytes_used, bytes_capacity, blocks and evictions."""
        return {}

    def classify_error(self, error: BaseException) -> ErrorClass:
        """Classify an exception that this tier did not map. OSError means UNAVAILABLE here."""
        return ErrorClass.UNAVAILABLE if isinstance(error, OSError) else ErrorClass.PERMANENT
