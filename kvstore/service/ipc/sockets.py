"""Unix-socket helpers: create it, set timeouts, detect the end of the peer."""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import struct
from typing import Final

from kvstore.errors import ConfigError

BACKLOG: Final = 64


def listen(path: str) -> socket.socket:
    """A listening Unix socket at `path`. The file of a socket without a listener is replaced.

    Raises ConfigError: another process listens there, the file is not a socket, or the socket
    cannot be created.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        sock.bind(path)
        os.chmod(path, 0o660)
        sock.listen(BACKLOG)
    except ConfigError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot create the socket {path!r}: {error.strerror or error}; give another --socket"
        ) from None
    return sock


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
        pid, _, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
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
