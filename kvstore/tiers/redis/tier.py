"""The verbs of the Redis tier: what is asked of the servers, and what their answers mean."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

from redis.connection import ConnectionPool

from kvstore.blocks.key import Key
from kvstore.errors import FrameTooLarge, TierError
from kvstore.tiers.base import PAGE_BYTES, Judgement, Tier
from kvstore.tiers.redis import faults, resp
from kvstore.tiers.redis.calls import Calls
from kvstore.tiers.redis.exchange import Exchange
from kvstore.tiers.redis.info import Info, ServerInfo, keys_in, parse_info, total
from kvstore.tiers.redis.keys import decode_name, encode_name, pattern
from kvstore.tiers.redis.resp import ErrorReply, Got, Value, command
from kvstore.tiers.redis.servers import Servers

log = logging.getLogger(__name__)

SPARE_CALLS: Final = 8
"""Calls at once beyond the workers': transfers of HTTP clients, a listing, statistics."""
SCAN_COUNT: Final = 1000
"""Names a server looks at for each step of a listing."""
TRIES: Final = 2
"""Times a cluster's nodes are asked for one value before redis-py's client is."""
REPAIR_TRIES: Final = 3
"""Times a write tries to put its frame where somebody else's value lies."""
COUNTERS: Final = (
    "reads",
    "read_bytes",
    "writes",
    "write_bytes",
    "faults",
    "foreign",
    "redirects",
)


