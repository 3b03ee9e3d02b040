"""A slow S3 service is slow, not dead: what a store said it keeps is in the bucket in the end.

SeaweedFS behind a proxy that passes so many bytes per second, and a store with the default limits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("boto3")

from s3_rig import FaultProxy, S3Server

import kvstore
from kvstore.blocks.key import Namespace
from kvstore.interface import BlockStore
from kvstore.store.store import Store

MIB: Final = 1 << 20
LIMIT_S: Final = 600.0
"""Timeout of every wait. It only guards against hangs."""


def space(block_bytes: int) -> Namespace:
    """A namespace with blocks of this size."""
    found = Namespace(
        model="slow", dtype="float16", layers=1, kv_heads=1, head_dim=block_bytes // 64
    )
    assert found.block_bytes == block_bytes
    return found


def content(name: bytes, nbytes: int) -> bytes:
    """The block of a hash: noise, so that no codec makes it smaller."""
    import random

    return random.Random(name).randbytes(nbytes)


def names(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def save_waiting(session: BlockStore, hashes: Sequence[bytes], nbytes: int) -> int:
    """Save a chain as a caller that can wait: ask again for what got no slot. Returns the number of
    leading blocks that the store took."""
    deadline_s = time.monotonic() + LIMIT_S
    done = 0
    while done < len(hashes) and time.monotonic() < deadline_s:
        save = session.save(hashes[done : done + 16])
        for index, slot in save.slot_assignments:
            session.slab_of(save).view(slot)[:nbytes] = content(save.hashes[index], nbytes)
        done += len(save.hashes) - save.dropped
        session.commit(save)
        if save.dropped:
            time.sleep(0.01)
    return done


def readable(store: Store, namespace: Namespace, hashes: Sequence[bytes]) -> int:
    """Number of blocks that load with the right bytes; each is loaded for itself."""
    found = 0
    with store.session(namespace) as session:
        for name in hashes:
            deadline_s = time.monotonic() + LIMIT_S
            load = session.load([name])
            while not load.done and time.monotonic() < deadline_s:
                session.poll(0.5)
            for slot in load.slots:
                block = bytes(session.slab_of(load).view(slot)[: namespace.block_bytes])
                assert block == content(name, namespace.block_bytes), "wrong bytes"
                found += 1
            session.release(load)
    return found


@pytest.mark.parametrize(
    ("block_bytes", "bytes_per_s", "tier_timeout"),
    [
        # A tenth of the second case, so that it is quick.
        (MIB // 4, 16e6, "200ms"),
        pytest.param(2 * MIB, 10e6, "2s", marks=pytest.mark.slow),
    ],
)
def test_nothing_that_was_kept_is_lost_over_a_slow_link(
    s3_server: S3Server, tmp_path: Path, block_bytes: int, bytes_per_s: float, tier_timeout: str
) -> None:
    """200 blocks through a slab of 64."""
    config = tmp_path / "kvstore.toml"
    config.write_text(f'[limits]\ntier_timeout = "{tier_timeout}"\n')
    bucket = s3_server.new_bucket()
    namespace = space(block_bytes)

    def open_store(endpoint: str) -> Store:
        values: dict[str, Any] = s3_server.values(bucket, endpoint=endpoint, linger="20ms")
        table = {"kind": "s3", **values}
        return kvstore.open(64 * block_bytes, block_bytes, tiers=(table,), config=config)

    with FaultProxy(s3_server.port) as proxy:
        proxy.bytes_per_s = bytes_per_s
        with open_store(proxy.endpoint) as store:
            with store.session(namespace) as session:
                kept = save_waiting(session, names(200), block_bytes)
            assert kept == 200
            assert store.flush(LIMIT_S)
            stats = store.stats()
            assert stats["l2"]["tier_writes_dropped"] == stats["l2"]["tier_writes_failed"] == 0
            assert stats["tiers"]["s3"]["breaker_opened"] == 0
    with open_store(s3_server.endpoint) as store:
        assert readable(store, namespace, names(200)) == kept
