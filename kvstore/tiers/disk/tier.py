"""The disk tier: frames appended to preallocated segments, an index in memory.

One lock guards the index, the table of segments and every reservation, and is never held across
I/O. A write reserves its pages under the lock, writes beside other writers, and only then is
published into the index; a read looks its place up, takes a reference on the segment, and reads
beside everything else. Space comes back a segment at a time; by default from the one that was
least recently read or written: a segment holds what was written together, and what is read again
is read together (a shared prompt's run), while the oldest segment often holds the prompts that
everybody shares.
"""

from __future__ import annotations

import ctypes
import errno
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.blocks.frame import bind
from kvstore.blocks.key import Key
from kvstore.errors import FrameTooLarge, TierError, TierFull, TierUnavailable
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import PAGE, Files, Pages
from kvstore.tiers.disk.index import MAX_FRAME_PAGES, pack_place, unpack_place
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import Limits, Shared
from kvstore.tiers.disk.volume import OVERHEAD_PAGES, Table, Taken
from kvstore.tiers.disk.volumes import Stripes

log = logging.getLogger(__name__)

SAME_KEY_WAIT_S = 60.0
"""Longest a writer waits for another that is writing the same key."""
CLOSE_WAIT_S = 30.0
"""Longest `close` waits for calls under way."""
WORKERS_READ, WORKERS_WRITE, WORKERS_DURABLE = 4, 2, 8
"""Calls worth having in flight at once, for each directory: reads, writes, and writes that wait for
stable storage (8 of them share an fdatasync: 5 times the rate of 2 at 64 KiB, 1.2 at 2 MiB)."""
MAX_WORKERS = 16
"""And for all of them together: each is a thread with buffers of its own."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskTier(Tier):
    """Keeps frames in directories of its own. Made by `open`; see the package's `Config`."""

    local_index = True
    sole_writer = True

    def __init__(
        self,
        directories: Sequence[str],
        limits: Limits,
        *,
        durable: bool = False,
        files: Files | None = None,
        name: str = "disk",
        close_wait_s: float = CLOSE_WAIT_S,
    ) -> None:
        """limits: of each directory. durable: see `Config`.

        Raises ConfigError when no directory can be had.
        """
        self.name = name
        self.workers_read = min(WORKERS_READ * len(directories), MAX_WORKERS)
        writes = WORKERS_DURABLE if durable else WORKERS_WRITE
        self.workers_write = min(writes * len(directories), MAX_WORKERS)
        self._files = files or Files()
        self._durable = durable
        self._close_wait_s = close_wait_s
        self._scratch = Pages()
        self._shared = Shared()
        self._stripes = Stripes(directories, self._files, self._shared, limits, name=name)
        self._capacity_bytes = limits.capacity_bytes * len(directories)
        self._largest_frame_pages = min(
            MAX_FRAME_PAGES, limits.segment_bytes // PAGE - OVERHEAD_PAGES
        )
        self._ages = limits.ttl_ms > 0
        self._lock = self._shared.lock
        self._changed = self._shared.changed
        self._writing: set[Key] = set()
        self._clearing = 0
        self._closed = False
        self._counts = dict.fromkeys(("reads", "writes", "read_bytes", "write_bytes", "faults"), 0)

    # ------------------------------------------------------------------ verbs

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            self._look()
            if self._stripes.all_up():
                return self._shared.index.held(keys)
            return [self._find(key) is not None for key in keys]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        with self._lock:
            self._look()
            found = self._find(key)
            if found is None:
                return 0
            segment, page, pages = found
            nbytes = (pages - 1) * PAGE
            if nbytes > len(payload):
                raise FrameTooLarge(f"a payload of {nbytes} bytes does not fit in {len(payload)}")
            table = self._stripes.of(segment)
            table.touch(segment)
            self._shared.hold(segment)
        got, fault, ended = 0, None, False
        try:
            views = [header[:PAGE], payload[:nbytes]]
            self._check_aligned(views)
            got = self._files.read_at(segment.fd, views, page * PAGE)
            ended = True
        except OSError as error:
            fault = error
        finally:
            whole = got == pages * PAGE
            with self._lock:
                last = self._shared.let_go(segment)
                if whole:
                    self._counts["reads"] += 1
                    self._counts["read_bytes"] += got
                    self._stripes.answered(table)
                elif ended and not segment.dead:
                    self._shared.index.remove(key, pack_place(segment.slot, page, pages))
            if last:
                table.bury(segment)
        if not whole:
            return self._not_read(table, segment, fault)
        bind(header, segment.salt(page))
        return nbytes

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        assert len(payload) > 0, "a frame without a payload"
        assert len(payload) % PAGE == 0, f"a payload of {len(payload)} bytes is not whole pages"
        pages = 1 + len(payload) // PAGE
        if pages > self._largest_frame_pages:
            raise TierFull(
                f"a frame of {pages * PAGE} bytes is larger than a segment of {self.name}; "
                "raise its capacity or its segment size"
            )
        ways, taken = self._claim(key, pages)
        fault: TierError | None = None
        try:
            for table in ways:
                fault = self._write_in(table, taken, key, header, payload)
                if fault is None:
                    return
                taken = None
        except BaseException:
            self._unclaim(key)
            raise
        if fault is not None:
            self._unclaim(key)
            raise fault

    def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            with self._lock:
                self._look()
                places = self._shared.take_out(key)
                for segment, _ in places:
                    self._shared.hold(segment)
            for segment, page in places:
                try:
                    segment.kill(self._files, page)
                except OSError as error:
                    # It is gone for this process; after a restart its header or its bytes tell.
                    self._count_fault()
                    log.warning("a deletion in %s is not on disk: %s", segment.path, error)
                finally:
                    self._stripes.of(segment).drop(segment)

    def usage(self) -> Iterator[tuple[Key, int]]:
        """Blocks of the most recently used segment first; in each, as they were written."""
        with self._lock:
            self._look()
            segments = list(self._shared.segments.values())
        segments.sort(key=lambda segment: segment.last_used, reverse=True)
        return self._usage(segments)

    def clear(self) -> None:
        with self._lock:
            self._check_open()
            self._clearing += 1
        try:
            for table in self._stripes.tables:
                table.clear()
        finally:
            with self._lock:
                self._clearing -= 1
                self._changed.notify_all()

    def flush(self) -> None:
        """Raises TierUnavailable also when an earlier sync failed, until its segment is gone: what
        was acknowledged is there, and nobody knows whether it would be after a power cut."""
        with self._lock:
            self._check_open()
        for table in self._stripes.tables:
            table.syncer.wait()
        fault = self._stripes.sync_fault()
        if fault:
            raise TierUnavailable(f"the disk could not sync: {fault}")

    def stats(self) -> dict[str, int | float | str]:
        shared = self._shared
        return {
            **self._stripes.stats(),
            "bytes_capacity": self._capacity_bytes,
            "blocks": len(shared.index),
            "evictions": shared.evictions,
            "expired": shared.expired,
            "torn": shared.torn,
            **self._counts,
            "direct": int(self._files.direct),
        }

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            quiet = self._changed.wait_for(self._is_quiet, self._close_wait_s)
        quiet &= self._stripes.stop()
        if quiet:
            self._stripes.close()
        else:
            # A write that hangs may still land: nobody else may recover these files before.
            log.error(
                "%s: calls are still under way; its directory is in use until this process ends",
                self.name,
            )

    # ------------------------------------------------------------------ parts of them

    def _is_quiet(self) -> bool:
        """Whether no call uses the tables; the lock is held."""
        return not (self._writing or self._clearing or self._shared.busy())

    def _look(self) -> None:
        """What every call does first: refuse when closed, forget what has expired. Locked."""
        self._check_open()
        if self._ages:
            self._stripes.expire()

    def _find(self, key: Key) -> tuple[Segment, int, int] | None:
        """Segment, page and pages of a block that can be had; the lock is held."""
        place = self._shared.index.get(key)
        if not place:
            return None
        slot, page, pages = unpack_place(place)
        segment = self._shared.segments[slot]
        return (segment, page, pages) if self._stripes.is_up(self._stripes.of(segment)) else None

    def _not_read(self, table: Table, segment: Segment, fault: OSError | None) -> int:
        """A read that did not get its frame: a miss, or TierUnavailable if that is the tier's."""
        self._count_fault()
        if fault is None:
            log.warning("%s ends inside a frame; its block is forgotten", segment.path)
            return 0
        with self._lock:
            self._stripes.failed(table, fault)
        if self._stripes.is_single():
            raise TierUnavailable(f"{self.name} cannot read {segment.path}: {fault}") from fault
        log.warning("%s cannot read %s: %s", self.name, segment.path, fault)
        return 0

    def _claim(self, key: Key, pages: int) -> tuple[Sequence[Table], Taken | None]:
        """Become the one writer of a key: where to write it, best first, and pages there if they
        can be had at once. Nowhere when it is held already."""
        with self._lock:
            self._look()
            if key in self._writing:
                if not self._changed.wait_for(lambda: key not in self._writing, SAME_KEY_WAIT_S):
                    raise TierUnavailable(f"another write of the same block hangs in {self.name}")
                self._check_open()
            if self._find(key) is not None:
                return (), None
            self._writing.add(key)
            ways = self._stripes.ways()
            return ways, ways[0].take(key, pages)

    def _unclaim(self, key: Key) -> None:
        with self._lock:
            self._writing.discard(key)
            self._changed.notify_all()

    def _write_in(
        self,
        table: Table,
        taken: Taken | None,
        key: Key,
        header: memoryview,
        payload: memoryview,
    ) -> TierError | None:
        """Write a frame into one directory and let readers see it, or say why not."""
        pages = 1 + len(payload) // PAGE
        try:
            segment, page = taken or table.reserve(key, pages)
        except TierFull as error:
            return error
        except OSError as error:
            return self._judged(table, error)
        fault: TierError | None = None
        written = False
        try:
            views = [self._bound(header, segment.salt(page)), payload]
            self._check_aligned(views)
            self._files.write_at(segment.fd, views, page * PAGE)
            if self._durable:
                table.syncer.wait(table.syncer.wrote(segment, pages * PAGE))
                if segment.sync_fault:
                    raise OSError(errno.EIO, f"the disk could not sync: {segment.sync_fault}")
            written = True
        except OSError as error:
            fault = self._judged(table, error)
        finally:
            with self._lock:
                if not self._durable:
                    table.syncer.wrote(segment, pages * PAGE)
                last = table.end_write(key, segment, page, pages, written=written)
                if written:
                    self._writing.discard(key)
                    self._counts["writes"] += 1
                    self._counts["write_bytes"] += pages * PAGE
                    self._stripes.answered(table)
                self._changed.notify_all()
            if last:
                table.bury(segment)
        return fault

    def _usage(self, segments: Sequence[Segment]) -> Iterator[tuple[Key, int]]:
        for segment in segments:
            # One at a time: nobody waits for the lock while a million keys are made.
            with self._lock:
                self._check_open()
                there = not segment.dead
                live = self._shared.index.live(segment.entries, segment.slot) if there else []
            for key, pages in live:
                yield key, pages * PAGE

    def _bound(self, header: memoryview, salt: int) -> memoryview:
        """A copy of the header, bound to its place: the caller's stays as it is."""
        page = self._scratch.page
        page[:] = header[:PAGE]
        bind(page, salt)
        return page

    def _judged(self, table: Table, error: OSError) -> TierError:
        """The tier's word for a system call that failed."""
        self._count_fault()
        judged: TierError
        if error.errno in _FULL:
            judged = TierFull(f"{self.name} has no room left on its file system")
        else:
            judged = TierUnavailable(f"{self.name} cannot write: {error}")
            with self._lock:
                self._stripes.failed(table, error)
        judged.__cause__ = error
        return judged

    def _count_fault(self) -> None:
        with self._lock:
            self._counts["faults"] += 1

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed")

    def _check_aligned(self, views: list[memoryview]) -> None:
        if self._files.direct:
            for view in views:
                assert address_of(view) % PAGE == 0, "a buffer that is not 4 KiB aligned"


def address_of(view: memoryview) -> int:
    """Where its bytes lie. (Through ctypes a tenth of the time, which asks for a writable one.)"""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
