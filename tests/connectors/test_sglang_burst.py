"""A burst of pages that is many times the slab: what SGLang was told is kept can be loaded."""

from __future__ import annotations

from pathlib import Path

from sglang_rig import HostMemory, Rank, flush, keys_of, settings, slots
from sidecar_rig import ForkedSidecar, disk

PAGES = 2048
SLOTS = 256
BATCH = 128
"""Pages of one call; SGLang's own number."""


def back_up(rank: Rank, keys: list[str]) -> int:
    """Write pages as SGLang's backup thread does, which stops at the first batch that is not all
    stored. Returns the number of leading pages that it was told are stored."""
    said = 0
    for at in range(0, len(keys), BATCH):
        batch = range(at, min(at + BATCH, len(keys)))
        stored = rank.set([keys[n] for n in batch], batch)
        assert stored == sorted(stored, reverse=True), "not a leading run"
        said += sum(stored)
        if not all(stored):
            break
    return said


def loadable(rank: Rank, keys: list[str], source: HostMemory) -> int:
    """Length of the leading run that loads with the bytes that were saved."""
    loaded = 0
    for at in range(0, len(keys), BATCH):
        batch = range(at, min(at + BATCH, len(keys)))
        for number, ok in zip(batch, rank.get([keys[n] for n in batch], batch), strict=True):
            if not ok:
                return loaded
            assert rank.host.page(number) == source.page(number), "wrong bytes"
            loaded += 1
    return loaded


def test_a_burst_of_eight_slabs_is_kept_as_said(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, {**slots(SLOTS), **disk(tmp_path / "disk", codec="none")})
    writer, reader = HostMemory(PAGES), HostMemory(PAGES)
    writer.fill(11)
    keys = keys_of("burst", PAGES)
    with Rank(settings(sidecar.socket), writer) as rank:
        said = back_up(rank, keys)
        flush(sidecar)
        stats = sidecar.stats()["l2"]
    assert said == PAGES, "a caller that can wait gets its slots"
    assert (stats["tier_writes_dropped"], stats["tier_writes_failed"]) == (0, 0)
    assert sidecar.stop() == 0
    sidecar.start()
    with Rank(settings(sidecar.socket), reader) as rank:
        assert rank.cached_prefix_len(keys) == said
        assert loadable(rank, keys, writer) == said
    assert sidecar.stop() == 0
