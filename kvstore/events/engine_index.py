"""Index of the blocks that each engine has cached, from published events. No I/O, no clock."""

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
"""Maximum number of blocks of all engines; more are not indexed, and counted."""
MAX_MEDIA: Final = 64
"""Maximum number of media of one engine; blocks in more are not indexed, and counted."""


class EngineIndex:
    """Cached blocks by engine and medium. The subscriber names an engine by its endpoint.

    The index is a hint where a request is likely to find its prefix. An engine may have removed a
    block whose event has not arrived yet.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._blocks: dict[str, dict[str, set[tuple[int, int]]]] = {}
        self._next: dict[str, int] = {}
        self._count = 0
        self._counts = {"batches": 0, "gaps": 0, "not_indexed": 0}

    def apply(self, engine: str, number: int, batch: Batch) -> None:
        """Apply an engine's next batch.

        A skipped number is a gap. The engine's blocks are then dropped from the index, because the
        lost batches may have removed some of them.
        """
        with self._lock:
            self._counts["batches"] += 1
            if number != self._next.get(engine, number):
                self._counts["gaps"] += 1
                self._drop_blocks(engine)
            self._next[engine] = number + 1
            for event in batch.events:
                if isinstance(event, BlockStored):
                    self._store(engine, event)
                elif isinstance(event, BlockRemoved):
                    self._remove(engine, event)
                elif isinstance(event, AllBlocksCleared):
                    self._drop_blocks(engine)

    def remove_engine(self, engine: str) -> None:
        """Drop the blocks of an engine that is gone."""
        with self._lock:
            self._drop_blocks(engine)
            self._next.pop(engine, None)

    def prefix_lengths(
        self, names: Sequence[BlockName], group: int = 0
    ) -> dict[str, dict[str, int]]:
        """By engine and medium: number of leading blocks of `names` that are cached there.

        An engine or medium without the first block is left out.
        """
        keys = [(short_name(name), group) for name in names]
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for engine, media in self._blocks.items():
                for medium, cached in media.items():
                    length = next((i for i, key in enumerate(keys) if key not in cached), len(keys))
                    if length:
                        found.setdefault(engine, {})[medium] = length
        return found

    def snapshot(self) -> dict[str, Any]:
        """For statistics."""
        with self._lock:
            engines = {
                engine: {medium: len(cached) for medium, cached in media.items()}
                for engine, media in self._blocks.items()
            }
            return {**self._counts, "blocks": self._count, "engines": engines}

    def _store(self, engine: str, event: BlockStored) -> None:
        media = self._blocks.setdefault(engine, {})
        medium = event.medium or "GPU"
        if medium not in media and len(media) >= MAX_MEDIA:
            self._counts["not_indexed"] += len(event.block_hashes)
            return
        cached = media.setdefault(medium, set())
        for name in event.block_hashes:
            key = (short_name(name), event.group_idx or 0)
            if key in cached:
                continue
            if self._count >= self._max_blocks:
                self._counts["not_indexed"] += 1
                continue
            cached.add(key)
            self._count += 1

    def _remove(self, engine: str, event: BlockRemoved) -> None:
        cached = self._blocks.get(engine, {}).get(event.medium or "GPU", set())
        for name in event.block_hashes:
            key = (short_name(name), event.group_idx or 0)
            if key in cached:
                cached.discard(key)
                self._count -= 1

    def _drop_blocks(self, engine: str) -> None:
        self._count -= sum(len(cached) for cached in self._blocks.pop(engine, {}).values())
