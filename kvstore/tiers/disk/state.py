"""What the directories of one disk tier have in common: the lock, the index, who uses what.

Every segment has one reference for being in a table and one for each call that holds its
descriptor. Leaving the table removes its file at once; the descriptor is closed by whoever lets
go last, so a read under way ends well. Its bytes count until then.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.blocks.key import Key
from kvstore.tiers.disk.index import MAX_SLOTS, Index, pack_place, unpack_place
from kvstore.tiers.disk.segment import Segment

AGE_PARTS = 8
"""With a time to live, a segment takes frames for this part of it, so that all of them go when
the first one must and none much earlier."""
OVERTAKEN_MAX = 1 << 16
"""Blocks whose older copies are remembered; see `Shared.overtaken`."""
CHECKPOINT_BYTES = 1 << 30
"""Frames written to a segment since its last checkpoint that are worth another one."""


@dataclass(frozen=True)
class Limits:
    """What a directory may take, and for how long. Sizes in bytes; ttl_ms 0: for ever."""

    capacity_bytes: int
    segment_bytes: int
    eviction: str = "lru"
    ttl_ms: int = 0
    checkpoint_bytes: int = CHECKPOINT_BYTES
    clock: Callable[[], float] = time.time
    """Seconds since 1970."""

    @property
    def append_ms(self) -> float:
        """How long a segment takes frames; 0: as long as there is room."""
        return self.ttl_ms / AGE_PARTS

    def now_ms(self) -> int:
        return int(self.clock() * 1000)


class Shared:
    """`lock` guards all of it, is the tier's own, and is never held across I/O.

    Methods are called with the lock held.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.index = Index()
        self.segments: dict[int, Segment] = {}
        """Every segment of every directory, by its slot in places."""
        self.evictions = 0
        """Blocks that went with their segment."""
        self.expired = 0
        """Of these, the ones whose time was over."""
        self.torn = 0
        self._overtaken: OrderedDict[Key, list[tuple[Segment, int]]] = OrderedDict()
        self._held = 0
        self._uses = 0

    def enter(self, segment: Segment) -> None:
        """Give a segment a slot, and the reference of its table."""
        segment.slot = next(slot for slot in range(MAX_SLOTS) if slot not in self.segments)
        segment.users += 1
        self.segments[segment.slot] = segment
        self.touch(segment)

    def put(self, key: Key, segment: Segment, page: int, pages: int) -> None:
        """A frame is written, and visible from now on.

        An older one of the same key lies where it could not be had: its directory was left alone.
        Who deletes the key must find that too, or it would be back after a restart.
        """
        old = self.index.get(key)
        if old:
            slot, old_page, _ = unpack_place(old)
            self._overtaken.setdefault(key, []).append((self.segments[slot], old_page))
            if len(self._overtaken) > OVERTAKEN_MAX:
                self._overtaken.popitem(last=False)
        self.index.put(key, pack_place(segment.slot, page, pages))

    def take_out(self, key: Key) -> list[tuple[Segment, int]]:
        """Take a key out of the index: where its frames lie (segment, page), to be killed there."""
        found = self._overtaken.pop(key, [])
        place = self.index.get(key)
        if place:
            slot, page, _ = unpack_place(place)
            self.index.remove(key, place)
            found.append((self.segments[slot], page))
        return [(segment, page) for segment, page in found if not segment.dead]

    def leave(self, segment: Segment) -> int:
        """Take a segment and its blocks out; how many these were."""
        segment.dead = True
        del self.segments[segment.slot]
        gone = self.index.remove_all(segment.entries, segment.slot)
        self.evictions += gone
        return gone

    def touch(self, segment: Segment) -> None:
        """It was used just now."""
        self._uses += 1
        segment.last_used = self._uses

    def hold(self, segment: Segment) -> None:
        """Keep the descriptor open until `let_go`."""
        segment.users += 1
        self._held += 1

    def let_go(self, segment: Segment) -> bool:
        """Return what `hold` took; True when the caller is the last, and must `bury` it."""
        self._held -= 1
        segment.users -= 1
        assert segment.users >= 0, "a segment dropped twice"
        if not self._held:
            self.changed.notify_all()
        return segment.users == 0

    def busy(self) -> bool:
        """Whether any call holds a segment."""
        return self._held > 0
