"""Frames in and out of a store, for clients that cannot map its slab (HTTP).

What comes in is verified before anybody can see it, and goes to L2 like a save; what goes out was
verified on its way up, or is made from a leased slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from kvstore.blocks import frame
from kvstore.blocks.key import Key, Namespace
from kvstore.cache.commands import Flight, Spill
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import WORKERS
from kvstore.errors import FrameInvalid, TierFull
from kvstore.shm.slab import Slab
from kvstore.store import block_io
from kvstore.store.locator import L2
from kvstore.tiers.base import Tier

log = logging.getLogger(__name__)


class FrameDoor:
    """Made by a store, of its own parts.

    namespace_of: the namespace of a digest, where a session has told of it.
    carry_out: gives the brain's plans to the workers. count_hits: blocks served from a tier.
    count_served: each frame asked for, and the tier it came from ("": nowhere).
    """

    def __init__(
        self,
        brain: L2Manager,
        slab: Slab,
        tiers: Sequence[Tier],
        *,
        namespace_of: Callable[[str], Namespace | None],
        carry_out: Callable[[Iterable[Flight], Iterable[Spill]], None],
        count_hits: Callable[[str, int], None],
        count_served: Callable[[Key, str], None],
    ) -> None:
        self._brain = brain
        self._slab = slab
        self._tiers = list(tiers)
        self._namespace_of = namespace_of
        self._carry_out = carry_out
        self._count_hits = count_hits
        self._count_served = count_served

    @property
    def payload_bytes(self) -> int:
        """Bytes a payload buffer must have to take any frame of this store."""
        return block_io.payload_bound(self._slab.slot_bytes)

    def contains(self, keys: Sequence[Key]) -> list[str]:
        """For each key the name of the fastest tier that has it, "" for none. Asks remote tiers,
        so it may wait for them."""
        names = [""] * len(keys)
        for i, key in enumerate(keys):
            borrowed = self._brain.borrow(key)
            if borrowed is not None:
                self._brain.release(WORKERS, [borrowed[0]])
                names[i] = L2
        for tier in self._tiers:
            missing = [i for i, name in enumerate(names) if not name]
            if missing:
                found = block_io.contained(tier, [keys[i] for i in missing])
                for i, has in zip(missing, found, strict=True):
                    names[i] = tier.name if has else ""
        return names

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """A verified frame of this block, from L2 or else a tier; payload bytes, 0 for a miss."""
        return self.resident(key, header, payload) or self.stored(key, header, payload)

    def resident(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """`read` from L2 only: memory's speed, whatever becomes of the tiers."""
        borrowed = self._brain.borrow(key)
        if borrowed is None:
            return 0
        slot, nbytes = borrowed
        try:
            length = _frame_of(key, self._slab.view(slot)[:nbytes], header, payload)
            self._count_served(key, L2)
            return length
        finally:
            self._brain.release(WORKERS, [slot])

    def stored(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """`read` from the tiers only: as slow as they are, and hung where one hangs."""
        for tier in self._tiers:
            try:
                length = block_io.read_frame(tier, key, header, payload)
                if length:
                    self._count_hits(tier.name, 1)
                    self._count_served(key, tier.name)
                    return length
            except Exception as error:
                log.warning("%s: read failed: %s", tier.name, error)
        self._count_served(key, "")
        return 0

    def write(self, key: Key, header: memoryview, payload: memoryview) -> bool:
        """Take a frame into L2 like a save; False when the block is held or on its way already.

        Raises:
            FrameInvalid: it is damaged, of another key, or of another size than its namespace's
                blocks. Before a session has told that size any that fits a slot is taken, for
                clients that speak HTTP only; a session then has what is of no use to it replaced.
            TierFull: no slot is free.
        """
        parsed = frame.parse_header(header, key)
        namespace = self._namespace_of(key.namespace)
        right = namespace.block_bytes if namespace is not None else parsed.raw_bytes
        right = min(right, self._slab.slot_bytes)
        if parsed.raw_bytes != right:
            raise FrameInvalid(f"a block of {parsed.raw_bytes} bytes; {right} are right")
        frame.verify_stored(parsed, payload)
        answer = self._brain.admit(WORKERS, [key], parsed.raw_bytes)
        self._carry_out((), answer.spills)
        if answer.dropped:
            raise TierFull("no slot of L2 is free; try again later")
        if not answer.grants:
            return False
        [(_, slot)] = answer.grants
        try:
            block_io.unpack_block(parsed, payload, self._slab.view(slot))
        except BaseException:
            self._brain.abandon(WORKERS, [slot])
            raise
        self._carry_out((), self._brain.commit(WORKERS, [slot]))
        return True


def _frame_of(key: Key, block: memoryview, header: memoryview, payload: memoryview) -> int:
    """Copy a block into an identity frame; payload bytes."""
    end = frame.padded(len(block))
    payload[: len(block)] = block
    payload[len(block) : end] = bytes(end - len(block))
    # The sum is of the copy: what leaves is what was checked.
    total = frame.checksum(payload[: len(block)])
    frame.pack_header(
        header,
        key=key,
        codec=block_io.IDENTITY,
        raw_bytes=len(block),
        stored_bytes=len(block),
        raw_sum=total,
        stored_sum=total,
    )
    return end
