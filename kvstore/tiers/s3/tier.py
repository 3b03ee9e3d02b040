"""The S3 tier: frames of many writers packed into segments, an index in memory.

One lock guards the index. No thread owns it during a request. A write joins a group and returns
when the group's segment is in the bucket and in the index. A read looks up its location and gets
these bytes of the segment directly into the caller's buffers.
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
from kvstore.tiers.base import IO_ALIGNMENT, Tier
from kvstore.tiers.s3 import layout
from kvstore.tiers.s3.client import Client
from kvstore.tiers.s3.faults import Invalid, Missing
from kvstore.tiers.s3.objects import Objects
from kvstore.tiers.s3.packer import Group, Packer
from kvstore.tiers.s3.reconciler import Reconciler, RetentionRules
from kvstore.tiers.s3.segment_index import (
    MAX_FRAME_SECTORS,
    MAX_SEGMENT_SECTORS,
    Segment,
    SegmentIndex,
)

log = logging.getLogger(__name__)

MAX_READ_COPIES: Final = 3
"""Maximum number of copies that a read tries."""
OPEN_TIMEOUT_S: Final = 10.0
"""Maximum wait of opening for the first listing. A longer listing continues in the background."""
SAME_KEY_WAIT_S: Final = 60.0
"""Maximum wait for another write of the same key."""
CLOSE_WAIT_S: Final = 5.0
"""Maximum wait of `close` for running requests; a store waits as long for its tiers."""


class S3Tier(Tier):
    """Stores frames in a bucket. Created by `open` from the package's `Config`."""

    local_index = True

    def __init__(
        self,
        client: Client,
        rules: RetentionRules,
        *,
        name: str,
        prefix: str,
        shards: int,
        segment_bytes: int,
        uploads: int,
        writer_threads: int,
        reader_threads: int,
        linger_s: float,
    ) -> None:
        """Returns when the first listing has ended or failed, or after OPEN_TIMEOUT_S."""
        self.name = name
        self.workers_read = reader_threads
        self.workers_write = writer_threads
        self._client = client
        self._capacity_bytes = rules.capacity_bytes
        self._has_ttl = bool(rules.ttl_s)
        self._index = SegmentIndex()
        self._objects = Objects(client, prefix, shards, accept_peer_s=rules.accept_peer_s)
        self._lock = threading.Condition()
        self._writing: set[Key] = set()
        self._closed = False
        self._counts = dict.fromkeys(("reads", "writes", "read_bytes", "write_bytes"), 0)
        self._packer = Packer(
            self._upload,
            group_bytes=segment_bytes,
            uploads=uploads,
            writers=writer_threads,
            linger_s=linger_s,
        )
        self._reconciler = Reconciler(self._index, self._objects, self._lock, rules)
        self._reconciler.start(OPEN_TIMEOUT_S)

    # ------------------------------------------------------------------ operations

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        with self._lock:
            self._check_open()
            if self._has_ttl:
                return [self._reconciler.find(key) is not None for key in keys]
            index = self._index.index
            return [key in index for key in keys]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        for _ in range(MAX_READ_COPIES):
            with self._lock:
                self._check_open()
                found = self._reconciler.find(key)
                if found is None:
                    return 0
                segment, sector, sectors = found
                nbytes = (sectors - 1) * IO_ALIGNMENT
                fits = nbytes <= len(payload)
                self._index.touch(segment)
            try:
                target = payload[: nbytes if fits else 0]
                self._objects.read(segment, sector, header[:IO_ALIGNMENT], target)
            except (Missing, Invalid) as error:
                self._untrack_missing(segment, error)
                continue
            if not fits:
                raise FrameTooLarge(
                    f"payload of {nbytes} bytes does not fit into {len(payload)} bytes"
                )
            with self._lock:
                self._counts["reads"] += 1
                self._counts["read_bytes"] += sectors * IO_ALIGNMENT
            return nbytes
        return 0

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        assert len(payload) > 0, "frame without a payload"
        assert len(payload) % IO_ALIGNMENT == 0, f"unaligned payload of {len(payload)} bytes"
        sectors = 1 + len(payload) // IO_ALIGNMENT
        nbytes = sectors * IO_ALIGNMENT + layout.max_footer_bytes([key])
        if sectors > MAX_FRAME_SECTORS or 0 < self._capacity_bytes < nbytes:
            raise TierFull(f"frame of {sectors * IO_ALIGNMENT} bytes is too large for {self.name}")
        if not self._begin_write(key):
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
            changed = {segment for key in keys for segment in self._index.mark_deleted(key)}
            empty = [segment for segment in changed if segment.all_deleted]
            for segment in empty:
                self._reconciler.untrack(segment)
        # After an error the blocks stay deleted here, and the reconciler's next round retries.
        self._reconciler.delete(empty)
        for segment in changed.difference(empty):
            self._reconciler.write_tombstone(segment)

    def usage(self) -> Iterator[tuple[Key, int]]:
        with self._lock:
            self._check_open()
            segments = self._index.mru_order()
        return chain.from_iterable(map(self._blocks, segments))

    def clear(self) -> None:
        with self._lock:
            self._check_open()
        self._reconciler.clear()

    def reconcile(self) -> None:
        """Run a round of the reconciler now. Raises TierUnavailable."""
        with self._lock:
            self._check_open()
        self._reconciler.reconcile()

    def stats(self) -> dict[str, int | float | str]:
        client = self._client.stats()
        errors = sum(int(n) for kind, n in client.items() if kind.startswith("errors_"))
        with self._lock:
            return {
                **self._reconciler.stats(),
                "blocks": len(self._index.index),
                **self._counts,
                **self._packer.stats(),
                **client,
                "errors": errors,
                "last_error": self._client.last_error,
            }

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._reconciler.request_stop()
            deadline_s = time.monotonic() + CLOSE_WAIT_S
            idle = self._lock.wait_for(lambda: not self._writing, CLOSE_WAIT_S)
        if not (self._reconciler.stop(max(0.0, deadline_s - time.monotonic())) and idle):
            log.error("%s: closed while requests hang; they end at their timeouts", self.name)
        self._client.close()

    # ------------------------------------------------------------------ internals

    def _upload(self, group: Group) -> None:
        """Upload a group and add it to the index. The packer calls this."""
        bound = group.nbytes + layout.max_footer_bytes(group.keys)
        if bound > MAX_SEGMENT_SECTORS * IO_ALIGNMENT:
            raise TierFull(f"segment of {bound} bytes is too large for one put")
        self._reconciler.reserve(bound)
        try:
            segment = self._objects.put(group, self._reconciler.is_usable)
            with self._lock:
                self._reconciler.register(segment)
                self._counts["writes"] += len(group.keys)
                self._counts["write_bytes"] += segment.nbytes
        finally:
            self._reconciler.release(bound)

    def _blocks(self, segment: Segment) -> list[tuple[Key, int]]:
        with self._lock:
            return self._index.blocks_of(segment)

    def _begin_write(self, key: Key) -> bool:
        """Become the only writer of a key; returns False if the tier contains it already."""
        with self._lock:
            self._check_open()
            if not self._lock.wait_for(lambda: key not in self._writing, SAME_KEY_WAIT_S):
                raise TierUnavailable(f"{self.name}: another write of the same block hangs")
            self._check_open()
            if self._reconciler.find(key) is not None:
                return False
            self._writing.add(key)
            return True

    def _untrack_missing(self, segment: Segment, error: Exception) -> None:
        """Untrack a segment whose object is missing or was replaced."""
        log.info("%s: segment %s is missing or invalid: %s", self.name, segment.name, error)
        with self._lock:
            if self._index.segments.get(segment.name) is segment:
                self._reconciler.on_missing(segment)

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"tier {self.name} is closed")
