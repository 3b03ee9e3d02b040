"""The pages of one host pool in one namespace: asked for, read and written in batches.

Answers are one word per page and never an exception for a fault of the store: what is not there,
damaged, late or unreachable is False. A block is verified by the store (length, checksums, key and
namespace) before its slot is shown to us, so what is copied out of a slot is what was stored.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.blocks.key import Namespace
from kvstore.connectors.sglang.copies import Copies, Extents, page_bytes
from kvstore.connectors.sglang.settings import DeadlineSettings
from kvstore.connectors.sglang.shared_client import Desk
from kvstore.interface import BlockStore, Load, Match

LEASED_SHARE: Final = 4
"""One ticket leases at most this part (a quarter) of the slab's slots: other ranks read too."""
LOADS_AHEAD: Final = 2
"""Loads that are out at once: the next is under way while one is copied."""
HOLES_MAX: Final = 4
"""Pages of a batch that may be missing before the rest of it counts as missing too."""
NO_SLOT_WAIT_S: Final = 0.002
"""Between two tries for slots that others hold."""
HASH_BYTES: Final = 32


def hashes_of(keys: Sequence[str]) -> list[bytes]:
    """SGLang's keys as hashes: the 32 bytes that 64 hex digits spell, else their digest.

    They are SGLang's own chain over the tokens before a page, and opaque here: two keys that differ
    in any letter are two hashes.
    """
    joined = joined_of(keys)
    return list(_split(len(keys)).unpack(joined)) if joined else [_hash_of(key) for key in keys]


def joined_of(keys: Sequence[str]) -> bytes:
    """The hashes of keys that are 64 hex digits each, one after another; nothing of other keys."""
    text = "".join(keys)
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return b""
    return raw if raw.hex() == text and set(map(len, keys)) == {2 * HASH_BYTES} else b""


@functools.lru_cache(maxsize=256)
def _split(count: int) -> struct.Struct:
    """Cuts `count` hashes apart: one call, where slices are as many."""
    return struct.Struct(f"{HASH_BYTES}s" * count)


def _hash_of(key: str) -> bytes:
    if len(key) == 2 * HASH_BYTES:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            raw = b""
        if raw.hex() == key:
            return raw
    return hashlib.sha256(key.encode()).digest()


