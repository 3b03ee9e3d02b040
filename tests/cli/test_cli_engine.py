"""`kvstore engine` as a process: a ready line, a served model, one line per error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from sidecar_rig import ForkedSidecar

from kvstore.cli import main


def test_it_serves_and_ends_on_a_signal() -> None:
    command = [sys.executable, "-m", "kvstore", "engine", "--model", "random", "--seed", "3"]
    options = ["--port", "0", "--threads", "1", "--num-pages", "64", "--lora", "red=random:1"]
    process = subprocess.Popen(
        [*command, *options, "--model-name", "tiny"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("kvstore engine: tiny at http://127.0.0.1:")
        url = ready.split()[-1]
        models = json.load(urllib.request.urlopen(f"{url}/models", timeout=20))
        assert [model["id"] for model in models["data"]] == ["tiny", "red"]
        body = {"model": "red", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request, timeout=20))
        assert answer["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/no/such/model"], ["/no/such/model"]),
        (["--model", "random", "--lora", "red"], ["'red'", "NAME=FOLDER"]),
        (["--model", "random", "--kv-memory", "1KiB"], ["1KiB", "65,536"]),
        (["--model", "random", "--num-pages", "0"], ["num_pages", "0"]),
        (["--model", "random", "--page-tokens", "5"], ["block_tokens", "16", "5"]),
        (["--model", "random", "--max-context", "9999"], ["9999", "4096"]),
        (["--model", "random", "--hash-algo", "sha256"], ["sha256_cbor"]),
        (["--model", "random", "--max-wait", "-1"], ["max_wait", "-1"]),
        (
            ["--model", "random", "--store", "/none.sock", "--prefetch", "best_efort"],
            ["best_efort", "'best_effort'"],
        ),
        (["--model", "random", "--store", "/dev"], ["'/dev'", "--socket"]),
        (["--model", "random", "--store", "/none.sock", "--kv-format", "int4"], ["'int4'", "int8"]),
        (["--model", "random", "--prefetch", "best_efort"], ["best_efort", "'best_effort'"]),
    ],
)
def test_an_invalid_option_is_one_line(
    options: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "--port", "0", *options]) == 2
    text = capfd.readouterr().err
    assert text.count("\n") == 1
    for word in words:
        assert word in text


def test_options_override_the_configuration_file(tmp_path: Path) -> None:
    from kvstore.cli.engine import _settings
    from kvstore.store.assembly import build_prefetch_policy

    file = tmp_path / "engine.toml"
    file.write_text(
        '[prefetch]\npolicy = "timeout"\nbase_wait = 7\nmax_wait = "3s"\nmin_load_tokens = 64\n'
        '[hash]\nseed = "a"\n'
    )
    nothing = {"policy": None, "max_wait": None, "min_load_tokens": None}
    read = _settings(str(file), prefetch=nothing, hash={"algorithm": None, "seed": None})
    policy = build_prefetch_policy(read)
    assert (policy.name, policy.max_wait_ms, read.prefetch.min_load_tokens) == (
        "timeout",
        3000.0,
        64,
    )
    assert (read.hash.algorithm, read.hash.seed) == ("sha256_cbor", "a")
    over = {**nothing, "policy": "best_effort", "max_wait": 9.0}
    read = _settings(str(file), prefetch=over, hash={"algorithm": "xxhash_cbor", "seed": "b"})
    assert build_prefetch_policy(read).name == "best_effort"
    assert build_prefetch_policy(read).max_wait_ms == 9.0
    assert (read.hash.algorithm, read.hash.seed) == ("xxhash_cbor", "b")


@pytest.mark.parametrize(("kv_format", "share"), [("planes", 1.0), ("int8", 20 / 64)])
def test_engines_of_one_kv_format_share_and_no_others(
    kv_format: str, share: float, tmp_path: Path
) -> None:
    """share: bytes of a block in a slot, divided by those of plain (float32, head_dim 16)."""
    from kvstore.cli.engine import StoreOptions, _connect
    from kvstore.engine.loader import random_model
    from kvstore.engine.loop import Engine
    from kvstore.engine.runner import Runner
    from kvstore.prefetch.policy import WaitComplete

    loaded = random_model(0, layers=1, hidden=16, heads=1, kv_heads=1, vocab=300)

    def cached_and_bytes(stored_as: str, socket: str) -> tuple[int, int]:
        runner = Runner(loaded, 64, 4)
        options = StoreOptions(socket, "", 20.0, WaitComplete(max_wait_ms=2e4), 2e4, 0, stored_as)
        client, hooks = _connect(loaded, runner, 8, 4, options)
        engine = Engine(loaded, num_pages=64, page_tokens=4, hooks=hooks, runner=runner)
        (output,) = engine.generate([[5] * 40], max_tokens=4)
        engine.check()
        engine.close()
        client.close()
        return output.cached.get("l2", 0), client.namespace.block_bytes

    sidecar = ForkedSidecar(tmp_path)
    assert cached_and_bytes("plain", sidecar.socket)[0] == 0
    hit, plain_bytes = cached_and_bytes("plain", sidecar.socket)
    assert hit == 36, "of 40 tokens, the whole pages before the last token"
    assert cached_and_bytes(kv_format, sidecar.socket) == (0, plain_bytes * share)
    assert cached_and_bytes(kv_format, sidecar.socket)[0] == 36
    assert sidecar.stop() == 0


def test_a_port_in_use_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    from kvstore.engine.server import listen

    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    assert main(["engine", "--model", "random", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capfd.readouterr().err
    taken.close()


def test_the_engine_works_without_its_sidecar(tmp_path: Path) -> None:
    """A missing sidecar is not an error: all lookups miss."""
    from kvstore.cli.engine import StoreOptions, _connect
    from kvstore.engine.loader import random_model
    from kvstore.engine.loop import Engine
    from kvstore.engine.runner import Runner
    from kvstore.prefetch.policy import Timeout

    loaded = random_model(0, layers=1, hidden=16, heads=1, kv_heads=1, vocab=300)
    runner = Runner(loaded, 64, 4)
    socket = os.fspath(tmp_path / "none.sock")
    options = StoreOptions(socket, "", 0.0, Timeout(max_wait_ms=200.0), 200.0, 0)
    client, hooks = _connect(loaded, runner, 8, 4, options)
    engine = Engine(loaded, num_pages=64, page_tokens=4, hooks=hooks, runner=runner)
    for _ in range(2):
        (output,) = engine.generate([[5] * 40], max_tokens=4)
        assert output.finish_reason is not None
        engine.reset_prefix_cache()
    engine.check()
    engine.close()
    client.close()
