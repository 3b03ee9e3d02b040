"""The messages between an engine's client and the node's sidecar, over a Unix socket.

Messages are control messages only: slot numbers, tier names, hashes. Block bytes stay in the slab.
The sidecar passes the slab's file descriptor once, with WELCOME.

A message is four bytes of length (little endian) and that many bytes of msgpack: an array whose
first element is a `MessageType`. The client sends the first message:

    [HELLO, {version, namespace, digest, token, client, pid, route}]
                                 token: auth token; route: traffic label, optional
                         -> [WELCOME, {version, slots, slot_bytes, session, salt}]
                            + file descriptors of the slab and of the shared index; salt: seed of
                            this client's hashes in the shared index
                         -> [REJECTED, reason, retryable]   then the server closes the connection
    [MATCH | LOAD | SAVE, id, [hash, ...]]
                         -> [UPDATE, id, done, fault, ...]   each time the operation changes
    [COMMIT, id, count]          count: slot assignments that the client has seen and filled. If the
                                 server assigned another number (its answer came after the client's
                                 timeout), it releases the slots instead of publishing unfilled ones
    [RELEASE, id]
    [LOOKUP_REPORT, [hash, ...]] a lookup that the client answered from the shared index
    [PING, number]       -> [PONG, number]   all earlier messages have been handled
    [STATS_REQUEST, token] -> [STATS, {...}] instead of HELLO; then the server closes the connection
    [GOODBYE]                    the client has no copy running and will close the connection

An UPDATE carries only additions since the last one, after `fault`. For a match: `[tier, ...],
[index, ...]` (the indices of cached blocks beyond the gap, once done). For a load: `[tier, ...],
[slot, ...]`. For a save: `[index, slot, index, slot, ...], dropped`.

The client chooses the operation ids. A match ends when it is done. A load or save ends with COMMIT
or RELEASE. The client ignores an update for an operation that has ended.

**The safety rule.** A client may copy to or from its leased slots at any moment, and the sidecar
cannot see that. Only two things prove that no copy can still run: the client's GOODBYE, or the end
of its process. The kernel frees a process's memory before it closes its sockets, and a device stops
accessing the slab once the process has ended.

Therefore the client never closes its socket while an operation with slots is open, except when its
process dies. The server frees a client's leases only at the end of the connection. If the
connection ends without GOODBYE, the server first waits for the end of the client's process, if the
system shows it. If a client sends invalid messages or does not read its answers, the server stops
reading from it, and the client keeps its leases until its process ends.

A process forked from a client has no operation and copies nothing: it closes its copy of the socket
and unmaps the slab. The server drops what any process other than the sender of HELLO sends, so no
child can end a lease of its parent.
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
"""Maximum size of the first message of a connection, before authentication."""
MAX_HASHES: Final = 65_536
"""Maximum number of hashes in one request: a million tokens in blocks of 16."""
MAX_HASH_BYTES: Final = 64
MAX_OPERATIONS: Final = 4_096
"""Maximum number of open operations of a client. The server accepts twice as many: some may have
timed out in the client before the server has read their RELEASE."""
MAX_UNPOLLED: Final = 2 * MAX_OPERATIONS
"""Operations kept for `poll`. If the caller never polls, the oldest are dropped."""
RECEIVE_BYTES: Final = 256 << 10

_LENGTH = struct.Struct("<I")


class MessageType(enum.IntEnum):
    """First element of every message."""

    HELLO = 1
    WELCOME = 2
    REJECTED = 3
    MATCH = 4
    LOAD = 5
    SAVE = 6
    COMMIT = 7
    RELEASE = 8
    UPDATE = 9
    PING = 10
    PONG = 11
    STATS_REQUEST = 12
    STATS = 13
    GOODBYE = 14
    LOOKUP_REPORT = 15


class MalformedMessage(KVStoreError):
    """Bytes on the socket that are not a valid message of this protocol."""


def pack(*message: Any) -> bytes:
    """One message with its length in front."""
    body: bytes = msgpack.packb(message)
    assert len(body) <= MAX_MESSAGE_BYTES, f"a message of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


class Receiver:
    """Splits the bytes of a stream socket into messages."""

    def __init__(self, sock: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._start = 0
        self.max_bytes = max_bytes
        """Maximum message size. The server raises it after authentication."""

    def read(self) -> list[Any] | None:
        """The next message; None at the end of the stream.

        Raises:
            MalformedMessage: invalid bytes; the rest of the stream cannot be read.
            TimeoutError: the socket's receive timeout (SO_RCVTIMEO) passed; call again.
            OSError: the connection broke.
        """
        while (message := self._next_message()) is None:
            try:
                data = self._receive()
            except BlockingIOError:
                raise TimeoutError("no data received") from None
            if not data:
                return None
            self.feed(data)
        return message

    def feed(self, data: bytes) -> None:
        """Add bytes that were received elsewhere (with file descriptors)."""
        self._buffer += data

    def _receive(self) -> bytes:
        """The next bytes of the stream; none at its end. Raises OSError."""
        return self._sock.recv(RECEIVE_BYTES)

    def _next_message(self) -> list[Any] | None:
        """The next complete message in the buffer, or None."""
        available = len(self._buffer) - self._start
        if available < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if length > self.max_bytes:
            raise MalformedMessage(
                f"message of {length} bytes exceeds the maximum of {self.max_bytes}"
            )
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


def pack_hello(
    namespace: Namespace, auth_token: str | None, client: str, pid: int, traffic_label: str = ""
) -> bytes:
    """The HELLO message of a client."""
    about = {
        "version": PROTOCOL_VERSION,
        "namespace": asdict(namespace),
        "digest": namespace.digest,
        "token": auth_token,
        "client": client,
        "pid": pid,
        **({"route": traffic_label} if traffic_label else {}),
    }
    message = pack(MessageType.HELLO, about)
    if len(message) > MAX_HELLO_BYTES:
        raise ConfigError(
            f"HELLO has {len(message)} bytes; model name and auth token must fit in "
            f"{MAX_HELLO_BYTES}"
        )
    return message


def parse_namespace(about: dict[str, Any]) -> Namespace:
    """The namespace in a HELLO message.

    Raises ConfigError: another protocol version, unknown namespace fields, or a digest that does
    not match the namespace (both sides would use different keys for the same bytes).
    """
    if about.get("version") != PROTOCOL_VERSION:
        raise ConfigError(
            f"the client uses protocol version {about.get('version')!r}, the sidecar "
            f"{PROTOCOL_VERSION}; run the same kvstore version on both sides"
        )
    spec = about.get("namespace")
    known = {field.name: field for field in fields(Namespace)}
    if not isinstance(spec, dict) or set(spec) != set(known):
        raise ConfigError(
            "HELLO: the fields of the namespace are not those of this sidecar's version"
        )
    for name, value in spec.items():
        type_name = str(known[name].type)
        valid = isinstance(value, int) and type(value) is not bool
        if type_name.startswith("int"):
            valid = valid or (value is None and "None" in type_name)
        else:
            valid = isinstance(value, str)
        if not valid:
            raise ConfigError(f"HELLO: namespace field {name} must be {type_name} (got {value!r})")
    namespace = Namespace(**spec)
    if about.get("digest") != namespace.digest:
        raise ConfigError(
            f"the client's digest {about.get('digest')!r} does not match its namespace "
            f"({namespace.digest!r}); run the same kvstore version on both sides"
        )
    return namespace


def check_hashes(value: Any) -> Sequence[bytes]:
    """The hashes of a request. Raises MalformedMessage."""
    if type(value) is not list or not len(value) <= MAX_HASHES:
        raise MalformedMessage(f"expected a list of at most {MAX_HASHES} hashes")
    for item in value:
        if type(item) is not bytes or not 1 <= len(item) <= MAX_HASH_BYTES:
            raise MalformedMessage(f"a hash must be 1 to {MAX_HASH_BYTES} bytes")
    return value


def check_number(value: Any) -> int:
    """An operation id or a count. Raises MalformedMessage."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise MalformedMessage(f"expected a non-negative integer, got {repr(value)[:40]}")
    return value


def _unpack(body: memoryview) -> list[Any]:
    """Decode one message. Raises MalformedMessage for every error of msgpack."""
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"unreadable: {error}") from None
    if type(message) is not list or not message or type(message[0]) is not int:
        raise MalformedMessage("a message must be an array that starts with a message type")
    return message
