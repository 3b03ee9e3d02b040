"""Passes over the media of bench/tiers.py for Redis and S3, with temporary servers."""

from __future__ import annotations

import http.client
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tier_media import CONTAINS_BLOCKS, Medium, Pass, TierMedium, percentile, run_pass

from kvstore.blocks.frame import HEADER_BYTES
from kvstore.testing.frames import key_of
from kvstore.tiers import redis, s3

PIPELINED: Final = 4
"""Requests in flight per bare connection."""
PIECE_BYTES: Final = 1 << 16
S3_AT_ONCE: Final = 16
"""The tier's default number of concurrent reads and writes."""
SEGMENT_BYTES: Final = 16 << 20
"""Size of the objects of bare puts; equals the tier's segments."""
CONTAINS_CALLS: Final = 50
CONTAINS_VALUE: Final = 4 << 10


def rigs() -> None:
    """Make the tests' servers importable."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def redis_server(stack: ExitStack) -> Callable[[int], Medium]:
    """Start a Valkey; return the function that makes a medium on it."""
    rigs()
    from redis_rig import Server, valkey_binary

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = Server(folder, valkey_binary(), maxmemory="1500mb", maxmemory_policy="noeviction")
    stack.callback(server.stop)
    return lambda nbytes: RedisMedium(nbytes, server.port)


def s3_server(stack: ExitStack) -> Callable[[int], Medium]:
    """Start a SeaweedFS; return the function that makes a medium on it."""
    rigs()
    from s3_rig import running_server

    server = stack.enter_context(running_server())
    return lambda nbytes: S3Medium(nbytes, server)


class Bare:
    """One connection with minimal RESP; values are sent from and received into buffers."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, name: bytes, pieces: list[memoryview]) -> None:
        nbytes = sum(map(len, pieces))
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, nbytes)
        views = [memoryview(head), *pieces, memoryview(b"\r\n")]
        while views:
            sent = self.socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def request(self, name: bytes) -> None:
        self.socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))

    def line(self) -> bytes:
        """Receive a one-line reply."""
        got = b""
        while not got.endswith(b"\r\n"):
            got += self.socket.recv(1)
        return got

    def value(self, header: memoryview, payload: memoryview) -> None:
        """Receive a value of exactly this header's and payload's size."""
        head = b"$%d\r\n" % (len(header) + len(payload))
        self.fill(memoryview(bytearray(len(head))), head)
        self.fill(header)
        self.fill(payload)
        self.fill(memoryview(bytearray(2)), b"\r\n")

    def fill(self, view: memoryview, expected: bytes = b"") -> None:
        done = 0
        while done < len(view):
            got = self.socket.recv_into(view[done:])
            assert got, "the server closed the connection"
            done += got
        assert not expected or view == expected, bytes(view)

    def exists(self, names: list[bytes]) -> int:
        """Return how many of the names exist: one command for each, all sent at once."""
        commands = (b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names)
        self.socket.sendall(b"".join(commands))
        got = bytearray()
        while got.count(b"\n") < len(names):
            got += self.socket.recv(PIECE_BYTES)
        return got.count(b":1")


class RedisMedium(TierMedium):
    """The Redis tier, and as many bare connections with pipelined values."""

    def __init__(self, nbytes: int, port: int) -> None:
        super().__init__(nbytes)
        self.open_tier(redis.open(redis.Config(host="127.0.0.1", port=port, timeout=30_000)))
        most = max(self.threads.values())
        self.bare = [Bare(port) for _ in range(most)]

    def limit(self, operation: str) -> Pass:
        """Measure batches of pipelined values; one call is one batch."""
        batches = self.count // PIPELINED

        def put(number: int, thread: int) -> None:
            bare, (_, header, payload) = self.bare[thread], self.frames[thread]
            for name in names_of(number):
                bare.put(name, [header, payload])
            for _ in range(PIPELINED):
                assert bare.line() == b"+OK\r\n"

        def get(number: int, thread: int) -> None:
            bare, buffer = self.bare[thread], self.buffers[thread]
            for name in names_of(number):
                bare.request(name)
            for _ in range(PIPELINED):
                bare.value(buffer.header, buffer.payload)
                self.check(buffer.payload)

        work = put if operation == "write" else get
        return run_pass(work, batches, self.threads[operation], PIPELINED * self.nbytes)

    def end(self) -> None:
        super().end()
        self.bare[0].socket.sendall(b"*1\r\n$7\r\nFLUSHDB\r\n")
        assert self.bare[0].line() == b"+OK\r\n"

    def contains(self) -> dict[str, float]:
        """Measure one round trip for the run, and the same commands over a bare connection."""
        keys = [key_of(number, tenant="contains") for number in range(CONTAINS_BLOCKS)]
        _, header, payload = self.frames[0]
        for key in keys:
            self.tier.write(key, header, payload[:CONTAINS_VALUE])
        names = [b"bare/%b" % key.hash for key in keys]
        for name in names:
            self.bare[0].put(name, [header])
            self.bare[0].line()
        tier, bare = [], []
        for _ in range(CONTAINS_CALLS):
            began = time.perf_counter()
            assert all(self.tier.contains(keys))
            tier.append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
            assert self.bare[0].exists(names) == len(names)
            bare.append((time.perf_counter() - began) * 1e3)
        self.end()
        return {
            "p50_ms": statistics.median(tier),
            "p99_ms": percentile(tier, 99),
            "limit_p50_ms": statistics.median(bare),
        }

    def close(self) -> None:
        super().close()
        for bare in self.bare:
            bare.socket.close()


