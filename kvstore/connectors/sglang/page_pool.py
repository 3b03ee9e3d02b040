"""The pages of one host pool in one namespace: looked up, read and written in batches.

The result is one bool for each page. An error of the store is never an exception: a page that is
missing, corrupt, late or unreachable is False. The store verifies a block (length, checksums, key
and namespace) before it assigns the slot, so a copied page has exactly the bytes that were saved.
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
from kvstore.connectors.sglang.settings import MaxWaitSettings
from kvstore.connectors.sglang.shared_client import SharedClient
from kvstore.interface import BlockStore, Load, Match

LEASE_DIVISOR: Final = 4
"""One operation leases at most a quarter of the slab's slots, because other ranks read too."""
CONCURRENT_LOADS: Final = 2
"""Maximum number of loads in flight: the next one runs while one is copied."""
HOLES_MAX: Final = 4
"""Maximum number of missing pages in a batch. After that the rest counts as missing too."""
NO_SLOT_WAIT_S: Final = 0.002
"""Delay between two attempts to lease slots that other readers have leased."""
HASH_BYTES: Final = 32


def hashes_of(keys: Sequence[str]) -> list[bytes]:
    """SGLang's keys as hashes: the 32 bytes of 64 hex digits, else the SHA-256 of the key.

    SGLang hashes all tokens up to the end of a page. The keys are opaque here: different keys have
    different hashes.
    """
    joined = joined_hashes(keys)
    return (
        list(_hash_splitter(len(keys)).unpack(joined))
        if joined
        else [_hash_of(key) for key in keys]
    )


def joined_hashes(keys: Sequence[str]) -> bytes:
    """The concatenated hashes of keys that are 64 hex digits each; empty for any other keys."""
    text = "".join(keys)
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return b""
    return raw if raw.hex() == text and set(map(len, keys)) == {2 * HASH_BYTES} else b""


@functools.lru_cache(maxsize=256)
def _hash_splitter(count: int) -> struct.Struct:
    """Splits `count` concatenated hashes in one call."""
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


