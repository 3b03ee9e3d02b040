"""Frames of writers that wait at the same time, grouped into one upload.

The first writer of a group leads it: it waits `linger_s` for others to join (not when the group is
full, nor when every writer there can be has come), then for one of `uploads` turns, while the group
stays open; then it uploads for all of them. Nothing is copied: the frames are the writers' own
buffers, and a writer returns only when the upload has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvstore.blocks.key import Key
from kvstore.errors import TierError, TierFull, TierUnavailable
from kvstore.tiers.base import PAGE_BYTES

MAX_BLOCKS: Final = 4096
"""Most blocks in one group."""


@dataclass(eq=False)
class Group:
    """Frames that travel together. closed: nobody joins any more. error: why it failed."""

    keys: list[Key] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    nbytes: int = 0
    closed: bool = False
    ended: bool = False
    error: BaseException | None = None

    def add(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """One more frame."""
        self.keys.append(key)
        self.views += [header[:PAGE_BYTES], payload]
        self.pages.append(1 + len(payload) // PAGE_BYTES)
        self.nbytes += PAGE_BYTES + len(payload)


class Packer:
    """Groups writers; thread-safe.

    upload: puts a whole group, and returns when its blocks are readable; bounded in time by
    itself. writers: how many may come at once; with all of them here nobody is waited for.
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
        self._inside = 0
        self._uploading = 0
        self._counts = {"groups": 0, "grouped_blocks": 0}

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Return when the frame is uploaded. Raises what its group's upload raised."""
        with self._changed:
            self._inside += 1
            group, leads = self._join(key, header, payload)
        try:
            if leads:
                self._lead(group)
            else:
                with self._changed:
                    # Not bounded here: the frame's buffer is in use until the upload ends, and
                    # that is bounded by its leader.
                    self._changed.wait_for(lambda: group.ended)
        finally:
            with self._changed:
                self._inside -= 1
        if group.error is not None:
            _raise_again(group.error)

    def stats(self) -> dict[str, int | float | str]:
        """Groups uploaded and blocks in them."""
        with self._changed:
            return dict(self._counts)

    def _join(self, key: Key, header: memoryview, payload: memoryview) -> tuple[Group, bool]:
        """The group that takes the frame, and whether its writer leads it; the lock is held."""
        group, frame_bytes = self._open, PAGE_BYTES + len(payload)
        if group is not None and group.nbytes + frame_bytes > self._group_bytes:
            self._close(group)
            group = None
        leads = group is None
        if group is None:
            group = self._open = Group()
        group.add(key, header, payload)
        if group.nbytes >= self._group_bytes or len(group.keys) >= MAX_BLOCKS:
            self._close(group)
        if self._inside >= self._writers:
            self._changed.notify_all()
        return group, leads

    def _close(self, group: Group) -> None:
        group.closed = True
        if self._open is group:
            self._open = None
        self._changed.notify_all()

    def _lead(self, group: Group) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: group.closed or self._inside >= self._writers, self._linger_s
            )
            self._changed.wait_for(lambda: self._uploading < self._uploads)
            self._uploading += 1
            self._close(group)
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


def _raise_again(error: BaseException) -> None:
    """Raise the fault of a group in one of its writers: each gets an exception of its own."""
    for kind in (TierUnavailable, TierFull, TierError):
        if isinstance(error, kind):
            raise kind(str(error)) from error
    raise error
