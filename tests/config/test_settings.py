"""One typed tree: which source wins, what each mistake is told, and that it is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kvstore.config.settings import Section, Settings, cache_folder, suggest, validate
from kvstore.config.units import parse_ms
from kvstore.errors import ConfigError

MAX_KEYS = 45

FILE = """
[l2]
bytes = "4GiB"
slot_bytes = "1MiB"

[[tiers]]
kind = "disk"
directory = "/somewhere"
capacity = "50GiB"

[limits]
tier_timeout = "1.5s"

[server.auth_tokens]
secret = "team-a"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(FILE)
    return path


def test_defaults() -> None:
    settings = Settings.load()
    assert settings.l2.bytes == 1 << 30
    assert settings.tiers == ()
    assert settings.server.auth_tokens == {}


def test_later_sources_win(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.load(file)
    assert (settings.l2.bytes, settings.l2.slot_bytes) == (4 << 30, 1 << 20)
    assert settings.limits.tier_timeout == 1500.0
    assert settings.server.auth_tokens == {"secret": "team-a"}
    [tier] = settings.tiers
    assert (tier.label, tier.codec) == ("disk", "auto")
    assert tier.model_extra == {"directory": "/somewhere", "capacity": "50GiB"}

    monkeypatch.setenv("KVSTORE_L2__BYTES", "2GiB")
    monkeypatch.setenv("KVSTORE_SERVER__PORT", "9000")
    monkeypatch.setenv("KVSTORE_TIERS", '[{"kind": "memory", "codec": "none"}]')
    settings = Settings.load(file)
    assert (settings.l2.bytes, settings.l2.slot_bytes) == (2 << 30, 1 << 20)
    assert settings.server.port == 9000
    assert [(tier.kind, tier.codec) for tier in settings.tiers] == [("memory", "none")]
    # A table is laid over the lower source's, key by key.
    assert settings.server.auth_tokens == {"secret": "team-a"}

    settings = Settings.load(file, {"l2": {"bytes": "3GiB"}, "server": {"port": 1}})
    assert (settings.l2.bytes, settings.l2.slot_bytes) == (3 << 30, 1 << 20)
    assert settings.server.port == 1

    assert Settings.load(file, environment=False).l2.bytes == 4 << 30


def test_the_tree_is_frozen(file: Path) -> None:
    settings = Settings.load(file)
    for part, name in ((settings, "l2"), (settings.l2, "bytes"), (settings.tiers[0], "kind")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"l2": {"bites": 1}}, ["unknown key 'l2.bites'", "'bytes'"]),
        ({"L2": {}}, ["unknown key 'L2'", "l2"]),
        ({"limits": {"max_client": 1}}, ["unknown key 'limits.max_client'", "'max_clients'"]),
        ({"l2": {"bytes": "4 GiX"}}, ["l2.bytes", "'4 GiX'"]),
        ({"l2": {"bytes": 5}}, ["l2.bytes", "4096"]),
        ({"l2": {"huge_pages": 3}}, ["l2.huge_pages", "3"]),
        ({"prefetch": {"max_wait": "2 parsecs"}}, ["prefetch.max_wait", "2 parsecs"]),
        ({"prefetch": {"max_wait": -1}}, ["prefetch.max_wait", "-1"]),
        ({"server": {"port": 70_000}}, ["server.port", "70000"]),
        ({"write": "through"}, ["write", "'through'"]),
        ({"tiers": [{"kind": "disk"}, {"name": "x"}]}, ["missing key 'tiers.1.kind'"]),
        ({"tiers": {"kind": "disk"}}, ["tiers"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load(None, overrides)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KVSTORE_L2__BITES", "1", ["'l2.bites'", "'bytes'"]),
        ("KVSTORE_LL2__BYTES", "1", ["KVSTORE_LL2__BYTES", "'l2'"]),
        ("KVSTORE_TIERS", "[{", ["environment", "tiers"]),
        ("KVSTORE_SERVER__PORT", "many", ["server.port", "'many'"]),
    ],
)
def test_a_mistake_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        Settings.load()
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("text", [b"[l2", b"\xff\xfe", b"l2 = 1\nl2 = 2"])
def test_a_file_that_is_no_toml(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="not TOML"):
        Settings.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        Settings.load(tmp_path / "none.toml")


def test_secrets_are_not_shown(file: Path) -> None:
    settings = Settings.load(file, {"server": {"admin_auth_token": "very secret"}})
    assert "secret" not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        Settings.load(None, {"server": {"auth_tokens": {"very secret": ["hush"]}}})
    assert "secret" not in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ms"), [("250ms", 250.0), ("1.5s", 1500.0), ("2m", 120_000.0), (7, 7.0), ("7", 7.0)]
)
def test_times(text: Any, ms: float) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["", "ms", "5 fortnights", -1, "nan", "inf", float("nan")])
def test_times_that_are_none(text: Any) -> None:
    with pytest.raises(ConfigError):
        parse_ms(text)


def test_nearest() -> None:
    assert suggest("bites", ["bytes", "slots"]) == "did you mean 'bytes'?"
    assert suggest("zzz", ["bytes", "slots"]) == "known: bytes, slots"


def test_a_tiers_own_part_is_told_apart_the_same_way() -> None:
    class Config(Section):
        directory: str

    assert validate(Config, {"directory": "x"}, "tiers.0").directory == "x"
    with pytest.raises(ConfigError, match=r"unknown key 'tiers\.0\.folder'.*directory"):
        validate(Config, {"directory": "x", "folder": "y"}, "tiers.0")
    with pytest.raises(ConfigError, match=r"missing key 'tiers\.0\.directory'"):
        validate(Config, {}, "tiers.0")
    with pytest.raises(ConfigError, match=r"'tiers\.0\.directroy'; did you mean 'directory'"):
        validate(Config, {"directroy": "x"}, "tiers.0")


def key_paths(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from (f"{name}.{inner}" for inner in key_paths(kind))
        else:
            yield name


def test_there_are_not_too_many_key_paths() -> None:
    assert len(list(key_paths(Settings))) <= MAX_KEYS


def test_the_cache_folder_follows_the_xdg_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvstore"
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / "home" / ".cache" / "kvstore"
