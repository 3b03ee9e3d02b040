"""The directories of one disk tier. Blocks are spread over them, and a failing one is disabled.

Each directory has its lock file, its part of the capacity, its segments and its syncer. All share
one index, so a block is found in whichever directory it was written to. Directories may be added,
reordered or missing from one opening to the next.

A directory whose disk fails while others work is disabled for some time. Its blocks are cache
misses until it works again. A tier with a single directory raises the errors instead, and the
circuit breaker (`tiers/wrappers.py`) handles them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.lockfile import (
    DirectoryLock,
    DirectoryUnavailable,
    has_lock_file,
    has_valid_segment,
    path_digest,
)
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import DiskLimits, DiskState
from kvstore.tiers.disk.volume import Volume

log = logging.getLogger(__name__)

MAX_DIRECTORIES = 16
MAX_CONSECUTIVE_FAILURES = 3
"""Consecutive failures after which a directory is disabled."""
DOWN_S = 5.0
"""How long a directory is disabled at first; each failed retry doubles it."""
MAX_DOWN_S = 80.0
"""Maximum time that a directory is disabled before the next retry."""


@dataclass
class _Health:
    """down_until_s: time of the next retry of a disabled directory; 0.0: it is up."""

    consecutive_failures: int = 0
    down_s: float = DOWN_S
    down_until_s: float = 0.0


class Volumes:
    """The usable directories of a tier. The lock of `state` guards their health."""

    def __init__(
        self,
        directories: Sequence[str],
        files: Files,
        state: DiskState,
        limits: DiskLimits,
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limits: limits of each directory.

        Raises ConfigError: no directory can be used, or one is invalid.
        """
        _check_different(directories)
        # The working directory may change while the tier is open.
        directories = [os.path.abspath(directory) for directory in directories]
        self._name = name
        self._clock = clock
        self._state = state
        self.volumes: list[Volume] = []
        self.missing: list[str] = []
        """Directories that were unavailable when the tier was opened."""
        self._locks: list[DirectoryLock] = []
        self._next_turn = 0
        self._down_count = 0
        """Number of disabled directories."""
        try:
            self._open(directories, files, limits)
        except BaseException:
            for volume in self.volumes:
                volume.syncer.stop()
                volume.close()
            for lock in self._locks:
                lock.release()
            raise
        self._health = [_Health() for _ in self.volumes]

    def volume_of(self, segment: Segment) -> Volume:
        """The volume of a segment."""
        return self.volumes[segment.volume_no]

    def is_single(self) -> bool:
        """Whether the tier has a single directory, whose errors the tier raises."""
        return len(self.volumes) == 1

    # ------------------------------------------------------------------ health

    def write_candidates(self) -> list[Volume]:
        """The volumes to try for the next write, best first. The caller owns the lock.

        Volumes with fewer writes in progress come first, and equal ones take turns. Writes are thus
        spread evenly over equal disks, and by speed over different ones. Disabled volumes come
        last.
        """
        if len(self.volumes) == 1:
            return self.volumes
        self._next_turn += 1
        up = [volume for volume in self.volumes if self.is_up(volume)]
        turn = self._next_turn % max(1, len(up))
        first = sorted(up[turn:] + up[:turn], key=lambda volume: volume.writes_in_progress)
        return first + [volume for volume in self.volumes if volume not in first]

    def is_up(self, volume: Volume) -> bool:
        """Whether a directory may be used now. The caller owns the lock."""
        if volume.lost:
            return False
        return not self._down_count or self._clock() >= self._health[volume.volume_no].down_until_s

    def are_all_up(self) -> bool:
        """Whether no directory is disabled or lost. The caller owns the lock."""
        return not self._down_count and not any(volume.lost for volume in self.volumes)

    def lost_reason(self) -> str:
        """Why the only directory of the tier is lost; "": it is not, or there are others. The
        caller owns the lock."""
        return self.volumes[0].lost if self.is_single() else ""

    def record_success(self, volume: Volume) -> None:
        """Record a successful call. The caller owns the lock."""
        health = self._health[volume.volume_no]
        if not health.consecutive_failures:
            return
        if health.down_until_s:
            log.warning("%s: directory %s is up", self._name, volume.directory)
            self._down_count -= 1
        self._health[volume.volume_no] = _Health()

    def record_failure(self, volume: Volume, error: OSError) -> None:
        """Record a failed call. The caller owns the lock."""
        health = self._health[volume.volume_no]
        health.consecutive_failures += 1
        if self.is_single() or health.consecutive_failures < MAX_CONSECUTIVE_FAILURES:
            return
        now_s = self._clock()
        if now_s < health.down_until_s:
            return
        if health.down_until_s:
            health.down_s = min(2 * health.down_s, MAX_DOWN_S)
        else:
            self._down_count += 1
        health.down_until_s = now_s + health.down_s
        log.warning(
            "%s: directory %s disabled for %g s; its blocks are cache misses: %s",
            self._name,
            volume.directory,
            health.down_s,
            error,
        )

    # ------------------------------------------------------------------ all volumes

    def expire_segments(self) -> None:
        """Remove expired segments from the index. The caller owns the lock."""
        for volume in self.volumes:
            if volume.expires_ms and volume.expire_segments():
                volume.syncer.wake()

    def sync_error(self) -> str:
        """Error of the first failed sync in any directory; "" if none failed."""
        return next(filter(None, (volume.sync_error() for volume in self.volumes)), "")

    def stats(self) -> dict[str, int]:
        with self._state.lock:
            each = [volume.stats() for volume in self.volumes]
            down = sum(not self.is_up(volume) for volume in self.volumes)
        total = {key: sum(one[key] for one in each) for key in each[0]}
        return {
            **total,
            "directories": len(self.volumes) + len(self.missing),
            "directories_down": down + len(self.missing),
        }

    def stop(self) -> bool:
        """Stop the syncers; returns False if one hangs."""
        ended = [volume.syncer.stop() for volume in self.volumes]
        return all(ended)

    def close(self) -> None:
        """Close all files and unlock the directories. The syncers have ended."""
        for volume in self.volumes:
            volume.close()
        for lock in self._locks:
            lock.release()

    # ------------------------------------------------------------------ opening

    def _open(self, directories: Sequence[str], files: Files, limits: DiskLimits) -> None:
        errors: list[ConfigError] = []
        peers: set[str] = set()
        # Directories with a lock file come first, because it lists the other ones.
        for directory in sorted(directories, key=has_lock_file, reverse=True):
            try:
                if path_digest(directory) in peers and not _was_used(directory):
                    raise DirectoryUnavailable(
                        f"{directory!r} contained blocks of this tier and is now empty; mount its "
                        "disk, or create an empty file kvstore.lock in it to start empty"
                    )
                lock = DirectoryLock(directory)
            except DirectoryUnavailable as error:
                errors.append(error)
                self.missing.append(directory)
                continue
            self._locks.append(lock)
            peers |= lock.peers
        for lock in self._locks:
            if lock.time is not None:
                limits.clock.advance(*lock.time)
        digests = [path_digest(directory) for directory in directories]
        for lock in list(self._locks):
            volume_no = len(self.volumes)
            try:
                if len(directories) > 1:
                    lock.record_peers(digests)
                volume = Volume(self._state, files, lock, volume_no, limits, self._name)
            except DirectoryUnavailable as error:
                errors.append(error)
                self.missing.append(lock.directory)
                self._locks.remove(lock)
                lock.release()
            else:
                self.volumes.append(volume)
        if not self.volumes:
            raise errors[0]
        for each in errors:
            log.error("%s: starting without a directory: %s", self._name, each)


def _was_used(directory: str) -> bool:
    """Whether a tier used this directory: it has a lock file, or segments without one."""
    if has_lock_file(directory):
        return True
    try:
        return has_valid_segment(directory)
    except OSError:
        return False


def _check_different(directories: Sequence[str]) -> None:
    """Raises ConfigError: two directories are the same."""
    seen: dict[str, str] = {}
    for directory in directories:
        real_path = os.path.realpath(directory)
        if real_path in seen:
            raise ConfigError(
                f"the disk tier's directories {seen[real_path]!r} and {directory!r} are the same; "
                "use a separate directory for each disk"
            )
        seen[real_path] = directory
