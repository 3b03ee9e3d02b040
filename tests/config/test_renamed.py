"""Every old public form is refused by one line that names the new form, and the new form works."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

import kvstore
from kvstore.cache.eviction import check_eviction
from kvstore.cli import EXIT_USER_ERROR, build_app, main
from kvstore.codecs import codec_for
from kvstore.config import renamed
from kvstore.config.settings import (
    ENV_NESTED,
    ENV_PREFIX,
    PrefetchSettings,
    Settings,
    TierSettings,
)
from kvstore.connectors.sglang.settings import BackendSettings, backend_settings
from kvstore.connectors.vllm.common.settings import ConnectorSettings, connector_settings
from kvstore.connectors.vllm.common.settings import TierSettings as OffloadTierSettings
from kvstore.errors import ConfigError
from kvstore.store.assembly import tier_module

KEYS = sorted(renamed.KEYS.items())
TIER_KEYS = sorted(
    (kind, *pair) for kind, keys in renamed.TIER_KEYS.items() for pair in keys.items()
)
FLAGS = sorted(
    (command, *pair) for command, flags in renamed.FLAGS.items() for pair in flags.items()
)
VALUES = sorted((what, *pair) for what, values in renamed.VALUES.items() for pair in values.items())
ARGUMENTS = sorted((name, *pair) for name, old in renamed.ARGUMENTS.items() for pair in old.items())
SECRET = "hush-hush"


def extra_keys(where: str) -> list[tuple[str, str]]:
    return sorted(renamed.EXTRA_KEYS[where].items())


def nested(path: str, value: Any = SECRET) -> dict[str, Any]:
    """`value` at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    line = str(caught.value)
    assert "\n" not in line
    assert SECRET not in line
    return line


