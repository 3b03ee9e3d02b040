"""The Redis tier with servers that reject, hang, send wrong data, fill up or restart.

Each failure has its exception, no wrong bytes are read, calls end within their bounds, and the tier
recovers.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis_rig import Proxy, Server, free_port, valkey_binary, wait_until

from kvstore.blocks.frame import HEADER_BYTES
from kvstore.errors import ConfigError, FrameInvalid, TierError, TierFull, TierUnavailable
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import redis as redis_tier
from kvstore.tiers.redis.keys import encode_name
from kvstore.tiers.redis.resp import SCRATCH_BYTES
from kvstore.tiers.redis.tier import RedisTier

KIB, MIB = 1 << 10, 1 << 20
SHORT_MS = 400
"""Timeout of tiers in tests with a hanging server."""
PASSWORD = "very secret indeed"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, valkey_binary())
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with contextlib.closing(server.client()) as client:
        yield client


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def open_() -> Iterator[Callable[..., RedisTier]]:
    with contextlib.ExitStack() as closing:

        def open_tier(at: Server | Proxy, **options: Any) -> RedisTier:
            options = {"url": f"redis://{at.address}", "timeout": 20_000, **options}
            tier = redis_tier.open(redis_tier.Config(**options))
            closing.callback(tier.close)
            return tier

        yield open_tier


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(256 * KIB)


def calls_of(tier: RedisTier, buffer: FrameBuffer) -> list[Callable[[], object]]:
    return [
        lambda: tier.contains([key_of(1)]),
        lambda: tier.read(key_of(1), buffer.header, buffer.payload),
        lambda: tier.write(*buffer.fill(key_of(2), 5000)),
        lambda: tier.delete([key_of(2)]),
        lambda: list(tier.keys()),
        tier.clear,
    ]


def good(tier: RedisTier, buffer: FrameBuffer, number: int = 1) -> bool:
    """Whether the block reads back unchanged."""
    length = tier.read(key_of(number), buffer.header, buffer.payload)
    assert not length or buffer.version_of(key_of(number), length) == 0
    return bool(length)


# ---------------------------------------------------------------------- unreachable


def test_a_refused_connection_is_unavailable_and_recovers(
    open_: Any, server: Server, buffer: FrameBuffer
) -> None:
    tier = open_(server)
    tier.write(*buffer.fill(key_of(1), 5000))
    server.kill()
    for call in calls_of(tier, buffer):
        with pytest.raises(TierUnavailable, match=f"redis {server.address} does not respond"):
            call()
    assert float(tier.stats()["errors"]) >= 6
    server.start()
    assert not good(tier, buffer), "the server restarted empty, so this is a miss"
    tier.write(*buffer.fill(key_of(1), 5000))
    assert good(tier, buffer)


def test_a_store_starts_while_its_server_is_away(
    open_: Any, server: Server, buffer: FrameBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    tier = open_(server)
    assert "not reachable yet" in caplog.text
    with pytest.raises(TierUnavailable):
        tier.contains([key_of(1)])
    server.start()
    assert tier.contains([key_of(1)]) == [False]


def test_a_restart_between_two_calls_is_not_even_noticed(
    open_: Any, server: Server, buffer: FrameBuffer
) -> None:
    tier = open_(server)
    tier.write(*buffer.fill(key_of(1), 5000))
    server.kill()
    server.start()
    tier.write(*buffer.fill(key_of(1), 5000))
    assert good(tier, buffer)
    assert tier.stats()["errors"] == 0


def test_a_frozen_server_is_unavailable_within_the_timeout(
    open_: Any, server: Server, buffer: FrameBuffer
) -> None:
    """The server accepts connections and requests, but does not reply."""
    tier = open_(server, timeout=SHORT_MS)
    tier.write(*buffer.fill(key_of(1), 200_000))
    server.freeze()
    for call in calls_of(tier, buffer):
        with pytest.raises(TierUnavailable):
            call()
    assert tier.stats()["writes"] == 1, "statistics do not wait for the server"
    server.thaw()
    wait_until(lambda: good(tier, buffer) or _written(tier, buffer), "the server's return")
    assert good(tier, buffer)


def _written(tier: RedisTier, buffer: FrameBuffer) -> bool:
    """A frozen server may execute earlier requests when it resumes; here, a clear."""
    try:
        tier.write(*buffer.fill(key_of(1), 200_000))
    except TierUnavailable:
        return False
    return True


def test_a_late_reply_is_never_taken_for_that_of_the_next_call(
    open_: Any, server: Server, buffer: FrameBuffer
) -> None:
    """The connection of a call that timed out is closed."""
    tier = open_(server, timeout=SHORT_MS, connections=1)
    for number in (1, 2):
        tier.write(*buffer.fill(key_of(number), 5000))
    for _ in range(3):
        server.freeze()
        with pytest.raises(TierUnavailable):
            tier.read(key_of(1), buffer.header, buffer.payload)
        with pytest.raises(TierUnavailable):
            tier.contains([key_of(3), key_of(3)])
        server.thaw()
        wait_until(lambda: _answers(tier), "the server's return")
        assert good(tier, buffer, 2)
        assert tier.contains([key_of(1), key_of(9), key_of(2)]) == [True, False, True]


def _answers(tier: RedisTier) -> bool:
    try:
        return tier.contains([key_of(9)]) == [False]
    except TierUnavailable:
        return False


def test_a_proxy_that_hangs_midway(open_: Any, proxy: Proxy, buffer: FrameBuffer) -> None:
    tier = open_(proxy, timeout=SHORT_MS)
    tier.write(*buffer.fill(key_of(1), 200_000))
    proxy.hung.set()
    for call in calls_of(tier, buffer)[:4]:
        with pytest.raises(TierUnavailable):
            call()
    proxy.hung.clear()
    proxy.drop()
    assert good(tier, buffer)


def test_a_slow_server_is_waited_for(open_: Any, proxy: Proxy, buffer: FrameBuffer) -> None:
    """A slow transfer succeeds if it stays within the minimum rate."""
    tier = open_(proxy)
    tier.write(*buffer.fill(key_of(1), 200_000))
    proxy.piece, proxy.pause_s = 10_000, 0.005
    assert good(tier, buffer)


def test_a_trickle_is_given_up(open_: Any, proxy: Proxy, buffer: FrameBuffer) -> None:
    """Each byte arrives within the timeout, but the whole value would take an hour."""
    tier = open_(proxy, timeout=SHORT_MS)
    tier.write(*buffer.fill(key_of(1), 200_000))
    proxy.piece, proxy.pause_s = 4, 0.05
    with pytest.raises(TierUnavailable, match="took too long"):
        tier.read(key_of(1), buffer.header, buffer.payload)
    proxy.piece, proxy.pause_s = 1 << 20, 0.0
    assert good(tier, buffer)


def test_a_server_killed_while_it_answers(open_: Any, proxy: Proxy, buffer: FrameBuffer) -> None:
    """The connection ends in the first line, in the header, in the payload or before the CRLF."""
    tier = open_(proxy)
    tier.write(*buffer.fill(key_of(1), 200_000))
    whole = HEADER_BYTES + 49 * HEADER_BYTES
    for cut_after in (0, 1, 7, 8, 500, HEADER_BYTES + 8, 150_000, whole + 9, whole + 10):
        proxy.drop()
        proxy.cut_after = cut_after
        with pytest.raises(TierUnavailable):
            tier.read(key_of(1), buffer.header, buffer.payload)
        proxy.cut_after = None
        assert good(tier, buffer)


@pytest.mark.parametrize(
    "reply",
    [
        b"$-1\r\n$-1\r\n",
        b"$8192\r\n" + b"x" * 100,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*2\r\n:1\r\n:2\r\n",
        b"+OK\r\n+OK\r\n",
        b"\0" * 10_000,
    ],
)
def test_a_garbled_reply_is_a_fault_and_costs_the_connection(
    reply: bytes, open_: Any, proxy: Proxy, buffer: FrameBuffer
) -> None:
    tier = open_(proxy, timeout=2 * SHORT_MS)
    tier.write(*buffer.fill(key_of(1), 5000))
    proxy.reply_with = reply
    for call in calls_of(tier, buffer)[:4]:
        with pytest.raises(TierError):
            call()
    proxy.reply_with = None
    assert good(tier, buffer)


def test_bytes_between_two_calls_cost_the_connection(
    open_: Any, proxy: Proxy, buffer: FrameBuffer
) -> None:
    """The server sends an extra reply shortly after. It is not taken for the next call's reply."""
    tier = open_(proxy, connections=1)
    tier.write(*buffer.fill(key_of(1), 5000))
    proxy.reply_with, proxy.piece, proxy.pause_s = b":0\r\n:1\r\n", 4, 0.2
    assert tier.contains([key_of(2)]) == [False]
    wait_until(lambda: proxy.replaced == 1, "the second reply")
    proxy.reply_with, proxy.piece, proxy.pause_s = None, 1 << 20, 0.0
    assert tier.contains([key_of(3)]) == [False]
    assert good(tier, buffer)


