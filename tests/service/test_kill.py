"""`kill -9` of the sidecar at 50 random moments while it writes, each time on the same disk tier.

After each restart: every cached block reads back byte-identical, every acknowledged write (a flush
that returned) is cached, and unfinished writes leave no other blocks.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOT_BYTES,
    ForkedSidecar,
    content,
    disk,
    get,
    hashes_of,
    match,
    put,
)

from kvstore.ipc.client import Client

KILLS = 50
BATCH = 8
MAX_BATCHES = 40
"""Maximum batches written between two kills; usually fewer."""
OLDER = 24
"""Blocks of earlier batches checked after each kill; all are checked at the end."""
LATEST_KILL_S = 0.06
"""On a quiet machine the writes take about twice as long, so most kills are during writes."""


def flush(sidecar: ForkedSidecar) -> bool:
    """Whether the sidecar reported a complete flush; False if it was killed during it."""
    try:
        connection = http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=LIMIT_S)
        connection.request("POST", "/v1/flush")
        answer = connection.getresponse()
        return bool(json.loads(answer.read())["flushed"])
    except (OSError, http.client.HTTPException, ValueError):
        return False


def check(client: Client, written: list[bytes], acknowledged: set[bytes]) -> int:
    """Read back every block that may be cached. Returns how many were."""
    found = 0
    for name in written:
        tiers = match(client, [name])
        if name in acknowledged:
            assert tiers, "an acknowledged block is missing"
        if tiers:
            blocks, _ = get(client, [name])
            assert blocks == [content(name)], "a block is not equal to what was written"
            found += 1
    return found


@pytest.mark.slow
def test_killed_during_writes_at_50_random_points(tmp_path: Path) -> None:
    chance = random.Random(2024)
    # Capacity for all writes, so that no acknowledged block may be evicted.
    capacity = 2 * KILLS * MAX_BATCHES * BATCH * (SLOT_BYTES + 4096)
    sidecar = ForkedSidecar(tmp_path, disk(tmp_path / "disk", str(capacity), codec="none"))
    acknowledged: set[bytes] = set()
    lives: list[list[bytes]] = []
    torn_lives = survivors = 0
    for life in range(KILLS):
        written: list[bytes] = []
        with Client(sidecar.socket, NAMESPACE, connect_timeout_s=LIMIT_S) as client:
            killer = threading.Timer(chance.uniform(0.0, LATEST_KILL_S), sidecar.kill)
            killer.start()
            for number in range(MAX_BATCHES):
                if not client.connected:
                    break
                hashes = hashes_of(f"{life} {number}", BATCH)
                # A save without enough free slots drops its tail; do not wait for that.
                written += hashes[: put(client, hashes)]
                if number % 8 == 4 and flush(sidecar):
                    # All blocks committed before the flush were in L2, and are on disk now.
                    acknowledged.update(written)
            killer.join()
        lives.append(written)
        sidecar.start()
        with Client(sidecar.socket, NAMESPACE, connect_timeout_s=LIMIT_S) as client:
            # The last batches in full, and a part of the earlier ones.
            older = [name for names in lives[:-1] for name in names]
            found = check(client, written, acknowledged)
            check(client, chance.sample(older, min(OLDER, len(older))), acknowledged)
            torn_lives += found < len(written)
            survivors += found
    with Client(sidecar.socket, NAMESPACE, connect_timeout_s=LIMIT_S) as client:
        check(client, [name for names in lives for name in names], acknowledged)
    # There were kills during writes, and acknowledged blocks.
    assert torn_lives > KILLS // 3
    assert survivors > KILLS
    assert len(acknowledged) > KILLS
    assert sidecar.stop() == 0
