"""`kvstore serve` and `kvstore stats` as commands: a ready line, and one line per error."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_rig import (
    NAMESPACE,
    SLOT_BYTES,
    ForkedSidecar,
    disk,
    hashes_of,
    put,
    run_command,
    wait_until,
)

from kvstore.ipc.client import Client
from kvstore.testing.processes import ProcessFailed, Sidecar, free_port


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    folder = tmp_path_factory.mktemp("running")
    made = ForkedSidecar(folder, disk(folder / "disk"))
    yield made
    made.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_from_ready_to_the_end(tmp_path: Path, number: int) -> None:
    flags = ("--l2", "1MiB", "--slot-bytes", str(SLOT_BYTES), "--write-policy", "write_back")
    flags += ("--disk", str(tmp_path / "disk"), "--disk-capacity", "16MiB", "--codec", "none")
    port = free_port()
    with Sidecar(tmp_path / "kv.sock", *flags, port=port) as sidecar:
        line = sidecar.wait_ready()
        assert str(tmp_path / "kv.sock") in line
        assert sidecar.url == f"http://127.0.0.1:{port}"
        with Client(sidecar.socket, NAMESPACE) as client:
            assert put(client, hashes_of("cli", 4)) == 4
            assert client.sync(10.0)
            sidecar.signal(number)
            assert sidecar.wait() == 0
    assert sidecar.output == line  # The ready line, and nothing else.
    assert not (tmp_path / "kv.sock").exists()


def test_an_error_is_one_line_and_exit_code_2(tmp_path: Path, running: ForkedSidecar) -> None:
    file = tmp_path / "file"
    file.touch()
    config = tmp_path / "bad.toml"
    config.write_text("[l2]\nbites = 1\n")
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    mine = ("--socket", str(tmp_path / "mine.sock"), "--port", "0")
    for flags, words in (
        (("--socket", running.socket, "--port", "0"), ["already listens", "--socket"]),
        (("--socket", str(file), "--port", "0"), ["not a socket"]),
        (("--socket", "/nonexistent/kv.sock", "--port", "0"), ["/nonexistent/kv.sock"]),
        (("--socket", str(tmp_path / ("x" * 200)), "--port", "0"), ["--socket"]),
        ((*mine[:2], "--port", port), [port, "--port"]),
        ((*mine, "--host", "nowhere.invalid"), ["nowhere.invalid"]),
        ((*mine, "--l2", "64TiB", "--slot-bytes", "1GiB"), ["64 TiB", "available", "--l2"]),
        ((*mine, "--config", str(config)), ["'l2.bites'", "'bytes'"]),
        ((*mine, "--write-policy", "write_trough"), ["'write_trough'", "'write_through'"]),
        ((*mine, "--eviction", "mru"), ["'mru'"]),
        ((*mine, "--l2", "4 Gallons"), ["l2.bytes", "4 Gallons"]),
        ((*mine, "--codec", "lz4"), ["--disk"]),
        ((*mine, "--disk", str(tmp_path / "d"), "--codec", "lz4"), ["'lz4'"]),
        (
            (*mine, "--disk", str(Path(running.socket).with_name("disk")), "--l2", "8MiB"),
            ["disk", "use"],
        ),
    ):
        code, out, err = run_command(tmp_path, "serve", *flags)
        assert code == 2, (flags, out, err)
        [line] = err.strip().splitlines()
        assert line.startswith("kvstore: ")
        for word in words:
            assert word in line, (flags, line)
        assert out == ""
        assert not (tmp_path / "mine.sock").exists()
    taken.close()
    assert running.stats()["l2"]["slots"] > 0  # It is not affected.


def test_the_socket_of_a_dead_sidecar_is_replaced(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path)
    sidecar.kill()
    assert Path(sidecar.socket).exists()
    sidecar.start()
    assert sidecar.stats()["l2"]["slots"] > 0
    assert sidecar.stop() == 0


def test_a_child_that_fails_reports_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="unknown eviction"):
        Sidecar(tmp_path / "kv.sock", "--eviction", "mru").wait_ready()


def test_stats(tmp_path: Path, running: ForkedSidecar) -> None:
    with Client(running.socket, NAMESPACE, name="watched") as client:
        put(client, hashes_of("stats", 3))
        assert client.sync(10.0)
        for where in (("--socket", running.socket), ("--url", running.url)):
            code, out, err = run_command(tmp_path, "stats", *where, "--json")
            assert code == 0, err
            numbers = json.loads(out)
            assert numbers["l2"]["slots_ready"] == 3
            [watched] = numbers["service"]["clients"].values()
            assert watched["about"].startswith("watched, pid")
        wait_until(lambda: running.stats()["tiers"]["disk"]["writes"] == 3, "three writes")
        code, out, _ = run_command(tmp_path, "stats", "--socket", running.socket)
        assert f"disk, namespace {NAMESPACE.digest[:8]}: byteshuffle-zstd," in " ".join(out.split())
        assert code == 0
        assert "watched" in out
        assert "disk" in out


def test_stats_without_a_sidecar(tmp_path: Path) -> None:
    for where in (
        ("--socket", str(tmp_path / "none.sock")),
        ("--url", f"http://127.0.0.1:{free_port()}"),
        ("--url", "nowhere"),
        ("--url", "http://x", "--socket", "y"),
    ):
        code, _, err = run_command(tmp_path, "stats", *where)
        assert code == 2
        assert len(err.strip().splitlines()) == 1