def test_a_value_given_up_midway_costs_the_connection(open_: Any, proxy: Proxy) -> None:
    """The remaining bytes arrive later, after the connection looks idle."""
    tier, large, small = open_(proxy, connections=1), FrameBuffer(2 * MIB), FrameBuffer(1)
    tier.write(*large.fill(key_of(1), 2 * MIB))
    proxy.piece, proxy.pause_s = SCRATCH_BYTES, 0.2
    with pytest.raises(TierError, match="does not fit"):
        tier.read(key_of(1), small.header, small.payload)
    assert tier.contains([key_of(1), key_of(2)]) == [True, False]


def test_corrupt_bytes_are_never_a_block(
    open_: Any, server: Server, client: Any, buffer: FrameBuffer
) -> None:
    """Another value under the key: the frame's checks reject it."""
    tier, rng = open_(server), random.Random(1)
    name = encode_name("kvstore", key_of(1))
    tier.write(*buffer.fill(key_of(1), 20_000))
    whole = client.get(name)
    tier.write(*buffer.fill(key_of(2), 20_000))
    other = client.get(encode_name("kvstore", key_of(2)))
    flipped = bytearray(whole)
    flipped[HEADER_BYTES + rng.randrange(20_000)] ^= 1
    for value in (bytes(flipped), whole[:-HEADER_BYTES], whole + bytes(HEADER_BYTES), other):
        client.set(name, value)
        length = tier.read(key_of(1), buffer.header, buffer.payload)
        with pytest.raises((FrameInvalid, AssertionError)):
            buffer.version_of(key_of(1), length)


