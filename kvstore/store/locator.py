"""Where a block lies: L2, a tier that answers from memory, or one that has to be asked.

Answers at once from what this process knows; what it does not know is asked behind the caller's
back, one batch for each tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.blocks.key import Key
from kvstore.cache.commands import Flight
from kvstore.cache.manager import L2Manager
from kvstore.store import block_io
from kvstore.store.tier_workers import Probe, TierWorkers

L2: Final = "l2"


class Finder:
    """Finds blocks in one store. `workers`: those of each tier, fastest first."""

    def __init__(self, brain: L2Manager, workers: Sequence[TierWorkers]) -> None:
        self._brain = brain
        self._workers = list(workers)
        self._remote = [w for w in workers if not w.tier.local_index]

    def sources(self, keys: Sequence[Key], held: Sequence[bool]) -> list[int | None]:
        """For each key the index of the fastest tier that has it; None for those that L2 holds
        (`Brain.held`) and those nobody is known to have. Touches no disk and no network."""
        answer: list[int | None] = [None] * len(keys)
        missing = [i for i, in_l2 in enumerate(held) if not in_l2]
        for index in range(len(self._workers)):
            if not missing:
                break
            found = self._has(index, [keys[i] for i in missing])
            for i, has in zip(missing, found, strict=True):
                if has:
                    answer[i] = index
            missing = [i for i, has in zip(missing, found, strict=True) if not has]
        return answer

    def locate(self, keys: Sequence[Key], nbytes: int) -> tuple[list[str], list[int]]:
        """Names of the tiers that hold the leading run, block by block; indices of the blocks
        behind it that are held too."""
        run = self._brain.match(keys, nbytes)
        tiers = [L2] * run
        rest = keys[run:]
        if not rest:
            return tiers, []
        held = self._brain.held(rest, nbytes)
        if not self._workers and True not in held:
            return tiers, []
        behind = []
        places = zip(held, self.sources(rest, held), strict=True)
        for index, (in_l2, source) in enumerate(places, start=run):
            if not in_l2 and source is None:
                continue
            if index > len(tiers):
                behind.append(index)
            else:
                tiers.append(L2 if source is None else self._workers[source].tier.name)
        return tiers, behind

    def next_source(self, flight: Flight) -> int | None:
        """A slower tier that has the flight's block too."""
        for index in range(flight.tier + 1, len(self._workers)):
            if self._has(index, [flight.key])[0]:
                return index
        return None

    def probe(self, keys: Sequence[Key], then: Callable[[], None]) -> bool:
        """Ask every tier without a local index for these keys, in one batch each.

        `then` is called once all have answered (no answer within the queue's bound is a no), from
        a worker or from here. False, and no call, when there is no such tier.
        """
        if not self._remote:
            return False
        left = len(self._remote) + 1
        lock = threading.Lock()

        def one_less() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                then()

        for index, workers in enumerate(self._workers):
            if workers.tier.local_index:
                continue

            def answered(probe: Probe, found: list[bool], tier: int = index) -> None:
                have = [key for key, has in zip(probe.keys, found, strict=True) if has]
                with self._brain.lock:
                    self._brain.places.learn(tier, have)
                one_less()

            if not workers.probe(Probe(keys, answered)):
                one_less()
        one_less()
        return True

    def _has(self, index: int, keys: Sequence[Key]) -> list[bool]:
        """Whether a tier has these keys, as far as memory knows."""
        tier = self._workers[index].tier
        if tier.local_index:
            return block_io.contained(tier, keys)
        with self._brain.lock:
            return self._brain.places.known(index, keys)
