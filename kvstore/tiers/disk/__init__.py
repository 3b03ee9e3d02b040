"""The disk tier: an append-only log of segments on local file systems.

tier       the tier's operations
volumes    the directories of the tier
volume     the segments of one directory
segment_set
           the segments of one directory, and whether it is still there
segment    one segment file
layout     the header and the footer of a segment file
state      the state that all directories share
index      the location of each block
recover    opening the segments of an earlier process
scan       finding frames in a segment without an index
sync       fdatasync for groups of writes
lockfile   the lock file of a directory
aside      unreadable segment files, set aside
clock      the clock that ages are measured with
files      the system calls
verify     checking every frame (`kvstore verify`)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from kvstore.cache.eviction import check_eviction
from kvstore.config.field_types import Bytes, Milliseconds
from kvstore.config.settings import Section
from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.aside import SetAside
from kvstore.tiers.disk.clock import AgeClock, uptime_s
from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.index import MAX_SEGMENT_SECTORS
from kvstore.tiers.disk.lockfile import LOCK_BYTES, segment_paths
from kvstore.tiers.disk.segment import MIN_SEGMENT_BYTES
from kvstore.tiers.disk.state import DiskLimits
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.volumes import MAX_DIRECTORIES

__all__ = ["Config", "DiskTier", "check", "directories", "open", "segment_bytes_for"]

SEGMENT_BYTES = 256 << 20
"""Default size of a segment, unless the capacity is small or very large."""
MIN_SEGMENTS = 8
"""Minimum number of segments, so that reclaiming one keeps most blocks."""
MAX_SEGMENTS = 512
"""Maximum number of segments of the default size. Each segment is an open file."""
MIN_CAPACITY_BYTES = 1 << 20
"""Minimum capacity of each directory in bytes."""

Directories = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_DIRECTORIES)]


class Config(Section):
    """Configuration of the disk tier."""

    name: str = "disk"
    directory: str | Directories
    """Directory for this tier's files only; it is created if it does not exist. A list of
    directories: blocks are spread over all of them, and each gets an equal part of the capacity."""
    capacity: Bytes = Field(ge=MIN_CAPACITY_BYTES)
    """Maximum size of all files of the tier: frames, indexes and preallocated space."""
    segment: Bytes = 0
    """Size of one segment. Space is reclaimed by segment. 0: chosen from the capacity."""
    ttl: Milliseconds = Field(default=0.0, ge=0)
    """Maximum age of a block. Blocks expire by segment, so a block may expire up to 1/8 early. 0:
    no limit."""
    eviction: str = "lru"
    """Eviction policy for segments: lru, or another policy of `kvstore.cache.eviction`."""
    direct_io: bool = True
    """Use O_DIRECT, which bypasses the page cache, if the file system supports it."""
    sync_writes: bool = False
    """Acknowledge a write, and show it to readers, only after fdatasync (one for a group of
    writes). It then survives a power loss. Otherwise it survives a kill of the process only."""

    @property
    def directories(self) -> tuple[str, ...]:
        """All directories, in the configured order."""
        return (self.directory,) if isinstance(self.directory, str) else self.directory


def directory_bytes(config: Config) -> int:
    """Capacity of each directory in bytes. Raises ConfigError: it is too small."""
    each = config.capacity // len(config.directories)
    if each < MIN_CAPACITY_BYTES:
        raise ConfigError(
            f"disk tier: capacity = {format_bytes(config.capacity)} is too small for "
            f"{len(config.directories)} directories; each needs at least "
            f"{format_bytes(MIN_CAPACITY_BYTES)}"
        )
    return each


def segment_bytes_for(config: Config) -> int:
    """Size of a new segment in bytes. Raises ConfigError: `segment` is out of range."""
    room = directory_bytes(config) - LOCK_BYTES
    if not config.segment:
        most = max(1, MAX_SEGMENTS // len(config.directories))
        size = max(min(SEGMENT_BYTES, room // MIN_SEGMENTS), room // most)
        return min(size // SECTOR_BYTES, MAX_SEGMENT_SECTORS) * SECTOR_BYTES
    size = config.segment // SECTOR_BYTES * SECTOR_BYTES
    largest = min(room // 2 // SECTOR_BYTES, MAX_SEGMENT_SECTORS) * SECTOR_BYTES
    if not MIN_SEGMENT_BYTES <= size <= largest:
        raise ConfigError(
            f"disk tier: segment = {format_bytes(config.segment)} is out of range; use "
            f"{format_bytes(MIN_SEGMENT_BYTES)} up to half the capacity of a directory "
            f"({format_bytes(largest)})"
        )
    return size


def check(config: Config) -> None:
    """Raises ConfigError: the capacity, the segment size or the eviction policy is invalid."""
    segment_bytes_for(config)
    check_eviction(config.eviction)


def directories(config: Config) -> tuple[str, ...]:
    """The directories that no other tier may use."""
    return config.directories


def open(
    config: Config,
    *,
    files: Files | None = None,
    clock: Callable[[], float] = time.time,
    uptime: Callable[[], float] = uptime_s,
) -> Tier:
    """Open the tier; create its directories if they do not exist.

    files: the system calls; a test passes failing ones. clock: seconds since 1970. uptime: seconds
    since boot.

    Raises ConfigError: no directory can be used, a directory contains other files, or no file
    system has room for one segment (such a tier would reject every block).
    """
    limits = DiskLimits(
        capacity_bytes=directory_bytes(config),
        segment_bytes=segment_bytes_for(config),
        eviction=check_eviction(config.eviction),
        ttl_ms=int(config.ttl),
        clock=AgeClock(clock, uptime),
    )
    tier = DiskTier(
        config.directories,
        limits,
        sync_writes=config.sync_writes,
        files=files or Files(direct_io=config.direct_io),
        name=config.name,
    )
    if not any(_has_room(directory, limits) for directory in config.directories):
        tier.close()
        directory = config.directories[0]
        status = os.statvfs(directory)
        raise ConfigError(
            f"disk tier: {directory!r} has {format_bytes(status.f_bavail * status.f_frsize)} free, "
            f"less than one segment ({format_bytes(limits.segment_bytes)}); free some space there, "
            "or lower the capacity (--disk-capacity)"
        )
    return tier


def _has_room(directory: str, limits: DiskLimits) -> bool:
    """Whether one segment fits into the directory, or it contains segments, also unreadable ones
    that can be deleted."""
    try:
        status = os.statvfs(directory)
        fits = status.f_bavail * status.f_frsize >= limits.segment_bytes
        return fits or bool(segment_paths(directory) or len(SetAside(Files(), directory)))
    except OSError:
        return False
