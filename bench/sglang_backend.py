"""Cost of set, get and exists for SGLang with pages of 2 MiB, compared with its own file backend.

Both backends get the same pages in one run, in turns, on the same disk, with the calls of SGLang's
controller: whole pages in tensors for the file backend (copied to and from the host pool, as the
controller does), addresses for kvstore. kvstore runs as on a node: a sidecar in a separate process
with a disk tier. "on disk" ends when the bytes are written and synced: SGLang's backend never
syncs, so this bench syncs its files. "cold" has nothing in memory: the page cache is dropped for
the files, and L2 is cleared for kvstore, whose disk tier bypasses the page cache.

    python bench/sglang_backend.py [--pages 256] [--rounds 3] [--folder DIR] [--json]
    python bench/sglang_backend.py --steps  # of one read: decode, verify, copy to the pool

Needs SGLang (.ci/engines sglang installs it). Of each figure the best round is shown.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvstore import codecs
from kvstore.blocks.frame import aligned_buffer, checksum
from kvstore.connectors.sglang.copies import Copies
from kvstore.testing.processes import Sidecar

LAYERS, TOKENS, HEADS, WIDTH = 32, 16, 8, 128
PAGE_BYTES = LAYERS * TOKENS * HEADS * WIDTH * 2 * 2
"""Llama-3-8B in bfloat16: 2 MiB."""
BATCH = 128
"""Pages of a batch of SGLang."""
STANDINS = Path(__file__).parents[1] / "tests" / "engines" / "sglang" / "standins"


class HostPool:
    """The memory of SGLang's host pool, page first: K and V of a page are one extent each."""

    layout, dtype, page_size = "page_first", torch.bfloat16, TOKENS
    layer_num, head_num, head_dim, v_head_dim = LAYERS, HEADS, WIDTH, WIDTH
    start_layer, end_layer = 0, LAYERS

    def __init__(self, pages: int) -> None:
        shape = (2, pages * TOKENS, LAYERS, HEADS, WIDTH)
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, index : index + TOKENS].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(PAGE_BYTES // 2, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        target = self.kv_buffer[:, index : index + TOKENS]
        target.copy_(page.view(target.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer.nbytes // 2
        each = PAGE_BYTES // 2
        firsts = indices.tolist()[::TOKENS]
        addresses = [base + at * half + index // TOKENS * each for index in firsts for at in (0, 1)]
        return addresses, [each] * len(addresses)


class FileBackend:
    """SGLang's file backend, called as its controller calls it."""

    name = "SGLang file"

    def __init__(self, pool: HostPool, folder: Path) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        self.pool, self.folder = pool, folder / "file"
        self.backend = HiCacheFile(storage_config({"file_storage_path": str(self.folder)}))

    def set(self, keys: list[str], pages: Sequence[int]) -> bool:
        values = [self.pool.get_data_page(page * TOKENS) for page in pages]
        return bool(self.backend.batch_set(keys, values))

    def get(self, keys: list[str], pages: Sequence[int]) -> bool:
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        got = self.backend.batch_get(keys, targets)
        for page, data in zip(pages, got, strict=True):
            self.pool.set_from_flat_data_page(page * TOKENS, data)
        return True

    def exists(self, keys: list[str]) -> int:
        return int(self.backend.batch_exists(keys))

    def sync(self) -> None:
        for path in self.folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.close(fd)

    def make_cold(self) -> None:
        self.sync()
        for path in self.folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def forget(self) -> None:
        self.backend.clear()

    def close(self) -> None:
        self.backend.clear()


class KVStore:
    """kvstore's backend over a sidecar."""

    name = "kvstore"

    def __init__(self, pool: HostPool, folder: Path, pages: int, codec: str) -> None:
        from kvstore.connectors.sglang import KVStoreBackend

        folder.mkdir(exist_ok=True)
        slab = pages * PAGE_BYTES + 64 * PAGE_BYTES
        config = folder / "kvstore.toml"
        config.write_text(
            f'[[tiers]]\nkind = "disk"\ndirectory = "{folder}/disk"\ncapacity = {4 * slab}\n'
            f'codec = "{codec}"\nqueue_time = 0\n[limits]\nwrite_queue_blocks = {2 * pages}\n'
        )
        flags = ("--l2", str(slab), "--slot-bytes", str(PAGE_BYTES), "--config", str(config))
        self.sidecar = Sidecar(folder / "kv.sock", *flags)
        self.sidecar.wait_ready()
        self.pool = pool
        chosen = {"socket": self.sidecar.socket, "interface_v1": 1, "http": self.sidecar.url}
        slow = {"base": 60_000, "max": 60_000}
        self.backend = KVStoreBackend(storage_config({**chosen, "max_wait": slow}))
        self.backend.register_mem_pool_host(pool)

    def set(self, keys: list[str], pages: Sequence[int]) -> bool:
        return all(self.backend.batch_set_v1(keys, self._slots(pages)))

    def get(self, keys: list[str], pages: Sequence[int]) -> bool:
        return all(self.backend.batch_get_v1(keys, self._slots(pages)))

    def exists(self, keys: list[str]) -> int:
        return self.backend.batch_exists(keys)

    def sync(self) -> None:
        self._post("/v1/flush")

    def make_cold(self) -> None:
        self.sync()
        self._post("/v1/clear?tier=l2")

    def forget(self) -> None:
        assert self.backend.clear()

    def close(self) -> None:
        self.backend.close()
        self.sidecar.stop()

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        return (torch.tensor(pages).reshape(-1, 1) * TOKENS + torch.arange(TOKENS)).reshape(-1)

    def _post(self, path: str) -> None:
        request = urllib.request.Request(self.sidecar.url + path, method="POST")
        urllib.request.urlopen(request, timeout=300).close()


def storage_config(chosen: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config=chosen,
    )


def gb_per_s(call: Callable[[list[str], Sequence[int]], bool], keys: list[str]) -> float:
    """Call for all keys, batch by batch. Page i of the pool belongs to key i."""
    start = time.perf_counter()
    for at in range(0, len(keys), BATCH):
        assert call(keys[at : at + BATCH], range(at, min(at + BATCH, len(keys)))), "a page failed"
    return len(keys) * PAGE_BYTES / (time.perf_counter() - start) / 1e9


def exists_us(
    backend: Any, keys: list[str], there: int = BATCH, calls: int = 300
) -> tuple[float, float]:
    """(median, fastest) time of one call for a batch with this number of leading pages."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        assert backend.exists(keys[:BATCH]) == there
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6, min(times) * 1e6


def measure(backend: Any, pool: HostPool, keys: list[str]) -> dict[str, float]:
    """One round with an empty backend. Checks that the loaded pages are equal."""
    sums = page_sums(pool, len(keys))
    row = {}
    start = time.perf_counter()
    row["set_gb_s"] = gb_per_s(backend.set, keys)
    backend.sync()
    row["set_on_disk_gb_s"] = len(keys) * PAGE_BYTES / (time.perf_counter() - start) / 1e9
    row["set_again_gb_s"] = gb_per_s(backend.set, keys)
    row["exists_us"], row["exists_min_us"] = exists_us(backend, keys)
    missing = [hashlib.sha256(b"missing %d" % n).hexdigest() for n in range(BATCH)]
    row["miss_us"], row["miss_min_us"] = exists_us(backend, missing, 0)
    pool.kv_buffer.zero_()
    row["get_warm_gb_s"] = gb_per_s(backend.get, keys)
    assert page_sums(pool, len(keys)) == sums, "the loaded bytes differ"
    backend.make_cold()
    pool.kv_buffer.zero_()
    row["get_cold_gb_s"] = gb_per_s(backend.get, keys)
    assert page_sums(pool, len(keys)) == sums, "the loaded bytes differ"
    backend.forget()
    return row


def page_sums(pool: HostPool, pages: int) -> list[bytes]:
    parts = pool.kv_buffer.view(torch.uint8).reshape(2, pages, -1)
    return [hashlib.blake2b(parts[:, n].contiguous().numpy().data).digest() for n in range(pages)]


@contextmanager
def backends(pool: HostPool, folder: Path, pages: int) -> Iterator[list[Any]]:
    made: list[Any] = [FileBackend(pool, folder)]
    try:
        for codec in ("none", "auto"):
            store = KVStore(pool, folder / codec, pages, codec)
            store.name = f"kvstore {codec}"
            made.append(store)
        yield made
    finally:
        for backend in made:
            backend.close()


def run(pages: int, rounds: int, where: str | None) -> list[dict[str, Any]]:
    pool = HostPool(pages)
    noise = torch.Generator().manual_seed(1)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=noise, dtype=torch.float32))
    keys = [hashlib.sha256(b"page %d" % number).hexdigest() for number in range(pages)]
    figures: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-sglang-", dir=where) as place:  # noqa: SIM117
        with backends(pool, Path(place), pages) as made:
            for _ in range(rounds):
                for backend in made:
                    row = measure(backend, pool, keys)
                    figures.setdefault(backend.name, []).append(row)
                    print(backend.name, row, file=sys.stderr)
    return [{"backend": name, **best(rows)} for name, rows in figures.items()]


def best(rows: list[dict[str, float]]) -> dict[str, float]:
    """The shortest times and the highest rates of all rounds: other work only slows them down."""
    return {
        name: (min if name.endswith("_us") else max)(row[name] for row in rows) for name in rows[0]
    }


def steps_ms() -> dict[str, float]:
    """CPU milliseconds of one thread for each step from a compressed page to the host pool; the
    minimum of many. The pages are normal noise: real KV compresses a little better."""
    pool = HostPool(16)
    noise = torch.Generator().manual_seed(1)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=noise, dtype=torch.float32))
    codec = codecs.codec_by_frame_id("zstd-planes/2")
    raw, slot = aligned_buffer(PAGE_BYTES), aligned_buffer(PAGE_BYTES)
    packed = aligned_buffer(codec.bound(PAGE_BYTES))
    times: dict[str, list[float]] = {"decode": [], "verify": [], "copy": []}
    for number in range(64):
        first = torch.arange(TOKENS) + number % 16 * TOKENS
        page = list(zip(*pool.get_page_buffer_meta(first), strict=True))
        copies = Copies(1)
        copies.to_slots([raw], [page])
        stored = codec.encode(raw, packed)
        calls: dict[str, Callable[[], Any]] = {
            "decode": lambda: codec.decode(packed[:stored], slot),  # noqa: B023 (called at once)
            "verify": lambda: checksum(slot),
            "copy": lambda: copies.to_host([slot], [page]),  # noqa: B023
        }
        for name, call in calls.items():
            start = time.thread_time()
            call()
            times[name].append((time.thread_time() - start) * 1e3)
        copies.close()
    return {name: min(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="folder for the files of both; default: in /tmp")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # several threads wait for one another if other work runs
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(STANDINS))
    if options.steps:
        print(json.dumps(steps_ms()))
        return
    rows = run(options.pages, options.rounds, options.folder)
    if options.json:
        print(json.dumps({"rows": rows, "page_bytes": PAGE_BYTES, "pages": options.pages}))
        return
    names = [name for name in rows[0] if name != "backend"]
    print(f"{'':18}" + "".join(f"{row['backend']:>18}" for row in rows))
    for name in names:
        print(f"{name:18}" + "".join(f"{row[name]:18.2f}" for row in rows))


if __name__ == "__main__":
    main()
