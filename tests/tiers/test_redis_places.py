"""Server addresses: sentinels and failover, a cluster and its redirects, invalid configurations,
and two stores that share a server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_rig import (
    HOST,
    Certificates,
    Cluster,
    Proxy,
    Server,
    free_port,
    sentinel_of,
    valkey_binary,
    wait_until,
)

from kvstore.blocks.key import Key
from kvstore.config.settings import validate
from kvstore.errors import ConfigError, FrameUnsupported, TierError, TierUnavailable
from kvstore.store import block_io
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.processes import PACKAGE_PARENT
from kvstore.tiers import redis as redis_tier
from kvstore.tiers.base import IO_ALIGNMENT, Tier
from kvstore.tiers.redis import tier as tier_module
from kvstore.tiers.redis.address import address_of
from kvstore.tiers.redis.keys import encode_name
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.unsupported import UnsupportedFrames

KIB = 1 << 10
SECRET = "very secret indeed"


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(64 * KIB)


@pytest.fixture
def open_() -> Iterator[Callable[..., RedisTier]]:
    with contextlib.ExitStack() as closing:

        def open_tier(**options: Any) -> RedisTier:
            tier = redis_tier.open(redis_tier.Config(**{"timeout": 20_000, **options}))
            closing.callback(tier.close)
            return tier

        yield open_tier


def good(tier: Tier, buffer: FrameBuffer, key: Key) -> bool:
    length = tier.read(key, buffer.header, buffer.payload)
    assert not length or buffer.version_of(key, length) == 0
    return bool(length)


def works(call: Callable[[], object]) -> bool:
    """Whether the call succeeds. Before that the server is unavailable or a demoted master."""
    try:
        call()
    except TierError:
        return False
    return True


# ---------------------------------------------------------------------- sentinels


def test_a_failover_is_followed(open_: Any, tmp_path: Path, buffer: FrameBuffer) -> None:
    """The master dies, and the sentinel promotes its replica. Old blocks are readable, and new ones
    are written. The first sentinel in the list is dead, which costs one refused connection."""
    binary = valkey_binary()
    master = Server(tmp_path / "master", binary)
    replica = Server(
        tmp_path / "replica", binary, replicaof=f"{HOST} {master.port}", repl_diskless_sync_delay=0
    )
    with contextlib.ExitStack() as stopping:
        stopping.callback(master.stop)
        stopping.callback(replica.stop)
        second = stopping.enter_context(contextlib.closing(replica.client()))
        wait_until(lambda: second.info()["master_link_status"] == "up", "the replica")
        sentinel = sentinel_of(tmp_path / "sentinel", binary, master, "blocks")
        stopping.callback(sentinel.stop)
        watch = stopping.enter_context(contextlib.closing(sentinel.client()))
        wait_until(lambda: len(watch.sentinel_slaves("blocks")) == 1, "the sentinel's knowledge")
        tier = open_(
            sentinels=(f"{HOST}:{free_port()}", sentinel.address),
            sentinel_master="blocks",
            timeout=500,
        )
        tier.write(*buffer.fill(key_of(1), 5000))
        wait_until(lambda: second.dbsize() == 1, "replication")
        pool = tier._servers.pools()[0]
        with tier._calls.exchange(pool):
            assert tier.contains([key_of(1)]) == [True], "on a second connection"
        master.freeze()
        with pytest.raises(TierUnavailable):
            tier.contains([key_of(1)])
        wait_until(lambda: works(lambda: tier.write(*buffer.fill(key_of(2), 5000))), "a failover")
        assert good(tier, buffer, key_of(1))
        assert second.info()["role"] == "master"
        assert second.exists(encode_name("kvstore", key_of(2)))
        # The old master returns without knowing that it was demoted. The tier does not use it.
        master.thaw()
        with tier._calls.exchange(pool):
            tier.write(*buffer.fill(key_of(3), 5000))
        assert tier.contains([key_of(1), key_of(2), key_of(3)]) == [True] * 3
        assert second.exists(encode_name("kvstore", key_of(3)))


def test_a_master_demoted_by_hand_is_left(open_: Any, tmp_path: Path, buffer: FrameBuffer) -> None:
    """READONLY means that the sentinels have another master now."""
    binary = valkey_binary()
    master = Server(tmp_path / "master", binary)
    other = Server(tmp_path / "other", binary)
    sentinel = sentinel_of(tmp_path / "sentinel", binary, master, "blocks")
    with contextlib.ExitStack() as stopping:
        for each in (master, other, sentinel):
            stopping.callback(each.stop)
        tier = open_(sentinels=(sentinel.address,), sentinel_master="blocks")
        tier.write(*buffer.fill(key_of(1), 5000))
        watch = stopping.enter_context(contextlib.closing(sentinel.client()))
        watch.sentinel_remove("blocks")
        watch.sentinel_monitor("blocks", HOST, other.port, 1)
        with contextlib.closing(master.client()) as client:
            client.replicaof(HOST, other.port)
        wait_until(lambda: works(lambda: tier.write(*buffer.fill(key_of(2), 5000))), "the other")
        with contextlib.closing(other.client()) as client:
            assert client.exists(encode_name("kvstore", key_of(2)))


def test_sentinels_that_are_away_are_unavailable(open_: Any) -> None:
    tier = open_(sentinels=(f"{HOST}:{free_port()}",), sentinel_master="blocks")
    with pytest.raises(TierUnavailable, match="redis master 'blocks' of the sentinels"):
        tier.contains([key_of(1)])


# ---------------------------------------------------------------------- cluster


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.start(tmp_path_factory.mktemp("cluster"), valkey_binary())
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    for node in running.nodes:
        with contextlib.closing(node.client()) as client:
            client.flushall()
    return running


def test_a_cluster_spreads_one_run_and_answers_in_order(
    open_: Any, cluster: Cluster, buffer: FrameBuffer
) -> None:
    tier = open_(cluster=(f"{HOST}:{free_port()}", cluster.addresses[1]), ttl="1h")
    keys = [key_of(number) for number in range(40)]
    for key in keys[::2]:
        tier.write(*buffer.fill(key, 5000))
    for node in cluster.nodes:
        with contextlib.closing(node.client()) as client:
            assert client.dbsize() > 0, "keys of one tenant are spread over the nodes"
    assert tier.contains(keys) == [True, False] * 20
    assert all(good(tier, buffer, key) for key in keys[::2])
    assert {key for key, _ in tier.usage()} == set(keys[::2])
    tier.delete(keys[:10])
    assert len(list(tier.keys())) == 15
    wait_until(lambda: tier.stats()["servers"] == 3, "an answer to INFO of all")
    assert tier.stats()["blocks"] == 15
    assert tier.stats()["bytes_capacity"] == 3 * 256 << 20
    tier.clear()
    assert tier.contains(keys) == [False] * 40
    assert tier.stats()["redirects"] == 0


def test_a_slot_that_moves_is_followed(open_: Any, cluster: Cluster, buffer: FrameBuffer) -> None:
    """ASK during the migration of a slot and MOVED after it, for every operation."""
    tier = open_(cluster=cluster.addresses, ttl="1h")
    moving, staying, name = key_of(1), key_of(2), encode_name("kvstore", key_of(1))
    slot = redis.crc.key_slot(name)
    for key in (moving, staying):
        tier.write(*buffer.fill(key, 5000))
    source = cluster.owner_of(name)
    target = next(node for node in cluster.nodes if node is not source)
    source_id, target_id = cluster.id_of(source), cluster.id_of(target)
    with contextlib.ExitStack() as closing:
        old = closing.enter_context(contextlib.closing(source.client()))
        new = closing.enter_context(contextlib.closing(target.client()))

        def setslot(client: Any, *words: str) -> None:
            client.execute_command("CLUSTER", "SETSLOT", slot, *words)

        setslot(new, "IMPORTING", source_id)
        setslot(old, "MIGRATING", target_id)
        old.migrate(HOST, target.port, name, 0, 10_000)
        assert new.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        assert good(tier, buffer, moving), "ASK"
        assert tier.contains([staying, moving, key_of(9)]) == [True, True, False]
        tier.delete([moving])
        assert not good(tier, buffer, moving)
        tier.write(*buffer.fill(moving, 6000))
        assert good(tier, buffer, moving)
        redirects = float(tier.stats()["redirects"])
        assert redirects >= 5
        for client in (new, old):
            setslot(client, "NODE", target_id)
        wait_until(lambda: cluster.owner_of(name) is target, "the slot's new owner to be known")
        assert tier.contains([moving, staying]) == [True, True], "MOVED"
        assert good(tier, buffer, moving)
        redirects = float(tier.stats()["redirects"])
        tier.write(*buffer.fill(moving, 6000))
        assert good(tier, buffer, moving)
        assert tier.stats()["redirects"] == redirects, "the slot map has the new node"
        tier.delete([moving])
        for client in (old, new):
            setslot(client, "NODE", source_id)
        wait_until(lambda: cluster.owner_of(name) is source, "the slot's return")
        tier.write(*buffer.fill(moving, 7000))
        assert old.exists(name)
        assert good(tier, buffer, moving)


@pytest.mark.parametrize("nbytes", [8, 100, 20_000, 3 * IO_ALIGNMENT, 40 * IO_ALIGNMENT])
def test_a_value_of_a_later_release_is_left_on_its_way_too(
    open_: Any,
    cluster: Cluster,
    buffer: FrameBuffer,
    nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path of values with many redirects: by redis-py's client."""
    monkeypatch.setattr(tier_module, "REDIRECT_TRIES", 0)
    tier, key = UnsupportedFrames(open_(cluster=cluster.addresses)), key_of(1)
    value = b"KVFRAM\2\0".ljust(nbytes, b"x")
    name = encode_name("kvstore", key)
    with contextlib.closing(cluster.owner_of(name).client()) as client:
        client.set(name, value)
        with pytest.raises(FrameUnsupported, match="frame version 2"):
            block_io.read_frame(tier, key, buffer.header, buffer.payload[:IO_ALIGNMENT])
        with pytest.raises(FrameUnsupported, match="frame version 2"):
            tier.inner.write(*buffer.fill(key, 5000))
        assert client.get(name) == value
        client.delete(name)
    tier.delete([key])
    tier.write(*buffer.fill(key, 5000))
    assert good(tier, buffer, key)
    tier.delete([key])


