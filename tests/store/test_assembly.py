"""Stores built from a configuration, and the errors for invalid settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import NAMESPACE, SLOT_BYTES, content, get, hashes_of, put

import kvstore
from kvstore.config.settings import Settings
from kvstore.errors import ConfigError
from kvstore.store.assembly import build_prefetch_policy, build_store, check_settings, open_tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.tenant_quota import TenantQuotas
from kvstore.tiers.wrappers import CallTimeout, CircuitBreaker, RateLimit, iter_layers

HASHES = hashes_of("assembly", 4)
L2 = {"bytes": 64 * SLOT_BYTES, "slot_bytes": SLOT_BYTES}

THIRD_PARTY = '''
"""A third-party tier: the memory tier in another package."""
from kvstore.tiers.memory import Config as Base, MemoryTier

class Config(Base):
    colour: str = "red"

def open(config):
    assert config.colour == "blue"
    return MemoryTier(config.capacity, name=config.name)
'''


def load(**overrides: Any) -> Settings:
    return Settings.load(None, {"l2": L2, **overrides}, environment=False)


def test_the_embedded_default(tmp_path: Path) -> None:
    for tier in ("l2", "disk"):
        with kvstore.open(
            64 * SLOT_BYTES, SLOT_BYTES, disk=tmp_path / "disk", disk_capacity="16MiB"
        ) as store:
            session = store.session(NAMESPACE)
            if tier == "l2":
                assert put(session, HASHES) == 4
                assert store.flush(30.0)
            assert get(session, HASHES) == ([content(name) for name in HASHES], [tier] * 4)
            session.close()


def test_the_arguments_of_open_override_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(
        '[[tiers]]\nkind = "memory"\nname = "attic"\n[limits]\nwrite_queue_blocks = 7\n'
    )
    with kvstore.open(64 * SLOT_BYTES, SLOT_BYTES, config=file) as store:
        assert list(store.stats()["tiers"]) == ["attic"]
        assert store.stats()["l2"]["slots"] == 64


def test_tiers_by_kind_name_and_order() -> None:
    tiers = [{"kind": "memory", "name": "near"}, {"kind": "memory", "capacity": "8MiB"}]
    with build_store(load(tiers=tiers, write={"policy": "selective"})) as store:
        numbers = store.stats()["tiers"]
        assert list(numbers) == ["near", "memory"]
        assert numbers["memory"]["bytes_capacity"] == 8 << 20
        # Every tier has a circuit breaker.
        assert numbers["near"]["state"] == "up"


def test_configured_limits_are_applied(tmp_path: Path) -> None:
    """Quotas of L2 and of a tier, a bandwidth limit and pins, each by its effect on the store."""
    table = {
        "kind": "disk",
        "directory": str(tmp_path / "disk"),
        "capacity": "16MiB",
        "codec": "none",
        "read_bandwidth_limit": "1KiB",
        "quota": {"small": f"{3 * (4096 + SLOT_BYTES)}"},
    }
    l2 = {**L2, "quota": {"small": 2 * SLOT_BYTES}, "max_pinned_fraction": 0.125, "ttl": "1h"}
    with build_store(load(tiers=[table], l2=l2)) as store:
        assert store.stats()["l2"]["max_pinned"] == store.slab.slots // 8
        for tenant in ("small", "large"):
            session = store.session(NAMESPACE, tenant)
            for name in hashes_of("limit", 6):
                put(session, [name], tenant)
                assert store.flush(30.0)
            session.close()
        stats = store.stats()
        assert stats["l2"]["tenants"] == {"small": 2, "large": 6}
        assert stats["tiers"]["disk"]["quota_evictions"] == 3
        assert stats["tiers"]["disk"]["blocks"] == 3 + 6
        layers = iter_layers(store.warmer.tiers[0])
        quotas = next(layer for layer in layers if isinstance(layer, TenantQuotas))
        # RateLimit is outside of the timeout and the breaker: its wait is not an error of the tier.
        assert isinstance(quotas.inner, RateLimit)
        assert isinstance(quotas.inner.inner, CircuitBreaker)


def test_a_third_party_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "thirdparty"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shed.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    [settings] = load(tiers=[{"kind": "thirdparty.shed", "colour": "blue"}]).tiers
    tier = open_tier(settings)
    assert isinstance(tier, MemoryTier)
    assert tier.name == "shed"
    [settings] = load(tiers=[{"kind": "thirdparty.shed", "color": "blue"}]).tiers
    with pytest.raises(ConfigError, match="did you mean 'colour'"):
        open_tier(settings, "tiers.0")
    for name in ("thirdparty", "thirdparty.shed"):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"l2": {**L2, "eviction": "lur"}}, ["'lur'", "'lru'"]),
        ({"write": {"policy": "write_trough"}}, ["'write_trough'", "'write_through'"]),
        ({"prefetch": {"policy": "time_out"}}, ["'time_out'", "'timeout'"]),
        ({"hash": {"algorithm": "sha256"}}, ["sha256"]),
        ({"hash": {"algorithm": "sha256_cbr"}}, ["'sha256_cbr'", "sha256_cbor"]),
        ({"tiers": [{"kind": "memry"}]}, ["'memry'", "'memory'"]),
        ({"tiers": [{"kind": "base"}]}, ["'base'", "Config and open"]),
        ({"tiers": [{"kind": "no.such.module"}]}, ["'no.such.module'"]),
        ({"tiers": [{"kind": "json.decoder"}]}, ["'json.decoder'", "Config and open"]),
        (
            {"tiers": [{"kind": "memory", "codec": "byteshuffle-zst"}]},
            ["'byteshuffle-zst'", "byteshuffle-zstd"],
        ),
        ({"l2": {"bytes": 4096, "slot_bytes": 8192}}, ["l2.bytes", "--slot-bytes"]),
    ],
)
def test_unknown_names_are_rejected_before_anything_is_created(
    overrides: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(load(**overrides))
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tiers": [{"kind": "memory", "capacty": 1}]}, ["'tiers.0.capacty'", "'capacity'"]),
        ({"tiers": [{"kind": "memory"}, {"kind": "memory"}]}, ["distinct"]),
        ({"l2": {"bytes": "64TiB", "slot_bytes": "1GiB"}}, ["64 TiB", "available"]),
        ({"l2": {"bytes": SLOT_BYTES, "slot_bytes": SLOT_BYTES}}, ["1 slots", "--l2"]),
    ],
)
def test_a_store_that_cannot_be_built(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_store(load(**overrides))
    for word in words:
        assert word in str(caught.value)


def test_a_failed_build_leaves_nothing_open(tmp_path: Path) -> None:
    """The disk tier's directory is unlocked again after the slab could not be created."""
    tier = {"kind": "disk", "directory": str(tmp_path / "disk"), "capacity": "8MiB"}
    with pytest.raises(ConfigError, match="does not fit"):
        build_store(load(tiers=[tier], l2={"bytes": "64TiB", "slot_bytes": SLOT_BYTES}))
    build_store(load(tiers=[tier])).close()


def test_limits_reach_the_wrappers() -> None:
    with build_store(load(tiers=[{"kind": "memory"}], limits={"tier_timeout": "3s"})) as store:
        layers = iter_layers(store._tiers[0])
        breaker = next(layer for layer in layers if isinstance(layer, CircuitBreaker))
        assert isinstance(breaker.inner, CallTimeout)
        assert breaker.inner.timeout_s == 3.0


def test_the_prefetch_policy() -> None:
    policy = build_prefetch_policy(load(prefetch={"policy": "wait_complete", "max_wait": "1s"}))
    assert (policy.name, policy.max_wait_ms) == ("wait_complete", 1000.0)
