"""L2 and a tier below it in a replay: which block lies where, and what goes down when."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.analysis.simulate.levels import Level
from kvstore.cache.write_policy import WritePolicy

L1, L2, L3 = "l1", "l2", "l3"
COMPUTED = "computed"
"""In place of a tier: the block was held below, and computed all the same, sooner than it came."""


class Tiers:
    """L2 (`host`), a tier below (`below`), or both.

    As in the store: what a request computes goes to L2, and from there down when the write policy
    says so; what is loaded from below is in L2 afterwards. Writes reach the tier before the next
    request does, and none is dropped. Within a request the deepest block is written and used first,
    so that the first stays longest; the disk tier evicts whole segments, this one blocks.
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
        """A request asks for these blocks; where each of the leading ones that are held lies."""
        host, below = self.host, self.below
        here = host.asked(run) if host is not None else 0
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
        """The request ran, with what was `found` loaded and the others computed.

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
        """The block is in L2 and was used."""
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
        """Write the block to the tier below, unless it is there."""
        if self.below is not None and key not in self.below:
            self.below.use(key, nbytes)
            self.bytes_written[L3] += nbytes
