"""L2 and a tier below it in a replay: where each block is, and when it is written down."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.analysis.simulate.levels import Level
from kvstore.cache.write_policy import WritePolicy

L1, L2, L3 = "l1", "l2", "l3"
COMPUTED = "computed"
"""In place of a tier: the block was cached below, but computing it was faster than loading it."""


class Tiers:
    """L2 (`host`), a tier below (`below`), or both.

    As in the store, a request saves its computed blocks to L2. The write policy decides when L2
    writes a block to the tier below. Blocks loaded from below are in L2 afterwards. Writes complete
    before the next request, and none is dropped. A request writes and uses its deepest block first,
    so that the first block stays longest. The real disk tier evicts whole segments, this one
    single blocks.
    """

    def __init__(self, host: Level | None, below: Level | None, write: WritePolicy) -> None:
        self.host = host
        self.below = below
        self.bytes_read = {L2: 0, L3: 0}
        self.bytes_written = {L2: 0, L3: 0}
        self._write = write
        self._counts_hits = below is not None and write.name == "selective"
        self._hits: dict[int, int] = {}
        self._keeps_sizes = below is not None and write.on_evict
        self._sizes: dict[int, int] = {}

    def find(self, run: Sequence[int]) -> list[str]:
        """Look up a request's blocks. Returns the tier of each leading block that is cached."""
        host, below = self.host, self.below
        here = host.lookup(run) if host is not None else 0
        found = [L2] * here
        if below is None:
            return found
        for key in run[here:]:
            if host is not None and key in host:
                found.append(L2)
            elif key in below:
                found.append(L3)
            else:
                break
        return found

    def keep(self, run: Sequence[int], sizes: Sequence[int], found: Sequence[str]) -> None:
        """Record that the request ran: its `found` blocks were loaded, the others computed.

        sizes: bytes of each block.
        """
        host, below = self.host, self.below
        if host is not None and below is None:
            self.bytes_read[L2] += sum(sizes[: len(found)])
            self.bytes_written[L2] += host.use_run(run, sizes)
            host.trim()
            return
        for index in range(len(found) - 1, -1, -1):
            tier = found[index]
            if tier == COMPUTED:
                continue
            self.bytes_read[tier] += sizes[index]
            if tier == L3 and below is not None:
                below.use(run[index], sizes[index])
        if host is None:
            for index in range(len(run) - 1, len(found) - 1, -1):
                self._down(run[index], sizes[index])
        else:
            for index in range(len(run) - 1, -1, -1):
                self._up(host, run[index], sizes[index])
            self._trim(host)
        if below is not None:
            below.trim()

    def _up(self, host: Level, key: int, nbytes: int) -> None:
        """Put a block into L2, or count its use."""
        if host.use(key, nbytes):
            self.bytes_written[L2] += nbytes
            if self._keeps_sizes:
                self._sizes[key] = nbytes
            if self._write.on_commit:
                self._down(key, nbytes)
        elif self._counts_hits:
            hits = self._hits[key] = self._hits.get(key, 0) + 1
            if self._write.on_hit(hits):
                self._down(key, nbytes)

    def _trim(self, host: Level) -> None:
        gone = host.trim()
        if not (self._counts_hits or self._keeps_sizes):
            return
        for key in gone:
            self._hits.pop(key, None)
            nbytes = self._sizes.pop(key, 0)
            if self._keeps_sizes:
                self._down(key, nbytes)

    def _down(self, key: int, nbytes: int) -> None:
        """Write a block to the tier below, unless it is there already."""
        if self.below is not None and key not in self.below:
            self.below.use(key, nbytes)
            self.bytes_written[L3] += nbytes