def test_a_value_read_on_its_way_between_nodes_is_checked_too(
    open_: Any, cluster: Cluster, buffer: FrameBuffer
) -> None:
    tier, name = open_(cluster=cluster.addresses), encode_name("kvstore", key_of(1))
    large = FrameBuffer(128 * KIB)
    source = cluster.owner_of(name)
    target = next(node for node in cluster.nodes if node is not source)
    slot = redis.crc.key_slot(name)
    with contextlib.closing(source.client()) as old, contextlib.closing(target.client()) as new:
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
        tier.write(*large.fill(key_of(1), 128 * KIB))
        with pytest.raises(TierError, match="does not fit"):
            tier.read(key_of(1), buffer.header, buffer.payload)
        assert good(tier, large, key_of(1))
        tier.delete([key_of(1)])
        for client in (new, old):
            client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")


def test_a_node_that_dies_and_returns(open_: Any, tmp_path: Path, buffer: FrameBuffer) -> None:
    """Blocks of a missing node are misses, and writes to it fail. Other blocks are readable if the
    cluster serves partial coverage. The node is used again after its return."""
    cluster = Cluster.start(tmp_path, valkey_binary())
    with contextlib.ExitStack() as stopping:
        stopping.callback(cluster.stop)
        for node in cluster.nodes:
            with contextlib.closing(node.client()) as client:
                client.config_set("cluster-require-full-coverage", "no")
        tier = open_(cluster=cluster.addresses, timeout=1000)
        keys = [key_of(number) for number in range(30)]
        for key in keys:
            tier.write(*buffer.fill(key, 5000))
        dead = cluster.nodes[0]
        lost = [key for key in keys if cluster.owner_of(encode_name("kvstore", key)) is dead]
        assert 0 < len(lost) < len(keys)
        dead.kill()
        assert tier.contains(keys) == [key not in lost for key in keys]
        with pytest.raises(TierUnavailable):
            tier.read(lost[0], buffer.header, buffer.payload)
        kept = next(key for key in keys if key not in lost)
        wait_until(lambda: works(lambda: good(tier, buffer, kept)), "the rest of the cluster")
        assert float(tier.stats()["errors"]) >= 2
        dead.start()
        wait_until(cluster.is_up, "the node's return")
        wait_until(lambda: works(lambda: tier.write(*buffer.fill(lost[0], 5000))), "the node's use")
        assert good(tier, buffer, lost[0])


