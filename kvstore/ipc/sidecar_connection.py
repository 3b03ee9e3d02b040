"""One connection of a client to the sidecar: dialled, welcomed, mapped, and let go of in order.

`client.Client` holds one at a time and dials the next when it ends. Sending never blocks the
caller: what the socket does not take at once waits for the link's writer thread. Nor does letting
go of a link: unmapping a large slab takes seconds, and the writer does it as its last deed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.interface import Load, Match, Save, Ticket
from kvstore.ipc.protocol import (
    MAX_HASHES,
    PROTOCOL_VERSION,
    Malformed,
    Receiver,
    Verb,
    check_number,
    hello,
    pack,
)
from kvstore.shm.shared_index import CatalogView
from kvstore.shm.slab import Slab

MAX_OUTBOUND_BYTES: Final = 16 << 20
"""Bytes waiting for the writer above which a client asks nothing new. Hand-backs still pass: there
are no more of them than outstanding tickets."""
NOTES_DUE: Final = 16
"""Runs answered by the catalogue that wait for the next verb; with more, the writer sends them."""
NOTES_MAX: Final = 256
"""Such runs kept while the sidecar is slow to read; the oldest are let go."""
SHOWN: Final = "l2"
"""The tier of what the catalogue shows."""


class NoSlab:
    """Behind tickets that were never asked of a sidecar: they name no slots."""

    slots = 0
    slot_bytes = 0

    def view(self, slot: int) -> memoryview:
        raise AssertionError(f"slot {slot} of no slab")


NO_SLAB = NoSlab()


class Link:
    """A connection that has been welcomed.

    slab: the sidecar's slab, mapped here.
    alive: the stream still stands; False once its reader met its end.
    hung: the other side has been silent past the limit; it may speak again.
    catalog: what the sidecar shows to all; None where it shows nothing.
    unheard: the last ticket number given out before the latest commit, until the sidecar has
        answered a later one: it has handled the commit then.
    holders: tickets with slots that have not been handed back. The safety rule of `protocol`:
        `finish` is called at zero and never before.

    Raises RuntimeError: the system has no room for one more thread. Nothing is taken over.
    """

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        slab: Slab,
        session: int,
        catalog: CatalogView | None = None,
    ) -> None:
        self.sock = sock
        self.receiver = receiver
        self.slab = slab
        self.session = session
        self.catalog = catalog
        self.unheard: int | None = None
        self.alive = True
        self.hung = False
        self.holders = 0
        self.waiting_since_s: float | None = None
        self.pinged = False
        self.outbound_bytes = 0
        self._notes: deque[Callable[[], Sequence[bytes]]] = deque(maxlen=NOTES_MAX)
        self._pending: deque[bytes] = deque()
        self._writing = False
        self._broken = False
        self._finished = False
        self._out = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="kvstore-writer", daemon=True)
        self._writer.start()

    def send(self, data: bytes) -> None:
        """Send in order, without waiting. A broken stream is the reader's to notice."""
        with self._out:
            if self._broken:
                return
            if not self._pending and not self._writing:
                try:
                    sent = self.sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    return
                if sent == len(data):
                    return
                data = data[sent:]
            self._pending.append(data)
            self.outbound_bytes += len(data)
            self._out.notify()

    def _write(self) -> None:
        """The writer: sends what the socket did not take at once; ends the link when told to, and
        only once everything is sent or the stream is broken."""
        while True:
            with self._out:
                self._writing = False
                while not (self._finished or self._pending or self._notes_due()):
                    self._out.wait()
                if not self._pending and not self._notes_due():
                    break
                data = self._pending.popleft() if self._pending else b""
                self._writing = True
            try:
                self.sock.sendall(data or self.noted())
            except OSError:
                with self._out:
                    self._pending.clear()
                    self._broken = True
                continue
            with self._out:
                self.outbound_bytes -= len(data)
        self.sock.close()
        self.slab.close()

    def known(self, hashes: Sequence[bytes]) -> int | None:
        """Length of the run as the catalogue tells it; None where the sidecar has to be asked: for
        what lies in a tier, and for what a commit of ours, still under way, may have changed."""
        if self.catalog is None or not hashes:
            return None
        run = self.catalog.run(hashes)
        certain = run == len(hashes) or self.lacks(hashes[run])
        return run if certain else None

    def known_of(self, joined: bytes, size: int) -> int | None:
        """`known` of hashes of `size` bytes each (see `CatalogView.run_of`), one after another."""
        if self.catalog is None or not joined:
            return None
        run = self.catalog.run_of(joined, size)
        end = run * size
        certain = end == len(joined) or self.lacks(joined[end : end + size])
        return run if certain else None

    def lacks(self, name: bytes) -> bool:
        """Whether the catalogue says that this block is nowhere; False says nothing."""
        return self.unheard is None and self.catalog is not None and self.catalog.absent(name)

    def states(self, hashes: Sequence[bytes]) -> list[bool | None]:
        """For each block whether the catalogue shows it, or says that it is nowhere; None where it
        knows of neither."""
        catalog = self.catalog
        if catalog is None:
            return [None] * len(hashes)
        states: list[bool | None] = []
        for name in hashes:
            if self.lacks(name):
                states.append(False)
            else:
                states.append(catalog.shows(name) or None)
        return states

    def note(self, run: Callable[[], Sequence[bytes]]) -> None:
        """Keep a run that the catalogue answered until the next verb, or until there are many: the
        caller, who asked because that costs nothing, does not pack them."""
        self._notes.append(run)
        if len(self._notes) >= NOTES_DUE:
            with self._out:
                self._out.notify()

    def noted(self) -> bytes:
        """Runs kept, as messages that the sidecar is to hear before the next verb."""
        messages: list[bytes] = []
        with contextlib.suppress(IndexError):  # somebody else may take them too
            while len(messages) < NOTES_DUE:
                run = self._notes.popleft()
                messages.append(pack(Verb.ASKED, run()[:MAX_HASHES]))
        return b"".join(messages)

    def _notes_due(self) -> bool:
        return len(self._notes) >= NOTES_DUE and not self._broken

    def stop_reading(self) -> None:
        """Wake whoever blocks in a read, as at the stream's end. What is queued is still sent."""
        try:
            self.sock.shutdown(socket.SHUT_RD)
        except OSError:
            return  # the other side was quicker

    def finish(self) -> None:
        """Have the writer say BYE, close the socket and unmap the slab; waits for neither.

        No slot of it is named by a live ticket any more. A sidecar that does not read now is told
        so when it reads again: without a BYE it would wait for this process's end before it took
        back what it leased to us.
        """
        assert self.holders == 0, f"{self.holders} tickets still name slots of this slab"
        self.send(pack(Verb.BYE))
        with self._out:
            self._finished = True
            self._out.notify()

    def join(self, limit_s: float) -> None:
        """Wait for what `finish` left to the writer; it goes on by itself after that."""
        self._writer.join(limit_s)