def names_of(number: int) -> list[bytes]:
    """Return the names of one batch of bare values."""
    return [b"bare/%d" % (number * PIPELINED + one) for one in range(PIPELINED)]


class Plain:
    """One HTTP connection for signed URLs; bodies are sent from and received into buffers."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port)
        self.connection.connect()
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, url: str, pieces: list[memoryview]) -> None:
        self.connection.putrequest("PUT", url, skip_accept_encoding=True)
        self.connection.putheader("Content-Length", str(sum(map(len, pieces))))
        self.connection.endheaders()
        for piece in pieces:
            self.connection.sock.sendall(piece)
        reply = self.connection.getresponse()
        reply.read()
        assert reply.status == 200, reply.status

    def get(self, url: str, first: int, views: list[memoryview]) -> None:
        nbytes = sum(map(len, views))
        headers = {"Range": f"bytes={first}-{first + nbytes - 1}"}
        self.connection.request("GET", url, headers=headers)
        reply = self.connection.getresponse()
        assert reply.status == 206, reply.status
        for view in views:
            done = 0
            while done < len(view):
                got = reply.readinto(view[done:])
                assert got, "the body ended early"
                done += got
        reply.read()


class S3Medium(TierMedium):
    """The S3 tier, and plain HTTP: puts of objects of a segment's size, gets of frame ranges."""

    total_bytes = 128 << 20

    def __init__(self, nbytes: int, server: Any) -> None:
        super().__init__(nbytes)
        self.server = server
        self.bucket = server.new_bucket()
        config = server.config(self.bucket, writer_threads=S3_AT_ONCE, reader_threads=S3_AT_ONCE)
        self.uploads = config.uploads
        self.open_tier(s3.open(config))
        self.frame_bytes = nbytes + HEADER_BYTES
        self.each = max(1, SEGMENT_BYTES // self.frame_bytes)
        self.plain = [Plain(server.endpoint) for _ in range(S3_AT_ONCE)]
        objects = -(-self.count // self.each)
        self.puts = [self._url("put_object", number) for number in range(objects)]
        self.gets = [self._url("get_object", number) for number in range(objects)]

    def limit(self, operation: str) -> Pass:
        """Measure bare requests; a write is one object, a read one range."""

        def put(number: int, thread: int) -> None:
            _, header, payload = self.frames[thread]
            self.plain[thread].put(self.puts[number], [header, payload] * self.each)

        def get(number: int, thread: int) -> None:
            buffer = self.buffers[thread]
            url, first = self.gets[number // self.each], number % self.each * self.frame_bytes
            self.plain[thread].get(url, first, [buffer.header, buffer.payload])
            self.check(buffer.payload)

        if operation == "write":
            return run_pass(put, len(self.puts), self.uploads, self.each * self.nbytes)
        return run_pass(get, self.count, self.threads[operation], self.nbytes)

    def contains(self) -> dict[str, float]:
        """Measure the lookup in the tier's index, without a request."""
        keys = [key_of(number, tenant="contains") for number in range(CONTAINS_BLOCKS)]
        _, header, payload = self.frames[0]
        small = payload[:CONTAINS_VALUE]
        run_pass(
            lambda number, _: self.tier.write(keys[number], header, small),
            len(keys),
            16,
            len(small),
        )
        times = []
        for _ in range(CONTAINS_CALLS):
            began = time.perf_counter()
            assert all(self.tier.contains(keys))
            times.append((time.perf_counter() - began) * 1e3)
        self.end()
        return {"p50_ms": statistics.median(times), "p99_ms": percentile(times, 99)}

    def close(self) -> None:
        super().close()
        for plain in self.plain:
            plain.connection.close()

    def _url(self, method: str, number: int) -> str:
        """Return the path and query of a signed URL."""
        values = {"Bucket": self.bucket, "Key": f"bare/{number}"}
        parts = urlsplit(self.server.client.generate_presigned_url(method, values))
        return f"{parts.path}?{parts.query}"
