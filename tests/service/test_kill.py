"""`kill -9` of the sidecar at 50 random moments while it writes, each time on the same disk tier.

After each restart: whatever it says is there reads back byte-identical; every write that was
acknowledged (a flush that returned) is there; and nothing else has come of what was under way.
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
"""Batches written in one life at most; most lives are shorter."""
OLDER = 24
"""Blocks of earlier lives looked at after each; all of them are at the end."""
LATEST_KILL_S = 0.06
"""A life's writes take about twice as long on a quiet machine: most kills fall into them."""


def flush(sidecar: ForkedSidecar) -> bool:
    """Whether the sidecar said that all was written; False when it died over it."""
    try:
        connection = http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=LIMIT_S)
        connection.request("POST", "/v1/flush")
        answer = connection.getresponse()
        return bool(json.loads(answer.read())["flushed"])
    except (OSError, http.client.HTTPException, ValueError):
        return False


def check(client: Client, written: list[bytes], acknowledged: set[bytes]) -> int:
    """Read back everything in the store that may be there; how many blocks were."""
    found = 0
    for name in written:
        tiers = match(client, [name])
        if name in acknowledged:
            assert tiers, "an acknowledged block is gone"
        if tiers:
            blocks, _ = get(client, [name])
            assert blocks == [content(name)], "a block is there and is not what was written"
            found += 1
    return found


@pytest.mark.slow
def test_killed_during_writes_at_50_random_points(tmp_path: Path) -> None:
    chance = random.Random(2024)
    # Room for all that is ever written: what is acknowledged may then not be evicted.
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
                # Too few free slots cut the tail of a save; what was not taken is not awaited.
                written += hashes[: put(client, hashes)]
                if number % 8 == 4 and flush(sidecar):
                    # All that was committed before the flush was in L2, and is below it now.
                    acknowledged.update(written)
            killer.join()
        lives.append(written)
        sidecar.start()
        with Client(sidecar.socket, NAMESPACE, connect_timeout_s=LIMIT_S) as client:
            # The last life in full, and a part of what earlier ones left.
            older = [name for names in lives[:-1] for name in names]
            found = check(client, written, acknowledged)
            check(client, chance.sample(older, min(OLDER, len(older))), acknowledged)
            torn_lives += found < len(written)
            survivors += found
    with Client(sidecar.socket, NAMESPACE, connect_timeout_s=LIMIT_S) as client:
        check(client, [name for names in lives for name in names], acknowledged)
    # The kills fell into the writes, and there was something to keep.
    assert torn_lives > KILLS // 3
    assert survivors > KILLS
    assert len(acknowledged) > KILLS
    assert sidecar.stop() == 0
