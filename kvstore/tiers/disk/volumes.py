"""The directories of one disk tier: blocks are spread over them, and one that fails is left out.

Each has a lock file, a part of the capacity, segments and a syncer of its own; the index is one.
So a block is found wherever it was written, and directories may be added, reordered or missing
from one opening to the next. A directory whose disk fails while others work is left alone for a
while: its blocks are misses until it answers again. With one directory that is the breaker's work
(`tiers/limits.py`), and errors go up.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.lockfile import DirectoryGone, DirectoryLock, digest_of, is_claimed
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import Limits, Shared
from kvstore.tiers.disk.volume import Table

log = logging.getLogger(__name__)

MAX_DIRECTORIES = 16
FAULTS_IN_A_ROW = 3
"""Failed calls after which a directory is left alone."""
DOWN_S = 5.0
"""How long, the first time; doubled with each trial that fails."""
MAX_DOWN_S = 80.0


@dataclass
class _Health:
    """faults: in a row. until_s: left alone before this time; 0.0 when it is up."""

    faults: int = 0
    down_s: float = DOWN_S
    until_s: float = 0.0


class Stripes:
    """The tables of every directory that can be had. The lock of `shared` guards their health."""

    def __init__(
        self,
        directories: Sequence[str],
        files: Files,
        shared: Shared,
        limits: Limits,
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limits: of each directory. Raises ConfigError when none can be had, or a wrong one."""
        _check_different(directories)
        self._name = name
        self._clock = clock
        self._shared = shared
        self.tables: list[Table] = []
        self.missing: list[str] = []
        """Directories that were not there when the tier was opened."""
        self._locks: list[DirectoryLock] = []
        self._turn = 0
        self._down = 0
        """How many are left alone."""
        try:
            self._open(directories, files, limits)
        except BaseException:
            for table in self.tables:
                table.syncer.stop()
                table.close()
            for lock in self._locks:
                lock.release()
            raise
        self._health = [_Health() for _ in self.tables]

    def of(self, segment: Segment) -> Table:
        """The table a segment belongs to."""
        return self.tables[segment.stripe]

    def is_single(self) -> bool:
        """Whether there is one directory only: then its errors are the tier's."""
        return len(self.tables) == 1

    # ------------------------------------------------------------------ health

    def ways(self) -> list[Table]:
        """Where to try the next write, best first. The caller holds the lock.

        The one with fewest writes under way, in turn among equals: a run is spread evenly over
        disks of one speed, and by their speeds over others. One left alone comes last.
        """
        if len(self.tables) == 1:
            return self.tables
        self._turn += 1
        up = [table for table in self.tables if self.is_up(table)]
        turn = self._turn % max(1, len(up))
        first = sorted(up[turn:] + up[:turn], key=lambda table: table.writes)
        return first + [table for table in self.tables if table not in first]

    def is_up(self, table: Table) -> bool:
        """Whether a directory may be asked. The caller holds the lock."""
        return not self._down or self._clock() >= self._health[table.number].until_s

    def all_up(self) -> bool:
        """Whether no directory is left alone. The caller holds the lock."""
        return not self._down

    def answered(self, table: Table) -> None:
        """A call went well. The caller holds the lock."""
        health = self._health[table.number]
        if not health.faults:
            return
        if health.until_s:
            log.warning("%s: %s works again", self._name, table.directory)
            self._down -= 1
        self._health[table.number] = _Health()

    def failed(self, table: Table, error: OSError) -> None:
        """A call failed. The caller holds the lock."""
        health = self._health[table.number]
        health.faults += 1
        if self.is_single() or health.faults < FAULTS_IN_A_ROW:
            return
        now_s = self._clock()
        if now_s < health.until_s:
            return
        if health.until_s:
            health.down_s = min(2 * health.down_s, MAX_DOWN_S)
        else:
            self._down += 1
        health.until_s = now_s + health.down_s
        log.warning(
            "%s: %s is left alone for %g s, its blocks are misses: %s",
            self._name,
            table.directory,
            health.down_s,
            error,
        )

    # ------------------------------------------------------------------ all of them

    def expire(self) -> None:
        """Take what is too old out of the index. The caller holds the lock."""
        for table in self.tables:
            if table.expires_ms and table.expire():
                table.syncer.nudge()

    def sync_fault(self) -> str:
        """Why what was written may not be on stable storage; empty when all is well."""
        return next(filter(None, (table.sync_fault() for table in self.tables)), "")

    def stats(self) -> dict[str, int]:
        with self._shared.lock:
            each = [table.stats() for table in self.tables]
            down = sum(not self.is_up(table) for table in self.tables)
        total = {key: sum(one[key] for one in each) for key in each[0]}
        return {
            **total,
            "directories": len(self.tables) + len(self.missing),
            "directories_down": down + len(self.missing),
        }

    def stop(self) -> bool:
        """End the syncers; False when one hangs."""
        ended = [table.syncer.stop() for table in self.tables]
        return all(ended)

    def close(self) -> None:
        """Close every file and let others have the directories. The syncers have ended."""
        for table in self.tables:
            table.close()
        for lock in self._locks:
            lock.release()

    # ------------------------------------------------------------------ opening

    def _open(self, directories: Sequence[str], files: Files, limits: Limits) -> None:
        faults: list[ConfigError] = []
        peers: set[str] = set()
        # Those that were used before come first: they know which others were.
        for directory in sorted(directories, key=is_claimed, reverse=True):
            try:
                if digest_of(directory) in peers and not is_claimed(directory):
                    raise DirectoryGone(
                        f"{directory!r} held blocks of this tier and is empty; mount its disk, or "
                        "make an empty file kvstore.lock in it to begin anew"
                    )
                lock = DirectoryLock(directory)
            except DirectoryGone as error:
                faults.append(error)
                self.missing.append(directory)
                continue
            self._locks.append(lock)
            peers |= lock.peers
        digests = [digest_of(directory) for directory in directories]
        for lock in list(self._locks):
            number = len(self.tables)
            try:
                if len(directories) > 1:
                    lock.name_peers(digests)
                table = Table(self._shared, files, lock.directory, number, limits, self._name)
            except DirectoryGone as error:
                faults.append(error)
                self.missing.append(lock.directory)
                self._locks.remove(lock)
                lock.release()
            else:
                self.tables.append(table)
        if not self.tables:
            raise faults[0]
        for fault in faults:
            log.error("%s goes on without a directory: %s", self._name, fault)


def _check_different(directories: Sequence[str]) -> None:
    """Raises ConfigError when two are the same."""
    seen: dict[str, str] = {}
    for directory in directories:
        place = os.path.realpath(directory)
        if place in seen:
            raise ConfigError(
                f"the disk tier's directories {seen[place]!r} and {directory!r} are the same; "
                "give each disk one of its own"
            )
        seen[place] = directory
