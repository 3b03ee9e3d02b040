"""The table of slots: who holds what. Counts and leases, no decisions.

A slot is FREE, FILLING (somebody writes to it; nobody else sees it) or READY. It has one count:
residency is one reference, each lease one more. Every lease stands in the book of one client, so
that all of them can be taken back when it dies. A count or a book that would fall below zero
raises; nothing is clamped.

All methods are called under the brain's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from kvstore.blocks.key import Key
from kvstore.cache.event_queue import Changes
from kvstore.cache.quotas import SlotQuotas

WORKERS: Final = 0
"""The client that holds the leases of the store's own workers."""
PINS: Final = -1
"""The client that holds one lease on each pinned block."""


class Listing(Protocol):
    """Where READY blocks are shown to others as they come and go; called under the brain's lock."""

    def show(self, key: Key) -> None:
        """The block is READY; it may be shown already."""
        ...

    def take_off(self, key: Key) -> None:
        """It is not any more."""
        ...


class Block:
    """What is known of a slot that is not free."""

    __slots__ = (
        "count",
        "dirty",
        "epoch",
        "filler",
        "hits",
        "key",
        "nbytes",
        "ready",
        "slot",
        "written",
    )

    def __init__(self, key: Key, slot: int, nbytes: int, filler: int) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.filler = filler
        self.ready = False
        self.count = 1
        self.hits = 0
        self.epoch = 0
        """The table's epoch when it was published."""
        self.dirty = False
        """Must be written below before it may be evicted (write_back)."""
        self.written = False
        """Has been sent to the tiers below, or came from one."""

    @property
    def evictable(self) -> bool:
        """Nobody has a lease on it, and it needs no writing first."""
        return self.ready and self.count == 1 and not self.dirty


