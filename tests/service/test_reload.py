"""Configuration reload of a real sidecar: by SIGHUP and over HTTP, all changes or none."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import NAMESPACE, SLOT_BYTES, hashes_of, match, put, run_command, wait_until

from kvstore.cli.common.sidecar_http import request_json
from kvstore.config.settings import Settings
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.ipc.client import Client
from kvstore.ipc.sidecar_connection import request_stats
from kvstore.service.reload import RELOADABLE, changes_between
from kvstore.testing.processes import Sidecar

SLOTS = 64


def file_of(folder: Path, **tables: Mapping[str, Any]) -> str:
    """A configuration with some tables of the test's default replaced."""
    base: dict[str, dict[str, Any]] = {
        "l2": {"bytes": SLOTS * SLOT_BYTES, "slot_bytes": SLOT_BYTES},
        "write": {"policy": "write_through"},
        "limits": {"shutdown_drain_timeout": 5000},
        "tier": {"kind": "disk", "directory": str(folder / "disk"), "capacity": "64MiB"},
        "server": {},
        "log": {},
    }
    lines = []
    for name, table in base.items():
        lines.append("[[tiers]]" if name == "tier" else f"[{name}]")
        lines += [
            f"{key} = {toml(value)}" for key, value in {**table, **tables.get(name, {})}.items()
        ]
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


