"""What an engine's client and the node's sidecar say to each other over a Unix socket.

Plans only: slot numbers, tier names, hashes. Block bytes never travel here; they lie in the slab,
whose file descriptor the sidecar passes once, with its welcome.

A message is four bytes of length (little endian) and that many bytes of msgpack: an array whose
first element is a `Verb`. The client speaks first:

    [HELLO, {version, namespace, digest, token, client, pid, route}]      route may be left out
                         -> [WELCOME, {version, slots, slot_bytes, session, salt}]
                            + the file descriptors of the slab and of the catalogue (`catalog`),
                            of which `salt` finds this client's blocks
                         -> [REFUSED, text, again]    and the server hangs up; again: it may
                                                      be worth another try later
    [MATCH | LOAD | SAVE, ticket, [hash, ...]]
                         -> [UPDATE, ticket, done, fault, ...]   as often as the ticket moves
    [COMMIT, ticket, grants]     grants: how many the client saw and filled; if the server granted
                                 another number (its answer came after the client gave up), the
                                 server releases instead of publishing slots nobody filled
    [RELEASE, ticket]
    [ASKED, [hash, ...]]         a run that was asked for, and answered by the catalogue
    [PING, number]       -> [PONG, number]        everything sent before has been handled
    [STATS_ASK, token]   -> [STATS, {...}]        instead of a hello; then the server hangs up
    [BYE]                the client has no copy running and will hang up

An UPDATE carries what is new since the last one, after `fault`: of a match `[tier, ...],
[index, ...]` (the second: what is held behind the run, once done); of a load `[tier, ...],
[slot, ...]`; of a save `[index, slot, index, slot, ...], dropped`.

Ticket numbers are the client's. A match ends with its done; a load or save with commit or release.
An update for a ticket the client has already handed back is ignored by it.

**The safety rule.** A slot leased to a client may be under copy at any moment, and the sidecar
cannot see it. The proof that none can run any more is the client's word (a BYE), or its end: the
memory of the process is gone before the kernel closes its sockets, and its device has let go of the
slab once the process itself has ended. Hence: the client never closes its socket while a ticket
with slots is outstanding, except by dying; and the server frees a client's leases at the end of its
connection and at no other time: after a hang-up without a BYE it waits for the end of the process
that connected, wherever the system shows it. A client that sends garbage, or does not read its
answers, is not read any more, and keeps its leases until it dies. (A process forked from a client
inherits both the socket and the mapping, so the rule holds for it too.)
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Final

import msgpack

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError, KVStoreError

PROTOCOL_VERSION: Final = 2

MAX_MESSAGE_BYTES: Final = 8 << 20
MAX_HELLO_BYTES: Final = 16 << 10
"""Bound on the first message of a connection, before anybody has shown a token."""
MAX_HASHES: Final = 65_536
"""Hashes in one verb: a million tokens in blocks of 16."""
MAX_HASH_BYTES: Final = 64
MAX_TICKETS: Final = 4_096
"""Tickets a client keeps outstanding; the server takes twice as many, for those the client has
given up and the server has not heard of yet."""
MOVED_MAX: Final = 2 * MAX_TICKETS
"""Tickets a client keeps for a poll; of a caller that never polls, the oldest are let go."""
RECEIVE_BYTES: Final = 256 << 10

_LENGTH = struct.Struct("<I")


class Verb(enum.IntEnum):
    """First element of every message."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    MATCH = 4
    LOAD = 5
    SAVE = 6
    COMMIT = 7
    RELEASE = 8
    UPDATE = 9
    PING = 10
    PONG = 11
    STATS_ASK = 12
    STATS = 13
    BYE = 14
    ASKED = 15


class Malformed(KVStoreError):
    """Bytes on the socket that are no message of this protocol."""


def pack(*message: Any) -> bytes:
    """One message with its length in front."""
    body: bytes = msgpack.packb(message)
    assert len(body) <= MAX_MESSAGE_BYTES, f"a message of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


