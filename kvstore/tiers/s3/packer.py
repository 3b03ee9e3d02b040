"""Groups the frames of concurrent writers into one upload.

The first writer of a group leads it. It waits up to `linger_s` for others to join, but not if the
group is full or all writers have joined. Then it waits until fewer than `uploads` uploads run; the
group stays open meanwhile. Then it uploads the whole group. Frames are not copied: the upload reads
the writers' buffers, and a writer returns when the upload has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvstore.blocks.key import Key
from kvstore.errors import TierError, TierFull, TierUnavailable
from kvstore.tiers.base import IO_ALIGNMENT

MAX_BLOCKS: Final = 4096
"""Maximum number of blocks in one group."""


@dataclass(eq=False)
class Group:
    """Frames of one upload. closed: no more frames join. error: of the failed upload."""

    keys: list[Key] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    sectors: list[int] = field(default_factory=list)
    nbytes: int = 0
    closed: bool = False
    ended: bool = False
    error: BaseException | None = None

    def add(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Add a frame."""
        self.keys.append(key)
        self.views += [header[:IO_ALIGNMENT], payload]
        self.sectors.append(1 + len(payload) // IO_ALIGNMENT)
        self.nbytes += IO_ALIGNMENT + len(payload)


class Packer:
    """Groups writers. Thread-safe.

    upload: uploads a group, and returns when its blocks are readable; it must end within a bounded
    time. uploads: maximum number of concurrent uploads. writers: number of writer threads; a group
    that all of them have joined does not wait.
    """

    def __init__(
        self,
        upload: Callable[[Group], None],
        *,
        group_bytes: int,
        uploads: int,
        writers: int,
        linger_s: float,
    ) -> None:
        self._upload = upload
        self._group_bytes = group_bytes
        self._uploads = uploads
        self._writers = writers
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._open: Group | None = None
        self._writers_inside = 0
        self._uploading = 0
        self._counts = {"groups": 0, "grouped_blocks": 0}

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Upload a frame with its group. Raises the error of the group's upload."""
        with self._changed:
            self._writers_inside += 1
            group, leads = self._join_group(key, header, payload)
        try:
            if leads:
                self._lead_group(group)
            else:
                with self._changed:
                    # No timeout: the upload uses the frame's buffer until it ends, and the
                    # leader's requests have timeouts.
                    self._changed.wait_for(lambda: group.ended)
        finally:
            with self._changed:
                self._writers_inside -= 1
        if group.error is not None:
            _reraise(group.error)

    def stats(self) -> dict[str, int | float | str]:
        """Number of uploaded groups, and of blocks in them."""
        with self._changed:
            return dict(self._counts)

    def _join_group(self, key: Key, header: memoryview, payload: memoryview) -> tuple[Group, bool]:
        """Add the frame to a group; returns the group and whether this writer leads it.

        The caller owns the lock.
        """
        group, frame_bytes = self._open, IO_ALIGNMENT + len(payload)
        if group is not None and group.nbytes + frame_bytes > self._group_bytes:
            self._close_group(group)
            group = None
        leads = group is None
        if group is None:
            group = self._open = Group()
        group.add(key, header, payload)
        if group.nbytes >= self._group_bytes or len(group.keys) >= MAX_BLOCKS:
            self._close_group(group)
        if self._writers_inside >= self._writers:
            self._changed.notify_all()
        return group, leads

    def _close_group(self, group: Group) -> None:
        group.closed = True
        if self._open is group:
            self._open = None
        self._changed.notify_all()

    def _lead_group(self, group: Group) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: group.closed or self._writers_inside >= self._writers, self._linger_s
            )
            self._changed.wait_for(lambda: self._uploading < self._uploads)
            self._uploading += 1
            self._close_group(group)
        try:
            self._upload(group)
        except BaseException as error:
            group.error = error
        finally:
            with self._changed:
                self._uploading -= 1
                self._counts["groups"] += group.error is None
                self._counts["grouped_blocks"] += len(group.keys) if group.error is None else 0
                group.ended = True
                self._changed.notify_all()


def _reraise(error: BaseException) -> None:
    """Raise the group's error in one of its writers, as a separate exception object."""
    for kind in (TierUnavailable, TierFull, TierError):
        if isinstance(error, kind):
            raise kind(str(error)) from error
    raise error