def test_a_node_that_hangs_costs_only_its_own_blocks(
    open_: Any, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """With its keys first or last, with an idle connection and without one."""
    cluster = Cluster.start(tmp_path, valkey_binary())
    with contextlib.ExitStack() as stopping:
        stopping.callback(cluster.stop)
        for node in cluster.nodes:
            with contextlib.closing(node.client()) as client:
                client.config_set("cluster-require-full-coverage", "no")
        tier = open_(cluster=cluster.addresses, timeout=2000)
        keys = [key_of(number) for number in range(30)]
        for key in keys:
            tier.write(*buffer.fill(key, 5000))
        hung = cluster.nodes[-1]
        lost = [key for key in keys if cluster.owner_of(encode_name("kvstore", key)) is hung]
        live = [key for key in keys if key not in lost]
        assert lost
        assert live
        hung.freeze()
        for order in (lost + live, live + lost, lost + live):
            assert tier.contains(order) == [key in live for key in order]
        assert all(good(tier, buffer, key) for key in live)
        with pytest.raises(TierUnavailable):
            tier.contains(lost)
        assert tier.contains(live) == [True] * len(live)
        hung.thaw()
        wait_until(lambda: all(tier.contains(keys)), "the node's return")


def test_a_cluster_that_is_down_is_unavailable_until_it_is_up(
    open_: Any, tmp_path: Path, buffer: FrameBuffer
) -> None:
    """Opened before any node runs, then complete, then with unassigned slots: CLUSTERDOWN."""
    cluster = Cluster.start(tmp_path, valkey_binary())
    with contextlib.ExitStack() as stopping:
        stopping.callback(cluster.stop)
        for node in cluster.nodes:
            node.kill()
        tier = open_(cluster=cluster.addresses, timeout=1000)
        with pytest.raises(TierUnavailable):
            tier.contains([key_of(1)])
        for node in cluster.nodes:
            node.start()
        wait_until(cluster.is_up, "the cluster's return")
        wait_until(lambda: works(lambda: tier.write(*buffer.fill(key_of(1), 5000))), "its use")
        name = encode_name("kvstore", key_of(1))
        owner = cluster.owner_of(name)
        with contextlib.closing(owner.client()) as client:
            client.execute_command("CLUSTER", "DELSLOTS", redis.crc.key_slot(name))
            wait_until(lambda: not cluster.is_up(), "the cluster to notice")
            for call in (
                lambda: tier.read(key_of(1), buffer.header, buffer.payload),
                lambda: tier.contains([key_of(1)]),
                lambda: tier.write(*buffer.fill(key_of(1), 5000)),
            ):
                with pytest.raises(TierUnavailable):
                    call()
            client.execute_command("CLUSTER", "ADDSLOTS", redis.crc.key_slot(name))
        wait_until(cluster.is_up, "the slot's return")
        wait_until(lambda: works(lambda: tier.write(*buffer.fill(key_of(1), 5000))), "its use")
        assert good(tier, buffer, key_of(1))


def test_a_server_of_the_other_kind_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a node of a cluster; use the key cluster"):
        redis_tier.open(redis_tier.Config(url=f"redis://{cluster.addresses[0]}"))
    server = Server(tmp_path, valkey_binary())
    with pytest.raises(ConfigError, match="not a cluster; use the key host"):
        redis_tier.open(redis_tier.Config(cluster=(server.address,)))
    server.stop()


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs one of url, host, socket, sentinels or cluster; none is set"),
        ({"host": "a", "socket": "/b"}, "host and socket are set"),
        ({"sentinels": ["a"]}, "needs both sentinels and sentinel_master"),
        ({"host": "a", "sentinel_master": "b"}, "needs both sentinels and sentinel_master"),
        ({"host": "a", "prefix": "x{y}"}, "prefix = 'x{y}'"),
        ({"host": "a", "prefix": ""}, "prefix = ''"),
        ({"cluster": ["a"], "database": 1}, "database = 1, but a cluster has database 0 only"),
        ({"url": f"http://u:{SECRET}@h"}, "scheme 'http'; known: redis, rediss, unix, valkey"),
        ({"url": f"redsi://u:{SECRET}@h"}, "scheme 'redsi'; did you mean 'redis'?"),
        ({"url": f"redis://u:{SECRET}@h:notaport"}, "url is not a valid URL"),
        ({"url": f"redis://u:{SECRET}@h/x"}, "ends in 'x'; end it with a database number"),
        ({"url": f"redis://u:{SECRET}@h?db=2"}, "set them as configuration keys"),
        ({"url": f"redis://u:{SECRET}@"}, "url has no host"),
        ({"url": "unix://"}, "url has no host"),
        ({"url": f"redis://u:{SECRET}@h", "password": "b"}, "twice, in url and as a key"),
        ({"url": "redis://h/2", "database": 3}, "database is set twice"),
        ({"sentinels": ["a:b"], "sentinel_master": "s"}, "invalid host 'a:b'"),
        ({"cluster": ["a@b"]}, "invalid host 'a@b'"),
        ({"socket": "/a", "tls": True}, "not support TLS over a Unix socket"),
        ({"host": "a", "tls_ca": "/nowhere"}, "tls_ca is set, but tls is not"),
        ({"host": "a", "tls": True, "tls_ca": "/nowhere"}, "tls_ca = '/nowhere'.*No such file"),
        ({"host": "a", "tls": True, "tls_cert": "/nowhere"}, "needs both tls_cert and tls_key"),
        ({"host": "a", "passwrod": SECRET}, "unknown key 'tiers.0.passwrod'; did you mean 'pass"),
        ({"host": "a", "user": "u", "password": [SECRET], "tls_key": "k"}, "tls is not"),
        ({"url": [SECRET]}, r"unknown scheme '\(none\)'"),
        ({"host": "a", "connections": 0}, "connections = 0"),
        ({"host": "a", "ttl": "soon"}, "ttl = 'soon'"),
    ],
)
def test_what_is_wrong_is_one_line_without_secrets(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        redis_tier.open(validate(redis_tier.Config, options, "tiers.0"))
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text", "place"),
    [
        ({"host": "a"}, "redis a:6379", {"db": 0}),
        ({"url": "valkey://a"}, "redis a:6379", {"db": 0}),
        ({"url": "redis://[::1]:7/4"}, "redis ::1:7", {"db": 4}),
        ({"url": "rediss://a", "user": "u"}, "redis a:6379", {"ssl_cert_reqs": "required"}),
        ({"url": "valkeys://a", "tls_verify": False}, "redis a:6379", {"ssl_cert_reqs": "none"}),
        ({"url": "unix:///run/r.sock", "database": 2}, "redis /run/r.sock", {"db": 2}),
        ({"url": "redis://u:p%40ss@a"}, "redis a:6379", {"username": "u", "password": "p@ss"}),
        ({"cluster": ["a", "b:7"]}, "redis cluster a:6379, b:7", {"protocol": 2}),
        (
            {"sentinels": ["a", "b:7"], "sentinel_master": "s"},
            "redis master 's' of the sentinels a:26379, b:7",
            {"socket_timeout": 1.0},
        ),
    ],
)
def test_addresses(options: dict[str, Any], text: str, place: dict[str, Any]) -> None:
    address = address_of(redis_tier.Config(**options))
    assert str(address) == text
    assert {name: address.options[name] for name in place} == place


