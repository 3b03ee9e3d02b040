"""The sidecar's own KV events: blocks stored in and removed from L2, in vLLM's format.

The medium is "CPU". A block has vLLM's name, the low 64 bits of its hash. Blocks of different
tensor-parallel ranks, models or tenants can have the same name. Such a name is stored from its
first block until its last block is removed. A router that indexes vLLM's events can so take the
node's host memory into account.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from kvstore.blocks.key import Key
from kvstore.cache.event_queue import L2EventBatch, L2EventQueue
from kvstore.events.codec import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    short_name,
)

log = logging.getLogger(__name__)

INTERVAL_S: Final = 0.05
MEDIUM: Final = "CPU"
MAX_NAMES: Final = 1 << 16
"""Maximum number of blocks in one event."""
GROUP_BYTES: Final = 4
KEY_LENGTHS: Final = (16 + GROUP_BYTES, 32 + GROUP_BYTES)
"""Lengths of vLLM's offload keys: a block's hash, then its KV group, big-endian."""


def name_of(key: Key) -> tuple[int, int]:
    """A block's name in events, and its KV group."""
    if len(key.hash) in KEY_LENGTHS:
        group = int.from_bytes(key.hash[-GROUP_BYTES:], "big")
        return short_name(key.hash[:-GROUP_BYTES]), group
    return short_name(key.hash), 0


class BlockNames:
    """Counts blocks by name: several ranks, models or tenants may have the same name."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def events(self, batch: L2EventBatch) -> list[Event]:
        """Apply a batch of L2 events. Returns the events to publish."""
        events: list[Event] = []
        if batch.is_snapshot:
            self._counts.clear()
            events.append(AllBlocksCleared())
        before: dict[tuple[int, int], bool] = {}
        for key, cached in batch.events:
            name = name_of(key)
            before.setdefault(name, name in self._counts)
            self._counts[name] += 1 if cached else -1
            assert self._counts[name] >= 0, "a block was removed that was never stored"
            if not self._counts[name]:
                del self._counts[name]
        for group, names in _by_group(n for n, was in before.items() if was and not self._has(n)):
            events += [BlockRemoved(part, MEDIUM, group) for part in _parts(names)]
        for group, names in _by_group(n for n, was in before.items() if not was and self._has(n)):
            events += [BlockStored(part, medium=MEDIUM, group_idx=group) for part in _parts(names)]
        return events

    def _has(self, name: tuple[int, int]) -> bool:
        return name in self._counts


class Sink(Protocol):
    """Sends batches: `zmq.Publisher`."""

    def publish(self, batch: Batch) -> None:
        """Send a batch, without waiting."""


class L2EventPublisher:
    """A thread that publishes L2's events. lock: the L2 manager's, for reading `queue`."""

    def __init__(self, queue: L2EventQueue, lock: AbstractContextManager[Any], sink: Sink) -> None:
        self._queue, self._lock, self._sink = queue, lock, sink
        self._names = BlockNames()
        self._counts: Counter[str] = Counter()
        self._stopping = threading.Event()
        with lock:
            queue.start()
        self._thread = threading.Thread(target=self._run, name="l2-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last events, and end the thread."""
        self._stopping.set()
        self._thread.join()

    def snapshot(self) -> dict[str, int]:
        """For statistics."""
        return {"blocks": len(self._names), **self._counts}

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self._publish()
        self._publish()

    def _publish(self) -> None:
        with self._lock:
            batch = self._queue.drain()
        events = self._names.events(batch)
        if events:
            self._sink.publish(Batch(time.time(), tuple(events)))
            self._counts["batches"] += 1
            self._counts["snapshots"] += batch.is_snapshot


def _by_group(names: Any) -> list[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for name, group in names:
        found.setdefault(group, []).append(name)
    return sorted(found.items())


def _parts(names: list[int]) -> list[tuple[int, ...]]:
    return [tuple(names[at : at + MAX_NAMES]) for at in range(0, len(names), MAX_NAMES)]