class RedisTier(Tier):
    """Keeps each frame as one string of a server. Made by `open`; see the package's `Config`."""

    local_index = False
    max_payload_bytes = resp.MAX_VALUE_BYTES - PAGE_BYTES

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
        """connections: worth having in use at once. ttl_ms: 0 for ever. timeout_s: longest a
        server may say nothing."""
        self.name = name
        self.workers_write = max(1, connections // 2)
        self.workers_read = max(1, connections - self.workers_write)
        self._servers = servers
        self._prefix = prefix
        self._ttl_ms = ttl_ms
        workers = self.workers_read + self.workers_write
        self._calls = Calls(servers, at_once=workers + SPARE_CALLS, timeout_s=timeout_s)
        self._info = ServerInfo(self.ask_info)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """One round trip for each server that may hold any of them, all at once. A node of a
        cluster that does not answer holds nothing; that none answers is TierUnavailable."""
        with self._edge():
            replies = self._calls.ask(b"EXISTS", [self._name(key) for key in keys])
            for line in replies:
                _good(line or b"")
            return [line == b":1" for line in replies]

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        name = self._name(key)
        with self._edge():
            value = self._get(name, header, payload)
        if value.got is Got.TOO_LARGE:
            raise FrameTooLarge(
                f"a payload of {value.payload_bytes} bytes does not fit {len(payload)}"
            )
        if value.got is Got.FOREIGN:
            self._calls.count("foreign")
            log.warning("%s: %s is no frame; it is deleted", self.name, name.decode())
            self.delete([key])
            return 0
        if value.got is Got.MISSING:
            return 0
        self._calls.count("reads")
        self._calls.count("read_bytes", PAGE_BYTES + value.payload_bytes)
        return value.payload_bytes

    def write(self, key: Key, header: memoryview, payload: memoryview) -> None:
        if len(payload) > self.max_payload_bytes:
            raise TierError(
                f"a payload of {len(payload)} bytes; a Redis value takes {self.max_payload_bytes}"
            )
        with self._edge():
            written = self._set(self._name(key), header[:PAGE_BYTES], payload)
        self._calls.count("writes", int(written))
        self._calls.count("write_bytes", (PAGE_BYTES + len(payload)) * written)

    def delete(self, keys: Sequence[Key]) -> None:
        with self._edge():
            self._unlink([self._name(key) for key in keys])

    def usage(self) -> Iterator[tuple[Key, int]]:
        """In no order: servers do not tell when a value was last used."""
        with self._edge():
            pools = self._servers.pools()
        seen: set[int] = set()
        for pool in pools:
            for names in self._scan(pool):
                with self._edge():
                    lengths = self._calls.ask(b"STRLEN", names)
                for name, line in zip(names, lengths, strict=True):
                    key = decode_name(self._prefix, name)
                    nbytes = int(line[1:]) if line and line[:1] == b":" else 0
                    # While a server's table grows, SCAN may give a name twice.
                    if key and resp.is_frame_length(nbytes) and hash(name) not in seen:
                        seen.add(hash(name))
                        yield key, nbytes

    def clear(self) -> None:
        """Delete what is under our prefix, and nothing else."""
        with self._edge():
            pools = self._servers.pools()
        for pool in pools:
            for names in self._scan(pool):
                with self._edge():
                    self._unlink(names)

    def stats(self) -> dict[str, int | float | str]:
        """bytes_used, bytes_capacity (0: unbounded), evictions and server_clients are the servers'
        own, of everybody who uses them; blocks counts the keys of the database. Does not wait for
        a server that is slow: what it said last is told."""
        infos = self._info.latest()
        limits = [total([info], "maxmemory") for info in infos]
        return {
            "bytes_used": total(infos, "used_memory"),
            "bytes_capacity": sum(limits) if all(limits) else 0,
            "blocks": keys_in(infos, self._servers.address.options.get("db") or 0),
            "evictions": total(infos, "evicted_keys"),
            "server_clients": total(infos, "connected_clients"),
            "servers": len(infos),
            "running_calls": self._calls.running,
            **self._calls.counted(COUNTERS),
        }

    def judge(self, error: BaseException) -> Judgement:
        away = faults.is_connection_fault(error)
        return Judgement.UNAVAILABLE if away else Judgement.PERMANENT

    def close(self) -> None:
        self._calls.close()

    def ask_info(self) -> list[Info]:
        """INFO of every server. Raises TierError: one is away, or refuses us."""
        infos: list[Info] = []
        with self._edge(counted=False):
            for pool in self._servers.pools():
                with self._calls.exchange(pool) as exchange:
                    infos.append(parse_info(exchange.ask("INFO")))
        return infos

    # --- one value ----------------------------------------------------------------------

    def _get(self, name: bytes, header: memoryview, payload: memoryview) -> Value:
        """GET, or GETEX where what is used shall live on."""
        for _ in range(TRIES):
            try:
                with self._calls.exchange(self._servers.pool_of(name), len(payload)) as exchange:
                    return self._get_on(exchange, name, header, payload)
            except ErrorReply as error:
                if error.code == "WRONGTYPE":
                    return Value(Got.FOREIGN)
                if not faults.is_redirect(error):
                    raise
                self._calls.look_elsewhere()
        return self._get_by_client(name, header, payload)

    def _get_on(
        self, exchange: Exchange, name: bytes, header: memoryview, payload: memoryview
    ) -> Value:
        if self._ttl_ms:
            exchange.send(command(b"GETEX", name, b"PX", b"%d" % self._ttl_ms))
            try:
                return exchange.value(header, payload)
            except ErrorReply as error:
                if not faults.refuses_refresh(error):
                    raise
        exchange.send(command(b"GET", name))
        return exchange.value(header, payload)

    def _get_by_client(self, name: bytes, header: memoryview, payload: memoryview) -> Value:
        """By redis-py, with its copies: the rare read that a cluster sends from node to node."""
        nbytes = int(self._servers.follow("STRLEN", name))
        payload_bytes = nbytes - PAGE_BYTES
        if not nbytes:
            return Value(Got.MISSING)
        if not resp.is_frame_length(nbytes):
            return Value(Got.FOREIGN)
        if payload_bytes > len(payload):
            return Value(Got.TOO_LARGE, payload_bytes)
        value = memoryview(self._servers.follow("GETRANGE", name, 0, nbytes - 1))
        if len(value) != nbytes:
            return Value(Got.MISSING)
        if self._ttl_ms:
            self._servers.follow("PEXPIRE", name, self._ttl_ms)
        header[:PAGE_BYTES], payload[:payload_bytes] = value[:PAGE_BYTES], value[PAGE_BYTES:]
        return Value(Got.FRAME, payload_bytes)

    def _set(self, name: bytes, header: memoryview, payload: memoryview) -> bool:
        """SET NX; False when a frame is there already, which then lives on."""
        nbytes = PAGE_BYTES + len(payload)
        head, tail = resp.set_around(name, nbytes, self._ttl_ms)
        for _ in range(TRIES):
            try:
                with self._calls.exchange(self._servers.pool_of(name), nbytes) as exchange:
                    for _ in range(REPAIR_TRIES):
                        exchange.send(head, header, payload, tail)
                        if _good(exchange.lines(1)[0]) != b"$-1":
                            return True
                        if self._keeps(exchange, name):
                            return False
                    raise TierError("somebody else's values keep appearing under our name")
            except ErrorReply as error:
                if not faults.is_redirect(error):
                    raise
                self._calls.look_elsewhere()
        expiry = ("PX", self._ttl_ms) if self._ttl_ms else ()
        value = b"".join((header, payload))
        return self._servers.follow("SET", name, value, "NX", *expiry) is not None

    def _keeps(self, exchange: Exchange, name: bytes) -> bool:
        """Whether what a SET NX found there can be a frame. It is given a new lease of life; what
        cannot be one is deleted, or a block would be acknowledged that nobody can read."""
        commands = command(b"STRLEN", name)
        if self._ttl_ms:
            commands += command(b"PEXPIRE", name, b"%d" % self._ttl_ms)
        exchange.send(commands)
        line = exchange.lines(1 + bool(self._ttl_ms))[0]
        error = resp.error_in(line)
        if error is not None and error.code != "WRONGTYPE":
            raise error
        if error is None and resp.is_frame_length(int(line[1:])):
            return True
        exchange.send(command(b"UNLINK", name))
        if _good(exchange.lines(1)[0]) != b":0":
            self._calls.count("foreign")
            log.warning("%s: %s is no frame; it is replaced", self.name, name.decode())
        return False

    # --- many names ---------------------------------------------------------------------

    def _unlink(self, names: Sequence[bytes]) -> None:
        for line in self._calls.ask(b"UNLINK", names, partial=False):
            _good(line or b"")

    def _scan(self, pool: ConnectionPool) -> Iterator[list[bytes]]:
        """Names of ours on one server, some at a time; no connection is held in between."""
        cursor: Any = 0
        while True:
            with self._edge(), self._calls.exchange(pool) as exchange:
                words = ("SCAN", cursor, "MATCH", pattern(self._prefix), "COUNT", SCAN_COUNT)
                cursor, found = exchange.ask(*words)
            names = [name for name in found if decode_name(self._prefix, name) is not None]
            if names:
                yield names
            if int(cursor) == 0:
                return

    @contextlib.contextmanager
    def _edge(self, *, counted: bool = True) -> Iterator[None]:
        """Where foreign faults become ours."""
        try:
            yield
        except faults.FOREIGN as error:
            self._calls.count("faults", int(counted))
            if faults.is_of_the_place(error):
                self._calls.look_again()
            where, secrets = str(self._servers), self._servers.address.secrets
            raise faults.mapped(error, where, secrets=secrets) from None

    def _name(self, key: Key) -> bytes:
        return encode_name(self._prefix, key)


def _good(line: bytes) -> bytes:
    """A one-line reply that is no error. Raises ErrorReply."""
    error = resp.error_in(line)
    if error is not None:
        raise error
    return line