class PagePool:
    """See the module's text. Methods may be called from several threads.

    store: bound to the pool's namespace; this page pool owns and closes it.
    copies: shared with other page pools; not closed here.
    """

    def __init__(self, store: BlockStore, copies: Copies, max_wait: MaxWaitSettings) -> None:
        self.namespace: Namespace = store.namespace
        self._client = SharedClient(store)
        self._copies = copies
        self._max_wait = max_wait
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()

    def cached_prefix_len(self, keys: Sequence[str]) -> int:
        """Number of leading pages that the store has.

        Answered from the node's shared index if possible, else by one match. That match also
        queries tiers over the network; the reads that follow use its result.
        """
        if not keys or self._client.is_absent(_hash_of(keys[0]), lambda: hashes_of(keys)):
            return 0
        length = self._client.cached_prefix_len(
            joined_hashes(keys), HASH_BYTES, lambda: hashes_of(keys)
        )
        return self._match_len(hashes_of(keys), self._deadline_of(0)) if length is None else length

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """True for each page that the store has, also beyond a gap. Needs one match for the pages
        that the node's shared index does not show."""
        hashes = hashes_of(keys)
        states = self._client.block_states(hashes)
        unknown = [index for index, state in enumerate(states) if state is None]
        if unknown:
            match = self._client.match([hashes[index] for index in unknown])
            length = self._wait_match(match, self._deadline_of(0))
            beyond_gap = match.beyond_gap if match.done else ()
            for index in (*range(length), *beyond_gap):
                states[unknown[index]] = True
        return [state is True for state in states]

    def get(self, keys: Sequence[str], pages: Sequence[Extents]) -> list[bool]:
        """Copy pages to their extents; True for each page that was copied in full.

        The extents of a page that is False are untouched.
        """
        assert len(keys) == len(pages), f"{len(keys)} keys for {len(pages)} pages"
        hashes = hashes_of(keys)
        got = [False] * len(keys)
        if not self._fits(pages):
            return got
        deadline_s = self._deadline_of(len(keys) * self.namespace.block_bytes)
        start = holes = 0
        cut_at = -1
        while start < len(hashes) and self._client.slots:
            start += self._read(hashes[start:], pages[start:], got, start, deadline_s)
            if start == len(hashes) or time.monotonic() >= deadline_s:
                break
            # The next block is missing or corrupt, or only a query of its tier finds it, or other
            # readers have leased all slots.
            while not (found := self._match_len(hashes[start:], deadline_s)) and holes < HOLES_MAX:
                holes += 1
                start += 1
            if not found:
                break
            if start == cut_at:
                time.sleep(NO_SLOT_WAIT_S)
            cut_at = start
        self._count(pages_loaded=sum(got), pages_missed=len(got) - sum(got))
        return got

    def set(self, keys: Sequence[str], pages: Sequence[Extents]) -> list[bool]:
        """Save pages; True for each page that the store has now. A page that is already stored is
        not written again.

        SGLang offers a page only once. So a save waits, within its maximum wait, for a sidecar that
        was lost and comes back.
        """
        assert len(keys) == len(pages), f"{len(keys)} keys for {len(pages)} pages"
        hashes = hashes_of(keys)
        stored, unsaved = 0, "pages_dropped"
        if self._fits(pages):
            last_s = time.monotonic() + self._max_wait.max / 1e3
            deadline_s = self._deadline_of(len(keys) * self.namespace.block_bytes)
            while True:
                slab = self._client.slab
                written = stored = self._write_all(hashes, pages, deadline_s)
                # The confirmation may take a little longer, but not longer than max_wait.max.
                confirmed = stored and self._client.confirm(
                    min(last_s, max(deadline_s, self._deadline_of(0)))
                )
                if not confirmed or self._client.slab is not slab:
                    stored = 0  # the sidecar has ended or does not respond
                if stored or not self._client.wait_for_reconnect(slab, deadline_s):
                    break
            if not stored and (written or not self._client.is_responsive):
                unsaved = "pages_failed"
        self._count(pages_saved=stored, **{unsaved: len(keys) - stored})
        return [index < stored for index in range(len(keys))]

    def reject(self, pages: int) -> None:
        """Count pages that must not be saved, because other weights computed them."""
        self._count(pages_rejected=pages)

    def stats(self) -> dict[str, int]:
        """Pages since the start, by the names of `metrics.COUNTERS`."""
        with self._counts_lock:
            return dict(self._counts)

    def close(self) -> None:
        """Close the store. No call may be under way."""
        self._client.close()

    def __repr__(self) -> str:
        return f"PagePool of {self.namespace.block_bytes} B pages, {self._client!r}"

    # Reading.

    def _match_len(self, hashes: Sequence[bytes], deadline_s: float) -> int:
        return self._wait_match(self._client.match(hashes), deadline_s) if hashes else 0

    def _wait_match(self, match: Match, deadline_s: float) -> int:
        """Number of matched blocks when the match ends, or at the deadline."""
        self._client.wait(lambda: match.done, deadline_s)
        return len(match.tiers)

    def _read(
        self,
        hashes: Sequence[bytes],
        pages: Sequence[Extents],
        got: list[bool],
        offset: int,
        deadline_s: float,
    ) -> int:
        """Read leading pages and return their number. `got[offset + i]` is the result of page i."""
        in_flight: deque[Load] = deque()
        windows = self._windows(hashes)
        done = 0
        try:
            while True:
                while (
                    len(in_flight) < CONCURRENT_LOADS
                    and (window := next(windows, None)) is not None
                ):
                    in_flight.append(self._client.load(window))
                if not in_flight:
                    return done
                load = in_flight[0]
                copied = self._copy_out(load, pages[done : done + len(load.hashes)], deadline_s)
                got[offset + done : offset + done + copied] = [True] * copied
                done += copied
                if copied < len(load.hashes):
                    return done
                self._client.release(in_flight.popleft())
        finally:
            for load in in_flight:
                self._client.release(load)

    def _windows(self, hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """Split the batch into parts that leave slots for other readers."""
        size = max(1, self._client.slots // LEASE_DIVISOR)
        for first in range(0, len(hashes), size):
            yield hashes[first : first + size]

    def _copy_out(self, load: Load, pages: Sequence[Extents], deadline_s: float) -> int:
        """Copy the blocks of a load as they arrive; returns the number copied by the deadline."""
        copied = 0
        while True:
            in_time = self._client.wait(
                lambda: load.done or len(load.slots) > copied,  # noqa: B023 (called at once)
                deadline_s,
            )
            done, arrived = load.done, len(load.slots)
            if arrived > copied:
                slab = self._client.slab_of(load)
                views = [slab.view(slot) for slot in load.slots[copied:arrived]]
                self._copies.to_host(views, pages[copied:arrived])
                copied = arrived
            elif done or not in_time:
                return copied

    # Writing.

    def _write_all(
        self, hashes: Sequence[bytes], pages: Sequence[Extents], deadline_s: float
    ) -> int:
        """Save the batch in parts; returns the number of leading pages that are stored."""
        stored = 0
        size = max(1, self._client.slots // LEASE_DIVISOR)
        while stored < len(hashes) and self._client.slots:
            end = stored + size
            written = self._write(hashes[stored:end], pages[stored:end], deadline_s)
            stored += written
            if stored < len(hashes) and time.monotonic() >= deadline_s:
                break
            if not written:
                time.sleep(NO_SLOT_WAIT_S)
        return stored

    def _write(self, hashes: Sequence[bytes], pages: Sequence[Extents], deadline_s: float) -> int:
        """Save one part; returns the number of its leading pages that are stored."""
        save = self._client.save(hashes)
        committed = False
        try:
            if not self._client.wait(lambda: save.done, deadline_s) or save.fault:
                return 0
            slab = self._client.slab_of(save)
            views = [slab.view(slot) for _, slot in save.slot_assignments]
            self._copies.to_slots(views, [pages[index] for index, _ in save.slot_assignments])
            self._client.commit(save)
            committed = True
            if not save.dropped:
                return len(hashes)
            # Slots are assigned in order: every dropped block comes after the last assigned one.
            return save.slot_assignments[-1][0] + 1 if save.slot_assignments else 0
        finally:
            if not committed:
                self._client.release(save)

    # Helpers.

    def _fits(self, pages: Sequence[Extents]) -> bool:
        """Check that every page has the size of a block, so that no copy passes an extent's end."""
        wrong = next((p for p in pages if page_bytes(p) != self.namespace.block_bytes), None)
        assert wrong is None, (
            f"a page of {page_bytes(wrong or ())} bytes, not {self.namespace.block_bytes}"
        )
        return bool(pages)

    def _deadline_of(self, nbytes: int) -> float:
        return time.monotonic() + self._max_wait.seconds_for(nbytes)

    def _count(self, **pages: int) -> None:
        with self._counts_lock:
            self._counts.update(pages)