class Receiver:
    """Cuts what arrives on a stream socket into messages."""

    def __init__(self, sock: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._start = 0
        self.max_bytes = max_bytes
        """Longest message taken; may be raised once the peer is known."""

    def read(self) -> list[Any] | None:
        """The next message; None at the end of the stream.

        Raises:
            Malformed: what came is no message; the stream cannot be read on.
            TimeoutError: the socket's receive timeout (SO_RCVTIMEO) passed; call again.
            OSError: the connection broke.
        """
        while (message := self._cut()) is None:
            try:
                data = self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                raise TimeoutError("nothing came") from None
            if not data:
                return None
            self.feed(data)
        return message

    def feed(self, data: bytes) -> None:
        """Take bytes that were received elsewhere (with a file descriptor, say)."""
        self._buffer += data

    def _cut(self) -> list[Any] | None:
        """The next whole message of the buffer, or None."""
        have = len(self._buffer) - self._start
        if have < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if length > self.max_bytes:
            raise Malformed(f"a message of {length} bytes; at most {self.max_bytes} are taken")
        end = self._start + _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view, view[self._start + _LENGTH.size : end] as body:
            message = _unpack(body)
        self._start = end
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = 0
        elif self._start >= RECEIVE_BYTES:
            del self._buffer[: self._start]
            self._start = 0
        return message


def hello(namespace: Namespace, token: str | None, client: str, pid: int, route: str = "") -> bytes:
    """The client's first message."""
    about = {
        "version": PROTOCOL_VERSION,
        "namespace": asdict(namespace),
        "digest": namespace.digest,
        "token": token,
        "client": client,
        "pid": pid,
        **({"route": route} if route else {}),
    }
    packed = pack(Verb.HELLO, about)
    if len(packed) > MAX_HELLO_BYTES:
        raise ConfigError(
            f"a hello of {len(packed)} bytes; model and token must fit in {MAX_HELLO_BYTES}"
        )
    return packed


def namespace_of(about: dict[str, Any]) -> Namespace:
    """The namespace a hello speaks of.

    Raises ConfigError: another protocol version, a spec this version cannot read, or one that
    contradicts the digest sent with it (the two sides would name the same bytes differently).
    """
    if about.get("version") != PROTOCOL_VERSION:
        raise ConfigError(
            f"the client speaks protocol {about.get('version')!r}, the sidecar {PROTOCOL_VERSION}; "
            "run the same kvstore on both sides"
        )
    spec = about.get("namespace")
    known = {field.name: field for field in fields(Namespace)}
    if not isinstance(spec, dict) or set(spec) != set(known):
        raise ConfigError("the hello's namespace does not have the fields this sidecar knows")
    for name, value in spec.items():
        kind = str(known[name].type)
        right = isinstance(value, int) and type(value) is not bool
        if kind.startswith("int"):
            right = right or (value is None and "None" in kind)
        else:
            right = isinstance(value, str)
        if not right:
            raise ConfigError(f"the hello's namespace has {name} = {value!r}, which is no {kind}")
    namespace = Namespace(**spec)
    if about.get("digest") != namespace.digest:
        raise ConfigError(
            f"the client's namespace contradicts its digest: {about.get('digest')!r} was said, "
            f"{namespace.digest!r} is the digest of the spec; run the same kvstore on both sides"
        )
    return namespace


def check_hashes(value: Any) -> Sequence[bytes]:
    """The hashes of a verb, or Malformed."""
    if type(value) is not list or not len(value) <= MAX_HASHES:
        raise Malformed(f"a verb takes a list of at most {MAX_HASHES} hashes")
    for item in value:
        if type(item) is not bytes or not 1 <= len(item) <= MAX_HASH_BYTES:
            raise Malformed(f"a hash is 1 to {MAX_HASH_BYTES} bytes")
    return value


def check_number(value: Any) -> int:
    """A ticket number or a count, or Malformed."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Malformed("a number that is none")
    return value


def _unpack(body: memoryview) -> list[Any]:
    """Decode one message; every way in which msgpack can refuse is Malformed."""
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise Malformed(f"unreadable: {error}") from None
    if type(message) is not list or not message or type(message[0]) is not int:
        raise Malformed("a message is an array that begins with a verb")
    return message
