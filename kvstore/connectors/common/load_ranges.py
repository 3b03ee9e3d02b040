"""A run that is loaded in several pieces, the last first, while its front is computed.

A store's load is a leading run of what was asked for, and blocks are fetched in the order in which
they were asked for. So the run is asked for in segments, the first blocks (which lie in L2) and
then the others from the end on: whatever the engine has computed when the two meet, everything
behind it is there. A run of which nothing is to be computed is asked for in one piece, and split
should it be late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.connectors.common.guarded_store import GuardedStore
from kvstore.interface import Load

SEGMENTS_MAX: Final = 16
"""Segments a run is loaded in, beside its part in L2."""
SEGMENT_MIN: Final = 4
"""Blocks of a segment, unless the run is shorter."""


@dataclass(eq=False, slots=True)
class Segment:
    """Blocks first..end of the prompt. given_up: what has not arrived is not wanted any more."""

    first: int
    ticket: Load
    given_up: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.ticket.hashes)

    @property
    def arrived_end(self) -> int:
        """Where what has arrived ends."""
        return self.first + len(self.ticket.slots)

    @property
    def coming(self) -> range:
        """Blocks that may still arrive."""
        done = self.ticket.done or self.given_up
        return range(0) if done else range(self.arrived_end, self.end)


@dataclass(eq=False)
class Segments:
    """What one request has asked for, by place in its prompt.

    hashes: of the prompt's whole chain. tiers: where each block from `base` on lay when it was
    asked for. gone: blocks that had arrived in segments handed back since.
    """

    store: GuardedStore
    hashes: Sequence[bytes]
    base: int
    tiers: Sequence[str]
    held: list[Segment] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def ask(self, leading: int) -> None:
        """Ask for every block of `tiers`: the first `leading` ones, then the rest from its end."""
        start = self.base + leading
        self._ask(self.base, start)
        self._ask_from_end(start, self.base + len(self.tiers))

    def ask_whole(self) -> None:
        """Ask for every block of `tiers` in one piece, in order."""
        self._ask(self.base, self.base + len(self.tiers))

    def split(self) -> None:
        """Ask anew for what is on its way, from its end on."""
        for segment in [segment for segment in self.held if segment.coming]:
            self.held.remove(segment)
            self._ask(segment.first, segment.arrived_end)  # before its lease goes
            self._ask_from_end(segment.arrived_end, segment.end)
            self._release(segment)

    def _ask_from_end(self, start: int, end: int) -> None:
        size = max(SEGMENT_MIN, -(-(end - start) // SEGMENTS_MAX))
        for first in reversed(range(start, end, size)):
            self._ask(first, min(first + size, end))

    def tier(self, block: int) -> str:
        """Where a block lay."""
        return self.tiers[block - self.base]

    def ready(self, first: int) -> int:
        """How many blocks from `first` on have arrived, in one row and one slab."""
        end, slab = first, None
        for segment in self.held:
            if segment.first > end or segment.first < first:
                break
            here = self.store.store.slab_of(segment.ticket)
            if slab is not None and here is not slab:
                break
            end, slab = segment.arrived_end, here
            if end < segment.end:
                break
        return max(0, end - first)

    def coming(self, first: int) -> list[int]:
        """Blocks from `first` on that are on their way, in order."""
        return [block for segment in self.held for block in segment.coming if block >= first]

    def next_arrived(self, first: int) -> int | None:
        """The first block from `first` on that has arrived."""
        found = (s.first for s in self.held if s.first >= first and s.ticket.slots)
        return next(found, None)

    def arrived(self) -> Counter[str]:
        """Blocks that have arrived, by tier, since the beginning; each once, though asked anew."""
        blocks = set(self.gone)
        for segment in self.held:
            blocks.update(range(segment.first, segment.arrived_end))
        return Counter(self.tier(block) for block in blocks)

    def cut(self, first: int) -> None:
        """What lies before block `first` is not wanted any more."""
        while self.held and self.held[0].first < first:
            segment = self.held.pop(0)
            if segment.end > first:
                self._ask(first, segment.end)  # before its lease goes: nobody evicts it meanwhile
            self._release(segment)

    def give_up(self) -> int:
        """What has not arrived is not wanted any more; returns how many blocks that is."""
        count = 0
        for segment in list(self.held):
            count += len(segment.coming)
            segment.given_up = True
            if not segment.ticket.slots:
                self.held.remove(segment)
                self._release(segment)
        return count

    def take(self, first: int, blocks: int) -> list[Load]:
        """Hand out the tickets of `blocks` blocks that have arrived; the caller releases them."""
        tickets, end = [], first + blocks
        while self.held and self.held[0].first < end:
            segment = self.held.pop(0)
            assert segment.first >= first
            tickets.append(segment.ticket)
            self.gone.update(range(segment.first, segment.arrived_end))
            if end < segment.end and (segment.coming or end < segment.arrived_end):
                self._ask(end, segment.end)
        return tickets

    def slots(self) -> tuple[int, int]:
        """Slots held, and those held or still to come."""
        arrived = sum(len(segment.ticket.slots) for segment in self.held)
        return arrived, arrived + sum(len(segment.coming) for segment in self.held)

    def ticket_ids(self) -> Iterator[int]:
        """Of every segment."""
        return (segment.ticket.ticket_id for segment in self.held)

    def close(self) -> None:
        """Hand everything back."""
        held, self.held = self.held, []
        for segment in held:
            self._release(segment)

    def _ask(self, first: int, end: int) -> None:
        """Blocks first..end as a segment; a store that does not take it leaves a gap."""
        if first >= end:
            return
        ticket = self.store.load(self.hashes[first:end])
        if ticket is not None:
            self.held.append(Segment(first, ticket))
            self.held.sort(key=lambda segment: segment.first)

    def _release(self, segment: Segment) -> None:
        self.gone.update(range(segment.first, segment.arrived_end))
        self.store.release(segment.ticket)
