"""Stores as the configuration describes them, and every name that is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import NAMESPACE, SLOT_BYTES, content, get, hashes_of, put

import kvstore
from kvstore.config.settings import Settings
from kvstore.errors import ConfigError
from kvstore.store.assembly import build_prefetch_policy, build_store, check, open_tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.tenant_quota import TenantQuotas
from kvstore.tiers.wrappers import Breaker, Deadline, RateLimit, layers_of

HASHES = hashes_of("wire", 4)
L2 = {"bytes": 64 * SLOT_BYTES, "slot_bytes": SLOT_BYTES}

FOREIGN = '''
"""Somebody else's tier: the memory tier under another roof."""
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


def test_open_lays_its_arguments_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[[tiers]]\nkind = "memory"\nname = "attic"\n[limits]\nqueue_blocks = 7\n')
    with kvstore.open(64 * SLOT_BYTES, SLOT_BYTES, config=file) as store:
        assert list(store.stats()["tiers"]) == ["attic"]
        assert store.stats()["l2"]["slots"] == 64


def test_tiers_by_kind_name_and_order() -> None:
    tiers = [{"kind": "memory", "name": "near"}, {"kind": "memory", "capacity": "8MiB"}]
    with build_store(load(tiers=tiers, write={"policy": "selective"})) as store:
        numbers = store.stats()["tiers"]
        assert list(numbers) == ["near", "memory"]
        assert numbers["memory"]["bytes_capacity"] == 8 << 20
        # Every tier stands behind a breaker.
        assert numbers["near"]["state"] == "up"


def test_budgets_of_the_configuration_hold(tmp_path: Path) -> None:
    """Quotas on L2 and below, a byte rate, pins: each by its effect on a store that was wired."""
    table = {
        "kind": "disk",
        "directory": str(tmp_path / "disk"),
        "capacity": "16MiB",
        "codec": "identity",
        "read_rate": "1KiB",
        "quota": {"small": f"{3 * (4096 + SLOT_BYTES)}"},
    }
    l2 = {**L2, "quota": {"small": 2 * SLOT_BYTES}, "pin_share": 0.125, "ttl_ms": "1h"}
    with build_store(load(tiers=[table], l2=l2)) as store:
        assert store.stats()["l2"]["pins_max"] == store.slab.slots // 8
        for tenant in ("small", "large"):
            session = store.session(NAMESPACE, tenant)
            for name in hashes_of("budget", 6):
                put(session, [name], tenant)
                assert store.flush(30.0)
            session.close()
        stats = store.stats()
        assert stats["l2"]["tenants"] == {"small": 2, "large": 6}
        assert stats["tiers"]["disk"]["quota_evictions"] == 3
        assert stats["tiers"]["disk"]["blocks"] == 3 + 6
        quotas = store.warmer.tiers[0]
        assert isinstance(quotas, TenantQuotas)
        # A rate is outside of the deadline and the breaker: to wait for it is no fault of the tier.
        assert isinstance(quotas.inner, RateLimit)
        assert isinstance(quotas.inner.inner, Breaker)


def test_a_tier_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somebody"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shed.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path))
    [settings] = load(tiers=[{"kind": "somebody.shed", "colour": "blue"}]).tiers
    tier = open_tier(settings)
    assert isinstance(tier, MemoryTier)
    assert tier.name == "shed"
    [settings] = load(tiers=[{"kind": "somebody.shed", "color": "blue"}]).tiers
    with pytest.raises(ConfigError, match="did you mean 'colour'"):
        open_tier(settings, "tiers.0")
    for name in ("somebody", "somebody.shed"):
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
        ({"tiers": [{"kind": "manager"}]}, ["'manager'", "Config and open"]),
        ({"tiers": [{"kind": "no.such.module"}]}, ["'no.such.module'"]),
        ({"tiers": [{"kind": "json.decoder"}]}, ["'json.decoder'", "Config and open"]),
        ({"tiers": [{"kind": "memory", "codec": "zstd-plane"}]}, ["'zstd-plane'", "zstd-planes"]),
        ({"l2": {"bytes": 4096, "slot_bytes": 8192}}, ["l2.bytes", "--slot"]),
    ],
)
def test_names_that_are_none_are_refused_before_anything_is_made(
    overrides: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load(**overrides))
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
def test_what_cannot_be_built(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_store(load(**overrides))
    for word in words:
        assert word in str(caught.value)


def test_a_failed_build_leaves_nothing_open(tmp_path: Path) -> None:
    """The disk tier's folder is free again, though the slab could not be had."""
    tier = {"kind": "disk", "directory": str(tmp_path / "disk"), "capacity": "8MiB"}
    with pytest.raises(ConfigError, match="does not fit"):
        build_store(load(tiers=[tier], l2={"bytes": "64TiB", "slot_bytes": SLOT_BYTES}))
    build_store(load(tiers=[tier])).close()


def test_limits_reach_the_wrappers() -> None:
    with build_store(load(tiers=[{"kind": "memory"}], limits={"tier_deadline_ms": "3s"})) as store:
        breaker = next(layer for layer in layers_of(store._tiers[0]) if isinstance(layer, Breaker))
        assert isinstance(breaker.inner, Deadline)
        assert breaker.inner.limit_s == 3.0


def test_the_prefetch_policy() -> None:
    policy = build_prefetch_policy(load(prefetch={"policy": "wait_complete", "cap_ms": "1s"}))
    assert (policy.name, policy.cap_ms) == ("wait_complete", 1000.0)
