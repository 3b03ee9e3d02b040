"""Reads and writes frames of a store, for clients that cannot map its slab (HTTP).

A written frame is verified before its block becomes visible, and enters L2 like a save. A frame
that is read was verified when it left its tier, or is made from a leased slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from kvstore.blocks import frame
from kvstore.blocks.key import Key, Namespace
from kvstore.cache.commands import InFlightLoad, TierWrite
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import WORKERS
from kvstore.errors import FrameInvalid, FrameUnsupported, TierFull
from kvstore.shm.slab import Slab
from kvstore.store import block_io
from kvstore.store.locator import L2
from kvstore.tiers.base import Tier

log = logging.getLogger(__name__)


class FrameAccess:
    """Frame access to one store. Made by the store.

    namespace_of: the namespace of a digest, or None before the first session with it.
    dispatch: queues loads and writes for the workers. count_hits: counts blocks read from a tier.
    count_lookup: counts each requested frame, with its tier ("": a miss).
    """

    def __init__(
        self,
        manager: L2Manager,
        slab: Slab,
        tiers: Sequence[Tier],
        *,
        namespace_of: Callable[[str], Namespace | None],
        dispatch: Callable[[Iterable[InFlightLoad], Iterable[TierWrite]], None],
        count_hits: Callable[[str, int], None],
        count_lookup: Callable[[Key, str], None],
    ) -> None:
        self._manager = manager
        self._slab = slab
        self._tiers = list(tiers)
        self._namespace_of = namespace_of
        self._dispatch = dispatch
        self._count_hits = count_hits
        self._count_lookup = count_lookup

    @property
    def payload_bytes(self) -> int:
        """Size of a payload buffer that can hold any frame of this store."""
        return block_io.max_payload_bytes(self._slab.slot_bytes)

    def contains(self, keys: Sequence[Key]) -> list[str]:
        """For each key the name of the fastest tier that contains it, "" for a miss. Queries
        remote tiers, so it may block."""
        names = [""] * len(keys)
        for i, key in enumerate(keys):
            leased = self._manager.lease_for_worker(key)
            if leased is not None:
                self._manager.release(WORKERS, [leased[0]])
                names[i] = L2
        for tier in self._tiers:
            missing = [i for i, name in enumerate(names) if not name]
            if missing:
                found = block_io.checked_contains(tier, [keys[i] for i in missing])
                for i, hit in zip(missing, found, strict=True):
                    names[i] = tier.name if hit else ""
        return names

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """Read a verified frame of this block from L2 or a tier. Returns the payload's length, 0
        for a miss."""
        return self.read_l2(key, header, payload) or self.read_tiers(key, header, payload)

    def read_l2(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """`read` from L2 only. Never waits for a tier."""
        leased = self._manager.lease_for_worker(key)
        if leased is None:
            return 0
        slot, nbytes = leased
        try:
            length = _pack_frame(key, self._slab.view(slot)[:nbytes], header, payload)
            self._count_lookup(key, L2)
            return length
        finally:
            self._manager.release(WORKERS, [slot])

    def read_tiers(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """`read` from the tiers only. Blocks while a tier hangs."""
        for tier in self._tiers:
            try:
                length = block_io.read_frame(tier, key, header, payload)
                if length:
                    self._count_hits(tier.name, 1)
                    self._count_lookup(key, tier.name)
                    return length
            except FrameUnsupported:
                continue  # a miss; the tier has counted it
            except Exception as error:
                log.warning("tier %s: read failed: %s", tier.name, error)
        self._count_lookup(key, "")
        return 0

    def write(self, key: Key, header: memoryview, payload: memoryview) -> bool:
        """Save a frame's block to L2. False when the block is already cached or loading.

        Raises:
            FrameUnsupported: the frame is of another release.
            FrameInvalid: the frame is corrupt, has another key, or its block does not have the
                block size of its namespace. Before the first session of a namespace that size is
                unknown, and any block that fits in a slot is accepted (for HTTP-only clients). A
                later session replaces blocks of the wrong size.
            TierFull: no slot is free.
        """
        parsed = frame.parse_header(header, key)
        namespace = self._namespace_of(key.namespace)
        expected_bytes = namespace.block_bytes if namespace is not None else parsed.raw_bytes
        expected_bytes = min(expected_bytes, self._slab.slot_bytes)
        if parsed.raw_bytes != expected_bytes:
            raise FrameInvalid(
                f"block of {parsed.raw_bytes} bytes where {expected_bytes} bytes are expected"
            )
        frame.verify_stored(parsed, payload)
        allocation = self._manager.allocate_save(WORKERS, [key], parsed.raw_bytes)
        self._dispatch((), allocation.tier_writes)
        if allocation.dropped:
            raise TierFull("no free slot in L2; try again later")
        if not allocation.slot_assignments:
            return False
        [(_, slot)] = allocation.slot_assignments
        try:
            block_io.unpack_block(parsed, payload, self._slab.view(slot))
        except BaseException:
            self._manager.abandon(WORKERS, [slot])
            raise
        self._dispatch((), self._manager.commit(WORKERS, [slot]))
        return True


def _pack_frame(key: Key, block: memoryview, header: memoryview, payload: memoryview) -> int:
    """Copy a block into an uncompressed frame. Returns the payload's length."""
    end = frame.padded_bytes(len(block))
    payload[: len(block)] = block
    payload[len(block) : end] = bytes(end - len(block))
    # The checksum covers the copy, so it matches the bytes that are sent.
    block_sum = frame.checksum(payload[: len(block)])
    frame.pack_header(
        header,
        key=key,
        codec=block_io.UNCOMPRESSED_ID,
        raw_bytes=len(block),
        stored_bytes=len(block),
        raw_sum=block_sum,
        stored_sum=block_sum,
    )
    return end
