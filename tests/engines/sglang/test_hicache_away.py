"""A sidecar that is away while SGLang's controller backs up. SGLang marks a node as backed up
whether that failed or not, and never offers it again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hicache_rig import PAGE_BYTES, absent, extra
from instance_rig import LENGTH, PAGES, SLOTS, Instance, sequence
from sidecar_rig import ForkedSidecar, wait_until

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent()), reason=absent()),
]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    made = ForkedSidecar(tmp_path, {"l2": {"bytes": SLOTS * PAGE_BYTES, "slot_bytes": PAGE_BYTES}})
    yield made
    made.kill()


def test_a_sidecar_away_for_one_backup(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    writer = Instance(extra(sidecar.socket), tmp_path)
    tokens = sequence(1)
    sidecar.kill()
    wait_until(lambda: not writer.connected(), "the loss is noticed")
    comes_back = threading.Timer(0.2, sidecar.start)
    comes_back.start()
    right = writer.compute(tokens, 1)
    comes_back.join()
    for _ in range(3):
        assert writer.use(tokens) == LENGTH
    reader = Instance(extra(sidecar.socket), tmp_path)
    assert reader.restore(tokens, right) == LENGTH
    for instance in (writer, reader):
        instance.stop()


def test_pages_that_are_not_saved_are_counted(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    writer = Instance(extra(sidecar.socket), tmp_path)
    sidecar.kill()
    wait_until(lambda: not writer.connected(), "the loss is noticed")
    writer.compute(sequence(1), 1)
    assert writer.page_pool.stats()["pages_failed"] == PAGES
    writer.stop()