class Shelf:
    """See the module's text. Methods may be called from several threads.

    store: bound to the pool's namespace; the shelf owns and closes it.
    copies: shared with other shelves; not closed here.
    """

    def __init__(self, store: BlockStore, copies: Copies, deadline: DeadlineSettings) -> None:
        self.namespace: Namespace = store.namespace
        self._desk = Desk(store)
        self._copies = copies
        self._deadline = deadline
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def run(self, keys: Sequence[str]) -> int:
        """How many of these pages, from the first on, the store holds.

        No trip where the node's catalogue tells, else one. Tiers that have to be asked over the
        network are asked by it, and known by the reads that follow.
        """
        if not keys or self._desk.lacks(_hash_of(keys[0]), lambda: hashes_of(keys)):
            return 0
        known = self._desk.known(joined_of(keys), HASH_BYTES, lambda: hashes_of(keys))
        return self._run(hashes_of(keys), self._until(0)) if known is None else known

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """For each page whether the store holds it, whatever stands before it. One trip for those
        that the node's catalogue does not tell of."""
        hashes = hashes_of(keys)
        states = self._desk.states(hashes)
        unknown = [index for index, state in enumerate(states) if state is None]
        if unknown:
            ticket = self._desk.match([hashes[index] for index in unknown])
            run = self._answer(ticket, self._until(0))
            behind = ticket.behind if ticket.done else ()
            for at in (*range(run), *behind):
                states[unknown[at]] = True
        return [state is True for state in states]

    def get(self, keys: Sequence[str], pages: Sequence[Extents]) -> list[bool]:
        """Copy pages to their extents; True for each that is there, all its bytes.

        The extents of a page that is False are untouched.
        """
        assert len(keys) == len(pages), f"{len(keys)} keys for {len(pages)} pages"
        hashes = hashes_of(keys)
        got = [False] * len(keys)
        if not self._fits(pages):
            return got
        deadline_s = self._until(len(keys) * self.namespace.block_bytes)
        start = holes = 0
        cut_at = -1
        while start < len(hashes) and self._desk.slots:
            start += self._read(hashes[start:], pages[start:], got, start, deadline_s)
            if start == len(hashes) or time.monotonic() >= deadline_s:
                break
            # The next block is missing or damaged, or lies in a tier that finds what it is asked
            # for, or other readers hold all slots.
            while not (found := self._run(hashes[start:], deadline_s)) and holes < HOLES_MAX:
                holes += 1
                start += 1
            if not found:
                break
            if start == cut_at:
                time.sleep(NO_SLOT_WAIT_S)
            cut_at = start
        self._count(got=sum(got), not_got=len(got) - sum(got))
        return got

    def set(self, keys: Sequence[str], pages: Sequence[Extents]) -> list[bool]:
        """Keep pages; True for each that the store holds now. A page that it held before is left
        as it is."""
        assert len(keys) == len(pages), f"{len(keys)} keys for {len(pages)} pages"
        hashes = hashes_of(keys)
        kept = 0
        if self._fits(pages):
            last_s = time.monotonic() + self._deadline.cap_ms / 1e3
            deadline_s = self._until(len(keys) * self.namespace.block_bytes)
            slab = self._desk.slab
            kept = self._write_all(hashes, pages, deadline_s)
            # What is written by then is worth a word more, within the cap.
            heard = kept and self._desk.confirm(min(last_s, max(deadline_s, self._until(0))))
            if not heard or self._desk.slab is not slab:
                kept = 0  # said to a sidecar that is gone, or does not answer
        self._count(kept=kept, not_kept=len(keys) - kept)
        return [index < kept for index in range(len(keys))]

    def stats(self) -> dict[str, int]:
        """Pages since the start: got, not_got, kept, not_kept."""
        with self._counting:
            return dict(self._counts)

    def close(self) -> None:
        """No call is under way."""
        self._desk.close()

    def __repr__(self) -> str:
        return f"shelf of {self.namespace.block_bytes} B pages, {self._desk!r}"

    # Reading.

    def _run(self, hashes: Sequence[bytes], deadline_s: float) -> int:
        return self._answer(self._desk.match(hashes), deadline_s) if hashes else 0

    def _answer(self, ticket: Match, deadline_s: float) -> int:
        """Length of the run by the deadline; a run only grows."""
        self._desk.wait(lambda: ticket.done, deadline_s)
        return len(ticket.tiers)

    def _read(
        self,
        hashes: Sequence[bytes],
        pages: Sequence[Extents],
        got: list[bool],
        offset: int,
        deadline_s: float,
    ) -> int:
        """Read the leading run; its length. `got[offset + i]` tells of the page i."""
        ahead: deque[Load] = deque()
        asking = self._windows(hashes)
        done = 0
        try:
            while True:
                while len(ahead) < LOADS_AHEAD and (window := next(asking, None)) is not None:
                    ahead.append(self._desk.load(window))
                if not ahead:
                    return done
                load = ahead[0]
                came = self._copy_out(load, pages[done : done + len(load.hashes)], deadline_s)
                got[offset + done : offset + done + came] = [True] * came
                done += came
                if came < len(load.hashes):
                    return done
                self._desk.release(ahead.popleft())
        finally:
            for load in ahead:
                self._desk.release(load)

    def _windows(self, hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """The batch in parts that leave slots for others."""
        size = max(1, self._desk.slots // LEASED_SHARE)
        for first in range(0, len(hashes), size):
            yield hashes[first : first + size]

    def _copy_out(self, load: Load, pages: Sequence[Extents], deadline_s: float) -> int:
        """Copy a load's blocks as they arrive; how many came by the deadline."""
        copied = 0
        while True:
            in_time = self._desk.wait(
                lambda: load.done or len(load.slots) > copied,  # noqa: B023 (called at once)
                deadline_s,
            )
            done, arrived = load.done, len(load.slots)
            if arrived > copied:
                slab = self._desk.slab_of(load)
                views = [slab.view(slot) for slot in load.slots[copied:arrived]]
                self._copies.to_host(views, pages[copied:arrived])
                copied = arrived
            elif done or not in_time:
                return copied

    # Writing.

    def _write_all(
        self, hashes: Sequence[bytes], pages: Sequence[Extents], deadline_s: float
    ) -> int:
        """Save the batch in parts; how many of the pages, from the first on, are kept."""
        kept = 0
        size = max(1, self._desk.slots // LEASED_SHARE)
        while kept < len(hashes) and self._desk.slots:
            end = kept + size
            wrote = self._write(hashes[kept:end], pages[kept:end], deadline_s)
            kept += wrote
            if kept < len(hashes) and time.monotonic() >= deadline_s:
                break
            if not wrote:
                time.sleep(NO_SLOT_WAIT_S)
        return kept

    def _write(self, hashes: Sequence[bytes], pages: Sequence[Extents], deadline_s: float) -> int:
        """Save one part; how many of its pages, from the first on, are held afterwards."""
        save = self._desk.save(hashes)
        committed = False
        try:
            if not self._desk.wait(lambda: save.done, deadline_s) or save.fault:
                return 0
            slab = self._desk.slab_of(save)
            views = [slab.view(slot) for _, slot in save.grants]
            self._copies.to_slots(views, [pages[index] for index, _ in save.grants])
            self._desk.commit(save)
            committed = True
            if not save.dropped:
                return len(hashes)
            # Slots are granted from the first block on; all that lack one lie behind the last.
            return save.grants[-1][0] + 1 if save.grants else 0
        finally:
            if not committed:
                self._desk.release(save)

    # Small things.

    def _fits(self, pages: Sequence[Extents]) -> bool:
        """Every page has exactly a block's bytes: nothing is read or written past an extent."""
        wrong = next((p for p in pages if page_bytes(p) != self.namespace.block_bytes), None)
        assert wrong is None, (
            f"a page of {page_bytes(wrong or ())} bytes where {self.namespace.block_bytes} are kept"
        )
        return bool(pages)

    def _until(self, nbytes: int) -> float:
        return time.monotonic() + self._deadline.of(nbytes)

    def _count(self, **pages: int) -> None:
        with self._counting:
            self._counts.update(pages)
