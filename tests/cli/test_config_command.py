"""`kvstore config`: `show` is correct, `check` reports every error, the schema agrees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvstore.cli import main
from kvstore.cli.common.config_keys import config_keys, sections, tier_models
from kvstore.cli.common.set_option import assigned
from kvstore.config.settings import Settings
from kvstore.errors import ConfigError
from kvstore.store.assembly import tier_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Capture = pytest.CaptureFixture[str]

FILE = """
[l2]
bytes = "4GiB"
quota = {"*" = "1GiB"}

[[tiers]]
kind = "disk"
directory = ["/a", "/b"]
capacity = "50GiB"
read_bandwidth_limit = 1000

[[tiers]]
kind = "redis"
url = "redis://user:hush@host"

[server.auth_tokens]
"hush one" = "team-a"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(FILE)
    return path


def out_of(capsys: Capture, *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_show_names_the_source_of_each_value(
    file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_L2__SLOT_BYTES", "1MiB")
    monkeypatch.setenv("KVSTORE_SERVER__PORT", "9000")
    monkeypatch.setenv("KVSTORE_SERVER__AUTH_TOKENS", '{"hush two": "team-b"}')
    arguments = ("show", "--config", str(file), "--set", "server.port=9001", "--json")
    text = out_of(capsys, *arguments)
    shown = json.loads(text)
    assert shown["l2"]["bytes"] == {"value": 4 << 30, "from": "file"}
    assert shown["l2"]["slot_bytes"] == {"value": 1 << 20, "from": "environment"}
    assert shown["l2"]["eviction"] == {"value": "lru", "from": "default"}
    assert shown["l2"]["quota"] == {"value": {"*": 1 << 30}, "from": "file"}
    assert shown["server"]["port"] == {"value": 9001, "from": "flag"}
    assert shown["server"]["auth_tokens"]["from"] == "file, environment"
    assert sorted(shown["server"]["auth_tokens"]["value"].values()) == ["team-a", "team-b"]
    disk, redis = shown["tiers"]
    assert disk["directory"] == {"value": ["/a", "/b"], "from": "file"}
    assert disk["read_bandwidth_limit"] == {"value": 1000, "from": "file"}
    assert disk["segment"] == {"value": 0, "from": "default"}
    assert redis["url"] == {"value": "**********", "from": "file"}
    assert redis["password"] == {"value": "", "from": "default"}
    assert "hush" not in text


def test_the_output_of_show_is_an_equal_configuration_file(
    file: Path, capsys: Capture, tmp_path: Path
) -> None:
    text = out_of(capsys, "show", "--config", str(file))
    assert "hush" not in text
    assert 'bytes = "4GiB" ' in text
    again = tmp_path / "again.toml"
    again.write_text(text)
    first, second = (Settings.load(path, environment=False) for path in (file, again))
    assert first.model_copy(update={"server": second.server, "tiers": ()}) == second.model_copy(
        update={"tiers": ()}
    )
    one, other = first.tiers[0], second.tiers[0]
    assert tier_config(one) == tier_config(other)
    assert (one.read_bandwidth_limit, one.codec) == (other.read_bandwidth_limit, other.codec)
    assert tomllib.loads(text)["tiers"][1]["url"] == "**********"


def test_show_masks_possible_secrets_of_an_unknown_kind(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "theirs.toml"
    path.write_text('[[tiers]]\nkind = "not.there"\napi_token = "hush"\nplace = "here"\n')
    text = out_of(capsys, "show", "--config", str(path))
    assert "hush" not in text
    assert 'place = "here"' in text


def test_show_of_an_invalid_key_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert main(["config", "show", "--set", "l2.bites=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "kvstore: unknown key 'l2.bites'; did you mean 'bytes'?\n"


WRONG = """
tiers = [
  {kind = "disk", capacity = "1GiB", segmnt = 1, write_bandwidth_limi = 5},
  {kind = "dsk"},
  {kind = "redis", codec = "zst"},
  {name = "x"},
  {kind = "disk", directory = "/x", capacity = "1GiB", segment = "5GiB"},
  {kind = "memory"},
  {kind = "memory"},
]
[l2]
bytes = "2 Gallons"
eviction = "mru"
quota = {a = "1KiB"}
[write]
policy = "write_trough"
[prefetch]
policy = "waits"
[hash]
algorithm = "md5"
[limits]
max_clients = 0
[log]
level = "loud"
"""
ERRORS = [
    ["l2.bytes", "'2 Gallons'"],
    ["'mru'"],
    ["'a'", "1 KiB", "slot"],
    ["'write_trough'", "'write_through'"],
    ["prefetch", "'waits'"],
    ["'md5'"],
    ["log.level", "'loud'"],
    ["limits.max_clients", "0"],
    ["missing key 'tiers.0.directory'"],
    ["'tiers.0.segmnt'", "'segment'"],
    ["'tiers.0.write_bandwidth_limi'", "'write_bandwidth_limit'"],
    ["tiers.1", "'dsk'", "'disk'"],
    ["tiers.2", "'zst'", "'zstd'"],
    ["tiers.2", "one of url"],
    ["missing key 'tiers.3.kind'"],
    ["tiers.4", "5 GiB", "512 MiB"],
    ["tiers.6", "'memory'", "distinct"],
]


def test_check_reports_every_error(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(WRONG)
    assert main(["config", "check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    for words in ERRORS:
        assert [line for line in lines if all(word in line for word in words)], words
    assert len(lines) == len(ERRORS), captured.err


def test_check_of_valid_and_invalid_files(file: Path, tmp_path: Path, capsys: Capture) -> None:
    assert out_of(capsys, "check", str(file)) == f"{file}: ok\n"
    broken, none = tmp_path / "broken.toml", tmp_path / "none.toml"
    broken.write_text("[l2")
    assert main(["config", "check", "--json", str(file), str(broken), str(none)]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [each["ok"] for each in report["files"]] == [True, False, False]
    assert "not TOML" in report["files"][1]["errors"][0]
    assert "No such file" in report["files"][2]["errors"][0]


def test_check_prints_no_secret(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        '[[tiers]]\nkind = "redis"\nurl = "ftp://hush"\n[server]\nadmin_auth_token = ["hush"]\n'
        "[server.auth_tokens]\nhush = 5\n"
    )
    assert main(["config", "check", str(path)]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 3
    assert "hush" not in captured.err


@pytest.fixture(scope="module")
def validator() -> Any:
    from kvstore.cli.common.config_schema import schema

    made = json.loads(json.dumps(schema()))
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (FILE, True),
        ("", True),
        ('[[tiers]]\nkind = "some.body.elses"\nanything = 1\n', True),
        ('[prefetch]\nmax_wait = "1.5s"\nbase_wait = 5\n', True),
        ("[l2]\nbites = 1\n", False),
        ('[l2]\nbytes = "4 Gallons"\n', False),
        ('[prefetch]\nmax_wait = "2 parsecs"\n', False),
        ("[server]\nport = 70000\n", False),
        ('[[tiers]]\nkind = "disk"\ncapacity = "1GiB"\n', False),
        ('[[tiers]]\nkind = "disk"\ndirectory = "x"\ncapacity = "1GiB"\nsegmnt = 1\n', False),
        ('[[tiers]]\nkind = "dsk"\n', False),
    ],
)
def test_the_schema_agrees_with_the_models(validator: Any, text: str, valid: bool) -> None:
    assert validator.is_valid(tomllib.loads(text)) is valid


def test_the_schema_is_printed_and_explains_every_key(capsys: Capture) -> None:
    printed = json.loads(out_of(capsys, "schema"))
    assert printed == json.loads(out_of(capsys, "schema", "--json"))
    for name, part in printed["$defs"].items():
        for key, about in part.get("properties", {}).items():
            if key != "name":
                assert about.get("description"), f"{name}.{key}"
    assert {"tier-disk", "tier-memory"} <= set(printed["$defs"])


def test_every_key_is_documented() -> None:
    models = [*sections().values(), *tier_models().values()]
    undocumented = [
        f"{model.__name__}.{key.path}"
        for model in models
        for key in config_keys(model)
        if not key.meaning and key.path != "name"
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    ("word", "tree"),
    [
        ("limits.max_clients=8", {"limits": {"max_clients": 8}}),
        ("l2.bytes=4GiB", {"l2": {"bytes": "4GiB"}}),
        ('l2.bytes="4GiB"', {"l2": {"bytes": "4GiB"}}),
        ("l2.huge_pages=true", {"l2": {"huge_pages": True}}),
        ("hash.seed=", {"hash": {"seed": ""}}),
        ("hash.seed=a=b", {"hash": {"seed": "a=b"}}),
        ('tiers=[{kind = "memory"}]', {"tiers": [{"kind": "memory"}]}),
    ],
)
def test_assignments(word: str, tree: dict[str, Any]) -> None:
    assert assigned([word]) == tree
    assert assigned([word, "write.policy=selective"]) == {**tree, "write": {"policy": "selective"}}


@pytest.mark.parametrize("word", ["", "x", "=1", "l2.=1", ".bytes=1"])
def test_invalid_assignments(word: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        assigned([word])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[tiers]]\nkind = "../../etc"\n', "unknown tier kind '../../etc'"),
        ('[[tiers]]\nkind = ".."\n', "unknown tier kind '..'"),
        (
            '[[tiers]]\nkind = "memory"\ncapacity = "1MiB"\nname = "a b"\n',
            "invalid tier name 'a b'",
        ),
        ('[server.auth_tokens]\n"" = "team"\n', "the token of 'team' is empty"),
        ('[server.auth_tokens]\n"hush" = ""\n', "invalid tenant ''"),
        ('[server.auth_tokens]\n"hush" = "*"\n', "invalid tenant '*'"),
        (f'[server.auth_tokens]\n"hush" = "{"t" * 256}"\n', "1 to 255 bytes"),
        ('[server]\nkv_events_replay = "tcp://*:1"\n', "requires server.kv_events_publish"),
        ('[trace]\nendpoint = "ftp://u:hush@x"\n', "'ftp://***@x' must be an HTTP URL"),
        ("[limits]\nmax_http_transfers = 1000000000\n", "limits.max_http_transfers"),
    ],
)
def test_check_finds_errors_that_would_stop_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "kv.toml"
    file.write_text(text)
    code = main(["config", "check", str(file)])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
    assert "hush" not in err


def test_a_login_in_an_address_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv.toml"
    file.write_text('[trace]\nendpoint = "http://u:hush@x:4318"\n')
    assert main(["config", "show", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    assert "hush" not in out
    assert 'endpoint = "http://***@x:4318"' in out
