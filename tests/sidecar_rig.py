"""Real sidecars for tests, forked quickly from a process that has imported everything.

The child runs `service.main.serve`, like `kvstore serve` after reading its command line. Tests
signal it by its own process id.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from kvstore.blocks.key import Namespace
from kvstore.cli import main
from kvstore.config.settings import Settings, merge
from kvstore.interface import BlockStore, Load, Operation, Save
from kvstore.ipc.protocol import MessageType, Receiver, pack, pack_hello
from kvstore.ipc.sidecar_connection import request_stats
from kvstore.service.main import serve
from kvstore.testing.processes import suspend

NAMESPACE = Namespace(model="m", layers=2, kv_heads=1, head_dim=64, dtype="float32", block_tokens=4)
SLOT_BYTES = NAMESPACE.block_bytes
SLOTS = 64
LIMIT_S = 60.0
"""Timeout of every wait in tests. It only guards against hangs."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["kvstore.service.main", "sidecar_rig"])


class ForkedSidecar:
    """A sidecar with `SLOTS` slots at `folder`/kv.sock.

    overrides: see `Settings.load`. stderr: file for its log.
    """

    def __init__(
        self, folder: Path, overrides: dict[str, Any] | None = None, *, stderr: Path | None = None
    ) -> None:
        self._stderr = str(stderr) if stderr is not None else ""
        self.socket = str(folder / "kv.sock")
        self._overrides = merge(
            {
                "l2": {"bytes": SLOTS * SLOT_BYTES, "slot_bytes": SLOT_BYTES},
                "server": {"socket": self.socket, "port": 0},
            },
            overrides or {},
        )
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start or restart the sidecar, and wait until it accepts clients."""
        ready, announce = _forks.Pipe(duplex=False)
        arguments = (self._overrides, announce, self._stderr)
        self._process = _forks.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        announce.close()
        assert ready.poll(LIMIT_S), "the sidecar is not ready"
        line = ready.recv()
        self.url = next(word.rstrip(",") for word in line.split() if word.startswith("http"))

    def stats(self, auth_token: str | None = None) -> dict[str, Any]:
        return request_stats(self.socket, auth_token)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(LIMIT_S)

    def suspend(self) -> None:
        suspend(self._pid)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def stop(self) -> int:
        """Terminate the sidecar. Returns its exit status: 0 if no assertion failed."""
        self._process.terminate()
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None, "the sidecar does not end"
        return self._process.exitcode

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _serve(overrides: dict[str, Any], announce: Connection, stderr: str) -> None:
    if stderr:
        os.dup2(os.open(stderr, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), 2)
    serve(Settings.load(None, overrides, environment=False), announce.send)


class PeerProcess:
    """A separate process that connects to a Unix socket and passes the connection to the test.
    The sidecar sees that process as its peer.

    sock: the connection; no other process has it open.
    """

    def __init__(self, path: str) -> None:
        here, there = _forks.Pipe()
        self._process = _forks.Process(target=_connect, args=(path, there), daemon=True)
        self._process.start()
        there.close()
        assert here.poll(LIMIT_S), "no connection"
        self.sock = socket.socket(fileno=recv_handle(here))
        here.close()

    def end(self) -> None:
        """Close the connection and end the process."""
        self.sock.close()
        self._process.kill()
        self._process.join(LIMIT_S)


def _connect(path: str, pipe: Connection) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        send_handle(pipe, sock.fileno(), None)
    time.sleep(600)


class RawClient(PeerProcess):
    """A client in a separate process that sends raw messages."""

    def __init__(self, path: str, first: bytes | None = None) -> None:
        super().__init__(path)
        self.sock.settimeout(30.0)
        self.receiver = Receiver(self.sock)
        self.sock.sendall(pack_hello(NAMESPACE, None, "raw", 1) if first is None else first)
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 1)
        for fd in fds:
            os.close(fd)
        self.receiver.feed(data)
        self.welcome: list[Any] = self.receiver.read() if data else []  # type: ignore[assignment]

    def request(self, *message: Any) -> list[Any]:
        self.sock.sendall(pack(*message))
        answer = self.receiver.read()
        assert answer is not None
        return answer

    def save(self, operation_id: int, hashes: list[bytes]) -> list[int]:
        """Send a save. Returns its assigned slots."""
        answer = self.request(MessageType.SAVE, operation_id, hashes)
        assert answer[:3] == [MessageType.UPDATE, operation_id, True]
        slots: list[int] = answer[4][1::2]
        return slots


def run_command(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command `kvstore` in a separate process. Returns (exit code, stdout, stderr)."""
    out, err = folder / "stdout", folder / "stderr"
    process = _forks.Process(target=_command, args=(arguments, str(out), str(err)), daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode is not None, "the command does not end"
    return process.exitcode, out.read_text(), err.read_text()


def _command(arguments: Sequence[str], out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), number)
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)


def disk(folder: Path, capacity: str = "64MiB", **more: Any) -> dict[str, Any]:
    """Overrides for a disk tier."""
    return {"tiers": [{"kind": "disk", "directory": str(folder), "capacity": capacity, **more}]}


def hashes_of(name: str, count: int) -> list[bytes]:
    """`count` artificial block hashes."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


def content(name: bytes, tenant: str = "") -> bytes:
    """The bytes of the block of this hash."""
    seed = hashlib.shake_128(name + tenant.encode()).digest(256)
    return seed * (SLOT_BYTES // len(seed))


def until_done(store: BlockStore, operation: Operation) -> Any:
    """Poll until the operation is done."""
    deadline = time.monotonic() + LIMIT_S
    while not operation.done:
        store.poll(0.1)
        assert time.monotonic() < deadline, "the operation is never done"
    return operation


def wait_until(true: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        time.sleep(0.01)
        assert time.monotonic() < deadline, f"never: {what}"


def put(store: BlockStore, hashes: Sequence[bytes], tenant: str = "") -> int:
    """Save these blocks. Returns the number of assigned slots."""
    save: Save = until_done(store, store.save(hashes))
    fill(store, save, tenant)
    store.commit(save)
    return len(save.slot_assignments)


def fill(store: BlockStore, save: Save, tenant: str = "") -> None:
    slab = store.slab_of(save)
    for index, slot in save.slot_assignments:
        slab.view(slot)[:SLOT_BYTES] = content(save.hashes[index], tenant)


def get(store: BlockStore, hashes: Sequence[bytes]) -> tuple[list[bytes], list[str]]:
    """Load these blocks. Returns (bytes, tiers) of the cached prefix."""
    until_done(store, store.match(hashes))
    load: Load = until_done(store, store.load(hashes))
    slab = store.slab_of(load)
    blocks = [bytes(slab.view(slot)[:SLOT_BYTES]) for slot in load.slots]
    tiers = list(load.tiers)
    store.release(load)
    return blocks, tiers


def match(store: BlockStore, hashes: Sequence[bytes]) -> list[str]:
    """The tiers of the cached prefix."""
    tiers: list[str] = until_done(store, store.match(hashes)).tiers
    return tiers
