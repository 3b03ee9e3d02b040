"""Frames of another release in a tier: hidden, counted, logged once per kind, never deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_rig import (
    SPACE,
    RemoteTier,
    flush_to_tiers,
    hashes,
    loaded_tiers,
    make_store,
    match,
    save,
    until,
)
from store_rig import key_of as key_in

from kvstore.blocks import frame
from kvstore.blocks.key import Key
from kvstore.codecs import codec_by_frame_id
from kvstore.errors import FrameTooLarge, FrameUnsupported
from kvstore.store import block_io
from kvstore.store.block_io import StagingBuffers
from kvstore.store.maintenance import MAX_WARM_BATCHES
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers import unsupported
from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.tenant_quota import TenantQuotas
from kvstore.tiers.unsupported import RECHECK_S, UnsupportedFrames

Frame = tuple[Key, memoryview, memoryview]


def of_version(version: int, made: Frame) -> Frame:
    key, header, payload = made
    header[6:8] = version.to_bytes(2, "little")
    return key, header, payload


def with_codec(name: str, made: Frame) -> Frame:
    key, header, payload = made
    old = frame.decode_header(header)
    frame.pack_header(
        header,
        key=key,
        codec=name,
        raw_bytes=old.raw_bytes,
        stored_bytes=old.stored_bytes,
        raw_sum=old.raw_sum,
        stored_sum=old.stored_sum,
    )
    return key, header, payload


class TestSuite(TierSuite):
    """The wrapper changes nothing for frames of this release."""

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return UnsupportedFrames(MemoryTier(capacity_bytes))


class Rig:
    """A memory tier with `count` frames of a later version, and the wrapper around it."""

    def __init__(self, count: int = 3) -> None:
        self.now_s = 1000.0
        self.buffer = FrameBuffer(5000)
        self.inner = MemoryTier()
        self.tier = UnsupportedFrames(self.inner, clock=lambda: self.now_s)
        self.keys = [key_of(number) for number in range(count)]
        for key in self.keys:
            self.inner.write(*of_version(2, self.buffer.fill(key, 5000)))

    def look(self, key: Key) -> None:
        with pytest.raises(FrameUnsupported, match="version 2"):
            self.read(key)

    def read(self, key: Key) -> int:
        return block_io.read_frame(self.tier, key, self.buffer.header, self.buffer.payload)

    def count(self, name: str) -> Any:
        return self.tier.stats()[f"unsupported_{name}"]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_one_look_hides_a_key(rig: Rig) -> None:
    assert rig.tier.contains(rig.keys) == [True] * 3, "not known yet"
    rig.look(rig.keys[1])
    for _ in range(2):
        assert rig.tier.contains(rig.keys) == [True, False, True]
        assert rig.read(rig.keys[1]) == 0
        assert list(rig.tier.keys()) == [rig.keys[2], rig.keys[0]]
    assert (rig.count("frames"), rig.count("hidden"), rig.count("writes")) == (1, 1, 0)
    assert rig.inner.contains(rig.keys) == [True] * 3


def test_a_write_over_an_unsupported_frame_fails_and_is_counted(rig: Rig) -> None:
    rig.look(rig.keys[0])
    with pytest.raises(FrameUnsupported):
        rig.tier.write(*rig.buffer.fill(rig.keys[0], 5000))
    assert (rig.count("frames"), rig.count("writes")) == (1, 1)
    rig.inner.read(rig.keys[0], rig.buffer.header, rig.buffer.payload)
    assert rig.buffer.header[6] == 2


def test_a_saved_block_is_not_said_to_be_in_a_local_tier_that_has_another_releases_frame(
    rig: Rig,
) -> None:
    """Also if this process has not looked at that frame before."""
    staging, slot = StagingBuffers(8192), frame.aligned_buffer(8192)
    codec = codec_by_frame_id("identity")
    for tries in (1, 2):
        result = block_io.write_block(rig.tier, rig.keys[0], 5000, slot, codec, staging)
        assert result.outcome.value == "unsupported"
        assert (rig.count("frames"), rig.count("writes")) == (1, tries)
    rig.inner.write(*rig.buffer.fill(key_of(9), 5000))
    result = block_io.write_block(rig.tier, key_of(9), 5000, slot, codec, staging)
    assert (result.outcome.value, result.stored_bytes) == ("loaded", 0)


def test_a_hidden_key_is_looked_at_again_after_a_while(rig: Rig) -> None:
    """The frame may have been evicted and written anew by a node of this release."""
    rig.look(rig.keys[0])
    rig.inner.delete([rig.keys[0]])
    rig.inner.write(*rig.buffer.fill(rig.keys[0], 5000))
    assert rig.tier.contains(rig.keys[:1]) == [False]
    rig.now_s += RECHECK_S
    assert rig.tier.contains(rig.keys[:1]) == [True]
    assert rig.read(rig.keys[0]) == 8192


@pytest.mark.parametrize(
    "remove",
    [
        lambda rig: rig.tier.delete(rig.keys),
        lambda rig: rig.tier.clear(),
        lambda rig: [rig.inner.clear(), rig.tier.contains(rig.keys)],
    ],
)
def test_a_hidden_key_that_is_gone_is_forgotten(rig: Rig, remove: Callable[[Rig], Any]) -> None:
    rig.look(rig.keys[0])
    remove(rig)
    assert rig.count("hidden") == 0
    rig.tier.write(*rig.buffer.fill(rig.keys[0], 5000))
    assert rig.read(rig.keys[0]) == 8192


def test_each_kind_is_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for version in (3, 3, 4):
        key = key_of(100 + len(caplog.records) + version)
        rig.inner.delete([key])
        rig.inner.write(*of_version(version, rig.buffer.fill(key, 5000)))
        with pytest.raises(FrameUnsupported):
            rig.read(key)
    for number in range(2):
        rig.inner.write(*with_codec("later/1", rig.buffer.fill(key_of(200 + number), 5000)))
        with pytest.raises(FrameUnsupported):
            rig.read(key_of(200 + number))
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 3
    assert "frame version 3" in logged[0]
    assert "unknown codec 'later/1'" in logged[2]
    assert rig.count("frames") == 5


def test_what_is_remembered_and_logged_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unsupported, "MAX_HIDDEN", 2)
    monkeypatch.setattr(unsupported, "MAX_KINDS", 2)
    rig = Rig(0)
    for number in range(5):
        rig.inner.write(*with_codec(f"later/{number}", rig.buffer.fill(key_of(number), 5000)))
        with pytest.raises(FrameUnsupported):
            rig.read(key_of(number))
    assert (rig.count("frames"), rig.count("hidden"), len(caplog.records)) == (5, 2, 2)


# ------------------------------------------------------------------ frames that do not fit


class WithoutHeader(MemoryTier):
    """A tier that does not return the header of a frame that does not fit."""

    def read(self, key: Key, header: memoryview, payload: memoryview) -> int:
        try:
            return super().read(key, header, payload)
        except FrameTooLarge:
            header[:] = bytes(4096)
            raise


@pytest.mark.parametrize(
    ("inner", "make", "outcome"),
    [
        (MemoryTier, lambda made: of_version(2, made), "unsupported"),
        (MemoryTier, lambda made: with_codec("later/1", made), "unsupported"),
        (MemoryTier, lambda made: made, "corrupt"),
        (WithoutHeader, lambda made: made, "unsupported"),
    ],
)
def test_a_frame_larger_than_any_block_is_judged_by_its_header(
    inner: type[MemoryTier], make: Callable[[Frame], Frame], outcome: str
) -> None:
    """A later release may store more bytes for the same block."""
    medium, key = inner(), key_of(1)
    medium.write(*make(FrameBuffer(50_000).fill(key, 50_000)))
    staging, slot = StagingBuffers(8192), frame.aligned_buffer(8192)
    tier = UnsupportedFrames(medium)
    result = block_io.read_block(tier, key, 8192, slot, staging, direct=False)
    assert result.outcome.value == outcome
    assert medium.contains([key]) == [outcome == "unsupported"]


# ------------------------------------------------------------------ below a store


def later_blocks(tier: Tier, session: Any, names: list[bytes]) -> None:
    """Write frames of a later version of these blocks, without the store."""
    buffer = FrameBuffer(SPACE.block_bytes)
    for name in names:
        tier.write(*of_version(2, buffer.fill(key_in(session, name), SPACE.block_bytes)))


@pytest.mark.parametrize("kind", [MemoryTier, RemoteTier])
def test_the_next_tier_has_the_block_that_one_has_of_another_release(
    kind: type[MemoryTier],
) -> None:
    first, second = kind(name="first"), MemoryTier(name="second")
    with make_store(first, second) as store:
        session = store.session(SPACE)
        later_blocks(first, session, hashes(4))
        save(session, hashes(4))
        flush_to_tiers(store)
        assert loaded_tiers(session, hashes(4)) == ["second"] * 4
        stats = store.stats()
        assert stats["tiers"]["first"]["checksum_failures"] == 0
        assert stats["tiers"]["first"]["errors"] == 0
        assert first.contains([key_in(session, name) for name in hashes(4)]) == [True] * 4


def test_a_load_says_why_and_the_next_match_does_not_promise_the_block() -> None:
    tier = MemoryTier()
    with make_store(tier) as store:
        session = store.session(SPACE)
        save(session, hashes(2))
        flush_to_tiers(store)
        later_blocks(tier, session, hashes(4)[2:])
        operation = session.load(hashes(4))
        until(lambda: session.poll(0.5) or operation.done)
        assert "frame version 2" in operation.fault
        session.release(operation)
        until(lambda: not store.stats()["l2"]["loads_in_flight"])
        assert len(match(session, hashes(4))) == 2


def test_warming_uses_the_room_for_blocks_that_can_be_read() -> None:
    """The most recently used frames of a tier are those of a release that was used for a while."""
    tier = MemoryTier()
    with make_store(tier, slots=16) as store:
        session = store.session(SPACE)
        save(session, hashes(10))
        flush_to_tiers(store)
        later_blocks(tier, session, hashes(30)[10:])
        assert store.warmer.warm(1.0) == 10
        store.clear("l2")
        assert store.warmer.warm(0.5) == 8
        stats = store.stats()["tiers"]["memory"]
        assert (stats["unsupported_frames"], stats["blocks"]) == (20, 30)


def test_warming_gives_up_after_some_batches() -> None:
    tier = MemoryTier()
    with make_store(tier, slots=16) as store:
        session = store.session(SPACE)
        later_blocks(tier, session, hashes(200))
        assert store.warmer.warm(1.0) == 0
        assert store.stats()["tiers"]["memory"]["unsupported_frames"] == MAX_WARM_BATCHES * 16


def test_a_quota_counts_them_and_makes_room_among_them() -> None:
    """They take bytes of the tenant's quota like others: evicting them is counted."""
    inner = MemoryTier()
    rig = Rig(0)
    for number in range(3):
        inner.write(*of_version(2, rig.buffer.fill(key_of(number), 5000)))
    tier = UnsupportedFrames(TenantQuotas(inner, {"tenant": 4 * 12_288}))
    tier.write(*rig.buffer.fill(key_of(10), 5000))
    tier.write(*rig.buffer.fill(key_of(11), 5000))
    assert tier.stats()["quota_evictions"] == 1