class SlotTable:
    """`slots` slots, the blocks in them, and every client's leases."""

    def __init__(self, slots: int, policy: SlotQuotas) -> None:
        assert slots > 0
        self.slots = slots
        self.policy = policy
        self.epoch = 0
        """Counts on as time goes by, for who lets blocks grow old."""
        self.evictable = 0
        """READY blocks that could be evicted now."""
        self.evictions = 0
        self.changes = Changes(self._resident)
        self._free = list(range(slots - 1, -1, -1))
        self._blocks: dict[Key, Block] = {}
        self._by_slot: list[Block | None] = [None] * slots
        self._held: dict[int, Counter[int]] = {WORKERS: Counter(), PINS: Counter()}
        self._listing: Listing | None = None

    @property
    def free(self) -> int:
        """Slots that are FREE."""
        return len(self._free)

    def list_in(self, listing: Listing) -> None:
        """Show every READY block there, now and from here on."""
        self._listing = listing
        for block in self._blocks.values():
            if block.ready:
                listing.show(block.key)

    def add_client(self, client: int) -> None:
        """A client that may hold leases from here on."""
        assert client not in self._held, f"client {client} is known already"
        self._held[client] = Counter()

    def drop_client(self, client: int) -> None:
        """Every lease of the client comes back; what it was filling is FREE."""
        for slot, leases in list(self._held[client].items()):
            for _ in range(leases):
                if self.at(slot).ready:
                    self.release(client, slot)
                else:
                    self.discard(client, slot)
        del self._held[client]

    def get(self, key: Key) -> Block | None:
        """The block of this key, FILLING or READY."""
        return self._blocks.get(key)

    def usable(self, key: Key, nbytes: int) -> Block | None:
        """The block of this key if it is READY and of this size."""
        block = self._blocks.get(key)
        return block if block is not None and block.ready and block.nbytes == nbytes else None

    def run(self, keys: Sequence[Key], nbytes: int) -> int:
        """How many of these blocks, from the first on, are READY and of this size."""
        blocks = self._blocks
        for index, key in enumerate(keys):
            block = blocks.get(key)
            if block is None or not block.ready or block.nbytes != nbytes:
                return index
        return len(keys)

    def held(self, keys: Sequence[Key], nbytes: int, coming: Collection[Key]) -> list[bool]:
        """For each key, whether its block is READY and of this size, or among those to come."""
        found = map(self._blocks.get, keys)
        held = [b is not None and b.ready and b.nbytes == nbytes for b in found]
        if not coming:
            return held
        return [ready or key in coming for ready, key in zip(held, keys, strict=True)]

    def at(self, slot: int) -> Block:
        """The block in a slot that is not free."""
        block = self._by_slot[slot]
        assert block is not None, f"slot {slot} is free"
        return block

    def take(self) -> int | None:
        """A free slot, made by evicting the coldest block that may go; None when there is none.

        The slot must be given to `fill` before anything else happens.
        """
        if not self._free:
            if not self.evictable:
                return None
            self.evict(next(b for b in map(self.__getitem__, self.policy.victims()) if b.evictable))
        return self._free.pop()

    def fill(self, client: int, key: Key, slot: int, nbytes: int) -> None:
        """FREE to FILLING: the slot is the client's alone."""
        assert key not in self._blocks, "a key is filled once"
        block = Block(key, slot, nbytes, client)
        self._held[client][slot] += 1
        self._blocks[key] = block
        self._by_slot[slot] = block
        self.policy.took(key.tenant)

    def publish(self, client: int, slot: int) -> Block:
        """FILLING to READY, the only way there: the filler's reference becomes residency."""
        block = self._filled_by(client, slot)
        self._take_back(client, slot)
        block.ready = True
        block.epoch = self.epoch
        self.policy.inserted(block.key, block.nbytes)
        self.evictable += block.evictable
        if self._listing is not None:
            self._listing.show(block.key)
        self.changes.moved(block.key, True)
        return block

    def discard(self, client: int, slot: int) -> None:
        """FILLING to FREE: it was not filled."""
        block = self._filled_by(client, slot)
        self._take_back(client, slot)
        block.count -= 1
        self._set_free(block)

    def lease(self, client: int, block: Block) -> None:
        """One more reference on a READY block, in the client's book."""
        assert block.ready, f"slot {block.slot} is being filled"
        self.evictable -= block.evictable
        block.count += 1
        self._held[client][block.slot] += 1

    def release(self, client: int, slot: int) -> Block:
        """One reference less. Residency itself goes only by `evict`."""
        block = self.at(slot)
        assert block.ready, f"slot {slot} is being filled"
        self._take_back(client, slot)
        assert block.count > 1, f"slot {slot} released past its residency"
        block.count -= 1
        self.evictable += block.evictable
        return block

    def set_dirty(self, block: Block, dirty: bool) -> None:
        """Whether the block must be written below before it may go."""
        self.evictable -= block.evictable
        block.dirty = dirty
        self.evictable += block.evictable

    def evict(self, block: Block) -> None:
        """READY to FREE."""
        assert block.ready
        assert block.count == 1, f"slot {block.slot} is leased"
        self.evictable -= block.evictable
        block.count -= 1
        self.policy.removed(block.key)
        self._set_free(block)
        self.evictions += 1
        if self._listing is not None:
            self._listing.take_off(block.key)
        self.changes.moved(block.key, False)

    def evict_idle(self) -> int:
        """Evict every block without a lease, dirty or not; returns how many."""
        idle = [b for b in self._blocks.values() if b.ready and b.count == 1]
        for block in idle:
            self.evict(block)
        return len(idle)

    def dirty(self) -> set[Key]:
        """Blocks that must be written below before they may be evicted."""
        return {key for key, block in self._blocks.items() if block.dirty}

    def older(self, epochs: int) -> list[Block]:
        """READY blocks that were published at least so many epochs ago."""
        oldest = self.epoch - epochs
        return [b for b in self._blocks.values() if b.ready and b.epoch <= oldest]

    def ready(self) -> list[Block]:
        """Every READY block."""
        return [block for block in self._blocks.values() if block.ready]

    @property
    def pinned(self) -> int:
        """Blocks that are pinned."""
        return len(self._held[PINS])

    def is_pinned(self, block: Block) -> bool:
        """Whether a block is pinned."""
        return block.slot in self._held[PINS]

    def pin(self, block: Block) -> None:
        """A lease that only `unpin` ends. The block stands in no order of eviction meanwhile: at
        its cold end pins would have to be stepped over at every eviction."""
        assert not self.is_pinned(block), f"slot {block.slot} is pinned already"
        self.lease(PINS, block)
        self.policy.removed(block.key)

    def unpin(self, block: Block) -> None:
        """The block may be evicted again; it counts as just used."""
        self.release(PINS, block.slot)
        self.policy.inserted(block.key, block.nbytes)

    def pinned_of(self, keys: Iterable[Key] | None) -> list[Block]:
        """Those of these keys' blocks, or of all, that are pinned."""
        if keys is None:
            return [self.at(slot) for slot in self._held[PINS]]
        blocks = map(self._blocks.get, keys)
        return [block for block in blocks if block is not None and self.is_pinned(block)]

    def touch(self, block: Block) -> None:
        """A READY block was used."""
        if not self.is_pinned(block):
            self.policy.touched(block.key)

    def stats(self) -> dict[str, int]:
        """Occupancy, in slots. free + filling + ready = slots."""
        blocks = self._blocks.values()
        ready = sum(block.ready for block in blocks)
        return {
            "slots": self.slots,
            "slots_free": len(self._free),
            "slots_filling": len(blocks) - ready,
            "slots_ready": ready,
            "slots_leased": sum(
                block.ready and block.count > 1 + self.is_pinned(block) for block in blocks
            ),
            "slots_pinned": self.pinned,
            "slots_dirty": sum(block.dirty for block in blocks),
            "evictions": self.evictions,
        }

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert len(self._free) + len(self._blocks) == self.slots
        assert len(set(self._free)) == len(self._free)
        leases: Counter[int] = Counter()
        for held in self._held.values():
            assert all(count > 0 for count in held.values())
            leases.update(held)
        for slot, block in enumerate(self._by_slot):
            if block is None:
                assert slot in self._free
                assert leases[slot] == 0
            else:
                assert block.slot == slot
                assert self._blocks[block.key] is block
                assert block.count == leases[slot] + block.ready
        assert self.evictable == sum(block.evictable for block in self._blocks.values())
        assert all(count == 1 for count in self._held[PINS].values()), "pinned twice"
        assert self.policy.slots == Counter(key.tenant for key in self._blocks)
        resident = {
            key for key, block in self._blocks.items() if block.ready and not self.is_pinned(block)
        }
        assert resident == set(self.policy.victims())

    def __getitem__(self, key: Key) -> Block:
        return self._blocks[key]

    def _resident(self) -> list[Key]:
        return [key for key, block in self._blocks.items() if block.ready]

    def _filled_by(self, client: int, slot: int) -> Block:
        block = self.at(slot)
        assert not block.ready, f"slot {slot} is published already"
        assert block.filler == client, f"slot {slot} is not filled by client {client}"
        return block

    def _take_back(self, client: int, slot: int) -> None:
        """Strike one lease from a client's book."""
        held = self._held[client]
        assert held[slot] > 0, f"client {client} has no lease on slot {slot}"
        held[slot] -= 1
        if not held[slot]:
            del held[slot]

    def _set_free(self, block: Block) -> None:
        assert block.count == 0
        del self._blocks[block.key]
        self._by_slot[block.slot] = None
        self.policy.gave(block.key.tenant)
        self._free.append(block.slot)
