"""The S3 tier: frames of many writers packed into segments, an index in memory.

One lock guards the catalog and is never held across a request. A write joins a group and returns
when the group's segment is in the bucket and in the index; a read looks its place up and asks for
just these bytes of the segment, straight into the caller's buffers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from kvstore.blocks.key import Key
from kvstore.errors import FrameTooLarge, TierError, TierFull, TierUnavailable
from kvstore.tiers.base import PAGE_BYTES, Tier
from kvstore.tiers.s3 import layout
from kvstore.tiers.s3.client import Client
from kvstore.tiers.s3.faults import Invalid, Missing
from kvstore.tiers.s3.objects import Objects
from kvstore.tiers.s3.packer import Group, Packer
from kvstore.tiers.s3.reconciler import Keeper, Rules
from kvstore.tiers.s3.segment_index import MAX_FRAME_PAGES, MAX_SEGMENT_PAGES, Catalog, Segment

log = logging.getLogger(__name__)

MAX_COPIES: Final = 3
"""Segments in which a read looks for one block."""
OPEN_WAIT_S: Final = 10.0
"""Longest that opening waits for what is in the bucket; the rest is learnt meanwhile."""
SAME_KEY_WAIT_S: Final = 60.0
"""Longest a writer waits for another that is writing the same key."""
CLOSE_WAIT_S: Final = 5.0
"""Longest `close` waits for what is under way: as long as a store waits for its tiers."""


class S3Tier(Tier):
    """Keeps frames in a bucket. Made by `open`; see the package's `Config`."""

    local_index = True

    def __init__(
        self,
        client: Client,
        rules: Rules,
        *,
        name: str,
        prefix: str,
        shards: int,
        segment_bytes: int,
        uploads: int,
        writers: int,
        readers: int,
        linger_s: float,
    ) -> None:
        """Returns when the bucket was looked through, or could not be, or after OPEN_WAIT_S."""
        self.name = name
        self.workers_read = readers
        self.workers_write = writers
        self._client = client
        self._capacity_bytes = rules.capacity_bytes
        self._mortal = bool(rules.ttl_s)
        self._catalog = Catalog()
        self._objects = Objects(client, prefix, shards, adopt_s=rules.adopt_s)
        self._lock = threading.Condition()
        self._writing: set[Key] = set()
        self._closed = False
        self._counts = dict.fromkeys(("reads", "writes", "read_bytes", "write_bytes"), 0)
        self._packer = Packer(
            self._upload,
            group_bytes=segment_bytes,
            uploads=uploads,
            writers=writers,
            linger_s=linger_s,
        )
        self._keeper = Keeper(self._catalog, self._objects, self._lock, rules)
        self._keeper.start(OPEN_WAIT_S)

    # ------------------------------------------------------------------ verbs

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            self._check_open()
            if self._mortal:
                return [self._keeper.find(key) is not None for key in keys]
            index = self._catalog.index
            return [key in index for key in keys]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        for _ in range(MAX_COPIES):
            with self._lock:
                self._check_open()
                found = self._keeper.find(key)
                if found is None:
                    return 0
                segment, page, pages = found
                nbytes = (pages - 1) * PAGE_BYTES
                if nbytes > len(payload):
                    raise FrameTooLarge(
                        f"a payload of {nbytes} bytes does not fit in {len(payload)}"
                    )
                self._catalog.touch(segment)
            try:
                self._objects.read(segment, page, header[:PAGE_BYTES], payload[:nbytes])
            except (Missing, Invalid) as fault:
                self._lost(segment, fault)
                continue
            with self._lock:
                self._counts["reads"] += 1
                self._counts["read_bytes"] += pages * PAGE_BYTES
            return nbytes
        return 0

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        assert len(payload) > 0, "a frame without a payload"
        assert len(payload) % PAGE_BYTES == 0, f"a payload of {len(payload)} is not whole pages"
        pages = 1 + len(payload) // PAGE_BYTES
        nbytes = pages * PAGE_BYTES + layout.footer_bound([key])
        if pages > MAX_FRAME_PAGES or 0 < self._capacity_bytes < nbytes:
            raise TierFull(
                f"a frame of {pages * PAGE_BYTES} bytes is larger than {self.name} takes"
            )
        if not self._claim(key):
            return
        try:
            self._packer.write(key, header, payload)
        finally:
            with self._lock:
                self._writing.discard(key)
                self._lock.notify_all()

    def delete(self, keys: Sequence[Key]) -> None:
        with self._lock:
            self._check_open()
            touched = {segment for key in keys for segment in self._catalog.kill(key)}
            dead = [segment for segment in touched if segment.all_dead]
            for segment in dead:
                self._keeper.forget(segment)
        # A fault leaves them forgotten here, and the next round of the keeper tries again.
        self._keeper.remove(dead)
        for segment in touched.difference(dead):
            self._keeper.write_grave(segment)

    def usage(self) -> Iterator[tuple[Key, int]]:
        with self._lock:
            self._check_open()
            segments = self._catalog.hottest()
        return chain.from_iterable(map(self._blocks, segments))

    def clear(self) -> None:
        with self._lock:
            self._check_open()
        self._keeper.clear()

    def refresh(self) -> None:
        """Learn now what other nodes have done, and collect. Raises TierUnavailable."""
        with self._lock:
            self._check_open()
        self._keeper.refresh()

    def stats(self) -> dict[str, int | float | str]:
        client = self._client.stats()
        faults = sum(int(n) for kind, n in client.items() if kind.startswith("faults_"))
        with self._lock:
            return {
                **self._keeper.stats(),
                "blocks": len(self._catalog.index),
                **self._counts,
                **self._packer.stats(),
                **client,
                "faults": faults,
                "trouble": self._client.trouble,
            }

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._keeper.halt()
            deadline_s = time.monotonic() + CLOSE_WAIT_S
            quiet = self._lock.wait_for(lambda: not self._writing, CLOSE_WAIT_S)
        if not (self._keeper.stop(max(0.0, deadline_s - time.monotonic())) and quiet):
            log.error("%s: closed while requests hang; they end by their own limits", self.name)
        self._client.close()

    # ------------------------------------------------------------------ parts of them

    def _upload(self, group: Group) -> None:
        """Put a group into the bucket and the index; called by the packer."""
        bound = group.nbytes + layout.footer_bound(group.keys)
        if bound > MAX_SEGMENT_PAGES * PAGE_BYTES:
            raise TierFull(f"a segment of {bound} bytes is larger than one put makes")
        self._keeper.reserve(bound)
        try:
            segment = self._objects.put(group, self._keeper.usable)
            with self._lock:
                self._keeper.register(segment)
                self._counts["writes"] += len(group.keys)
                self._counts["write_bytes"] += segment.nbytes
        finally:
            self._keeper.release(bound)

    def _blocks(self, segment: Segment) -> list[tuple[Key, int]]:
        with self._lock:
            return self._catalog.blocks(segment)

    def _claim(self, key: Key) -> bool:
        """Become the one writer of a key; False when it is held already."""
        with self._lock:
            self._check_open()
            if not self._lock.wait_for(lambda: key not in self._writing, SAME_KEY_WAIT_S):
                raise TierUnavailable(f"another write of the same block hangs in {self.name}")
            self._check_open()
            if self._keeper.find(key) is not None:
                return False
            self._writing.add(key)
            return True

    def _lost(self, segment: Segment, fault: Exception) -> None:
        """Its object is gone or is another: forget it."""
        log.info("%s: %s is gone: %s", self.name, segment.name, fault or "removed by another node")
        with self._lock:
            if self._catalog.segments.get(segment.name) is segment:
                self._keeper.lose(segment)

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed")
