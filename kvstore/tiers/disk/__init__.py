"""The disk tier: an append-only log of segments on local file systems.

`tier` has the verbs, `stripes` the directories, `table` the segments of one, `segment` one file of
them, `layout` its fixed pages, `shared` what the directories have in common, `index` where blocks
lie, `recover` and `scan` what an earlier process left, `sync` stable storage, `directory` whose it
is, `files` the system calls, and `verify` the check of every frame.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from kvstore.cache.eviction import check_eviction
from kvstore.config.settings import Bytes, Milliseconds, Section
from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import PAGE, Files
from kvstore.tiers.disk.index import MAX_SEGMENT_PAGES
from kvstore.tiers.disk.lockfile import LOCK_BYTES, segment_paths
from kvstore.tiers.disk.segment import MIN_SEGMENT_BYTES
from kvstore.tiers.disk.state import Limits
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.volumes import MAX_DIRECTORIES

__all__ = ["Config", "DiskTier", "check", "open", "segment_bytes_for"]

SEGMENT_BYTES = 256 << 20
"""A segment, unless the capacity is small or very large."""
MIN_SEGMENTS = 8
"""A small capacity is divided into this many, so that reclaiming one leaves most."""
MAX_SEGMENTS = 512
"""A large one into this many: each is an open file."""
MIN_CAPACITY_BYTES = 1 << 20
"""Of each directory."""

Directories = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_DIRECTORIES)]


class Config(Section):
    """The disk tier's part of the configuration."""

    name: str = "disk"
    directory: str | Directories
    """A directory of its own, made if need be; nobody else's files are touched in it. A list:
    blocks are spread over all of them, and each takes the same part of the capacity."""
    capacity: Bytes = Field(ge=MIN_CAPACITY_BYTES)
    """Most bytes of all its files together: frames, indexes and preallocated room."""
    segment: Bytes = 0
    """Bytes of one segment, the unit in which space is reclaimed; 0: by the capacity."""
    ttl: Milliseconds = Field(default=0.0, ge=0)
    """How long a block is kept at most; 0: for ever. Whole segments go, so it may be an eighth
    less."""
    eviction: str = "lru"
    """Which segment makes room: lru, or another order of `kvstore.cache.eviction`."""
    direct: bool = True
    """Bypass the page cache (O_DIRECT) where the file system allows it."""
    durable: bool = False
    """A write returns, and readers see it, only when power loss cannot undo it (fdatasync, in
    groups). Otherwise it returns when a kill of the process cannot."""

    @property
    def directories(self) -> tuple[str, ...]:
        """All of them, in the order given."""
        return (self.directory,) if isinstance(self.directory, str) else self.directory


def directory_bytes(config: Config) -> int:
    """What each directory may take. Raises ConfigError when that is too little."""
    each = config.capacity // len(config.directories)
    if each < MIN_CAPACITY_BYTES:
        raise ConfigError(
            f"capacity = {format_bytes(config.capacity)} of the disk tier over "
            f"{len(config.directories)} directories; at least {format_bytes(MIN_CAPACITY_BYTES)} "
            "for each is right"
        )
    return each


def segment_bytes_for(config: Config) -> int:
    """Bytes of a new segment. Raises ConfigError when the one asked for cannot be."""
    room = directory_bytes(config) - LOCK_BYTES
    if not config.segment:
        most = max(1, MAX_SEGMENTS // len(config.directories))
        size = max(min(SEGMENT_BYTES, room // MIN_SEGMENTS), room // most)
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


def check(config: Config) -> None:
    """Raises ConfigError: a capacity, segment or order of eviction that cannot be."""
    segment_bytes_for(config)
    check_eviction(config.eviction)


def open(
    config: Config, *, files: Files | None = None, clock: Callable[[], float] = time.time
) -> Tier:
    """Open or make the tier.

    files: the system calls, where a test wants them to fail. clock: seconds since 1970.

    Raises ConfigError when none of its directories can be had, one is somebody else's, or no file
    system has room for even one segment: such a tier would refuse every block for ever.
    """
    limits = Limits(
        capacity_bytes=directory_bytes(config),
        segment_bytes=segment_bytes_for(config),
        eviction=check_eviction(config.eviction),
        ttl_ms=int(config.ttl),
        clock=clock,
    )
    tier = DiskTier(
        config.directories,
        limits,
        durable=config.durable,
        files=files or Files(direct=config.direct),
        name=config.name,
    )
    if not any(_has_room(directory, limits) for directory in config.directories):
        tier.close()
        directory = config.directories[0]
        status = os.statvfs(directory)
        raise ConfigError(
            f"the disk tier writes segments of {format_bytes(limits.segment_bytes)}, and "
            f"{directory!r} has {format_bytes(status.f_bavail * status.f_frsize)} free; free some "
            "space there, or lower its capacity (--disk-capacity)"
        )
    return tier


def _has_room(directory: str, limits: Limits) -> bool:
    """Whether a segment fits, or lies there already."""
    try:
        status = os.statvfs(directory)
        fits = status.f_bavail * status.f_frsize >= limits.segment_bytes
        return fits or bool(segment_paths(directory))
    except OSError:
        return False
