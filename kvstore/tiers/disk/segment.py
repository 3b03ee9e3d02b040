"""One segment file: frames one after another, and their index at the end once it is sealed.

    sector 0          header: magic, version, checksum, sequence number, size, secret (16 bytes),
                      time of creation
    sector 1 ...      frames in consecutive sectors; gaps where a write failed
    ...               footer body: the packed `Entries`
    ...               tombstones, one byte per entry: 1 if the block was deleted after sealing
    last sector       trailer: the header's fields again, and the sector of the body

The checksum of a frame's header is masked (`frame.mask_checksum`) with a nonce made from the
segment's secret and the frame's sector. A scan without a footer therefore accepts only frames that
this tier wrote at that sector. It rejects bytes inside a block that look like a frame.

The last sector of a segment in use is zero, or the trailer of a checkpoint. A checkpoint is a
footer for the frames written so far. It fits into the space reserved for the final footer, so later
frames do not overwrite it.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left
from typing import Final

from kvstore.blocks.frame import aligned_buffer, checksum
from kvstore.blocks.key import Key
from kvstore.tiers.disk.files import SECTOR_BYTES, Files
from kvstore.tiers.disk.index import MAX_NAMESPACES, MAX_SEGMENT_SECTORS, Entries, max_entry_bytes
from kvstore.tiers.disk.layout import (
    CHECKPOINT,
    SEALED,
    SECRET_BYTES,
    SUFFIX,
    Footer,
    SegmentIdentity,
    SegmentInvalid,
    SegmentUnsupported,
    read_footer,
    read_identity,
    write_footer,
    write_header,
)

MIN_SEGMENT_BYTES: Final = 16 * SECTOR_BYTES
_FIXED_FOOTER_BYTES = 3 * SECTOR_BYTES
"""The trailer, and the padding of the body and of the tombstones."""


class Segment:
    """A segment and its open descriptor. The tier's lock guards all fields, but not the file."""

    def __init__(
        self, path: str, fd: int, identity: SegmentIdentity, *, name_durable: bool
    ) -> None:
        """name_durable: the file's name is on stable storage."""
        self.path = path
        self.fd = fd
        self.identity = identity
        self.created_ms = identity.created_ms
        """Time of creation in milliseconds since 1970."""
        self.segment_no = 0
        """The segment's number in locations."""
        self.volume_no = 0
        """Number of its directory."""
        self.entries = Entries()
        self.next_sector = 1
        self.namespaces: set[tuple[str, str]] = set()
        self.footer_bytes = _FIXED_FOOTER_BYTES
        """Maximum size of the footer with all frames reserved so far."""
        self.refs = 0
        """References to the descriptor: one of the volume, one of each call that uses it."""
        self.writing: set[int] = set()
        """First sectors of the frames that calls are writing."""
        self.last_used = 0
        """The tier's use counter at the last read or write of this segment."""
        self.removed = False
        """Removed from the volume: the last reference closes the descriptor."""
        self.truncated = False
        """The file is shorter than its header says: read only."""
        self.unsupported_frames = 0
        """Number of frames of other releases that a scan found."""
        self.left_as_it_is = False
        """There are such frames, or an index of a later version: no footer is written, because it
        would not have all that this one has, and no frames are appended."""
        self.seal_pending = False
        """The syncer has to write the footer."""
        self.sealed = False
        self.tombstones = bytearray()
        """Tombstone of each entry of a sealed segment."""
        self.tombstones_sector = 0
        self.deleted_sectors: set[int] = set()
        """First sectors of the frames deleted from an unsealed segment."""
        self.checkpoint_sector = 0
        """The checkpoint lists all frames before this sector; 0: no checkpoint."""
        self.file_lock = threading.Lock()
        """Guards writes of the footer and of deletions. Only `_sync_lock` is taken inside."""
        self.sync_error = ""
        """Error of a failed sync; permanent, and the segment takes no more frames."""
        self._name_durable = name_durable
        self._sync_lock = threading.Lock()

    @property
    def sequence_no(self) -> int:
        return self.identity.sequence_no

    @property
    def nbytes(self) -> int:
        return self.identity.nbytes

    @property
    def read_only(self) -> bool:
        """Whether no frames may be appended."""
        return self.truncated or self.left_as_it_is

    # ------------------------------------------------------------------ room

    def reserve(self, key: Key, sectors: int) -> int:
        """Reserve sectors for a frame; returns the first one, or 0 if the segment is full."""
        if self.sync_error:
            return 0
        footer = self.footer_bytes + max_entry_bytes(key) + 1
        if (self.next_sector + sectors) * SECTOR_BYTES + footer > self.identity.nbytes:
            return 0
        if key[:2] not in self.namespaces:
            if len(self.namespaces) >= MAX_NAMESPACES:
                return 0
            self.namespaces.add(key[:2])
        sector = self.next_sector
        self.next_sector += sectors
        self.footer_bytes = footer
        return sector

    def segment_nonce(self, sector: int) -> int:
        """The nonce that masks the header checksum of a frame at `sector`."""
        return checksum(self.identity.secret + sector.to_bytes(8, "little"))

    # ------------------------------------------------------------------ file

    @classmethod
    def create(
        cls,
        files: Files,
        directory: str,
        sequence_no: int,
        nbytes: int,
        created_ms: int,
        *,
        reuse: Segment | None = None,
    ) -> Segment:
        """Create an empty, fully allocated segment. Its name is durable after a sync.

        created_ms: now, in milliseconds since 1970. reuse: a removed segment of the same size
        without other references; its file becomes the new segment. A file system writes faster to
        blocks that were written before, and under the new secret the old frames are invalid. After
        a kill before the rename, the header does not match the file name, and recovery deletes it.

        Raises OSError.
        """
        path = os.path.join(directory, f"{sequence_no:012d}{SUFFIX}")
        identity = SegmentIdentity(sequence_no, nbytes, os.urandom(SECRET_BYTES), created_ms)
        fd, current_path = (reuse.fd, reuse.path) if reuse else (files.create(path, nbytes), path)
        try:
            write_header(files, fd, identity)
            if reuse:
                files.rename(reuse.path, path)
        except BaseException:
            files.close(fd)
            files.unlink(current_path)
            raise
        return cls(path, fd, identity, name_durable=False)

    @classmethod
    def open(cls, files: Files, path: str, *, writable: bool = True) -> Segment:
        """Open an existing segment without its footer.

        Raises SegmentInvalid, SegmentUnsupported, OSError.
        """
        fd = files.open(path, writable=writable)
        try:
            identity, corrupt = read_identity(files, fd)
            if os.path.basename(path) != f"{identity.sequence_no:012d}{SUFFIX}":
                raise SegmentInvalid(f"its header has sequence number {identity.sequence_no}")
            if (
                identity.nbytes % SECTOR_BYTES
                or not MIN_SEGMENT_BYTES <= identity.nbytes <= MAX_SEGMENT_SECTORS * SECTOR_BYTES
            ):
                raise SegmentInvalid(f"its header has an invalid size ({identity.nbytes} bytes)")
            segment = cls(path, fd, identity, name_durable=True)
            status = os.fstat(fd)
            segment.truncated = status.st_size != identity.nbytes
            segment.created_ms = identity.created_ms or int(status.st_mtime * 1000)
            if corrupt and writable:
                write_header(files, fd, identity)
            return segment
        except BaseException:
            files.close(fd)
            raise

    def sync(self, files: Files) -> None:
        """Wait until every written frame is on stable storage.

        Raises OSError, also for every later call. A failed fdatasync drops dirty pages, and the
        next fdatasync does not report them again. Of several concurrent calls the kernel reports
        the error to one only. So the calls take turns, and one failure is permanent. Frames stay
        readable if their checksums match.
        """
        with self._sync_lock:
            if self.sync_error:
                raise OSError(errno.EIO, f"an earlier sync failed: {self.sync_error}")
            try:
                files.sync(self.fd)
                if not self._name_durable:
                    files.sync_directory(os.path.dirname(self.path))
                    self._name_durable = True
            except OSError as error:
                self.sync_error = str(error)
                raise

    def seal(self, files: Files) -> None:
        """Sync the frames, then write the footer. Raises OSError.

        The caller guarantees that no write is in progress, and that none starts before `reopen`.
        The footer itself is not synced: a segment with a missing or partial footer is scanned.
        """
        if self.left_as_it_is:
            return
        with self.file_lock:
            self.sync(files)
            entries = self.entries.sorted_by_sector(without=self.deleted_sectors)
            self.tombstones_sector = self._write_footer(files, entries, self.next_sector, SEALED)
            self.entries, self.tombstones = entries, bytearray(len(entries))
            self.deleted_sectors.clear()
            self.checkpoint_sector = 0
            self.sealed = True

    def checkpoint(self, files: Files, entries: Entries, sector: int, deleted_count: int) -> None:
        """Write a checkpoint: an index of the frames before `sector`, for recovery after a kill.

        The frames are on stable storage. deleted_count: size of `deleted_sectors` when `entries`
        was copied. If it has grown, `entries` contains deleted frames and no checkpoint is written.
        Raises OSError.
        """
        with self.file_lock:
            if not self.sealed and deleted_count == len(self.deleted_sectors):
                self._write_footer(files, entries, sector, CHECKPOINT)
                self.checkpoint_sector = sector

    def load_footer(self, files: Files) -> bool:
        """Load entries, tombstones and the end from the footer; returns False if it is invalid."""
        footer = self._read_footer(files, SEALED)
        if footer is None:
            return False
        self.restore_entries(footer.entries, footer.next_sector)
        self.tombstones, self.tombstones_sector = footer.tombstones, footer.tombstones_sector
        self.sealed = True
        return True

    def load_checkpoint(self, files: Files) -> bool:
        """Load entries from a checkpoint, if there is one. Frames may follow at `next_sector`."""
        footer = self._read_footer(files, CHECKPOINT)
        if footer is None:
            return False
        self.restore_entries(footer.entries, footer.next_sector)
        self.checkpoint_sector = footer.next_sector
        return True

    def restore_entries(self, entries: Entries, next_sector: int) -> None:
        """Set the segment's entries. All frames end before `next_sector`."""
        self.entries, self.next_sector = entries, next_sector

    def reopen(self, files: Files) -> None:
        """Make a sealed or unsealed segment ready for appending, without its deleted blocks.

        The tombstones are discarded with the footer, so a cleared header marks a deleted frame from
        then on. The headers are cleared once more here, in case a kill came between the write of a
        tombstone and the clearing of its header. Raises OSError.
        """
        marked = zip(self.entries.first_sectors, self.tombstones, strict=self.sealed)
        deleted = {sector for sector, tombstone in marked if tombstone}
        for sector in deleted:
            files.write_at(self.fd, [aligned_buffer(SECTOR_BYTES)], sector * SECTOR_BYTES)
        if self.sealed or not self.checkpoint_sector:
            files.write_at(self.fd, [aligned_buffer(SECTOR_BYTES)], self.nbytes - SECTOR_BYTES)
        self.sealed, self.tombstones, self.tombstones_sector = False, bytearray(), 0
        self.entries = self.entries.sorted_by_sector(without=deleted)
        self.namespaces = set(self.entries.namespaces)
        self.footer_bytes = _FIXED_FOOTER_BYTES + len(self.entries.pack()) + len(self.entries)

    def mark_deleted(self, files: Files, sector: int) -> None:
        """Record on disk that the frame at `sector` is deleted. Raises OSError."""
        with self.file_lock:
            if self.sealed:
                self._write_tombstone(files, sector)
            else:
                self.deleted_sectors.add(sector)
                if self.checkpoint_sector:
                    self.checkpoint_sector = 0
                    files.write_at(
                        self.fd, [aligned_buffer(SECTOR_BYTES)], self.nbytes - SECTOR_BYTES
                    )
            files.write_at(self.fd, [aligned_buffer(SECTOR_BYTES)], sector * SECTOR_BYTES)

    def _write_tombstone(self, files: Files, sector: int) -> None:
        """Set the tombstone of the entry at `sector`, and write the sector that contains it."""
        at = bisect_left(self.entries.first_sectors, sector)
        assert self.entries.first_sectors[at] == sector, "no entry of this segment"
        self.tombstones[at] = 1
        first = at - at % SECTOR_BYTES
        scratch = aligned_buffer(SECTOR_BYTES)
        tombstones = self.tombstones[first : first + SECTOR_BYTES]
        scratch[: len(tombstones)] = tombstones
        files.write_at(self.fd, [scratch], self.tombstones_sector * SECTOR_BYTES + first)

    def _read_footer(self, files: Files, magic: bytes) -> Footer | None:
        try:
            return read_footer(files, self.fd, self.identity, magic)
        except SegmentUnsupported:
            self.left_as_it_is = True
            return None

    def _write_footer(self, files: Files, entries: Entries, next_sector: int, magic: bytes) -> int:
        return write_footer(files, self.fd, self.identity, entries, next_sector, magic)
