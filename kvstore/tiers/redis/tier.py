"""The operations of the Redis tier: commands to the servers, and the meaning of their replies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

from redis.connection import ConnectionPool

from kvstore.blocks.frame import check_version
from kvstore.blocks.key import Key
from kvstore.codecs import check_supported
from kvstore.errors import FrameTooLarge, TierError
from kvstore.tiers.base import IO_ALIGNMENT, ErrorClass, Tier
from kvstore.tiers.redis import faults, resp
from kvstore.tiers.redis.calls import Calls
from kvstore.tiers.redis.exchange import Exchange
from kvstore.tiers.redis.info import Info, ServerInfo, count_keys, parse_info, sum_field
from kvstore.tiers.redis.keys import decode_name, encode_name, scan_pattern
from kvstore.tiers.redis.resp import ErrorReply, Value, ValueKind, pack_command
from kvstore.tiers.redis.servers import Servers

log = logging.getLogger(__name__)

SPARE_CALLS: Final = 8
"""Concurrent calls besides those of the workers: HTTP transfers, a listing, statistics."""
SCAN_COUNT: Final = 1000
"""Names that a server examines in each step of a listing."""
REDIRECT_TRIES: Final = 2
"""Requests for one value that follow the slot map, before redis-py's client takes over."""
REPAIR_TRIES: Final = 3
"""Number of times a write replaces a value that is not a frame."""
COUNTERS: Final = (
    "reads",
    "read_bytes",
    "writes",
    "write_bytes",
    "errors",
    "foreign",
    "redirects",
)

_NO_HEADER: Final = bytes(IO_ALIGNMENT)


