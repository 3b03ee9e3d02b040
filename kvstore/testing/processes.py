"""Real processes for tests, benches and the demo: started, waited for, signalled by their own id.

A process is ready when it prints a line that `ready` accepts. Everything it prints is kept (up to
a bound) and shown when it does not become ready.
"""

from __future__ import annotations

import collections
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvstore.errors import KVStoreError

READY_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 20.0
MAX_LINES: Final = 2_000
"""Lines of output kept; older ones are dropped."""

PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[2])
"""The folder that `kvstore` is imported from: children run there, so they import the same one."""


class ProcessFailed(KVStoreError):
    """A child did not become ready, or did not end when told."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
    return port


def suspend(pid: int, limit_s: float = STOP_LIMIT_S) -> None:
    """Stop a process and return when none of its threads runs any more: the signal alone only
    asks. Raises ProcessFailed when it does not stop in time."""
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + limit_s
    while not all(_stopped(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        if time.monotonic() > deadline_s:
            raise ProcessFailed(f"process {pid} does not stop")
        time.sleep(0.001)


def _stopped(stat: Path) -> bool:
    """Whether a thread is stopped, traced or gone, by its /proc/.../stat."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Child:
    """A child process and what it has printed.

    argv: the command. ready: tells whether a line of output says that the child is ready.
    """

    def __init__(self, argv: Sequence[str], *, ready: Callable[[str], bool] | None = None) -> None:
        self.argv = list(argv)
        self.lines: collections.deque[str] = collections.deque(maxlen=MAX_LINES)
        self.ready_line = ""
        self._ready = ready
        self._settled = threading.Event()
        self._process = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=PACKAGE_PARENT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """What it printed, stdout and stderr together."""
        return "\n".join(self.lines)

    def wait_ready(self, limit_s: float = READY_LIMIT_S) -> str:
        """The line that said so. Raises ProcessFailed when it ends first, or takes too long."""
        if not self._settled.wait(limit_s) or not self.ready_line:
            state = self.returncode
            self.kill()
            why = f"exit status {state}" if state is not None else f"not ready in {limit_s:g} s"
            raise ProcessFailed(f"{' '.join(self.argv[:6])} ...: {why}\n{self.output}")
        return self.ready_line

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Its exit status once it ends. Raises ProcessFailed when it does not in time."""
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(
                f"{' '.join(self.argv[:6])} ...: still runs after {limit_s:g} s\n{self.output}"
            ) from None
        self._reader.join(limit_s)
        return status

    def signal(self, number: int) -> None:
        """Send a signal, to this process only."""
        self._process.send_signal(number)

    def stop(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Ask it to end, and wait; its exit status."""
        self.signal(signal.SIGTERM)
        try:
            return self.wait(limit_s)
        except ProcessFailed:
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once, and reap it."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(STOP_LIMIT_S)

    def suspend(self) -> None:
        """SIGSTOP: it hangs until `resume`."""
        suspend(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.rstrip("\n")
            self.lines.append(line)
            if not self.ready_line and (self._ready is None or self._ready(line)):
                self.ready_line = line
                self._settled.set()
        self._settled.set()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.returncode is None:
            self.kill()


class Sidecar(Child):
    """`kvstore serve` as a child. socket: its Unix socket; url: its HTTP side, once ready.

    flags: more of its command line, e.g. ("--disk", folder, "--l2", "64MiB").
    """

    def __init__(self, socket_path: str | os.PathLike[str], *flags: str, port: int = 0) -> None:
        self.socket = os.fspath(socket_path)
        argv = [sys.executable, "-m", "kvstore", "serve", "--socket", self.socket]
        argv += ["--port", str(port), *flags]
        super().__init__(argv, ready=lambda line: line.startswith("kvstore ready"))

    @property
    def url(self) -> str:
        """http://host:port of the HTTP side."""
        found = re.search(r"http://[^\s,]+", self.ready_line)
        assert found, "not ready yet"
        return found.group()