# ---------------------------------------------------------------------- rejections


def test_a_full_server_says_so_and_still_reads(
    open_: Any, server: Server, client: Any, buffer: FrameBuffer
) -> None:
    tier = open_(server, ttl="1h")
    tier.write(*buffer.fill(key_of(1), 5000))
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1mb")
    with pytest.raises(TierFull, match="is full: OOM"):
        tier.write(*buffer.fill(key_of(2), 200_000))
    assert good(tier, buffer)
    assert tier.contains([key_of(1), key_of(2)]) == [True, False]
    client.config_set("maxmemory", "256mb")
    tier.write(*buffer.fill(key_of(2), 200_000))
    assert good(tier, buffer, 2)


def test_a_replica_refuses_writes_and_still_reads(
    open_: Any, server: Server, client: Any, buffer: FrameBuffer
) -> None:
    """With a TTL a read is also a write, if the server allows writes."""
    tiers = [open_(server), open_(server, ttl="1h")]
    tiers[0].write(*buffer.fill(key_of(1), 5000))
    client.replicaof("127.0.0.1", free_port())
    for tier in tiers:
        with pytest.raises(TierError, match="is a replica") as caught:
            tier.write(*buffer.fill(key_of(2), 5000))
        assert not isinstance(caught.value, TierUnavailable), "the server still answers reads"
        assert good(tier, buffer)
        assert tier.contains([key_of(1)]) == [True]
    client.config_set("replica-serve-stale-data", "no")
    with pytest.raises(TierUnavailable, match="MASTERDOWN"):
        tiers[0].read(key_of(1), buffer.header, buffer.payload)
    client.replicaof("NO", "ONE")
    tiers[1].write(*buffer.fill(key_of(2), 5000))


def test_a_loading_server_is_unavailable(tmp_path: Path, open_: Any, buffer: FrameBuffer) -> None:
    server = Server(tmp_path, valkey_binary(), dbfilename="dump.rdb")
    tier = open_(server)
    for number in range(8):
        tier.write(*buffer.fill(key_of(number), 5000))
    with contextlib.closing(server.client()) as client:
        client.save()
        server.kill()
        server._options |= {
            "key_load_delay": 250_000,
            "loading_process_events_interval_bytes": 1024,
        }
        server.start(wait=False)
        seen = []

        def loaded() -> bool:
            try:
                return good(tier, buffer)
            except TierUnavailable as error:
                seen.append(str(error))
                return False

        wait_until(loaded, "the end of loading")
        assert any("LOADING" in text for text in seen), seen
        server.stop()


def test_a_user_that_may_only_read(
    open_: Any, server: Server, client: Any, buffer: FrameBuffer
) -> None:
    open_(server).write(*buffer.fill(key_of(1), 5000))
    client.execute_command(
        "ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "+@read", "+@connection", "+info"
    )
    tier = open_(server, user="reader", password=PASSWORD, ttl="1h")
    assert good(tier, buffer)
    assert tier.contains([key_of(1)]) == [True]
    with pytest.raises(TierError, match="not have the permission"):
        tier.write(*buffer.fill(key_of(2), 5000))


