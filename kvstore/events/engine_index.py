"""Which engine holds which blocks, by the events they publish. No I/O, no clock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from kvstore.events.codec import (
    AllBlocksCleared,
    Batch,
    BlockName,
    BlockRemoved,
    BlockStored,
    short_name,
)

MAX_BLOCKS: Final = 1 << 22
"""Blocks known of all engines together; more are not indexed, and counted."""
MAX_MEDIA: Final = 64
"""Media of one engine; blocks in others are not indexed, and counted."""


class EngineIndex:
    """Blocks by engine and medium. An engine is named by whoever listens to it (its endpoint).

    Not a promise: an engine may have dropped a block whose event is still on its way. It says
    where a request is likely to find its prefix.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._held: dict[str, dict[str, set[tuple[int, int]]]] = {}
        self._next: dict[str, int] = {}
        self._count = 0
        self._counts = {"batches": 0, "gaps": 0, "not_indexed": 0}

    def take(self, engine: str, number: int, batch: Batch) -> None:
        """One engine's next batch. A number that was skipped is a gap: what it told of before is
        forgotten, for removals may be among what was lost."""
        with self._lock:
            self._counts["batches"] += 1
            if number != self._next.get(engine, number):
                self._counts["gaps"] += 1
                self._forget(engine)
            self._next[engine] = number + 1
            for event in batch.events:
                if isinstance(event, BlockStored):
                    self._store(engine, event)
                elif isinstance(event, BlockRemoved):
                    self._remove(engine, event)
                elif isinstance(event, AllBlocksCleared):
                    self._forget(engine)

    def forget(self, engine: str) -> None:
        """The engine is gone."""
        with self._lock:
            self._forget(engine)
            self._next.pop(engine, None)

    def runs(self, names: Sequence[BlockName], group: int = 0) -> dict[str, dict[str, int]]:
        """By engine and medium: blocks of the leading run of `names` that lie there. An engine or
        a medium without the first of them is left out."""
        keys = [(short_name(name), group) for name in names]
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for engine, media in self._held.items():
                for medium, held in media.items():
                    run = next((i for i, key in enumerate(keys) if key not in held), len(keys))
                    if run:
                        found.setdefault(engine, {})[medium] = run
        return found

    def snapshot(self) -> dict[str, Any]:
        """For statistics."""
        with self._lock:
            engines = {
                engine: {medium: len(held) for medium, held in media.items()}
                for engine, media in self._held.items()
            }
            return {**self._counts, "blocks": self._count, "engines": engines}

    def _store(self, engine: str, event: BlockStored) -> None:
        media = self._held.setdefault(engine, {})
        medium = event.medium or "GPU"
        if medium not in media and len(media) >= MAX_MEDIA:
            self._counts["not_indexed"] += len(event.block_hashes)
            return
        held = media.setdefault(medium, set())
        for name in event.block_hashes:
            key = (short_name(name), event.group_idx or 0)
            if key in held:
                continue
            if self._count >= self._max_blocks:
                self._counts["not_indexed"] += 1
                continue
            held.add(key)
            self._count += 1

    def _remove(self, engine: str, event: BlockRemoved) -> None:
        held = self._held.get(engine, {}).get(event.medium or "GPU", set())
        for name in event.block_hashes:
            key = (short_name(name), event.group_idx or 0)
            if key in held:
                held.discard(key)
                self._count -= 1

    def _forget(self, engine: str) -> None:
        self._count -= sum(len(held) for held in self._held.pop(engine, {}).values())