class Running:
    """A sidecar with its configuration file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "kvstore.toml"
        self.write()
        self.process = Sidecar(folder / "kv.sock", "--config", str(self.file))
        self.process.wait_ready()
        self.url = self.process.url

    def write(self, **tables: Mapping[str, Any]) -> None:
        self.file.write_text(file_of(self.folder, **tables))

    def reload(self, token: str | None = None, **tables: Mapping[str, Any]) -> dict[str, Any]:
        """Write the file and reload over HTTP."""
        self.write(**tables)
        return request_json(self.url, "/v1/reload", {}, auth_token=token)

    def hang_up(self, expected: str) -> None:
        """Send SIGHUP; returns when the sidecar has printed the line."""
        before = len(self.process.lines)
        self.process.signal(signal.SIGHUP)
        wait_until(
            lambda: any(expected in line for line in list(self.process.lines)[before:]), expected
        )

    def stats(self, token: str | None = None) -> dict[str, Any]:
        return request_stats(self.process.socket, token)

    def client(self, **more: Any) -> Client:
        return Client(self.process.socket, NAMESPACE, connect_timeout_s=30.0, **more)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("reload"))
    yield made
    assert made.process.stop() == 0, made.process.output


@pytest.fixture(autouse=True)
def as_it_was(running: Running) -> Iterator[None]:
    yield
    running.reload()


def changed(answer: dict[str, Any]) -> dict[str, Any]:
    return {change["key"]: change.get("new") for change in answer["changed"]}


def test_a_signal_applies_the_changed_file(running: Running) -> None:
    running.write(l2={"max_pinned_fraction": 0.5}, write={"policy": "selective"})
    running.hang_up("kvstore reloaded: l2.max_pinned_fraction, write.policy")
    assert running.stats()["l2"]["max_pinned"] == SLOTS // 2
    with running.client() as client:
        names = hashes_of("selective", 3)
        writes = running.stats()["tiers"]["disk"]["writes"]
        put(client, names)
        assert client.sync(10.0)
        request_json(running.url, "/v1/flush", {})
        assert running.stats()["tiers"]["disk"]["writes"] == writes  # no second hit
    running.hang_up("kvstore reloaded: nothing has changed")


def test_the_http_route_applies_and_returns_all_changes(running: Running) -> None:
    answer = running.reload(
        l2={"ttl": "1h", "quota": {"*": 8 * SLOT_BYTES}},
        write={"policy": "write_back", "selective_hits": 3},
        limits={
            "max_clients": 1,
            "write_queue_blocks": 7,
            "tier_timeout": "3s",
            "breaker_failures": 9,
            "breaker_reset": "1s",
            "handshake_timeout": "1s",
            "http_transfer_timeout": "9s",
            "shutdown_drain_timeout": "4s",
        },
        log={"level": "info", "format": "json"},
        tier={
            "read_bandwidth_limit": "1GiB",
            "write_bandwidth_limit": "2GiB",
            "queue_time": "1s",
            "quota": {"*": "8MiB"},
        },
    )
    keys = {re.sub(r"^tiers\.\d+", "tiers", key) for key in changed(answer)}
    assert keys == RELOADABLE - {
        "l2.max_pinned_fraction",
        "server.auth_tokens",
        "server.admin_auth_token",
    }
    assert changed(answer)["l2.ttl"] == 3_600_000.0
    assert {"key": "limits.write_queue_blocks", "old": 256, "new": 7} in answer["changed"]
    with running.client() as client:
        put(client, hashes_of("quota", 12))
        # L2 has eight blocks of the tenant; the second client is rejected.
        assert len(match(client, hashes_of("quota", 12))) <= 8
        with Client(running.process.socket, NAMESPACE) as second:
            assert "1 clients" in second.match(hashes_of("quota", 1)).fault


def test_a_smaller_quota_applies_from_the_next_save(running: Running) -> None:
    with running.client() as client:
        request_json(running.url, "/v1/clear?tier=l2", {})
        put(client, hashes_of("large", 30))
        assert client.sync(10.0)
        wait_until(lambda: running.stats()["l2"]["slots_ready"] == 30, "thirty blocks")
        request_json(running.url, "/v1/flush", {})
        running.reload(l2={"quota": {"default": 10 * SLOT_BYTES}})
        put(client, hashes_of("one more", 1))
        assert client.sync(10.0)
        assert running.stats()["l2"]["tenants"]["default"] == 10
        running.reload()
        put(client, hashes_of("many more", 20))
        assert client.sync(10.0)
        assert running.stats()["l2"]["tenants"]["default"] == 30


def test_blocks_expire_after_a_reload(running: Running) -> None:
    with running.client() as client:
        put(client, hashes_of("old", 4))
        assert client.sync(10.0)
        assert running.stats()["l2"]["slots_ready"] > 0
        running.reload(l2={"ttl": "80ms"})
        wait_until(lambda: running.stats()["l2"]["slots_ready"] == 0, "L2 is empty")
        assert len(match(client, hashes_of("old", 4))) == 4  # on disk


def test_dirty_blocks_are_written_after_a_policy_change(
    running: Running,
) -> None:
    running.reload(write={"policy": "write_back"})
    with running.client() as client:
        names = hashes_of("dirty", 5)
        put(client, names)
        assert client.sync(10.0)
        assert running.stats()["l2"]["slots_dirty"] == 5
        running.reload()
        wait_until(lambda: running.stats()["l2"]["slots_dirty"] == 0, "all is written")
        request_json(running.url, "/v1/clear?tier=l2", {})
        assert match(client, names) == ["disk"] * 5


def test_auth_tokens_change_and_connected_clients_stay(running: Running) -> None:
    with running.client() as client:
        put(client, hashes_of("mine", 2))
        server = {"auth_tokens": {"new-secret": "team-b"}, "admin_auth_token": "of-the-admin"}
        answer = running.reload(server=server)
        assert answer["changed"] == [
            {"key": "server.auth_tokens"},
            {"key": "server.admin_auth_token"},
        ]
        assert len(match(client, hashes_of("mine", 2))) == 2
        with pytest.raises(ConfigError, match="requires an auth token"):
            Client(running.process.socket, NAMESPACE)
        with running.client(auth_token="new-secret") as other:
            assert match(other, hashes_of("mine", 2)) == []
        with pytest.raises(TierUnavailable, match="401"):
            running.reload()
        assert changed(running.reload(token="of-the-admin")).keys() == {
            "server.auth_tokens",
            "server.admin_auth_token",
        }
    assert "secret" not in running.process.output
    assert "of-the-admin" not in running.process.output


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"l2": {"bytes": 2 * SLOTS * SLOT_BYTES}}, ["l2.bytes", "restart"]),
        ({"l2": {"eviction": "lfu"}}, ["l2.eviction", "restart"]),
        ({"tier": {"capacity": "128MiB"}}, ["tiers.0.capacity", "restart"]),
        ({"tier": {"codec": "none"}}, ["tiers.0.codec", "restart"]),
        ({"tier": {"kind": "memory", "directory": "x"}}, ["tiers.0.kind"]),
        ({"limits": {"max_http_transfers": 9}}, ["limits.max_http_transfers", "restart"]),
        ({"server": {"host": "0.0.0.0"}}, ["server.host", "restart"]),
        ({"hash": {"seed": "x"}, "server": {"kv_events": ["tcp://x:1"]}}, ["server.kv_events"]),
        ({"l2": {"tttl": "1s"}}, ["'l2.tttl'", "'ttl'"]),
        ({"write": {"policy": "write_bak"}}, ["'write_bak'", "'write_back'"]),
        ({"l2": {"quota": {"a": 5}}}, ["quota", "'a'"]),
        ({"log": {"level": "loud"}}, ["log.level", "'loud'"]),
    ],
)
def test_an_invalid_or_fixed_change_applies_nothing(
    running: Running, tables: dict[str, Any], words: list[str]
) -> None:
    """The file also changes a reloadable key, which must not be applied."""
    limits = {"shutdown_drain_timeout": 1234, **tables.get("limits", {})}
    before = running.stats()["reloads"]
    with pytest.raises(ConfigError) as caught:
        running.reload(**{**tables, "limits": limits})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    after = running.stats()["reloads"]
    assert after == {**before, "rejected": before["rejected"] + 1, "in_force": 0}
    running.hang_up("configuration not reloaded: ")
    assert changed(running.reload(limits={"shutdown_drain_timeout": 4321})) == {
        "limits.shutdown_drain_timeout": 4321.0
    }


def test_a_missing_or_invalid_file_applies_nothing(running: Running) -> None:
    for text in ("[l2", None):
        running.file.unlink()
        if text is not None:
            running.file.write_text(text)
        with pytest.raises(ConfigError, match="config file"):
            request_json(running.url, "/v1/reload", {})
        running.hang_up("configuration not reloaded: config file")
        running.write()
    assert running.reload()["changed"] == []


def test_reloads_are_metrics(running: Running) -> None:
    def told() -> dict[str, str]:
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvstore_config_"))

    running.reload(limits={"shutdown_drain_timeout": 1111})
    good = told()
    assert good["kvstore_config_last_reload_successful"] == "1.0"
    assert float(good["kvstore_config_last_reload_success_timestamp_seconds"]) > 1e9
    with pytest.raises(ConfigError):
        running.reload(limits={"shutdown_drain_timeout": "soon"})
    bad = told()
    assert bad["kvstore_config_last_reload_successful"] == "0.0"
    for result, more in (("applied", 0), ("rejected", 1)):
        name = f'kvstore_config_reloads_total{{result="{result}"}}'
        assert float(bad[name]) == float(good[name]) + more


def test_many_signals_are_harmless(running: Running) -> None:
    applied = running.stats()["reloads"]["applied"]
    for _ in range(50):
        os.kill(running.process.pid, signal.SIGHUP)
        time.sleep(0.001)
    wait_until(lambda: running.stats()["reloads"]["applied"] > applied, "a reload")
    running.hang_up("kvstore reloaded")


def test_keys_of_engines_are_listed_separately(running: Running, tmp_path: Path) -> None:
    running.write(limits={"shutdown_drain_timeout": 777})
    with running.file.open("a") as file:
        file.write('[prefetch]\nbase_wait = "70ms"\n')
    code, out, err = run_command(tmp_path, "config", "reload", "--url", running.url)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "limits.shutdown_drain_timeout: 5000.0 -> 777.0",
        "prefetch.base_wait: read by engines at start",
    ]
    code, out, _ = run_command(tmp_path, "config", "reload", "--url", running.url, "--json")
    assert (code, json.loads(out)) == (0, {"changed": [], "for_engines": []})


def test_a_reload_without_a_file_is_an_error(tmp_path: Path) -> None:
    flags = (
        "--l2",
        str(SLOTS * SLOT_BYTES),
        "--slot-bytes",
        str(SLOT_BYTES),
        "--set",
        "limits.max_clients=1",
    )
    with Sidecar(tmp_path / "kv.sock", *flags) as sidecar:
        sidecar.wait_ready()
        with pytest.raises(ConfigError, match="without --config"):
            request_json(sidecar.url, "/v1/reload", {})
        with Client(sidecar.socket, NAMESPACE, connect_timeout_s=30.0):
            with Client(sidecar.socket, NAMESPACE) as second:
                assert "1 clients" in second.match(hashes_of("x", 1)).fault
            request = urllib.request.Request(f"{sidecar.url}/v1/reload", method="GET")
            with pytest.raises(urllib.error.HTTPError, match="405"):
                urllib.request.urlopen(request)
        assert sidecar.stop() == 0


def test_every_reloadable_key_exists() -> None:
    known = {
        f"{section}.{name}"
        for section, field in Settings.model_fields.items()
        if isinstance(field.annotation, type)
        for name in getattr(field.annotation, "model_fields", ())
    }
    assert {key for key in RELOADABLE if not key.startswith("tiers.")} <= known
    one = Settings.load(None, {"tiers": [{"kind": "memory"}]}, environment=False)
    for name in (key.partition(".")[2] for key in RELOADABLE if key.startswith("tiers.")):
        value = {"a": "1MiB"} if name == "quota" else 1
        other = Settings.load(None, {"tiers": [{"kind": "memory", name: value}]}, environment=False)
        assert [change.key for change in changes_between(one, other)] == [f"tiers.{name}"]
