"""`kill -9` of the sidecar in the middle of a batch of SGLang's own controller: arrived pages are
used, failed pages do not count as stored, and the next batch reconnects."""

from __future__ import annotations

import json
import logging
import urllib.request
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hicache_rig import HEADS, LAYERS, PAGE_BYTES, TOKENS, WIDTH, absent, driver, extra
from sidecar_rig import ForkedSidecar, disk, wait_until

from kvstore.connectors.sglang.copies import Copies, Extents

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent()), reason=absent()),
]

PAGES = 120
"""Pages of a sequence: one batch of the controller, in four parts of at most a quarter of the slab.
The last part has 24 pages: SGLang requests at least 16 at once."""
SLOTS = 128
LENGTH = PAGES * TOKENS


class KillingCopies(Copies):
    """Kills the sidecar when the copies of the second part of a batch are about to run, once."""

    def __init__(self, sidecar: ForkedSidecar) -> None:
        super().__init__(2)
        self._sidecar, self.left = sidecar, 2

    def to_host(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        self._countdown()
        super().to_host(slots, pages)

    def to_slots(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        self._countdown()
        super().to_slots(slots, pages)

    def _countdown(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._sidecar.kill()


class Instance:
    """SGLang's tree and controller over a new backend; all memory is empty."""

    def __init__(self, chosen: dict[str, Any], folder: Path) -> None:
        drive = driver()
        drive.Drive.cfg = drive.CacheConfig(
            page_size=TOKENS,
            kv_size=4 * LENGTH,
            max_context_len=2 * LENGTH,
            num_layers=LAYERS,
            head_num=HEADS,
            head_dim=WIDTH,
        )
        options = SimpleNamespace(core="python", layout="page_first", backend="dynamic")
        self.fixture, self.cache, self.device, self.requests = drive.make(
            options, chosen, str(folder)
        )
        self.backend = self.cache.cache_controller.storage_backend
        (self._page_pool,) = self.backend._page_pools._page_pools.values()
        self.prefetches = 0

    def killing(self, sidecar: ForkedSidecar) -> KillingCopies:
        """Kill the sidecar in the middle of the next batch."""
        copies = KillingCopies(sidecar)
        self._page_pool._copies = copies
        return copies

    def connected(self) -> bool:
        """True if the backend is connected to a sidecar."""
        return bool(self._page_pool._client._store.connected)

    def compute(self, tokens: array[int], seed: int) -> list[torch.Tensor]:
        """Fill the KV of a sequence and let the controller back it up; returns K and V by layer."""
        pool = self.device.get_kvcache()
        slots = self.device.alloc(LENGTH)
        noise = torch.Generator().manual_seed(seed)
        kept = []
        for buffer in _buffers(pool):
            rows = torch.randn((LENGTH, *buffer.shape[1:]), generator=noise).to(buffer.dtype)
            buffer[slots] = rows
            kept.append(rows)
        drive = driver()
        self.cache.insert(drive.InsertParams(key=drive.RadixKey(tokens), value=slots.clone()))
        self.cache.flush_pending_backups()
        cache = self.cache

        def backed_up() -> bool:
            queue = cache.cache_controller.backup_queue
            return not cache.ongoing_write_through and not cache.ongoing_backup and queue.empty()

        drive.pump(cache, backed_up, "the backup ends")
        return kept

    def restore(self, tokens: array[int], right: list[torch.Tensor]) -> int:
        """Prefetch a sequence, load it, compare every byte; returns the number of loaded tokens."""
        drive = driver()
        self.prefetches += 1
        handle = drive.CacheRequestHandle(f"request {self.prefetches}", 0)
        match = self._match(tokens)
        assert (match.device_prefix_len, match.host_hit_length) == (0, 0), "requested once"
        self.cache.prefetch_from_storage(handle, match.last_host_node, tokens)
        if self.cache.has_ongoing_prefetch(handle):
            done = lambda: self.cache.check_prefetch_progress(handle)  # noqa: E731
            drive.pump(self.cache, done, "the prefetch ends")
        match = self._match(tokens)
        if match.host_hit_length:
            request = self.fixture._make_req(self.requests)
            self.fixture._apply_match_to_req(request, match)
            self.cache.init_load_back(
                drive.InitLoadBackParams(
                    best_match_node=match.best_match_node,
                    host_hit_length=match.host_hit_length,
                    mem_quota=None,
                    req=request,
                )
            )
            self.cache.ready_to_load_host_cache()
            drive.pump(self.cache, lambda: not self.cache.ongoing_load_back, "load back")
        match = self._match(tokens)
        came = int(match.device_prefix_len)
        if came:
            slots = self.cache.path_device_indices(match.last_device_node)
            for buffer, rows in zip(_buffers(self.device.get_kvcache()), right, strict=True):
                got = buffer[slots][:came]
                assert torch.equal(got.view(torch.uint8), rows[:came].view(torch.uint8))
        return came

    def stop(self) -> None:
        self.cache.cache_controller._stop_storage_threads()
        self.backend.close()

    def _match(self, tokens: array[int]) -> Any:
        drive = driver()
        return self.cache.match_prefix(drive.MatchPrefixParams(key=drive.RadixKey(tokens)))


def _buffers(pool: Any) -> list[torch.Tensor]:
    return [
        each for n in range(LAYERS) for each in (pool.get_key_buffer(n), pool.get_value_buffer(n))
    ]


def sequence(number: int) -> array[int]:
    return array("q", range(100_000 * number, 100_000 * number + LENGTH))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    slab = {"l2": {"bytes": SLOTS * PAGE_BYTES, "slot_bytes": PAGE_BYTES}}
    room = disk(tmp_path / "disk", "256MiB", codec="none")
    made = ForkedSidecar(tmp_path, {**slab, **room})
    yield made
    made.kill()


def flush(sidecar: ForkedSidecar) -> None:
    request = urllib.request.Request(f"{sidecar.url}/v1/flush", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer) == {"flushed": True}


def test_a_kill_while_the_controller_reads(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    writer = Instance(extra(sidecar.socket), tmp_path)
    first, second = sequence(1), sequence(2)
    right = writer.compute(first, 1)
    flush(sidecar)
    also = writer.compute(second, 2)
    flush(sidecar)
    writer.stop()

    reader = Instance(extra(sidecar.socket), tmp_path)
    copies = reader.killing(sidecar)
    came = reader.restore(first, right)
    assert copies.left <= 0, "it was killed"
    assert 0 < came < LENGTH, "the head of the batch arrived, its tail did not"
    sidecar.start()
    wait_until(reader.connected, "it has reconnected")
    assert reader.restore(second, also) == LENGTH
    reader.stop()
    another = Instance(extra(sidecar.socket), tmp_path)
    assert another.restore(first, right) == LENGTH, "nothing was lost"
    another.stop()


def test_a_kill_while_the_controller_writes(
    sidecar: ForkedSidecar, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Instance(extra(sidecar.socket), tmp_path)
    copies = writer.killing(sidecar)
    caplog.set_level(logging.WARNING)
    first, second = sequence(1), sequence(2)
    right = writer.compute(first, 1)
    assert copies.left <= 0, "it was killed"
    assert f"Write page to storage: {PAGES} pages failed" in caplog.text
    sidecar.start()
    wait_until(writer.connected, "it has reconnected")
    also = writer.compute(second, 2)

    reader = Instance(extra(sidecar.socket), tmp_path)
    assert reader.restore(second, also) == LENGTH
    assert reader.restore(first, right) < LENGTH, "any pages that arrived are correct"
    for instance in (writer, reader):
        instance.stop()