def test_wrong_credentials_are_one_line_without_them(tmp_path: Path) -> None:
    server = Server(tmp_path, valkey_binary(), requirepass="right")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"url": f"redis://:{PASSWORD.replace(' ', '%20')}@{server.address}"}, "rejects this user"),
        ({"host": "127.0.0.1", "port": server.port, "password": PASSWORD}, "rejects this user"),
        ({"host": "127.0.0.1", "port": server.port}, "requires a password"),
    ]
    for options, words in wrong:
        with pytest.raises(ConfigError, match=words) as caught:
            redis_tier.open(redis_tier.Config(**options))
        assert "\n" not in str(caught.value)
        assert PASSWORD not in str(caught.value)
    server.stop()


def test_a_password_changed_meanwhile_is_permanent(
    open_: Any, server: Server, client: Any, buffer: FrameBuffer
) -> None:
    tier = open_(server)
    tier.contains([key_of(1)])
    client.config_set("requirepass", "new")
    client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(TierError, match="requires a password") as caught:
        tier.contains([key_of(1)])
    assert not isinstance(caught.value, TierUnavailable)
    client.config_set("requirepass", "")
    assert tier.contains([key_of(1)]) == [False]


def test_a_password_that_nobody_asks_for(server: Server) -> None:
    with pytest.raises(ConfigError, match="password is set, but the server has none") as caught:
        redis_tier.open(redis_tier.Config(host="127.0.0.1", port=server.port, password=PASSWORD))
    assert PASSWORD not in str(caught.value)


def test_a_secret_in_a_servers_words_is_not_repeated(proxy: Proxy) -> None:
    """Some servers repeat the unknown command with its arguments."""
    proxy.reply_with = b"-ERR unknown command 'AUTH', with args beginning with: '%s'\r\n" % (
        PASSWORD.encode()
    )
    with pytest.raises(ConfigError, match=r"unknown command.*'\*\*\*'") as caught:
        redis_tier.open(redis_tier.Config(host="127.0.0.1", port=proxy.port, password=PASSWORD))
    assert PASSWORD not in str(caught.value)


def test_too_many_clients_is_unavailable(
    open_: Any, server: Server, client: Any, buffer: FrameBuffer
) -> None:
    client.config_set("maxclients", 1)
    tier = open_(server)
    with pytest.raises(TierUnavailable):
        tier.contains([key_of(1)])
    client.config_set("maxclients", 100)
    assert tier.contains([key_of(1)]) == [False]


def test_a_value_longer_than_the_server_takes_is_permanent(
    open_: Any, server: Server, client: Any
) -> None:
    """The server replies and closes during the transfer. Reads still work."""
    tier, large = open_(server), FrameBuffer(8 * MIB)
    client.config_set("proto-max-bulk-len", MIB)
    for _ in range(3):
        with pytest.raises(TierError, match="invalid bulk length") as caught:
            tier.write(*large.fill(key_of(1), 8 * MIB))
        assert not isinstance(caught.value, TierUnavailable)
    assert tier.contains([key_of(1)]) == [False]


def test_a_payload_longer_than_redis_takes_is_refused_unsent(
    open_: Any, server: Server, buffer: FrameBuffer
) -> None:
    """The buffer is not touched, so it takes address space only."""
    tier = open_(server)
    assert tier.max_payload_bytes == (512 << 20) - HEADER_BYTES
    with pytest.raises(TierError, match="too large for a Redis value"):
        tier.write(key_of(1), buffer.header, memoryview(mmap.mmap(-1, 512 << 20)))
    assert tier.contains([key_of(1)]) == [False]


def test_faults_in_many_threads_leave_nothing_behind(
    open_: Any, proxy: Proxy, buffer: FrameBuffer
) -> None:
    """Random disconnects of readers and writers: every read is correct or fails."""
    tier = open_(proxy, timeout=5000)
    keys = [key_of(number) for number in range(20)]
    done = False

    def work(turn: int) -> tuple[int, int]:
        mine, right, failed = FrameBuffer(60 * KIB), 0, 0
        for step in range(120):
            key = keys[(step * 7 + turn * 5) % len(keys)]
            try:
                if step % 3 == turn % 3:
                    tier.write(*mine.fill(key, 40_000))
                else:
                    length = tier.read(key, mine.header, mine.payload)
                    assert not length or mine.version_of(key, length) == 0
                    right += bool(length)
            except TierError:
                failed += 1
        return right, failed

    def cut() -> None:
        while not done:
            time.sleep(0.02)
            proxy.drop()

    with ThreadPoolExecutor(5) as pool:
        cutting = pool.submit(cut)
        results = list(pool.map(work, range(4)))
        done = True
        cutting.result()
    assert sum(right for right, _ in results) > 0
    assert sum(failed for _, failed in results) > 0
    assert tier.stats()["calls_in_flight"] == 0
    tier.write(*buffer.fill(keys[0], 40_000))
    assert good(tier, buffer, 0)
