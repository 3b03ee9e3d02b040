"""The disk tier: an append-only log of segments on a local file system.

`tier` has the verbs, `table` the segments, `segment` one file of them, `index` where blocks lie,
`recover` what an earlier process left, `sync` stable storage, `directory` whose it is, `files`
the system calls, and `verify` the check of every frame.
"""

from __future__ import annotations

import os

from pydantic import Field

from kvstore.config import Bytes, Section
from kvstore.errors import ConfigError
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.directory import LOCK_BYTES, segment_paths
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.index import MAX_SEGMENT_PAGES
from kvstore.tiers.disk.segment import MIN_SEGMENT_BYTES
from kvstore.tiers.disk.tier import DiskTier
from kvstore.units import format_bytes

__all__ = ["Config", "DiskTier", "open", "segment_bytes_for"]

SEGMENT_BYTES = 256 << 20
"""A segment, unless the capacity is small or very large."""
MIN_SEGMENTS = 8
"""A small capacity is divided into this many, so that reclaiming one leaves most."""
MAX_SEGMENTS = 512
"""A large one into this many: each is an open file."""
MIN_CAPACITY_BYTES = 1 << 20


class Config(Section):
    """The disk tier's part of the configuration."""

    name: str = "disk"
    directory: str
    """A directory of its own, made if need be; nobody else's files are touched in it."""
    capacity: Bytes = Field(ge=MIN_CAPACITY_BYTES)
    """Most bytes of all its files together: frames, indexes and preallocated room."""
    segment: Bytes = 0
    """Bytes of one segment, the unit in which space is reclaimed; 0: by the capacity."""
    direct: bool = True
    """Bypass the page cache (O_DIRECT) where the file system allows it."""
    durable: bool = False
    """A write returns, and readers see it, only when power loss cannot undo it (fdatasync, in
    groups)."""


def segment_bytes_for(config: Config) -> int:
    """Bytes of a new segment. Raises ConfigError when the one asked for cannot be."""
    room = config.capacity - LOCK_BYTES
    if not config.segment:
        size = max(min(SEGMENT_BYTES, room // MIN_SEGMENTS), room // MAX_SEGMENTS)
        return min(size // PAGE, MAX_SEGMENT_PAGES) * PAGE
    size = config.segment // PAGE * PAGE
    largest = min(room // 2 // PAGE, MAX_SEGMENT_PAGES) * PAGE
    if not MIN_SEGMENT_BYTES <= size <= largest:
        raise ConfigError(
            f"segment = {format_bytes(config.segment)} of the disk tier; from "
            f"{format_bytes(MIN_SEGMENT_BYTES)} to half its capacity ({format_bytes(largest)}) "
            "is right"
        )
    return size


def open(config: Config, *, files: Files | None = None) -> Tier:
    """Open or make the tier.

    files: the system calls, where a test wants them to fail.

    Raises ConfigError when its directory cannot be had, or its file system has no room for even
    one segment: such a tier would refuse every block for ever.
    """
    segment_bytes = segment_bytes_for(config)
    tier = DiskTier(
        config.directory,
        config.capacity,
        segment_bytes,
        durable=config.durable,
        files=files or Files(direct=config.direct),
        name=config.name,
    )
    status = os.statvfs(config.directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < segment_bytes and not segment_paths(config.directory):
        tier.close()
        raise ConfigError(
            f"the disk tier writes segments of {format_bytes(segment_bytes)}, and "
            f"{config.directory!r} has {format_bytes(free_bytes)} free; free some space there, or "
            "lower its capacity (--disk-capacity)"
        )
    return tier
