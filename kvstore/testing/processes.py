"""Real processes for tests, benchmarks and the demo: start, wait, signal by process id.

A process is ready when it prints a line that `ready` accepts. Its output is kept (up to a limit)
and shown if it does not become ready.
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

READY_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
MAX_LINES: Final = 2_000
"""Maximum lines of output that are kept. Older ones are dropped."""

PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[2])
"""The folder that `kvstore` is imported from. Children run there, to import the same package."""


class ProcessFailed(KVStoreError):
    """A child did not become ready, or did not end."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is currently unused."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
    return port


def suspend(pid: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop a process with SIGSTOP, and wait until all its threads have stopped.

    Raises ProcessFailed if they do not stop in time.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + timeout_s
    while not all(_stopped(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        if time.monotonic() > deadline_s:
            raise ProcessFailed(f"process {pid} did not stop within {timeout_s:g} s")
        time.sleep(0.001)


def _stopped(stat: Path) -> bool:
    """Return whether a thread is stopped, traced or gone, by its /proc/.../stat."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Child:
    """A child process and its output.

    argv: the command. ready: returns whether a line of output means that the child is ready.
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
        """Exit status. None: still running."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Output so far, stdout and stderr together."""
        return "\n".join(self.lines)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> str:
        """Return the ready line. Raises ProcessFailed if the child ends first, or on timeout."""
        if not self._settled.wait(timeout_s) or not self.ready_line:
            state = self.returncode
            self.kill()
            why = f"exit status {state}" if state is not None else f"not ready in {timeout_s:g} s"
            raise ProcessFailed(f"{' '.join(self.argv[:6])} ...: {why}\n{self.output}")
        return self.ready_line

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Return the exit status when the child ends. Raises ProcessFailed on timeout."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(
                f"{' '.join(self.argv[:6])} ...: still running after {timeout_s:g} s\n{self.output}"
            ) from None
        self._reader.join(timeout_s)
        return status

    def signal(self, number: int) -> None:
        """Send a signal, to this process only."""
        self._process.send_signal(number)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM and wait. Returns the exit status."""
        self.signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except ProcessFailed:
            self.kill()
            raise

    def kill(self) -> None:
        """Send SIGKILL and reap the child."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)

    def suspend(self) -> None:
        """Send SIGSTOP: the child hangs until `resume`."""
        suspend(self.pid)

    def resume(self) -> None:
        """Send SIGCONT."""
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
    """`kvstore serve` as a child. socket: its Unix socket. url: of its HTTP server, once ready.

    flags: more of its command line, such as ("--disk", folder, "--l2", "64MiB").
    """

    def __init__(self, socket_path: str | os.PathLike[str], *flags: str, port: int = 0) -> None:
        self.socket = os.fspath(socket_path)
        argv = [sys.executable, "-m", "kvstore", "serve", "--socket", self.socket]
        argv += ["--port", str(port), *flags]
        super().__init__(argv, ready=lambda line: line.startswith("kvstore ready"))

    @property
    def url(self) -> str:
        """http://host:port of the HTTP server."""
        found = re.search(r"http://[^\s,]+", self.ready_line)
        assert found, "not ready yet"
        return found.group()
