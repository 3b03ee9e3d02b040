"""Unix-socket helpers: the listening socket and its file, timeouts, the process of the peer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvstore.errors import ConfigError
from kvstore.ipc.protocol import RECEIVE_BYTES, Receiver

log = logging.getLogger(__name__)

BACKLOG: Final = 64
START_WAIT_S: Final = 5.0
"""Longest wait for another sidecar that creates its socket in the same directory."""
_CREDENTIALS: Final = struct.Struct("3i")
"""pid, uid and gid of a process, as the kernel gives them."""


class UnixListener(socket.socket):
    """A listening Unix socket. Closing it removes its file, unless the file is another socket's."""

    def __init__(self, path: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = path
        self._file: tuple[int, int] | None = None

    def open(self) -> None:
        """Create the file, and listen. Raises OSError."""
        # Accepted sockets inherit this. Without it, `ProcessReceiver` cannot tell processes apart.
        with contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.bind(self.path)
        self._file = file_id(self.path)
        os.chmod(self.path, 0o660)
        self.listen(BACKLOG)

    def owns_file(self) -> bool:
        """Whether the file at the path is this socket's.

        While the socket is open, the file system gives the number of its file to no other file.
        """
        return self._file is not None and file_id(self.path) == self._file

    def remove_file(self) -> None:
        """Remove the file if it is this socket's. Call it while the socket listens: another sidecar
        does not take the path then, so it cannot come between the check and the removal."""
        if self.owns_file():
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._file = None

    def close(self) -> None:
        self.remove_file()
        super().close()


def listen(path: str) -> UnixListener:
    """A listening Unix socket at `path`. The file of a socket without a listener is replaced.

    Raises ConfigError: another process listens there, the file is not a socket, or the socket
    cannot be created.
    """
    sock = UnixListener(path)
    try:
        with _start_lock(path):
            _remove_stale_socket(path)
            sock.open()
    except ConfigError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot create the socket {path!r}: {error.strerror or error}; give another --socket"
        ) from None
    return sock


def file_id(path: str) -> tuple[int, int] | None:
    """Device and number of the file at the path; None: no file, or it is not accessible."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _start_lock(path: str) -> Iterator[None]:
    """Exclude other sidecars that start in this directory. Otherwise two may find the same stale
    file, and the second would remove the new file of the first."""
    with contextlib.ExitStack() as stack:
        deadline_s = time.monotonic() + START_WAIT_S
        with contextlib.suppress(OSError):  # no lock on this file system: start without it
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            fd = os.open(os.path.dirname(path) or ".", flags)
            stack.callback(os.close, fd)
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        log.warning("%s: another process keeps its directory locked", path)
                        break
                    time.sleep(0.01)
        yield


def _remove_stale_socket(path: str) -> None:
    """Remove a socket file without a listener."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"{path!r} exists and is not a socket; give another --socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its backlog is full: a process listens
    raise ConfigError(f"a sidecar already listens on {path!r}; give another --socket")


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Set the receive and send timeouts of a blocking socket. 0: no timeout."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def wait_for_hang_up(sock: socket.socket) -> None:
    """Wait until both directions of the stream are closed. Reads nothing."""
    poll = select.poll()
    poll.register(sock, 0)  # POLLHUP is always reported
    poll.poll()


class ProcessReceiver(Receiver):
    """Receives what one process sends: the sender of the first byte.

    A forked child of a client has the client's socket too. The kernel says which process sent which
    bytes (SO_PASSCRED), and never returns bytes of two processes together.

    on_foreign: called with the number of bytes and the pid of another process, whose bytes are
    dropped. Processes of a pid namespace that the system does not show all have the pid 0.
    """

    def __init__(
        self, sock: socket.socket, max_bytes: int, on_foreign: Callable[[int, int], None]
    ) -> None:
        super().__init__(sock, max_bytes)
        self._on_foreign = on_foreign
        self._pid: int | None = None

    def _receive(self) -> bytes:
        while True:
            data, about, _, _ = self._sock.recvmsg(
                RECEIVE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
            )
            pid = _pid_in(about)
            if self._pid is None:
                self._pid = pid
            if not data or pid == self._pid:
                return data
            self._on_foreign(len(data), pid)


def _pid_in(about: list[tuple[int, int, bytes]]) -> int:
    """The pid in the ancillary data of a message; 0: none is shown."""
    for level, kind, data in about:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(data)[0])
    return 0


class Peer:
    """The process that connected a Unix socket.

    known: False if the system does not show the process (it is in a pid namespace that we do not
    see, or the kernel or sandbox has no pidfd_open).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._fd = _peer_process(sock)

    @property
    def known(self) -> bool:
        return self._fd is not None

    def wait_for_exit(self, or_readable: int) -> None:
        """Wait until the process has exited, with all its files closed.

        Returns earlier if the file descriptor `or_readable` becomes readable, and at once if the
        process is not known.
        """
        if self._fd is None:
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(or_readable, select.POLLIN)
        poll.poll()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _peer_process(sock: socket.socket) -> int | None:
    """A pidfd of the process that connected `sock`. None if it is unknown or has hung up."""
    try:
        pid, _, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if pid <= 0:
            return None  # in a pid namespace that we do not see
        fd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(sock, 0)
        if not poll.poll(0):
            return fd
        os.close(fd)  # it has hung up: another process may have its pid
    except OSError as error:
        # Without descriptors or memory the client is rejected: to serve it would be unsafe.
        if error.errno not in (errno.ESRCH, errno.ENOSYS, errno.EPERM, errno.EINVAL):
            raise
    return None
