"""The disk tier: frames appended to preallocated segments, an index in memory.

One lock guards the index, the table of segments and every reservation, and is never held across
I/O. A write reserves its pages under the lock, writes beside other writers, and only then is
published into the index; a read looks its place up, takes a reference on the segment, and reads
beside everything else. Space comes back a segment at a time, from the one that was least
recently read or written: a segment holds what was written together, and what is read again is
read together (a shared prompt's run), while the oldest segment often holds the prompts that
everybody shares.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.blocks import Key
from kvstore.errors import TierError, TierFull, TierUnavailable
from kvstore.frame import bind
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.directory import DirectoryLock
from kvstore.tiers.disk.files import PAGE, Files, Pages
from kvstore.tiers.disk.index import MAX_FRAME_PAGES, pack_place, unpack_place
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.sync import Syncer
from kvstore.tiers.disk.table import Table

log = logging.getLogger(__name__)

SAME_KEY_WAIT_S = 60.0
"""Longest a writer waits for another that is writing the same key."""
CLOSE_WAIT_S = 30.0
"""Longest `close` waits for calls under way."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskTier(Tier):
    """Keeps frames in a directory of its own. Made by `open`; see the package's `Config`."""

    workers_read = 4
    workers_write = 2
    local_index = True

    def __init__(
        self,
        directory: str,
        capacity_bytes: int,
        segment_bytes: int,
        *,
        durable: bool = False,
        files: Files | None = None,
        name: str = "disk",
        close_wait_s: float = CLOSE_WAIT_S,
    ) -> None:
        """capacity_bytes: most bytes of all files together. segment_bytes: of each new one.

        Raises ConfigError when the directory cannot be had.
        """
        self.name = name
        self._files = files or Files()
        self._durable = durable
        self._close_wait_s = close_wait_s
        self._scratch = Pages()
        self._directory_lock = DirectoryLock(directory)
        try:
            self._table = Table(self._files, directory, capacity_bytes, segment_bytes)
        except BaseException:
            self._directory_lock.release()
            raise
        self._lock = self._table.lock
        self._changed = self._table.changed
        self._writing: set[Key] = set()
        self._clearing = 0
        self._closed = False
        self._counts = dict.fromkeys(("reads", "writes", "read_bytes", "write_bytes", "faults"), 0)
        self._syncer = Syncer(self._sync_segment)

    # ------------------------------------------------------------------ verbs

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            self._check_open()
            index = self._table.index
            return [key in index for key in keys]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        with self._lock:
            self._check_open()
            found = self._table.find(key)
            if found is None:
                return 0
            segment, page, pages = found
            nbytes = (pages - 1) * PAGE
            if nbytes > len(payload):
                raise TierError(f"a payload of {nbytes} bytes does not fit in {len(payload)}")
            self._table.hold(segment)
        try:
            views = [header[:PAGE], payload[:nbytes]]
            self._check_aligned(views)
            got = self._files.read_at(segment.fd, views, page * PAGE)
        except OSError as error:
            self._count_fault()
            raise TierUnavailable(f"{self.name} cannot read {segment.path}: {error}") from error
        finally:
            self._table.drop(segment)
        if got < pages * PAGE:
            log.warning("%s ends inside a frame; its block is forgotten", segment.path)
            self._count_fault()
            with self._lock:
                if not segment.dead:
                    self._table.index.remove(key, pack_place(segment.slot, page, pages))
            return 0
        bind(header, segment.salt(page))
        with self._lock:
            self._counts["reads"] += 1
            self._counts["read_bytes"] += got
        return nbytes

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        assert len(payload) > 0, "a frame without a payload"
        assert len(payload) % PAGE == 0, f"a payload of {len(payload)} bytes is not whole pages"
        pages = 1 + len(payload) // PAGE
        if pages > min(MAX_FRAME_PAGES, self._table.largest_frame_pages):
            raise TierFull(
                f"a frame of {pages * PAGE} bytes is larger than a segment of {self.name}; "
                "raise its capacity or its segment size"
            )
        if not self._claim(key):
            return
        try:
            segment, page = self._table.reserve(key, pages)
        except BaseException as error:
            self._unclaim(key)
            if isinstance(error, OSError):
                raise self._judged(error) from error
            raise
        written = False
        try:
            views = [self._bound(header, segment.salt(page)), payload]
            self._check_aligned(views)
            self._files.write_at(segment.fd, views, page * PAGE)
            mark = self._syncer.wrote(segment, pages * PAGE)
            if self._durable:
                self._syncer.wait(mark)
                self._check_synced(segment.sync_fault)
            written = True
        except OSError as error:
            raise self._judged(error) from error
        finally:
            self._publish(key, segment, page, pages, written=written)

    def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            with self._lock:
                self._check_open()
                found = self._table.find(key)
                if found is None:
                    continue
                segment, page, pages = found
                self._table.index.remove(key, pack_place(segment.slot, page, pages))
                self._table.hold(segment)
            try:
                segment.kill(self._files, page)
            except OSError as error:
                # It is gone for this process; after a restart its header or its bytes tell.
                self._count_fault()
                log.warning("a deletion in %s is not on disk: %s", segment.path, error)
            finally:
                self._table.drop(segment)

    def usage(self) -> Iterator[tuple[Key, int]]:
        with self._lock:
            self._check_open()
            places = list(self._table.index.items())
        return ((key, unpack_place(place)[2] * PAGE) for key, place in places)

    def clear(self) -> None:
        with self._lock:
            self._check_open()
            self._clearing += 1
        try:
            self._table.clear()
        finally:
            with self._lock:
                self._clearing -= 1
                self._changed.notify_all()

    def flush(self) -> None:
        with self._lock:
            self._check_open()
        self._syncer.wait()
        self._check_synced(self._table.sync_fault())

    def stats(self) -> dict[str, int | float | str]:
        return {**self._table.stats(), **self._counts, "direct": int(self._files.direct)}

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            quiet = self._changed.wait_for(self._is_quiet, self._close_wait_s)
        quiet &= self._syncer.stop()
        if quiet:
            self._table.close()
            self._directory_lock.release()
        else:
            # A write that hangs may still land: nobody else may recover these files before.
            log.error(
                "%s: calls are still under way; its directory is in use until this process ends",
                self.name,
            )

    # ------------------------------------------------------------------ parts of them

    def _is_quiet(self) -> bool:
        """Whether no call uses the table; the lock is held."""
        return not (self._writing or self._clearing or self._table.busy())

    def _claim(self, key: Key) -> bool:
        """Become the one writer of a key; False when it is held already."""
        with self._lock:
            self._check_open()
            if not self._changed.wait_for(lambda: key not in self._writing, SAME_KEY_WAIT_S):
                raise TierUnavailable(f"another write of the same block hangs in {self.name}")
            self._check_open()
            if key in self._table.index:
                return False
            self._writing.add(key)
            return True

    def _unclaim(self, key: Key) -> None:
        with self._lock:
            self._writing.discard(key)
            self._changed.notify_all()

    def _publish(self, key: Key, segment: Segment, page: int, pages: int, *, written: bool) -> None:
        """The write has ended: let readers see it, if it went well."""
        with self._lock:
            if written:
                self._table.insert(key, segment, page, pages)
                self._counts["writes"] += 1
                self._counts["write_bytes"] += pages * PAGE
            self._writing.discard(key)
            self._changed.notify_all()
        self._table.end_write(segment)

    def _bound(self, header: memoryview, salt: int) -> memoryview:
        """A copy of the header, bound to its place: the caller's stays as it is."""
        page = self._scratch.page
        page[:] = header[:PAGE]
        bind(page, salt)
        return page

    def _sync_segment(self, segment: Segment) -> None:
        with self._lock:
            if segment.dead:
                return
            self._table.hold(segment)
        try:
            segment.sync(self._files)
        finally:
            self._table.drop(segment)

    def _judged(self, error: OSError) -> TierError:
        self._count_fault()
        if error.errno in _FULL:
            return TierFull(f"{self.name} has no room left on its file system")
        return TierUnavailable(f"{self.name} cannot write: {error}")

    def _count_fault(self) -> None:
        with self._lock:
            self._counts["faults"] += 1

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed")

    def _check_synced(self, fault: str) -> None:
        if fault:
            raise TierUnavailable(f"the disk could not sync: {fault}")

    def _check_aligned(self, views: list[memoryview]) -> None:
        if self._files.direct:
            for view in views:
                address = np.frombuffer(view, np.uint8).ctypes.data
                assert address % PAGE == 0, "a buffer that is not 4 KiB aligned"
