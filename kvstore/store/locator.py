"""Finds the tier of each block: L2, a tier with a local index, or a remote tier.

The locator answers at once from memory. Blocks it does not know of are queried in the background,
with one batch per remote tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.blocks.key import Key
from kvstore.cache.commands import InFlightLoad
from kvstore.cache.manager import L2Manager
from kvstore.store import block_io
from kvstore.store.tier_workers import Probe, TierWorkers

L2: Final = "l2"


class BlockLocator:
    """Finds blocks in one store. workers: one per tier, fastest tier first."""

    def __init__(self, manager: L2Manager, workers: Sequence[TierWorkers]) -> None:
        self._manager = manager
        self._workers = list(workers)
        self._remote = [w for w in workers if not w.tier.local_index]

    def find_tiers(self, keys: Sequence[Key], in_l2: Sequence[bool]) -> list[int | None]:
        """For each key the index of the fastest tier that contains it. None if the block is in L2
        or if no tier is known to contain it. Does no disk or network I/O.

        in_l2: the answer of `L2Manager.cached_or_loading` for these keys.
        """
        answer: list[int | None] = [None] * len(keys)
        missing = [i for i, cached in enumerate(in_l2) if not cached]
        for index in range(len(self._workers)):
            if not missing:
                break
            found = self._contains(index, [keys[i] for i in missing])
            for i, hit in zip(missing, found, strict=True):
                if hit:
                    answer[i] = index
            missing = [i for i, hit in zip(missing, found, strict=True) if not hit]
        return answer

    def locate_prefix(self, keys: Sequence[Key], nbytes: int) -> tuple[list[str], list[int]]:
        """The tier of each block of the cached prefix, and the indices of the cached blocks beyond
        the gap."""
        prefix_len = self._manager.match(keys, nbytes)
        tiers = [L2] * prefix_len
        rest = keys[prefix_len:]
        if not rest:
            return tiers, []
        in_l2 = self._manager.cached_or_loading(rest, nbytes)
        if not self._workers and True not in in_l2:
            return tiers, []
        beyond_gap = []
        sources = zip(in_l2, self.find_tiers(rest, in_l2), strict=True)
        for index, (cached, tier) in enumerate(sources, start=prefix_len):
            if not cached and tier is None:
                continue
            if index > len(tiers):
                beyond_gap.append(index)
            else:
                tiers.append(L2 if tier is None else self._workers[tier].tier.name)
        return tiers, beyond_gap

    def next_tier(self, load: InFlightLoad) -> int | None:
        """The next slower tier that contains the block of this load, or None."""
        for index in range(load.tier + 1, len(self._workers)):
            if self._contains(index, [load.key])[0]:
                return index
        return None

    def probe(self, keys: Sequence[Key], on_end: Callable[[], None]) -> bool:
        """Query every tier without a local index for these keys, in one batch each.

        Calls `on_end` once all tiers have answered, from a worker or from this call. A tier whose
        probe queue is full counts as a miss. Returns False, without a call, if there is no such
        tier.
        """
        if not self._remote:
            return False
        left = len(self._remote) + 1
        lock = threading.Lock()

        def count_down() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                on_end()

        for index, workers in enumerate(self._workers):
            if workers.tier.local_index:
                continue

            def on_answer(probe: Probe, found: list[bool], tier: int = index) -> None:
                hits = [key for key, hit in zip(probe.keys, found, strict=True) if hit]
                with self._manager.lock:
                    self._manager.remote_locations.add(tier, hits)
                count_down()

            if not workers.submit_probe(Probe(keys, on_answer)):
                count_down()
        count_down()
        return True

    def _contains(self, index: int, keys: Sequence[Key]) -> list[bool]:
        """Whether a tier contains these keys, as far as this process knows."""
        tier = self._workers[index].tier
        if tier.local_index:
            return block_io.checked_contains(tier, keys)
        with self._manager.lock:
            return self._manager.remote_locations.contains(index, keys)
