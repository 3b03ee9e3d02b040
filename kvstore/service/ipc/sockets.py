"""The Unix socket's plumbing: making it, bounding it, telling when the other side is gone."""

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
    """A listening Unix socket at `path`; a dead one's file is replaced.

    Raises ConfigError: somebody listens there already, the file is something else, or the socket
    cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear_the_way(path)
        sock.bind(path)
        os.chmod(path, 0o660)
        sock.listen(BACKLOG)
    except ConfigError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot make the socket {path!r}: {error.strerror or error}; give another --socket"
        ) from None
    return sock


def _clear_the_way(path: str) -> None:
    """Remove a socket file that nobody listens on any more."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"{path!r} exists and is no socket; give another --socket")
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
            pass  # its backlog is full: somebody is there
    raise ConfigError(f"socket in use: a sidecar listens on {path!r}; give another --socket")


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Bound receiving and sending on a blocking socket; 0: wait as long as it takes."""
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def await_hang_up(sock: socket.socket) -> None:
    """Wait until both directions of the stream are over, reading nothing."""
    poll = select.poll()
    poll.register(sock, 0)  # POLLHUP is always reported
    poll.poll()


class Peer:
    """The process that connected a Unix socket, to be waited for.

    known: False where the system does not show it (a pid namespace that is not ours or below it, a
    kernel or sandbox without pidfd_open).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._fd = _peer_process(sock)

    @property
    def known(self) -> bool:
        return self._fd is not None

    def await_end(self, or_readable: int) -> None:
        """Return once the process has ended, every file of its closed, or once the file descriptor
        `or_readable` is readable; at once where the process is not known."""
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
    """A pidfd of the process that connected `sock`, which is still connected; else None."""
    try:
        pid, _, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if pid <= 0:
            return None  # of a namespace we do not see into
        fd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(sock, 0)
        if not poll.poll(0):
            return fd
        os.close(fd)  # it has hung up: its pid may be another's by now
    except OSError as error:
        # Without descriptors or memory the client is turned away: it would be served unsafely.
        if error.errno not in (errno.ESRCH, errno.ENOSYS, errno.EPERM, errno.EINVAL):
            raise
    return None
