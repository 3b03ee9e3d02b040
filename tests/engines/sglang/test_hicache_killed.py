"""`kill -9` of the sidecar in the middle of a batch of SGLang's own controller: arrived pages are
used, failed pages do not count as stored, and the next batch reconnects."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hicache_rig import PAGE_BYTES, absent, extra
from instance_rig import LENGTH, PAGES, SLOTS, Instance, sequence
from sidecar_rig import ForkedSidecar, disk, wait_until

from kvstore.connectors.sglang.copies import Copies, Extents

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent()), reason=absent()),
]


class KillingCopies(Copies):
    """Kills the sidecar when the copies of the second part of a batch are about to run, once."""

    def __init__(self, sidecar: ForkedSidecar) -> None:
        super().__init__(2)
        self._sidecar, self.left = sidecar, 2

    def to_host(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        self._countdown()
        super().to_host(slots, pages)

    def to_slots(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        self._countdown()
        super().to_slots(slots, pages)

    def _countdown(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._sidecar.kill()


def killing(instance: Instance, sidecar: ForkedSidecar) -> KillingCopies:
    """Kill the sidecar in the middle of the instance's next batch."""
    copies = KillingCopies(sidecar)
    instance.page_pool._copies = copies
    return copies


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    slab = {"l2": {"bytes": SLOTS * PAGE_BYTES, "slot_bytes": PAGE_BYTES}}
    room = disk(tmp_path / "disk", "256MiB", codec="none")
    made = ForkedSidecar(tmp_path, {**slab, **room})
    yield made
    made.kill()


def flush(sidecar: ForkedSidecar) -> None:
    request = urllib.request.Request(f"{sidecar.url}/v1/flush", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer) == {"flushed": True}


def test_a_kill_while_the_controller_reads(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    writer = Instance(extra(sidecar.socket), tmp_path)
    first, second = sequence(1), sequence(2)
    right = writer.compute(first, 1)
    flush(sidecar)
    also = writer.compute(second, 2)
    flush(sidecar)
    writer.stop()

    reader = Instance(extra(sidecar.socket), tmp_path)
    copies = killing(reader, sidecar)
    came = reader.restore(first, right)
    assert copies.left <= 0, "it was killed"
    assert 0 < came < LENGTH, "the head of the batch arrived, its tail did not"
    sidecar.start()
    wait_until(reader.connected, "it has reconnected")
    assert reader.restore(second, also) == LENGTH
    reader.stop()
    another = Instance(extra(sidecar.socket), tmp_path)
    assert another.restore(first, right) == LENGTH, "nothing was lost"
    another.stop()


def test_a_kill_while_the_controller_writes(
    sidecar: ForkedSidecar, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Instance(extra(sidecar.socket), tmp_path)
    copies = killing(writer, sidecar)
    caplog.set_level(logging.WARNING)
    first, second = sequence(1), sequence(2)
    right = writer.compute(first, 1)
    assert copies.left <= 0, "it was killed"
    assert f"Write page to storage: {PAGES} pages failed" in caplog.text
    sidecar.start()
    wait_until(writer.connected, "it has reconnected")
    also = writer.compute(second, 2)

    reader = Instance(extra(sidecar.socket), tmp_path)
    assert reader.restore(second, also) == LENGTH
    assert reader.restore(first, right) < LENGTH, "any pages that arrived are correct"
    for instance in (writer, reader):
        instance.stop()
