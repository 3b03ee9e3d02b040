"""Frames of other releases in a tier: a wrapper that hides, counts and never deletes them.

During a rolling upgrade, and after going back to an older release, a tier has frames that this
release does not understand (`FrameUnsupported`). To this release such a key is absent: `contains`
is False, `read` is a miss, and `write` fails, because the first writer wins. The frame stays for
the releases that understand it.

The wrapper remembers the keys for `RECHECK_S`. Otherwise every lookup of a prefix would report
blocks that cannot be loaded, and every load would read them again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.blocks.key import Key
from kvstore.codecs import check_supported
from kvstore.errors import FrameTooLarge, FrameUnsupported
from kvstore.tiers.base import IO_ALIGNMENT, Tier
from kvstore.tiers.wrappers import Clock, Wrapper

log = logging.getLogger(__name__)

MAX_HIDDEN: Final = 1 << 15
"""Maximum number of hidden keys; the oldest is then forgotten, and found again by a read."""
RECHECK_S: Final = 600.0
"""Time after which a hidden key is read again. The frame may have been evicted and written anew."""
MAX_KINDS: Final = 32
"""Maximum number of kinds that are logged; frames of further kinds are only counted."""
_EMPTY: Final = memoryview(bytearray())
_NO_HEADER: Final = bytes(IO_ALIGNMENT)


class UnsupportedFrames(Wrapper):
    """Hides the frames that this release does not understand. The module's docstring says how."""

    def __init__(self, tier: Tier, *, clock: Clock = time.monotonic) -> None:
        super().__init__(tier)
        self._clock = clock
        self._lock = threading.Lock()
        self._hidden: OrderedDict[Key, tuple[float, str]] = OrderedDict()
        """Time at which each hidden key is read again, and the reason."""
        self._kinds: set[str] = set()
        self._frames = 0
        self._writes = 0

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        found = self.inner.contains(keys)
        if not self._hidden:
            return found
        found = list(found)
        with self._lock:
            for index, key in enumerate(keys):
                if not found[index]:
                    self._hidden.pop(key, None)  # deleted by another node, or evicted
                elif self._reason(key):
                    found[index] = False
        return found

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """Read a frame. A hidden key is a miss. The caller passes a frame that it does not
        understand to `hide`."""
        return 0 if self._is_hidden(key) else self.inner.read(key, header, payload)

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Write a frame. Raises FrameUnsupported: the tier has one of another release."""
        self._reject_hidden(key)
        try:
            self.inner.write(key, header, payload)
        except FrameUnsupported as error:
            self.hide(key, error, writes=1)
            raise

    def delete(self, keys: Sequence[Key]) -> None:
        self.inner.delete(keys)
        with self._lock:
            for key in keys:
                self._hidden.pop(key, None)

    def usage(self) -> Iterator[tuple[Key, int]]:
        return ((key, size) for key, size in self.inner.usage() if not self._is_hidden(key))

    def clear(self) -> None:
        self.inner.clear()
        with self._lock:
            self._hidden.clear()

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            own = {
                "unsupported_frames": self._frames,
                "unsupported_writes": self._writes,
                "unsupported_hidden": len(self._hidden),
            }
        return {**self.inner.stats(), **own}

    def hide(self, key: Key, error: FrameUnsupported, *, writes: int = 0) -> None:
        """Hide a key and count its frame. The first frame of a kind is logged.

        error: its text is the kind. writes: number of writes that the frame prevented.
        """
        kind = str(error)
        with self._lock:
            self._frames += key not in self._hidden
            self._writes += writes
            self._hidden[key] = (self._clock() + RECHECK_S, kind)
            if len(self._hidden) > MAX_HIDDEN:
                self._hidden.popitem(last=False)
            is_new = kind not in self._kinds and len(self._kinds) < MAX_KINDS
            if is_new:
                self._kinds.add(kind)
        if is_new:
            log.warning(
                "tier %s: unsupported %s: a miss, and not deleted; another release wrote it. "
                "Further frames of this kind are counted only",
                self.name,
                kind,
            )

    def check_stored(self, key: Key, header: memoryview) -> None:
        """Check a key that the tier contains already: a write of it would change nothing.

        header: a buffer of 4,096 bytes. Reads one header: always from a tier of which this process
        is the only writer (it is local), from others only while keys are hidden.

        Raises FrameUnsupported: the tier's frame is of another release. Passes on its errors.
        """
        if not (self._hidden or self.sole_writer):
            return
        self._reject_hidden(key)
        header[:IO_ALIGNMENT] = _NO_HEADER
        try:
            self.inner.read(key, header, _EMPTY)
        except FrameTooLarge:  # as every frame is
            try:
                check_supported(header)
            except FrameUnsupported as error:
                self.hide(key, error, writes=1)
                raise

    def _is_hidden(self, key: Key) -> bool:
        if not self._hidden:
            return False
        with self._lock:
            return bool(self._reason(key))

    def _reject_hidden(self, key: Key) -> None:
        """Count and raise FrameUnsupported for a write of a hidden key."""
        with self._lock:
            reason = self._reason(key)
            if reason:
                self._writes += 1
                raise FrameUnsupported(reason)

    def _reason(self, key: Key) -> str:
        """Why a key is hidden; "" if it is not. The caller owns the lock."""
        until_s, reason = self._hidden.get(key, (0.0, ""))
        if reason and self._clock() >= until_s:
            del self._hidden[key]
            return ""
        return reason
