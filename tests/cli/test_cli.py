"""The command line as a user sees it: a process, its output, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

import kvstore
from kvstore import cli
from kvstore.cli import bench, main
from kvstore.errors import ConfigError, StoreClosed

VECTORS = Path(__file__).parent.parent / "data" / "hash_vectors.json"
LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def run(arguments: Sequence[str], stdin: str | bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer()

    @app.callback()
    def group() -> None:
        return None

    @app.command("raise")
    def command() -> None:
        raise error

    return app


def assert_one_line(error: str, *words: str) -> None:
    assert error.startswith("kvstore: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


def test_every_module_is_a_command() -> None:
    folder = Path(cli.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")} - {"common"}
    assert set(cli.COMMANDS) == modules | packages
    assert {"hash", "plan", "version", "bench"} <= set(cli.COMMANDS)


def test_hash_reproduces_a_vector_as_a_process() -> None:
    vectors = json.loads(VECTORS.read_text())["vectors"]
    vector = next(v for v in vectors if v["lora"] and v["hash_seed"] == "0")
    name, path = vector["lora"]
    options = ["--algo", vector["algo"], "--block-tokens", str(vector["block_tokens"])]
    options += ["--hash-seed", "0", "--lora-name", name, "--lora-path", path]
    stdin = " ".join(map(str, vector["tokens"]))
    done = run(["hash", *options, "--token-ids", "-"], stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().split("\n") == [*vector["hashes"], ""]
    done = run(["hash", *options, "--json", "--token-ids", "-"], stdin)
    assert json.loads(done.stdout) == {"hashes": vector["hashes"]}


@pytest.mark.parametrize(
    "text",
    ["1 2 3 4", "1,2,3,4", "1, 2\n\t3,\r\n4\n", "[1, 2, 3, 4]", "\n [1,2,\n3,4]\n", ",1 2,3 4,"],
)
def test_hash_accepts_ids_in_any_format(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids").write_text(text)
    assert main(["hash", "--block-tokens", "2", "--token-ids", str(tmp_path / "ids")]) == 0
    printed = capsys.readouterr().out.split()
    (tmp_path / "ids").write_text("1 2 3 4 5")
    assert main(["hash", "--block-tokens", "2", "--token-ids", str(tmp_path / "ids")]) == 0
    assert capsys.readouterr().out.split() == printed
    assert len(printed) == 2


def test_hash_of_less_than_a_block_is_empty() -> None:
    done = run(["hash", "--token-ids", "-", "--json"], "1 2 3")
    assert json.loads(done.stdout) == {"hashes": []}
    assert run(["hash", "--token-ids", "-"], "").stdout == b""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 2 x", ["'x'", "token id 3"]),
        ("1 -2", ["'-2'"]),
        ("1.5", ["'1.5'"]),
        ("[1, 2.0]", ["2.0", "token id 2"]),
        ("[1, true]", ["true"]),
        ("[1, [2]]", ["[2]"]),
        ("[1, 2", ["JSON"]),
        ("4294967296", ["4294967296", "0..4294967295"]),
        ("[-7]", ["-7"]),
        ("9" * 5000, ["token id 1"]),
        ("٣", ["token id 1"]),
    ],
)
def test_an_invalid_token_is_one_line_and_exit_2(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids").write_text(text)
    assert main(["hash", "--token-ids", str(tmp_path / "ids")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_line(captured.err, *words)
    assert len(captured.err) < 200


def test_bytes_that_are_not_text_are_rejected() -> None:
    done = run(["hash", "--token-ids", "-"], b"\xff\xfe1 2")
    assert (done.returncode, done.stdout) == (2, b"")
    assert_one_line(done.stderr.decode(), "not UTF-8 text")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hash"], ["--token-ids"]),
        (["hash", "--token-ids", "no/such/file"], ["no/such/file"]),
        (["hash", "--token-ids", "-", "--algo", "sha256"], ["pickles", "sha256_cbor"]),
        (["hash", "--token-ids", "-", "--algo", "sha256_cbr"], ["did you mean sha256_cbor"]),
        (["hash", "--token-ids", "-", "--block-tokens", "0"], ["block_tokens must be 1"]),
        (["hash", "--token-ids", "-", "--block-tokens", "many"], ["--block-tokens", "integer"]),
        (["hash", "--token-ids", "-", "--lora-name", "a"], ["--lora-path"]),
        (["hash", "--token-ids", "-", "--cache-salt", "\udcff"], ["Unicode"]),
        (["no-such-command"], ["no-such-command"]),
        (["bench", "no-such-bench"], ["no-such-bench"]),
        (["plan", "no/such/config.json"], ["no/such/config.json"]),
    ],
)
def test_an_invalid_command_line_is_one_line_and_exit_2(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_line(captured.err, *words)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", *arguments, "--json"]) == 0
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    return report


def test_plan_of_llama_3_8b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_8B))
    report = plan_json(capsys, str(config), "--l2", "200GiB", "--l3", "2TiB")
    frames = 2**41 // (2**21 + 4096)
    assert report == {
        "dtype": "bfloat16",
        "attention": "gqa",
        "bytes_per_token": 131_072,
        "block_tokens": 16,
        "block_bytes": 2**21,
        "window": {"layers": 0, "tokens": 0, "bytes": 0},
        "rows": [
            {
                "tier": "l2",
                "bytes": 200 * 2**30,
                "blocks": 102_400,
                "tokens": 1_638_400,
                "prefixes_2k": 800,
                "prefixes_8k": 200,
                "prefixes_32k": 50,
            },
            {
                "tier": "l3",
                "bytes": 2**41,
                "blocks": frames,
                "tokens": frames * 16,
                "prefixes_2k": frames // 128,
                "prefixes_8k": frames // 512,
                "prefixes_32k": frames // 2048,
            },
        ],
    }
    # A folder works as well as the file in it, and other options change the figures.
    report = plan_json(capsys, str(tmp_path), "--dtype", "fp8", "--tp-size", "2")
    assert (report["bytes_per_token"], report["rows"]) == (32_768, [])


def test_plan_rounds_blocks_up_and_prefixes_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # 512 bytes per token. Blocks of 3 tokens take a whole page; 2,048 tokens take 683 blocks.
    report = plan_json(capsys, str(tmp_path), "--l2", str(4096 * 684 - 1), "--block-tokens", "3")
    rows = report["rows"]
    assert isinstance(rows, list)
    assert rows[0]["blocks"] == 683
    assert rows[0]["prefixes_2k"] == 1


def test_plan_prints_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    done = run(["plan", str(tmp_path), "--l2", "200GiB", "--l3", "2TiB"])
    assert done.returncode == 0
    text = done.stdout.decode()
    for figure in ("131,072 bytes per token", "200 GiB", "1,638,400", "32k", "l3"):
        assert figure in text


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ("{", [], ["JSON"]),
        ("[1]", [], ["not a JSON object"]),
        ("{}", [], ["model_type"]),
        ('{"model_type": "lama"}', [], ["did you mean llama"]),
        ('{"model_type": "llama"}', [], ["has no 'num_attention_heads'"]),
        (json.dumps(LLAMA_3_8B), ["--l2", "200GiX"], ["200GiX"]),
        (json.dumps(LLAMA_3_8B), ["--block-tokens", "0"], ["block_tokens"]),
    ],
)
def test_plan_names_the_error(
    content: str,
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", str(tmp_path), *arguments]) == 2
    assert_one_line(capsys.readouterr().err, *words)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == kvstore.__version__
    assert main([]) == 0
    assert "hash" in capsys.readouterr().out


def test_bench_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert capsys.readouterr().out.split() == list(bench.BENCHES)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("two\nlines"), 2), (StoreClosed("gone"), 2), (KeyboardInterrupt(), 130)],
)
def test_faults_become_exit_codes(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["raise"], build=lambda: app_that_raises(error)) == code
    captured = capsys.readouterr()
    if code == 2:
        assert_one_line(captured.err, " ".join(str(error).split()))


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert main(["raise"], build=lambda: app_that_raises(error)) == 2
    assert_one_line(capsys.readouterr().err, "torch", "kvstore-offload[engine]")
    ours = ModuleNotFoundError("No module named 'kvstore.nope'", name="kvstore.nope")
    with pytest.raises(ModuleNotFoundError):
        main(["raise"], build=lambda: app_that_raises(ours))


def test_a_reader_that_exits_early_causes_no_error() -> None:
    script = f"seq 100000 | {sys.executable} -m kvstore hash --token-ids - | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], capture_output=True, timeout=60, check=False
    )
    assert done.stderr == b""
    assert len(done.stdout) == 65