def test_secrets_are_in_no_repr() -> None:
    config = redis_tier.Config(host="a", password=SECRET, sentinel_password=SECRET)
    assert SECRET not in repr(config)
    assert SECRET not in repr(address_of(config))
    config = redis_tier.Config(url=f"redis://u:{SECRET}@a")
    assert SECRET not in repr(config) + repr(address_of(config)) + str(address_of(config))


def test_an_untrusted_certificate_is_refused(tmp_path: Path, open_: Any) -> None:
    ours, others = (Certificates.make(tmp_path / name) for name in ("ours", "others"))
    server = Server(tmp_path / "server", valkey_binary())
    proxy = Proxy(server.port, tls=ours)
    url = f"rediss://{proxy.address}"
    with pytest.raises(ConfigError, match="the server's certificate is not trusted"):
        redis_tier.open(redis_tier.Config(url=url, tls_ca=str(others.ca)))
    assert open_(url=url, tls_ca=str(ours.ca)).contains([key_of(1)]) == [False]
    assert open_(url=url, tls_verify=False).contains([key_of(1)]) == [False]
    proxy.close()
    server.stop()


def test_risky_memory_settings_are_logged_at_start(
    open_: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, valkey_binary())
    with contextlib.closing(server.client()) as client:
        for memory, policy, ttl, words in (
            ("0", "allkeys-lru", "0", "has no maxmemory"),
            ("256mb", "noeviction", "1h", "use allkeys-lru"),
            ("256mb", "volatile-lru", "0", "evicts only keys with a TTL"),
            ("256mb", "volatile-lru", "1h", ""),
            ("256mb", "allkeys-lfu", "0", ""),
        ):
            client.config_set("maxmemory", memory)
            client.config_set("maxmemory-policy", policy)
            caplog.clear()
            open_(host=HOST, port=server.port, ttl=ttl)
            assert words in caplog.text
            assert bool(caplog.text) == bool(words)
    server.stop()


# ---------------------------------------------------------------------- a store on top

SHARED_STORE = """
import sys

import kvstore
from store_rig import SPACE, hashes, loaded_tiers, match, save, flush_to_tiers

table = {"kind": "redis", "url": sys.argv[1], "timeout": 20000}
with kvstore.open(l2="64KiB", slot_bytes="4KiB", tiers=(table,)) as store:
    session = store.session(SPACE, tenant="team:a")
    names = hashes(12, "shared")
    if sys.argv[2] == "store":
        save(session, names)
        flush_to_tiers(store)
    else:
        assert match(session, names) == ["redis"] * 12, match(session, names)
        assert loaded_tiers(session, names) == ["redis"] * 12
        assert match(store.session(SPACE, tenant="team"), names) == []
        assert match(session, names) == ["l2"] * 12
    session.close()
print("done")
"""


def test_a_second_process_loads_what_the_first_stored(tmp_path: Path) -> None:
    server = Server(tmp_path, valkey_binary())
    paths = os.pathsep.join((PACKAGE_PARENT, str(Path(__file__).parent.parent)))
    for role in ("store", "load"):
        done = subprocess.run(
            [sys.executable, "-c", SHARED_STORE, f"redis://{server.address}", role],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    server.stop()
