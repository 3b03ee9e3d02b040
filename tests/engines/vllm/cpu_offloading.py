"""vLLM's native tiering on a CPU, for tests: its own spec, with a worker that copies by numpy.

vLLM's worker rejects a CPU (it copies by CUDA). Everything else is vLLM's: the manager, the host
pool, keys, groups, tiers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, on the caller's thread.

    An offloaded block has `per_block` contiguous engine blocks, tensor by tensor.
    """

    def __init__(self, caches: Any, region: SharedOffloadRegion, per_block: int) -> None:
        self._region = region
        self._per_block = per_block
        self._device = [each.tensor for each in caches.tensors]
        self._host = [
            region.create_next_worker_view(each.page_size_bytes * per_block)
            for each in caches.tensors
        ]
        self._tensors = [
            sorted({reference.tensor_idx for reference in group})
            for group in caches.group_data_refs
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Any) -> None:
        return None

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, device: Any, host: Any, *, to_host: bool) -> bool:
        began_s, nbytes = time.perf_counter(), 0
        for tensor, block, offloaded, place in self._places(device, host):
            page = self._device[tensor][block]
            size = page.numel()
            row = self._host[tensor][offloaded][place * size : (place + 1) * size]
            if to_host:
                row.copy_(page)
            else:
                page.copy_(row)
            nbytes += size
        seconds = time.perf_counter() - began_s
        self._ended.append(TransferResult(job_id, True, nbytes, seconds))
        return True

    def _places(self, device: Any, host: Any) -> list[tuple[int, int, int, int]]:
        """(tensor, engine block, offloaded block, index in it) of every page of a job."""
        places = []
        first_block = first_row = 0
        for group, count in enumerate(device.group_sizes):
            if not count:
                continue
            skipped = device.block_indices[group] % self._per_block
            for number in range(count):
                offloaded, place = divmod(skipped + number, self._per_block)
                block = int(device.block_ids[first_block + number])
                row = int(host.chunk_ids[first_row + offloaded])
                places += [(tensor, block, row, place) for tensor in self._tensors[group]]
            first_block += count
            first_row += -(-(skipped + count) // self._per_block)
        return places


class CpuTieringSpec(TieringOffloadingSpec):
    """`spec_name`: vLLM's tiering with the worker above."""

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        if not self._worker:
            assert all(each.tensor.dtype == torch.int8 for each in kv_caches.tensors)
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
