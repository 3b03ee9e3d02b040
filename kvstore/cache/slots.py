"""The table of slots, the blocks in them and their leases. It makes no decisions.

A slot is FREE, FILLING (one client writes to it and no other client sees it) or READY. A READY
block has one reference for being cached and one more per lease. The table records the client of
every lease, so that it can release all leases of a client that dies. A count that would fall below
zero raises AssertionError; nothing is clamped.

Call it under the L2 manager's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Protocol

from kvstore.blocks.key import Key
from kvstore.cache.block import Block
from kvstore.cache.chains import Chains
from kvstore.cache.event_queue import L2EventQueue
from kvstore.cache.quotas import SlotQuotas

WORKERS: Final = 0
"""Client number of the store's own workers."""
PINS: Final = -1
"""Client number of pins: it has one lease on each pinned block."""


class SlotListener(Protocol):
    """Is told which blocks are READY; called under the L2 manager's lock."""

    def insert(self, key: Key) -> None:
        """The block is READY. May be called again for the same block."""
        ...

    def remove(self, key: Key) -> None:
        """The block is no longer READY."""
        ...


class SlotTable:
    """slots: number of slots. quotas: slots per tenant, and the eviction policy."""

    def __init__(self, slots: int, quotas: SlotQuotas) -> None:
        assert slots > 0
        self.slots = slots
        self.quotas = quotas
        self.epoch = 0
        """Advances with time, so that old blocks can expire."""
        self.evictable = 0
        """Number of READY blocks that could be evicted now."""
        self.evictions = 0
        self.events = L2EventQueue(self._ready_keys)
        self.on_evict_deferred: Callable[[Block], object] = lambda block: None
        """Called before a block is evicted that some tier still has to get."""
        self._free = list(range(slots - 1, -1, -1))
        self._blocks: dict[Key, Block] = {}
        self._by_slot: list[Block | None] = [None] * slots
        self._leases: dict[int, Counter[int]] = {WORKERS: Counter(), PINS: Counter()}
        self._listener: SlotListener | None = None
        self.chains = Chains()

    @property
    def free(self) -> int:
        """Number of FREE slots."""
        return len(self._free)

    def set_listener(self, listener: SlotListener) -> None:
        """Tell the listener of every READY block, now and from now on."""
        self._listener = listener
        for block in self._blocks.values():
            if block.ready:
                listener.insert(block.key)

    def add_client(self, client: int) -> None:
        """Add a client that may have leases."""
        assert client not in self._leases, f"client {client} exists already"
        self._leases[client] = Counter()

    def drop_client(self, client: int) -> None:
        """Release every lease of the client and free the slots that it was filling."""
        for slot, leases in list(self._leases[client].items()):
            for _ in range(leases):
                if self.block_at(slot).ready:
                    self.release(client, slot)
                else:
                    self.discard(client, slot)
        del self._leases[client]

    def get(self, key: Key) -> Block | None:
        """The block of this key, FILLING or READY."""
        return self._blocks.get(key)

    def ready_block(self, key: Key, nbytes: int) -> Block | None:
        """The block of this key if it is READY and of this size."""
        block = self._blocks.get(key)
        return block if block is not None and block.ready and block.nbytes == nbytes else None

    def cached_prefix_len(self, keys: Sequence[Key], nbytes: int) -> int:
        """Number of leading blocks that are READY and of this size."""
        blocks = self._blocks
        for index, key in enumerate(keys):
            block = blocks.get(key)
            if block is None or not block.ready or block.nbytes != nbytes:
                return index
        return len(keys)

    def cached_or_loading(
        self, keys: Sequence[Key], nbytes: int, loading: Collection[Key]
    ) -> list[bool]:
        """For each key, whether its block is READY and of this size, or in `loading`."""
        found = map(self._blocks.get, keys)
        cached = [b is not None and b.ready and b.nbytes == nbytes for b in found]
        if not loading:
            return cached
        return [ready or key in loading for ready, key in zip(cached, keys, strict=True)]

    def block_at(self, slot: int) -> Block:
        """The block in a slot that is not free."""
        block = self._by_slot[slot]
        assert block is not None, f"slot {slot} is free"
        return block

    def take_slot(self, parent: Block | None = None) -> int | None:
        """A FREE slot for a block that follows `parent`; evicts a block if needed.
        None if there is no such block.

        The caller must call `fill_slot` before it does anything else with the table.
        """
        if not self._free:
            blocks = map(self.__getitem__, self.quotas.eviction_order())
            victim = self.chains.pick_victim(blocks, parent) if self.evictable else None
            if victim is None:
                return None
            self.evict(victim)
        return self._free.pop()

    def fill_slot(self, client: int, key: Key, slot: int, nbytes: int) -> Block:
        """FREE to FILLING: only this client uses the slot."""
        assert key not in self._blocks, "a key is filled once"
        block = Block(key, slot, nbytes, client)
        self._leases[client][slot] += 1
        self._blocks[key] = block
        self._by_slot[slot] = block
        self.quotas.on_alloc(key.tenant)
        return block

    def publish(self, client: int, slot: int) -> Block:
        """FILLING to READY, the only way there; the filler's lease ends."""
        block = self._block_filled_by(client, slot)
        self._remove_lease(client, slot)
        block.ready = True
        block.epoch = self.epoch
        self.quotas.on_insert(block.key, block.nbytes)
        self.evictable += block.evictable
        if self._listener is not None:
            self._listener.insert(block.key)
        self.events.record(block.key, True)
        return block

    def discard(self, client: int, slot: int) -> None:
        """FILLING to FREE: the client did not fill the slot."""
        block = self._block_filled_by(client, slot)
        self._remove_lease(client, slot)
        block.ref_count -= 1
        self._free_slot(block)

    def lease(self, client: int, block: Block) -> None:
        """Add a lease of the client on a READY block."""
        assert block.ready, f"slot {block.slot} is being filled"
        self.evictable -= block.evictable
        block.ref_count += 1
        self._leases[client][block.slot] += 1

    def release(self, client: int, slot: int) -> Block:
        """Remove one lease of the client. Only `evict` removes the block itself."""
        block = self.block_at(slot)
        assert block.ready, f"slot {slot} is being filled"
        self._remove_lease(client, slot)
        assert block.ref_count > 1, f"slot {slot} has no lease to release"
        block.ref_count -= 1
        self.evictable += block.evictable
        return block

    def set_dirty(self, block: Block, dirty: bool) -> None:
        """Set whether the block must be written to a tier before it may be evicted."""
        self.evictable -= block.evictable
        block.dirty = dirty
        self.evictable += block.evictable

    def evict(self, block: Block) -> None:
        """READY to FREE."""
        assert block.ready
        assert block.ref_count == 1, f"slot {block.slot} is leased"
        self.evictable -= block.evictable
        block.ref_count -= 1
        self.quotas.on_remove(block.key)
        if block.deferred:
            self.on_evict_deferred(block)
        self._free_slot(block)
        self.evictions += 1
        if self._listener is not None:
            self._listener.remove(block.key)
        self.events.record(block.key, False)

    def evict_idle(self) -> int:
        """Evict every block without a lease, dirty or not; returns their number."""
        idle = [b for b in self._blocks.values() if b.ready and b.ref_count == 1]
        for block in idle:
            self.evict(block)
        return len(idle)

    def dirty_keys(self) -> set[Key]:
        """Keys of the blocks that must be written before they may be evicted."""
        return {key for key, block in self._blocks.items() if block.dirty}

    def older_than(self, epochs: int) -> list[Block]:
        """READY blocks that were published at least this many epochs ago."""
        oldest = self.epoch - epochs
        return [b for b in self._blocks.values() if b.ready and b.epoch <= oldest]

    def ready_blocks(self) -> list[Block]:
        """Every READY block."""
        return [block for block in self._blocks.values() if block.ready]

    @property
    def pinned(self) -> int:
        """Number of pinned blocks."""
        return len(self._leases[PINS])

    def is_pinned(self, block: Block) -> bool:
        """Whether a block is pinned."""
        return block.slot in self._leases[PINS]

    def pin(self, block: Block) -> None:
        """Add a lease that only `unpin` ends. The eviction policy does not see the block meanwhile,
        so that no eviction has to step over pinned blocks."""
        assert not self.is_pinned(block), f"slot {block.slot} is pinned already"
        self.lease(PINS, block)
        self.quotas.on_remove(block.key)

    def unpin(self, block: Block) -> None:
        """Let the block be evicted again; it counts as just used."""
        self.release(PINS, block.slot)
        self.quotas.on_insert(block.key, block.nbytes)

    def pinned_blocks(self, keys: Iterable[Key] | None) -> list[Block]:
        """The pinned blocks among these keys; None: among all."""
        if keys is None:
            return [self.block_at(slot) for slot in self._leases[PINS]]
        blocks = map(self._blocks.get, keys)
        return [block for block in blocks if block is not None and self.is_pinned(block)]

    def touch(self, block: Block) -> None:
        """Record a use of a READY block."""
        if not self.is_pinned(block):
            self.quotas.on_access(block.key)

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
                block.ready and block.ref_count > 1 + self.is_pinned(block) for block in blocks
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
        for of_client in self._leases.values():
            assert all(count > 0 for count in of_client.values())
            leases.update(of_client)
        for slot, block in enumerate(self._by_slot):
            if block is None:
                assert slot in self._free
                assert leases[slot] == 0
            else:
                assert block.slot == slot
                assert self._blocks[block.key] is block
                assert block.ref_count == leases[slot] + block.ready
                assert block.parent is None or self._by_slot[block.parent.slot] is block.parent
                newer, child = None, block.child
                while child is not None:
                    assert self._by_slot[child.slot] is child
                    assert (child.parent, child.newer) == (block, newer)
                    newer, child = child, child.older
        assert self.evictable == sum(block.evictable for block in self._blocks.values())
        assert all(count == 1 for count in self._leases[PINS].values()), "pinned twice"
        assert self.quotas.slots == Counter(key.tenant for key in self._blocks)
        not_pinned = {
            key for key, block in self._blocks.items() if block.ready and not self.is_pinned(block)
        }
        assert not_pinned == set(self.quotas.eviction_order())

    def __getitem__(self, key: Key) -> Block:
        return self._blocks[key]

    def _ready_keys(self) -> list[Key]:
        return [key for key, block in self._blocks.items() if block.ready]

    def _block_filled_by(self, client: int, slot: int) -> Block:
        block = self.block_at(slot)
        assert not block.ready, f"slot {slot} is published already"
        assert block.filler == client, f"slot {slot} is not filled by client {client}"
        return block

    def _remove_lease(self, client: int, slot: int) -> None:
        leases = self._leases[client]
        assert leases[slot] > 0, f"client {client} has no lease on slot {slot}"
        leases[slot] -= 1
        if not leases[slot]:
            del leases[slot]

    def _free_slot(self, block: Block) -> None:
        assert block.ref_count == 0
        self.chains.unlink(block)
        del self._blocks[block.key]
        self._by_slot[block.slot] = None
        self.quotas.on_free(block.key.tenant)
        self._free.append(block.slot)
