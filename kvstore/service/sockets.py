"""The Unix socket's plumbing: making it, bounding it, telling when the other side is gone."""

from __future__ import annotations

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
