"""What the store's tests share: blocks whose bytes follow from their key, and small stores."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.blocks.key import Key, Namespace
from kvstore.interface import Load, Match, Save, Ticket
from kvstore.shm.slab import Slab
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

SLOT_BYTES = 4096
WAIT_S = 60.0
"""A wait that lasts longer is a hang; passing tests wait milliseconds."""

# 2,560 bytes a block: less than a slot, and no whole pages.
SPACE = Namespace(model="m", layers=2, kv_heads=1, head_dim=20, dtype="bfloat16", block_tokens=16)
OTHER_SPACE = Namespace(
    model="m", revision="2", layers=2, kv_heads=1, head_dim=20, dtype="bfloat16", block_tokens=16
)


class RemoteTier(MemoryTier):
    """A memory tier that does not answer from memory: it has to be asked."""

    local_index = False


class CountingTier(MemoryTier):
    """A memory tier that counts reads by key."""

    def __init__(self, capacity_bytes: int = 1 << 30, *, name: str = "memory") -> None:
        super().__init__(capacity_bytes, name=name)
        self.reads: list[Key] = []
        self.gate = threading.Event()
        self.gate.set()

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        self.reads.append(key)
        assert self.gate.wait(WAIT_S)
        return super().read(key, header, payload)


def hashes(count: int, label: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{label}/{n}".encode()).digest() for n in range(count)]


def key_of(session: Session, name: bytes) -> Key:
    return Key(session.tenant, session.namespace.digest, name)


def content(key: Key, nbytes: int) -> bytes:
    """The one right block of a key; half of it is noise, half compresses, as KV does."""
    seed = f"{key.tenant}|{key.namespace}|".encode() + key.hash
    noise = hashlib.shake_128(seed).digest(nbytes // 2)
    return b"".join(bytes([0x3F, byte]) for byte in noise) + b"\x01" * (nbytes % 2)


def make_store(*tiers: Tier, slots: int = 32, **options: Any) -> Store:
    return Store(Slab.create(slots, SLOT_BYTES), tiers, **options)


def fill(session: Session, ticket: Save) -> None:
    """Write what belongs there into every granted slot."""
    for index, slot in ticket.grants:
        block = content(key_of(session, ticket.hashes[index]), session.namespace.block_bytes)
        session.slab_of(ticket).view(slot)[: len(block)] = block


def save(session: Session, names: Sequence[bytes]) -> Save:
    ticket = session.save(names)
    assert ticket.done
    fill(session, ticket)
    session.commit(ticket)
    return ticket


def until(condition: Callable[[], object], what: str = "") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what or "nothing happened"
        time.sleep(0.002)


def ended(session: Session, ticket: Ticket) -> None:
    """Poll until the ticket is done."""
    deadline_s = time.monotonic() + WAIT_S
    while not ticket.done:
        assert time.monotonic() < deadline_s, "the ticket never ended"
        session.poll(0.5)


def match(session: Session, names: Sequence[bytes]) -> list[str]:
    ticket: Match = session.match(names)
    ended(session, ticket)
    return ticket.tiers


def load(session: Session, names: Sequence[bytes]) -> Load:
    """Load to the end, and hold every block to its right bytes."""
    ticket = session.load(names)
    ended(session, ticket)
    check(session, ticket)
    return ticket


def check(session: Session, ticket: Load) -> None:
    assert len(ticket.tiers) == len(ticket.slots)
    for name, slot in zip(ticket.hashes, ticket.slots, strict=False):
        right = content(key_of(session, name), session.namespace.block_bytes)
        assert bytes(session.slab_of(ticket).view(slot)[: len(right)]) == right, "wrong bytes"


def loaded_tiers(session: Session, names: Sequence[bytes]) -> list[str]:
    """Where each block of the run came from; its leases go back at once."""
    ticket = load(session, names)
    session.release(ticket)
    return ticket.tiers


def free_slots(store: Store) -> int:
    free: int = store.stats()["l2"]["slots_free"]
    return free


def spill_to_tiers(store: Store) -> None:
    """Everything written down, and L2 empty."""
    assert store.flush(WAIT_S)
    store.clear("l2")
    assert free_slots(store) == store.slab.slots
