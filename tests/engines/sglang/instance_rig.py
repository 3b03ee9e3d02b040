"""One instance of SGLang's tree and controller over a backend, driven sequence by sequence."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hicache_rig import HEADS, LAYERS, TOKENS, WIDTH, driver

PAGES = 120
"""Pages of a sequence: one batch of the controller, in four parts of at most a quarter of the slab.
The last part has 24 pages: SGLang requests at least 16 at once."""
SLOTS = 128
"""Slots of the sidecar's slab."""
LENGTH = PAGES * TOKENS


class Instance:
    """SGLang's tree and controller over a new backend; all memory is empty."""

    def __init__(self, chosen: dict[str, Any], folder: Path, **arguments: Any) -> None:
        """arguments: of SGLang's server."""
        drive = driver()
        from sglang.srt import server_args

        drive.Drive.cfg = drive.CacheConfig(
            page_size=TOKENS,
            kv_size=4 * LENGTH,
            max_context_len=2 * LENGTH,
            num_layers=LAYERS,
            head_num=HEADS,
            head_dim=WIDTH,
        )
        options = SimpleNamespace(core="python", layout="page_first", backend="dynamic")
        publish = server_args.set_global_server_args_for_scheduler

        def publish_with(args: Any) -> None:
            for name, value in arguments.items():
                setattr(args, name, value)
            publish(args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_args, "set_global_server_args_for_scheduler", publish_with)
            made = drive.make(options, chosen, str(folder))
        self.fixture, self.cache, self.device, self.requests = made
        self.backend = self.cache.cache_controller.storage_backend
        (self.page_pool,) = self.backend._page_pools._page_pools.values()
        self.prefetches = 0

    def connected(self) -> bool:
        """True if the backend is connected to a sidecar."""
        return bool(self.page_pool._client._store.connected)

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
        self._wait_for_backups()
        return kept

    def use(self, tokens: array[int]) -> int:
        """Use a sequence again; returns the number of its tokens that SGLang still has."""
        drive = driver()
        match = self._match(tokens)
        slots = self.cache.path_device_indices(match.last_device_node)
        self.cache.insert(drive.InsertParams(key=drive.RadixKey(tokens), value=slots.clone()))
        self.cache.flush_pending_backups()
        self._wait_for_backups()
        return int(match.device_prefix_len)

    def flush(self) -> None:
        """Empty the tree and its pools, as the scheduler's flush_cache does."""
        self.cache.reset()
        self.requests.clear()
        self.device.clear()

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

    def _wait_for_backups(self) -> None:
        cache = self.cache

        def backed_up() -> bool:
            queue = cache.cache_controller.backup_queue
            return not cache.ongoing_write_through and not cache.ongoing_backup and queue.empty()

        driver().pump(cache, backed_up, "the backup ends")

    def _match(self, tokens: array[int]) -> Any:
        drive = driver()
        return self.cache.match_prefix(drive.MatchPrefixParams(key=drive.RadixKey(tokens)))


def _buffers(pool: Any) -> list[torch.Tensor]:
    return [
        each for n in range(LAYERS) for each in (pool.get_key_buffer(n), pool.get_value_buffer(n))
    ]


def sequence(number: int) -> array[int]:
    return array("q", range(100_000 * number, 100_000 * number + LENGTH))