class RedisTier(Tier):
    """Stores each frame as one string value. Created by `open` from the package's `Config`."""

    local_index = False
    max_payload_bytes = resp.MAX_VALUE_BYTES - IO_ALIGNMENT

    def __init__(
        self,
        servers: Servers,
        *,
        prefix: str,
        ttl_ms: int,
        connections: int,
        timeout_s: float,
        name: str = "redis",
    ) -> None:
        """connections: number of concurrent transfers. ttl_ms: 0 for no expiry. timeout_s: maximum
        wait for data from a server."""
        self.name = name
        self.workers_write = max(1, connections // 2)
        self.workers_read = max(1, connections - self.workers_write)
        self._servers = servers
        self._prefix = prefix
        self._ttl_ms = ttl_ms
        workers = self.workers_read + self.workers_write
        self._calls = Calls(servers, max_calls=workers + SPARE_CALLS, timeout_s=timeout_s)
        self._info = ServerInfo(self.query_info)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Query all servers that may have the keys at the same time, with one round trip each.

        Keys on a cluster node that does not respond are reported as absent. Raises TierUnavailable:
        no server responds.
        """
        with self._map_errors():
            replies = self._calls.send_for_each(b"EXISTS", [self._name(key) for key in keys])
            for line in replies:
                _raise_if_error(line or b"")
            return [line == b":1" for line in replies]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        """Read a frame. Also raises FrameUnsupported, for a value of another length than a frame's
        that begins as a frame of a later version."""
        name = self._name(key)
        header[:IO_ALIGNMENT] = _NO_HEADER
        with self._map_errors():
            value = self._get(name, header, payload)
        if value.kind is ValueKind.TOO_LARGE:
            raise FrameTooLarge(
                f"payload of {value.payload_bytes} bytes does not fit into {len(payload)} bytes"
            )
        if value.kind is ValueKind.FOREIGN:
            check_version(header)
            self._calls.count("foreign")
            log.warning("%s: deleting the value of %s: not a frame", self.name, name.decode())
            self.delete([key])
            return 0
        if value.kind is ValueKind.MISSING:
            return 0
        self._calls.count("reads")
        self._calls.count("read_bytes", IO_ALIGNMENT + value.payload_bytes)
        return value.payload_bytes

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        """Write a frame. Also raises FrameUnsupported: the server has one of another release."""
        if len(payload) > self.max_payload_bytes:
            raise TierError(
                f"payload of {len(payload)} bytes is too large for a Redis value (at most "
                f"{self.max_payload_bytes})"
            )
        with self._map_errors():
            written = self._set(self._name(key), header[:IO_ALIGNMENT], payload)
        self._calls.count("writes", int(written))
        self._calls.count("write_bytes", (IO_ALIGNMENT + len(payload)) * written)

    def delete(self, keys: Sequence[Key]) -> None:
        with self._map_errors():
            self._unlink([self._name(key) for key in keys])

    def usage(self) -> Iterator[tuple[Key, int]]:
        """In no particular order, because servers do not report the last use of a value."""
        with self._map_errors():
            pools = self._servers.pools()
        seen: set[int] = set()
        for pool in pools:
            for names in self._scan(pool):
                with self._map_errors():
                    lengths = self._calls.send_for_each(b"STRLEN", names)
                for name, line in zip(names, lengths, strict=True):
                    key = decode_name(self._prefix, name)
                    nbytes = int(line[1:]) if line and line[:1] == b":" else 0
                    # SCAN may return a name twice while the server's table grows.
                    if key and resp.is_frame_length(nbytes) and hash(name) not in seen:
                        seen.add(hash(name))
                        yield key, nbytes

    def clear(self) -> None:
        """Delete all names with the configured prefix, and no others."""
        with self._map_errors():
            pools = self._servers.pools()
        for pool in pools:
            for names in self._scan(pool):
                with self._map_errors():
                    self._unlink(names)

    def stats(self) -> dict[str, int | float | str]:
        """Statistics of the servers and of this tier's calls.

        bytes_used, bytes_capacity (0: unbounded), evictions and server_clients come from the
        servers and include their other users. blocks is the number of keys in the database. If a
        server is slow, its previous values are returned.
        """
        infos = self._info.latest()
        limits = [sum_field([info], "maxmemory") for info in infos]
        return {
            "bytes_used": sum_field(infos, "used_memory"),
            "bytes_capacity": sum(limits) if all(limits) else 0,
            "blocks": count_keys(infos, self._servers.address.options.get("db") or 0),
            "evictions": sum_field(infos, "evicted_keys"),
            "server_clients": sum_field(infos, "connected_clients"),
            "servers": len(infos),
            "calls_in_flight": self._calls.running,
            **self._calls.counters(COUNTERS),
        }

    def classify_error(self, error: BaseException) -> ErrorClass:
        unreachable = faults.is_connection_fault(error)
        return ErrorClass.UNAVAILABLE if unreachable else ErrorClass.PERMANENT

    def close(self) -> None:
        self._calls.close()

    def query_info(self) -> list[Info]:
        """INFO of every server. Raises TierError: a server is unreachable or rejects us."""
        infos: list[Info] = []
        with self._map_errors(counted=False):
            for pool in self._servers.pools():
                with self._calls.exchange(pool) as exchange:
                    infos.append(parse_info(exchange.execute("INFO")))
        return infos

    # --- one value ----------------------------------------------------------------------

    def _get(self, name: bytes, header: memoryview, payload: memoryview) -> Value:
        """Read a value by GET, or by GETEX to renew its TTL."""
        for _ in range(REDIRECT_TRIES):
            try:
                with self._calls.exchange(self._servers.pool_of(name), len(payload)) as exchange:
                    return self._get_on(exchange, name, header, payload)
            except ErrorReply as error:
                if error.code == "WRONGTYPE":
                    return Value(ValueKind.FOREIGN)
                if not faults.is_redirect(error):
                    raise
                self._calls.on_redirect()
        return self._get_by_client(name, header, payload)

    def _get_on(
        self, exchange: Exchange, name: bytes, header: memoryview, payload: memoryview
    ) -> Value:
        if self._ttl_ms:
            exchange.send(pack_command(b"GETEX", name, b"PX", b"%d" % self._ttl_ms))
            try:
                return exchange.read_value(header, payload)
            except ErrorReply as error:
                if not faults.rejects_getex(error):
                    raise
        exchange.send(pack_command(b"GET", name))
        return exchange.read_value(header, payload)

    def _get_by_client(self, name: bytes, header: memoryview, payload: memoryview) -> Value:
        """Read a value with redis-py's client, which copies it: for reads with many redirects."""
        nbytes = int(self._servers.execute_following_redirects("STRLEN", name))
        payload_bytes = nbytes - IO_ALIGNMENT
        if not nbytes:
            return Value(ValueKind.MISSING)
        if not resp.is_frame_length(nbytes) or payload_bytes > len(payload):
            start = self._servers.execute_following_redirects("GETRANGE", name, 0, IO_ALIGNMENT - 1)
            header[: len(start)] = start
            if resp.is_frame_length(nbytes):
                return Value(ValueKind.TOO_LARGE, payload_bytes)
            return Value(ValueKind.FOREIGN)
        value = memoryview(
            self._servers.execute_following_redirects("GETRANGE", name, 0, nbytes - 1)
        )
        if len(value) != nbytes:
            return Value(ValueKind.MISSING)
        if self._ttl_ms:
            self._servers.execute_following_redirects("PEXPIRE", name, self._ttl_ms)
        header[:IO_ALIGNMENT], payload[:payload_bytes] = value[:IO_ALIGNMENT], value[IO_ALIGNMENT:]
        return Value(ValueKind.FRAME, payload_bytes)

    def _set(self, name: bytes, header: memoryview, payload: memoryview) -> bool:
        """Write a value by SET NX; returns False if a frame exists already, and renews its TTL."""
        nbytes = IO_ALIGNMENT + len(payload)
        head, tail = resp.pack_set(name, nbytes, self._ttl_ms)
        for _ in range(REDIRECT_TRIES):
            try:
                with self._calls.exchange(self._servers.pool_of(name), nbytes) as exchange:
                    for _ in range(REPAIR_TRIES):
                        exchange.send(head, header, payload, tail)
                        if _raise_if_error(exchange.read_lines(1)[0]) != b"$-1":
                            return True
                        if self._is_frame_stored(exchange, name):
                            return False
                    raise TierError("another client keeps writing other values to this key")
            except ErrorReply as error:
                if not faults.is_redirect(error):
                    raise
                self._calls.on_redirect()
        expiry = ("PX", self._ttl_ms) if self._ttl_ms else ()
        value = b"".join((header, payload))
        if self._servers.execute_following_redirects("SET", name, value, "NX", *expiry) is not None:
            return True
        start = self._servers.execute_following_redirects("GETRANGE", name, 0, IO_ALIGNMENT - 1)
        check_supported(memoryview(bytes(start).ljust(IO_ALIGNMENT, b"\0")))
        return False

    def _is_frame_stored(self, exchange: Exchange, name: bytes) -> bool:
        """Whether the existing value can be a frame. Renews the TTL of a frame.

        Deletes any other value. Otherwise the write would acknowledge a block that cannot be read.
        Raises FrameUnsupported: the value is a frame of another release.
        """
        commands = pack_command(b"STRLEN", name)
        if self._ttl_ms:
            commands += pack_command(b"PEXPIRE", name, b"%d" % self._ttl_ms)
        exchange.send(commands)
        line = exchange.read_lines(1 + bool(self._ttl_ms))[0]
        error = resp.parse_error(line)
        if error is not None and error.code != "WRONGTYPE":
            raise error
        if error is None:
            stored = memoryview(bytearray(IO_ALIGNMENT))
            exchange.send(pack_command(b"GETRANGE", name, b"0", b"%d" % (IO_ALIGNMENT - 1)))
            exchange.read_value(stored, stored[:0])
            check_supported(stored)
        if error is None and resp.is_frame_length(int(line[1:])):
            return True
        exchange.send(pack_command(b"UNLINK", name))
        if _raise_if_error(exchange.read_lines(1)[0]) != b":0":
            self._calls.count("foreign")
            log.warning("%s: replacing the value of %s: not a frame", self.name, name.decode())
        return False

    # --- many names ---------------------------------------------------------------------

    def _unlink(self, names: Sequence[bytes]) -> None:
        for line in self._calls.send_for_each(b"UNLINK", names, partial=False):
            _raise_if_error(line or b"")

    def _scan(self, pool: ConnectionPool) -> Iterator[list[bytes]]:
        """Batches of this tier's names on one server. Uses no connection between batches."""
        cursor: Any = 0
        while True:
            with self._map_errors(), self._calls.exchange(pool) as exchange:
                words = ("SCAN", cursor, "MATCH", scan_pattern(self._prefix), "COUNT", SCAN_COUNT)
                cursor, found = exchange.execute(*words)
            names = [name for name in found if decode_name(self._prefix, name) is not None]
            if names:
                yield names
            if int(cursor) == 0:
                return

    @contextlib.contextmanager
    def _map_errors(self, *, counted: bool = True) -> Iterator[None]:
        """Map exceptions of calls to tier errors. counted: count them in the statistics."""
        try:
            yield
        except faults.CALL_ERRORS as error:
            self._calls.count("errors", int(counted))
            if faults.may_have_moved(error):
                self._calls.on_server_failure()
            where, secrets = str(self._servers), self._servers.address.secrets
            raise faults.map_error(error, where, secrets=secrets) from None

    def _name(self, key: Key) -> bytes:
        return encode_name(self._prefix, key)


def _raise_if_error(line: bytes) -> bytes:
    """Return a one-line reply. Raises ErrorReply: it is an error."""
    error = resp.parse_error(line)
    if error is not None:
        raise error
    return line