def lines_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that fails."""
    assert main(list(arguments)) == EXIT_USER_ERROR
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert SECRET not in err
    return err.removeprefix("kvstore: ").rstrip("\n")


def tree_of(path: str) -> dict[str, Any]:
    section, _, key = path.partition(".")
    if section == "tiers":
        return {"tiers": [{"kind": "memory", key: SECRET}]}
    return nested(path)


def fields() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        model = TierSettings if name == "tiers" else field.annotation
        assert isinstance(model, type)
        yield from (f"{name}.{key}" for key in model.model_fields)


def numbered(path: str) -> str:
    """The path with the number of the first tier."""
    return path.replace("tiers.", "tiers.0.", 1) if path.startswith("tiers.") else path


@pytest.mark.parametrize(("old", "new"), KEYS)
def test_an_old_key_of_the_file(old: str, new: str) -> None:
    line = f"{numbered(old)} is now {numbered(new)}"
    assert refusal(Settings.load, None, tree_of(old)) == line
    assert new in set(fields())
    assert old not in set(fields())


def test_an_old_table_is_one_line_without_its_contents(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(f'[server.tokens]\n{SECRET} = "team-a"\n')
    assert refusal(Settings.load, file) == "server.tokens is now server.auth_tokens"


@pytest.mark.parametrize(("old", "new"), [pair for pair in KEYS if "tiers." not in pair[0]])
def test_an_old_environment_variable(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    def variable(key: str) -> str:
        return ENV_PREFIX + key.replace(".", ENV_NESTED).upper()

    for name in (variable(old), variable(old).lower(), variable(old) + "__" + SECRET):
        with monkeypatch.context() as context:
            context.setenv(name, SECRET)
            assert refusal(Settings.load) == f"{variable(old)} is now {variable(new)}"


@pytest.mark.parametrize(("old", "new"), KEYS)
def test_an_old_key_of_the_command_line(
    capfd: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    line = f"{numbered(old)} is now {numbered(new)}"
    assert lines_of(capfd, "config", "show", "--set", f"{numbered(old)}={SECRET}") == line


@pytest.mark.parametrize(("kind", "old", "new"), TIER_KEYS)
def test_an_old_key_of_a_kind_of_tier(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, old: str, new: str
) -> None:
    line = f"tiers.0.{old} is now tiers.0.{new}"
    table = {"kind": kind, old: SECRET}
    assert refusal(Settings.load, None, {"tiers": [table]}) == line
    assert refusal(kvstore.open, tiers=(table,)) == line
    assert refusal(Settings.load, None, {"tiers": [{**table, "kind": f"kvstore.tiers.{kind}"}]})
    assert lines_of(capfd, "serve", "--set", f"tiers=[{{kind='{kind}', {old}='{SECRET}'}}]") == line
    assert lines_of(capfd, "serve", "--set", f"tiers.0.{old}={SECRET}") == line
    file = tmp_path / "kvstore.toml"
    file.write_text(f"[[tiers]]\nkind = '{kind}'\n{old} = '{SECRET}'\n")
    assert main(["config", "check", str(file)]) == EXIT_USER_ERROR
    assert line in capfd.readouterr().err
    own = set(tier_module(kind).Config.model_fields)
    assert new in own
    assert old not in own


def test_an_old_key_of_another_kind_of_tier_is_unknown() -> None:
    table = {"kind": "memory", "durable": True}
    assert "unknown key 'tiers.0.durable'" in refusal(kvstore.open, tiers=(table,))


@pytest.mark.parametrize(("old", "new"), extra_keys("kv_connector_extra_config"))
def test_an_old_key_of_the_vllm_connector(old: str, new: str) -> None:
    where = "kv_connector_extra_config"
    assert refusal(connector_settings, nested(old)) == f"{where}.{old} is now {where}.{new}"
    models = {**ConnectorSettings.model_fields, **PrefetchSettings.model_fields}
    assert new.rpartition(".")[2] in models
    assert old.rpartition(".")[2] not in models


@pytest.mark.parametrize(("old", "new"), extra_keys("secondary_tiers"))
def test_an_old_key_of_the_vllm_tier(old: str, new: str) -> None:
    from kvstore.config.settings import validate

    line = refusal(validate, OffloadTierSettings, nested(old), "secondary_tiers")
    assert line == f"secondary_tiers.{old} is now secondary_tiers.{new}"
    assert new in OffloadTierSettings.model_fields
    assert old not in OffloadTierSettings.model_fields


@pytest.mark.parametrize(("old", "new"), extra_keys("hicache-storage-backend-extra-config"))
def test_an_old_key_of_the_sglang_backend(old: str, new: str) -> None:
    where = "hicache-storage-backend-extra-config"
    assert refusal(backend_settings, nested(old)) == f"{where}.{old} is now {where}.{new}"
    schema: Mapping[str, Any] = BackendSettings.model_json_schema()
    definitions = schema.get("$defs", {})
    keys = set(schema["properties"]) | {
        f"max_wait.{key}" for each in definitions.values() for key in each.get("properties", {})
    }
    assert new in keys
    assert old not in keys


@pytest.mark.parametrize(("command", "old", "new"), FLAGS)
def test_an_old_flag(capfd: pytest.CaptureFixture[str], command: str, old: str, new: str) -> None:
    line = f"{old} is now {new}"
    assert lines_of(capfd, *command.split(), old, SECRET) == line
    assert lines_of(capfd, *command.split(), f"{old}={SECRET}") == line
    here: Any = typer.main.get_command(build_app())
    for name in command.split():
        here = here.commands[name]
    flags = {flag for option in here.params for flag in (*option.opts, *option.secondary_opts)}
    assert new in flags
    assert old not in flags


def test_a_flag_that_never_was_is_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    assert "No such option: --toking" in lines_of(capfd, "stats", "--toking", "x")
    assert "No such option: --every" in lines_of(capfd, "serve", "--every", "2")


CHECKS: dict[str, Callable[[str], object]] = {
    "codec": lambda name: codec_for(name, "bfloat16"),
    "eviction policy": check_eviction,
}


@pytest.mark.parametrize(("what", "old", "new"), VALUES)
def test_an_old_value(tmp_path: Path, what: str, old: str, new: str) -> None:
    line = f"{what} {old!r} is now {new!r}"
    assert refusal(CHECKS[what], old) == line
    CHECKS[what](new)
    argument = what.partition(" ")[0]
    options: dict[str, Any] = {"l2": "1MiB", "slot_bytes": "64KiB", "disk": tmp_path / "disk"}
    assert line in refusal(kvstore.open, **{**options, argument: old})
    kvstore.open(**{**options, argument: new}).close()


@pytest.mark.parametrize(("what", "old", "new"), VALUES)
def test_an_old_value_of_a_command(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, what: str, old: str, new: str
) -> None:
    flag = "--" + what.partition(" ")[0]
    line = f"{what} {old!r} is now {new!r}"
    disk = ["--disk", str(tmp_path / "d")]
    assert line in lines_of(capfd, "serve", flag, old, *disk)
    if flag == "--eviction":
        trace = tmp_path / "trace.jsonl"
        trace.write_text(json.dumps({"timestamp": 0, "hash_ids": [1], "input_length": 512}) + "\n")
        command = ("simulate", str(trace), "--infinite")
        assert lines_of(capfd, *command, flag, f"lru,{old}") == line
        assert lines_of(capfd, *command, "--l3-eviction", old) == line
        assert main([*command, flag, f"lru,{new}"]) == 0


@pytest.mark.parametrize(("function", "old", "new"), ARGUMENTS)
def test_an_old_argument(function: str, old: str, new: str) -> None:
    import inspect

    called = getattr(kvstore, function)
    line = f"kvstore.{function}({old}=...) is now {new}=..."
    assert refusal(called, **{old: SECRET}) == line
    known = inspect.signature(called).parameters
    assert new in known
    assert old not in known


def test_an_old_argument_of_an_embedded_store() -> None:
    from kvstore.blocks.key import Namespace
    from kvstore.connectors.sglang.page_pools import _open_embedded as open_sglang
    from kvstore.connectors.vllm.common.open_store import _open_embedded as open_vllm

    namespace = Namespace(model="demo", dtype="float16", layers=1, kv_heads=1, head_dim=8)
    for make in (lambda table: open_vllm(table, namespace), lambda table: open_sglang(table, 4096)):
        for old, new in extra_keys("embedded"):
            assert refusal(make, {old: SECRET}) == f"embedded.{old} is now embedded.{new}"


@pytest.mark.parametrize(("old", "new"), sorted(renamed.HEADERS.items()))
def test_an_old_header(old: str, new: str) -> None:
    for given in (old, old.lower()):
        line = refusal(renamed.refuse_headers, ["content-type", given])
        assert line == f"header {old} is now {new}"
    renamed.refuse_headers(["content-type", new])


def test_the_changelog_has_every_new_name() -> None:
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    rows = {tuple(row.strip("` ") for row in line.split("|")[2:4]) for line in text.splitlines()}
    tables = [
        renamed.FLAGS,
        renamed.TIER_KEYS,
        renamed.VALUES,
        renamed.ARGUMENTS,
        renamed.BODY_KEYS,
    ]
    pairs = {pair for table in tables for each in table.values() for pair in each.items()}
    pairs |= {(old.partition(".")[2], new.partition(".")[2]) for old, new in renamed.KEYS.items()}
    pairs |= set(renamed.HEADERS.items())
    quoted = {tuple(name.strip('"') for name in row) for row in rows}
    assert {pair for pair in pairs if pair not in quoted} == set()
