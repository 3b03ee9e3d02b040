"""A store with an S3 tier: one process loads the blocks that another one saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3")

from s3_rig import FaultProxy, S3Server
from store_rig import SPACE, flush_to_tiers, hashes, load, loaded_tiers, match, save

import kvstore
from kvstore.store.store import Store
from kvstore.testing.processes import PACKAGE_PARENT

BLOCKS = 24
FLUSH_LIMIT_S = 120.0


def open_store(table: dict[str, Any], config: str) -> Store:
    return kvstore.open("1MiB", "4KiB", tiers=({"kind": "s3", **table},), config=config)


def save_blocks(table: dict[str, Any], config: str) -> None:
    """The program of the first process."""
    with open_store(table, config) as store, store.session(SPACE) as session:
        save(session, hashes(BLOCKS))
        assert store.flush(FLUSH_LIMIT_S)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Long timeouts, because a slow test machine would open the circuit breaker."""
    path = tmp_path / "kvstore.toml"
    path.write_text('[limits]\ntier_timeout = "60s"\nbreaker_reset = "100ms"\n')
    return str(path)


def test_what_one_process_saves_another_loads(s3_server: S3Server, config: str) -> None:
    table = s3_server.values(s3_server.new_bucket(), linger="20ms")
    folders = [PACKAGE_PARENT, *map(str, Path(__file__).parents[:2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    argv = [sys.executable, __file__, json.dumps(table), config]
    subprocess.run(argv, env=environment, check=True, timeout=240)
    with open_store(table, config) as store, store.session(SPACE) as session:
        assert match(session, hashes(BLOCKS)) == ["s3"] * BLOCKS
        assert loaded_tiers(session, hashes(BLOCKS)) == ["s3"] * BLOCKS
        assert loaded_tiers(session, hashes(BLOCKS)) == ["l2"] * BLOCKS


def test_a_service_that_goes_away_cuts_runs_and_comes_back(
    s3_server: S3Server, config: str
) -> None:
    with FaultProxy(s3_server.port) as proxy:
        values = {"endpoint": proxy.endpoint, "timeout": "5s"}
        table = s3_server.values(s3_server.new_bucket(), **values)
        with open_store(table, config) as store, store.session(SPACE) as session:
            save(session, hashes(BLOCKS))
            flush_to_tiers(store)
            for code in ("SlowDown", "ExpiredToken", "AccessDenied"):
                proxy.answer("503 Service Unavailable", code)
                ticket = load(session, hashes(BLOCKS))
                assert ticket.slots == []
                session.release(ticket)
            assert store.stats()["tiers"]["s3"]["errors_slow_down"] >= 1
            proxy.strike("")
            store.clear("l2")
            deadline = 200
            while (tiers := loaded_tiers(session, hashes(BLOCKS))) != ["s3"] * BLOCKS:
                store.clear("l2")
                deadline -= 1
                assert deadline, f"it did not come back: {tiers}"
                session.poll(0.05)


if __name__ == "__main__":
    save_blocks(json.loads(sys.argv[1]), sys.argv[2])
