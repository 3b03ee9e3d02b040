"""The disk tier: frames appended to preallocated segments, an index in memory.

One lock guards the index, the segments and all reservations. No thread does I/O while it owns the
lock. A write reserves its sectors under the lock, writes without it, and then publishes the frame
in the index. A read looks up its location, takes a reference to the segment, and reads without the
lock.

Space is reclaimed by segment. By default the least recently read or written segment is evicted. A
segment contains blocks that were written together, and these are usually read together (the prefix
of a shared prompt). The oldest segment often contains the most widely shared prompts, so age alone
would be a bad criterion.
"""

from __future__ import annotations

import ctypes
import errno
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.blocks.frame import mask_checksum
from kvstore.blocks.key import Key
from kvstore.errors import FrameTooLarge, TierError, TierFull, TierUnavailable
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import SECTOR_BYTES, Files, SectorBuffer
from kvstore.tiers.disk.index import MAX_FRAME_SECTORS, pack_location, unpack_location
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.state import DiskLimits, DiskState
from kvstore.tiers.disk.volume import OVERHEAD_SECTORS, Reservation, Volume
from kvstore.tiers.disk.volumes import Volumes

log = logging.getLogger(__name__)

SAME_KEY_WAIT_S = 60.0
"""Maximum wait for another write of the same key."""
CLOSE_WAIT_S = 30.0
"""Maximum wait of `close` for running calls."""
WORKERS_READ, WORKERS_WRITE, WORKERS_SYNC_WRITES = 4, 2, 8
"""Concurrent calls per directory: reads, writes, and writes with `sync_writes`. (8 writes that
share an fdatasync reach 5 times the rate of 2 at 64 KiB, and 1.2 times at 2 MiB.)"""
MAX_WORKERS = 16
"""Maximum number of workers for reads, and for writes. Each is a thread with its buffers."""
_NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskTier(Tier):
    """Stores frames in segment files. Created by `open` from the package's `Config`."""

    local_index = True
    sole_writer = True

    def __init__(
        self,
        directories: Sequence[str],
        limits: DiskLimits,
        *,
        sync_writes: bool = False,
        files: Files | None = None,
        name: str = "disk",
        close_wait_s: float = CLOSE_WAIT_S,
    ) -> None:
        """limits: limits of each directory. sync_writes: see `Config`.

        Raises ConfigError: no directory can be used.
        """
        self.name = name
        self.workers_read = min(WORKERS_READ * len(directories), MAX_WORKERS)
        writes = WORKERS_SYNC_WRITES if sync_writes else WORKERS_WRITE
        self.workers_write = min(writes * len(directories), MAX_WORKERS)
        self._files = files or Files()
        self._sync_writes = sync_writes
        self._close_wait_s = close_wait_s
        self._scratch = SectorBuffer()
        self._state = DiskState()
        self._volumes = Volumes(directories, self._files, self._state, limits, name=name)
        self._capacity_bytes = limits.capacity_bytes * len(directories)
        self._max_frame_sectors = min(
            MAX_FRAME_SECTORS, limits.segment_bytes // SECTOR_BYTES - OVERHEAD_SECTORS
        )
        self._has_ttl = limits.ttl_ms > 0
        self._lock = self._state.lock
        self._changed = self._state.changed
        self._writing: set[Key] = set()
        self._clearing = 0
        self._closed = False
        self._counts = dict.fromkeys(("reads", "writes", "read_bytes", "write_bytes", "errors"), 0)

    # ------------------------------------------------------------------ operations

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            self._begin_call()
            if self._volumes.are_all_up():
                return self._state.index.contains_each(keys)
            return [self._find(key) is not None for key in keys]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        with self._lock:
            self._begin_call()
            found = self._find(key)
            if found is None:
                return 0
            segment, sector, sectors = found
            nbytes = (sectors - 1) * SECTOR_BYTES
            fits = nbytes <= len(payload)
            volume = self._volumes.volume_of(segment)
            volume.touch(segment)
            self._state.acquire(segment)
        got, failure, ended = 0, None, False
        try:
            views = [header[:SECTOR_BYTES], payload[:nbytes]][: 1 + fits]
            self._check_aligned(views)
            got = self._files.read_at(segment.fd, views, sector * SECTOR_BYTES)
            ended = True
        except OSError as error:
            failure = error
        finally:
            complete = got == (sectors if fits else 1) * SECTOR_BYTES
            with self._lock:
                last = self._state.release(segment)
                if complete:
                    self._counts["reads"] += 1
                    self._counts["read_bytes"] += got
                    self._volumes.record_success(volume)
                elif ended and not segment.removed:
                    self._state.index.remove(
                        key, pack_location(segment.segment_no, sector, sectors)
                    )
            if last:
                volume.close_segment(segment)
        if not complete:
            return self._handle_read_failure(volume, segment, failure)
        mask_checksum(header, segment.segment_nonce(sector))
        if not fits:
            raise FrameTooLarge(f"payload of {nbytes} bytes does not fit into {len(payload)} bytes")
        return nbytes

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        assert len(payload) > 0, "frame without a payload"
        assert len(payload) % SECTOR_BYTES == 0, (
            f"payload of {len(payload)} bytes is not a multiple of {SECTOR_BYTES}"
        )
        sectors = 1 + len(payload) // SECTOR_BYTES
        if sectors > self._max_frame_sectors:
            raise TierFull(
                f"frame of {sectors * SECTOR_BYTES} bytes is larger than a segment of {self.name}; "
                "raise the tier's capacity or segment size"
            )
        candidates, reservation = self._begin_write(key, sectors)
        error: TierError | None = None
        try:
            for volume in candidates:
                error = self._write_to(volume, reservation, key, header, payload)
                if error is None:
                    return
                reservation = None
        except BaseException:
            self._end_write(key)
            raise
        if error is not None:
            self._end_write(key)
            raise error

    def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            with self._lock:
                self._begin_call()
                locations = self._state.remove_key(key)
                for segment, _ in locations:
                    self._state.acquire(segment)
            for segment, sector in locations:
                try:
                    segment.mark_deleted(self._files, sector)
                except OSError as error:
                    # The block is deleted for this process. After a restart its header or its
                    # checksum decides.
                    self._count_error()
                    log.warning("%s: cannot record a deletion on disk: %s", segment.path, error)
                finally:
                    self._volumes.volume_of(segment).release(segment)

    def usage(self) -> Iterator[tuple[Key, int]]:
        """Blocks of the most recently used segment first; within a segment in write order."""
        with self._lock:
            self._begin_call()
            segments = list(self._state.segments.values())
        segments.sort(key=lambda segment: segment.last_used, reverse=True)
        return self._iter_usage(segments)

    def clear(self) -> None:
        with self._lock:
            self._check_open()
            self._clearing += 1
        try:
            for volume in self._volumes.volumes:
                volume.clear()
        finally:
            with self._lock:
                self._clearing -= 1
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all acknowledged writes are on stable storage.

        Raises TierUnavailable: the sync failed, or an earlier sync of an existing segment failed.
        The acknowledged blocks are readable then, but may not survive a power loss.
        """
        with self._lock:
            self._check_open()
        for volume in self._volumes.volumes:
            volume.syncer.wait_synced()
        failure = self._volumes.sync_error()
        if failure:
            raise TierUnavailable(f"{self.name}: sync failed: {failure}")

    def stats(self) -> dict[str, int | float | str]:
        state = self._state
        return {
            **self._volumes.stats(),
            "bytes_capacity": self._capacity_bytes,
            "blocks": len(state.index),
            "evictions": state.evictions,
            "expired": state.expired,
            "torn": state.torn,
            **self._counts,
            "direct_io": int(self._files.direct_io),
        }

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._changed.wait_for(self._is_idle, self._close_wait_s)
        idle &= self._volumes.stop()
        if idle:
            self._volumes.close()
        else:
            # A hanging write may still complete, so no other process may recover these files yet.
            log.error(
                "%s: closed while calls hang; its directories stay locked until this process ends",
                self.name,
            )

    # ------------------------------------------------------------------ internals

    def _is_idle(self) -> bool:
        """Whether no call uses a volume. The caller owns the lock."""
        return not (self._writing or self._clearing or self._state.is_busy())

    def _begin_call(self) -> None:
        """Check that the tier is open, and expire blocks. The caller owns the lock."""
        self._check_open()
        if self._has_ttl:
            self._volumes.expire_segments()

    def _find(self, key: Key) -> tuple[Segment, int, int] | None:
        """(segment, sector, sectors) of a block in a directory that is up. The caller owns the
        lock."""
        location = self._state.index.get(key)
        if not location:
            return None
        segment_no, sector, sectors = unpack_location(location)
        segment = self._state.segments[segment_no]
        return (
            (segment, sector, sectors)
            if self._volumes.is_up(self._volumes.volume_of(segment))
            else None
        )

    def _handle_read_failure(self, volume: Volume, segment: Segment, error: OSError | None) -> int:
        """Count a failed read and return a miss. error: of the read; None: the file was too short.

        Raises TierUnavailable: the read failed in the tier's only directory.
        """
        self._count_error()
        if error is None:
            log.warning("%s ends inside a frame; dropped the block from the index", segment.path)
            return 0
        with self._lock:
            self._volumes.record_failure(volume, error)
        if self._volumes.is_single():
            raise TierUnavailable(f"{self.name} cannot read {segment.path}: {error}") from error
        log.warning("%s cannot read %s: %s", self.name, segment.path, error)
        return 0

    def _begin_write(self, key: Key, sectors: int) -> tuple[Sequence[Volume], Reservation | None]:
        """Become the only writer of a key.

        Returns the volumes to try, best first, and sectors in the first one if its active segment
        has room. Returns no volumes if the tier contains the key already.
        """
        with self._lock:
            self._begin_call()
            if key in self._writing:
                if not self._changed.wait_for(lambda: key not in self._writing, SAME_KEY_WAIT_S):
                    raise TierUnavailable(f"{self.name}: another write of the same block hangs")
                self._check_open()
            if self._find(key) is not None:
                return (), None
            self._writing.add(key)
            candidates = self._volumes.write_candidates()
            return candidates, candidates[0].reserve_in_active(key, sectors)

    def _end_write(self, key: Key) -> None:
        with self._lock:
            self._writing.discard(key)
            self._changed.notify_all()

    def _write_to(
        self,
        volume: Volume,
        reservation: Reservation | None,
        key: Key,
        header: memoryview,
        payload: memoryview,
    ) -> TierError | None:
        """Write a frame to one directory and publish it; returns the error if that fails."""
        sectors = 1 + len(payload) // SECTOR_BYTES
        try:
            segment, sector = reservation or volume.reserve(key, sectors)
        except TierFull as error:
            return error
        except OSError as error:
            return self._map_write_error(volume, error)
        failure: TierError | None = None
        written = False
        try:
            views = [self._mask_header(header, segment.segment_nonce(sector)), payload]
            self._check_aligned(views)
            self._files.write_at(segment.fd, views, sector * SECTOR_BYTES)
            if self._sync_writes:
                volume.syncer.wait_synced(
                    volume.syncer.record_write(segment, sectors * SECTOR_BYTES)
                )
                if segment.sync_error:
                    raise OSError(errno.EIO, f"sync failed: {segment.sync_error}")
            written = True
        except OSError as error:
            failure = self._map_write_error(volume, error)
        finally:
            with self._lock:
                if not self._sync_writes:
                    volume.syncer.record_write(segment, sectors * SECTOR_BYTES)
                last = volume.end_write(key, segment, sector, sectors, written=written)
                if written:
                    self._writing.discard(key)
                    self._counts["writes"] += 1
                    self._counts["write_bytes"] += sectors * SECTOR_BYTES
                    self._volumes.record_success(volume)
                self._changed.notify_all()
            if last:
                volume.close_segment(segment)
        return failure

    def _iter_usage(self, segments: Sequence[Segment]) -> Iterator[tuple[Key, int]]:
        for segment in segments:
            # One segment per lock, so that calls do not wait while a million keys are built.
            with self._lock:
                self._check_open()
                present = not segment.removed
                live = (
                    self._state.index.live_entries(segment.entries, segment.segment_no)
                    if present
                    else []
                )
            for key, sectors in live:
                yield key, sectors * SECTOR_BYTES

    def _mask_header(self, header: memoryview, nonce: int) -> memoryview:
        """A copy of the header with its checksum masked; the caller's header is not changed."""
        sector = self._scratch.sector
        sector[:] = header[:SECTOR_BYTES]
        mask_checksum(sector, nonce)
        return sector

    def _map_write_error(self, volume: Volume, error: OSError) -> TierError:
        """The tier error for a failed system call."""
        self._count_error()
        mapped: TierError
        if error.errno in _NO_SPACE_ERRNOS:
            mapped = TierFull(f"{self.name}: the file system is full")
        else:
            mapped = TierUnavailable(f"{self.name} cannot write: {error}")
            with self._lock:
                self._volumes.record_failure(volume, error)
        mapped.__cause__ = error
        return mapped

    def _count_error(self) -> None:
        with self._lock:
            self._counts["errors"] += 1

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed")

    def _check_aligned(self, views: list[memoryview]) -> None:
        if self._files.direct_io:
            for view in views:
                assert address_of(view) % SECTOR_BYTES == 0, "buffer not aligned to 4,096 bytes"


def address_of(view: memoryview) -> int:
    """The address of a view. (ctypes takes a tenth of the time, but needs a writable view.)"""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
