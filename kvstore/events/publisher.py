"""The sidecar's own KV events: what its L2 takes and drops, in vLLM's format, with medium "CPU".

A block is named as vLLM names it, by the low 64 bits of its hash, whatever tensor-parallel rank,
model or tenant it is of: it is there from the first that is stored until the last is dropped. So a
router that indexes vLLM's events can weigh the node's host memory too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from kvstore.blocks.key import Key
from kvstore.cache.event_queue import Changes, Told
from kvstore.events.codec import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    short_name,
)

log = logging.getLogger(__name__)

EVERY_S: Final = 0.05
MEDIUM: Final = "CPU"
NAMES_MAX: Final = 1 << 16
"""Blocks named in one event."""
GROUP_BYTES: Final = 4
KEY_LENGTHS: Final = (16 + GROUP_BYTES, 32 + GROUP_BYTES)
"""Of what vLLM's offloading calls its units: a block's hash, then its KV group, big-endian."""


def name_of(key: Key) -> tuple[int, int]:
    """The name in events, and the KV group."""
    if len(key.hash) in KEY_LENGTHS:
        group = int.from_bytes(key.hash[-GROUP_BYTES:], "big")
        return short_name(key.hash[:-GROUP_BYTES]), group
    return short_name(key.hash), 0


class Names:
    """Blocks by name, each counted: several ranks, models or tenants may share one."""

    def __init__(self) -> None:
        self._held: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def events(self, told: Told) -> list[Event]:
        """What these changes mean, as events."""
        events: list[Event] = []
        if told.whole:
            self._held.clear()
            events.append(AllBlocksCleared())
        before: dict[tuple[int, int], bool] = {}
        for key, there in told.changes:
            name = name_of(key)
            before.setdefault(name, name in self._held)
            self._held[name] += 1 if there else -1
            assert self._held[name] >= 0, "a block went that had not come"
            if not self._held[name]:
                del self._held[name]
        for group, names in _by_group(n for n, was in before.items() if was and not self._has(n)):
            events += [BlockRemoved(part, MEDIUM, group) for part in _parts(names)]
        for group, names in _by_group(n for n, was in before.items() if not was and self._has(n)):
            events += [BlockStored(part, medium=MEDIUM, group_idx=group) for part in _parts(names)]
        return events

    def _has(self, name: tuple[int, int]) -> bool:
        return name in self._held


class Sink(Protocol):
    """Where batches go: `event_sockets.Publisher`."""

    def publish(self, batch: Batch) -> None:
        """Send a batch, without waiting."""


class L2Events:
    """A thread that publishes. lock: the brain's, under which `changes` is read."""

    def __init__(self, changes: Changes, lock: AbstractContextManager[Any], sink: Sink) -> None:
        self._changes, self._lock, self._sink = changes, lock, sink
        self._names = Names()
        self._counts: Counter[str] = Counter()
        self._stopping = threading.Event()
        with lock:
            changes.listen()
        self._thread = threading.Thread(target=self._run, name="l2-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last changes, and end the thread."""
        self._stopping.set()
        self._thread.join()

    def snapshot(self) -> dict[str, int]:
        """For statistics."""
        return {"blocks": len(self._names), **self._counts}

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._publish()
        self._publish()

    def _publish(self) -> None:
        with self._lock:
            told = self._changes.take()
        events = self._names.events(told)
        if events:
            self._sink.publish(Batch(time.time(), tuple(events)))
            self._counts["batches"] += 1
            self._counts["told_anew"] += told.whole


def _by_group(names: Any) -> list[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for name, group in names:
        found.setdefault(group, []).append(name)
    return sorted(found.items())


def _parts(names: list[int]) -> list[tuple[int, ...]]:
    return [tuple(names[at : at + NAMES_MAX]) for at in range(0, len(names), NAMES_MAX)]
