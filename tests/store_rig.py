"""Helpers of the store's tests: small stores, and blocks whose bytes follow from their key."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.blocks.key import Key, Namespace
from kvstore.interface import Load, Match, Operation, Save
from kvstore.shm.slab import Slab
from kvstore.store.session import Session
from kvstore.store.store import Store
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier

SLOT_BYTES = 4096
WAIT_S = 60.0
"""Timeout of every wait. A passing test waits milliseconds."""

# A block has 2,560 bytes: less than a slot, and not a multiple of 4,096.
SPACE = Namespace(model="m", layers=2, kv_heads=1, head_dim=20, dtype="bfloat16", block_tokens=16)
OTHER_SPACE = Namespace(
    model="m", revision="2", layers=2, kv_heads=1, head_dim=20, dtype="bfloat16", block_tokens=16
)


class RemoteTier(MemoryTier):
    """A memory tier without a local index: the store must query it."""

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
    """The block of a key. Half of its bytes are noise, half compress, like KV data."""
    seed = f"{key.tenant}|{key.namespace}|".encode() + key.hash
    noise = hashlib.shake_128(seed).digest(nbytes // 2)
    return b"".join(bytes([0x3F, byte]) for byte in noise) + b"\x01" * (nbytes % 2)


def make_store(*tiers: Tier, slots: int = 32, **options: Any) -> Store:
    return Store(Slab.create(slots, SLOT_BYTES), tiers, **options)


def fill(session: Session, operation: Save) -> None:
    """Write its block into every assigned slot."""
    for index, slot in operation.slot_assignments:
        block = content(key_of(session, operation.hashes[index]), session.namespace.block_bytes)
        session.slab_of(operation).view(slot)[: len(block)] = block


def save(session: Session, names: Sequence[bytes]) -> Save:
    operation = session.save(names)
    assert operation.done
    fill(session, operation)
    session.commit(operation)
    return operation


def until(condition: Callable[[], object], what: str = "") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what or "nothing happened"
        time.sleep(0.002)


def wait_done(session: Session, operation: Operation) -> None:
    """Poll until the operation is done."""
    deadline_s = time.monotonic() + WAIT_S
    while not operation.done:
        assert time.monotonic() < deadline_s, "the operation never ended"
        session.poll(0.5)


def match(session: Session, names: Sequence[bytes]) -> list[str]:
    operation: Match = session.match(names)
    wait_done(session, operation)
    return operation.tiers


def load(session: Session, names: Sequence[bytes]) -> Load:
    """Load, wait until it is done, and check the bytes of every block."""
    operation = session.load(names)
    wait_done(session, operation)
    check(session, operation)
    return operation


def check(session: Session, operation: Load) -> None:
    assert len(operation.tiers) == len(operation.slots)
    for name, slot in zip(operation.hashes, operation.slots, strict=False):
        expected = content(key_of(session, name), session.namespace.block_bytes)
        assert bytes(session.slab_of(operation).view(slot)[: len(expected)]) == expected, (
            "wrong bytes"
        )


def loaded_tiers(session: Session, names: Sequence[bytes]) -> list[str]:
    """Load a prefix and release it. Returns the source tier of each block."""
    operation = load(session, names)
    session.release(operation)
    return operation.tiers


def free_slots(store: Store) -> int:
    free: int = store.stats()["l2"]["slots_free"]
    return free


def flush_to_tiers(store: Store) -> None:
    """Write all blocks to the tiers and empty L2."""
    assert store.flush(WAIT_S)
    store.clear("l2")
    assert free_slots(store) == store.slab.slots