def dial(
    path: str,
    namespace: Namespace,
    token: str | None,
    client: str,
    *,
    route: str = "",
    limit_s: float,
    tick_s: float,
) -> Link:
    """Connect, say hello, map the slab.

    limit_s: bound on each step. tick_s: how often a silent `receiver.read` raises TimeoutError.

    Raises:
        TierUnavailable: nobody listens, or not now.
        ConfigError: the sidecar refused this client for what it is.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        sock.settimeout(limit_s)
        sock.connect(path)
        greeting = hello(namespace, token, client, os.getpid(), route)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(greeting)  # turned away already: the reason is there to be read
        receiver = Receiver(sock)
        flags = socket.MSG_CMSG_CLOEXEC
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2, flags)
        if not data:
            raise TierUnavailable(f"the sidecar at {path} hung up at hello")
        receiver.feed(data)
        about = _welcome(receiver.read(), path)
        if not fds:
            raise TierUnavailable(f"the sidecar at {path} passed no slab")
        salt = about.get("salt")
        catalog = CatalogView(fds[1], salt) if len(fds) > 1 and type(salt) is bytes else None
        numbers = [check_number(about.get(name)) for name in ("slots", "slot_bytes", "session")]
        slots, slot_bytes, session = numbers
        slab = Slab.attach(fds.pop(0), slots, slot_bytes)
        sock.settimeout(None)
        seconds = int(tick_s)
        micros = max(1, int((tick_s - seconds) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, micros))
        try:
            return Link(sock, receiver, slab, session, catalog)
        except RuntimeError as error:
            slab.close()
            raise TierUnavailable(f"no thread for the sidecar at {path}: {error}") from None
    except (OSError, Malformed) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise TierUnavailable(f"no sidecar at {path}: {reason}") from None
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _welcome(message: list[Any] | None, path: str) -> dict[str, Any]:
    """What the sidecar's answer to a hello says."""
    if message is None:
        raise TierUnavailable(f"the sidecar at {path} hung up at hello")
    if message[0] == Verb.REFUSED and len(message) == 3:
        if message[2]:
            raise TierUnavailable(f"the sidecar at {path} is busy: {message[1]}")
        raise ConfigError(f"the sidecar at {path} refused: {message[1]}")
    if message[0] != Verb.WELCOME or len(message) != 2 or type(message[1]) is not dict:
        raise Malformed("no welcome")
    about: dict[str, Any] = message[1]
    if about.get("version") != PROTOCOL_VERSION:
        raise ConfigError(
            f"the sidecar at {path} speaks protocol {about.get('version')!r}, this client "
            f"{PROTOCOL_VERSION}; run the same kvstore on both sides"
        )
    return about


def grow(ticket: Ticket, news: Sequence[Any], link: Link) -> None:
    """Enter what an update brings into its ticket, all but its end.

    Raises Malformed, or ValueError, TypeError, IndexError: it is no update of such a ticket.
    """
    if isinstance(ticket, Match):
        ticket.tiers.extend(news[0])
        ticket.behind = news[1]
    elif isinstance(ticket, Load):
        tiers, slots = news
        _check_slots(slots, len(tiers), link)
        ticket.tiers.extend(tiers)
        ticket.slots.extend(slots)
    elif isinstance(ticket, Save):
        flat, dropped = news
        _check_slots(flat[1::2], len(flat) // 2, link)
        ticket.grants.extend(zip(flat[::2], flat[1::2], strict=True))
        ticket.dropped = dropped


def _check_slots(slots: Sequence[Any], right: int, link: Link) -> None:
    """Slots named by an update must lie in the link's slab, one for each block."""
    if len(slots) != right:
        raise Malformed("an update whose lists differ in length")
    for slot in slots:
        if check_number(slot) >= link.slab.slots:
            raise Malformed(f"slot {slot} of a slab of {link.slab.slots}")


def ask_stats(path: str, token: str | None, *, limit_s: float = 10.0) -> dict[str, Any]:
    """The statistics of the sidecar at `path`, without becoming its client.

    Raises TierUnavailable: nobody answers; ConfigError: refused.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(limit_s)
            sock.connect(path)
            sock.sendall(pack(Verb.STATS_ASK, token))
            message = Receiver(sock).read()
    except (OSError, Malformed) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TierUnavailable(f"no sidecar at {path}: {reason}") from None
    if message is not None and message[0] == Verb.STATS and type(message[-1]) is dict:
        numbers: dict[str, Any] = message[1]
        return numbers
    _welcome(message, path)
    raise TierUnavailable(f"the sidecar at {path} sent no statistics")
