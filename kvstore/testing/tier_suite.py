"""Conformance tests for tiers: a class of tests to derive from.

    class TestMine(TierSuite):
        persistent = True

        def open_tier(self, tmp_path, capacity_bytes):
            return mine.open(mine.Config(directory=str(tmp_path), capacity=capacity_bytes))

Needs pytest. A tier without a size limit sets `limited = False`. A tier whose bytes at rest can be
read from outside implements `stored_bytes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.blocks.frame import aligned_buffer
from kvstore.blocks.key import Key
from kvstore.errors import FrameTooLarge, TierError
from kvstore.testing.frames import FrameBuffer, block_of, key_of
from kvstore.tiers.base import IO_ALIGNMENT, Tier

KIB = 1 << 10


class TierSuite:
    """Tests of one kind of tier. Override `open_tier`, and other methods as needed."""

    persistent: ClassVar[bool] = False
    """The tier still has its blocks after it is opened again in the same place."""
    limited: ClassVar[bool] = True
    """The tier keeps to `capacity_bytes` by evicting."""
    capacity_bytes: ClassVar[int] = 64 << 20
    small_capacity_bytes: ClassVar[int] = 4 << 20
    sizes: ClassVar[tuple[int, ...]] = (1, IO_ALIGNMENT, IO_ALIGNMENT + 1, 64 * KIB, 2048 * KIB)
    """Stored bytes of the frames to write and read back."""
    racers: ClassVar[int] = 4
    """Number of threads in the concurrency tests."""

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        """Open the tier at `tmp_path`, with its existing content."""
        raise NotImplementedError

    def stored_bytes(self, tmp_path: Path) -> bytes | None:
        """Return all bytes at rest, read without the tier. None: not possible."""
        return None

    def settled_stats(self, tier: Tier) -> dict[str, int | float | str]:
        """Return the statistics after all earlier operations. Override it for a tier that gets them
        from a server without waiting."""
        return tier.stats()

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.open_tier(tmp_path, self.capacity_bytes)
        yield tier
        tier.close()

    @pytest.fixture
    def buffer(self) -> FrameBuffer:
        return FrameBuffer(max(self.sizes))

    # ------------------------------------------------------------------ one caller

    def test_an_empty_tier_has_no_blocks(self, tier: Tier, buffer: FrameBuffer) -> None:
        assert tier.contains([key_of(1), key_of(2)]) == [False, False]
        assert tier.contains([]) == []
        assert tier.read(key_of(1), buffer.header, buffer.payload) == 0
        tier.delete([key_of(1)])

    def test_frames_of_every_size_read_back(self, tier: Tier, buffer: FrameBuffer) -> None:
        for number, nbytes in enumerate(self.sizes):
            tier.write(*buffer.fill(key_of(number), nbytes))
        keys = [key_of(number) for number in range(len(self.sizes))]
        assert tier.contains(keys) == [True] * len(keys)
        for key, nbytes in zip(keys, self.sizes, strict=True):
            frame = b"".join(buffer.fill(key, nbytes)[1:])
            buffer.header[:], buffer.payload[:] = bytes(IO_ALIGNMENT), bytes(len(buffer.payload))
            length = tier.read(key, buffer.header, buffer.payload)
            assert length == len(frame) - IO_ALIGNMENT
            assert bytes(buffer.header) + bytes(buffer.payload[:length]) == frame

    def test_contains_keeps_the_order_of_keys(self, tier: Tier, buffer: FrameBuffer) -> None:
        tier.write(*buffer.fill(key_of(1), 5000))
        keys = [key_of(0), key_of(1), key_of(2), key_of(1)]
        assert tier.contains(keys) == [False, True, False, True]

    def test_the_first_writer_wins(self, tier: Tier, buffer: FrameBuffer) -> None:
        tier.write(*buffer.fill(key_of(1), 9000, version=0))
        tier.write(*buffer.fill(key_of(1), 9000, version=1))
        length = tier.read(key_of(1), buffer.header, buffer.payload)
        assert buffer.version_of(key_of(1), length, versions=2) == 0

    def test_every_part_of_a_key_distinguishes_blocks(
        self, tier: Tier, buffer: FrameBuffer
    ) -> None:
        key = key_of(1)
        tier.write(*buffer.fill(key, 5000))
        others = [
            key._replace(tenant="other"),
            key._replace(namespace="cd" * 16),
            key._replace(hash=key.hash[:-1] + bytes([key.hash[-1] ^ 1])),
            key._replace(hash=key.hash[:16]),
            key._replace(tenant=key.namespace, namespace=key.tenant),
        ]
        assert tier.contains(others) == [False] * len(others)
        for other in others:
            assert tier.read(other, buffer.header, buffer.payload) == 0
            tier.write(*buffer.fill(other, 5000))
        for each in [key, *others]:
            assert buffer.version_of(each, tier.read(each, buffer.header, buffer.payload)) == 0

    def test_odd_tenants_and_short_hashes_are_keys_too(
        self, tier: Tier, buffer: FrameBuffer
    ) -> None:
        keys = [Key("../ü\n:/ *", "a/b", b"\0"), Key("x" * 200, "n", b"\xff" * 64)]
        for key in keys:
            tier.write(*buffer.fill(key, 4000))
        for key in keys:
            assert buffer.version_of(key, tier.read(key, buffer.header, buffer.payload)) == 0

    def test_a_buffer_that_is_too_small_is_an_error_and_loses_nothing(
        self, tier: Tier, buffer: FrameBuffer
    ) -> None:
        tier.write(*buffer.fill(key_of(1), 2 * IO_ALIGNMENT))
        header = bytes(buffer.header)
        for payload in (aligned_buffer(IO_ALIGNMENT), aligned_buffer(IO_ALIGNMENT)[:0]):
            buffer.header[:] = bytes(IO_ALIGNMENT)
            with pytest.raises(FrameTooLarge):
                tier.read(key_of(1), buffer.header, payload)
            assert bytes(buffer.header) == header
        assert (
            buffer.version_of(key_of(1), tier.read(key_of(1), buffer.header, buffer.payload)) == 0
        )

    def test_a_larger_buffer_is_unchanged_after_the_payload(
        self, tier: Tier, buffer: FrameBuffer
    ) -> None:
        tier.write(*buffer.fill(key_of(1), IO_ALIGNMENT))
        target = aligned_buffer(4 * IO_ALIGNMENT)
        target[:] = b"\xa5" * len(target)
        assert tier.read(key_of(1), buffer.header, target) == IO_ALIGNMENT
        assert bytes(target[IO_ALIGNMENT:]) == b"\xa5" * (3 * IO_ALIGNMENT)

    def test_a_deleted_block_is_gone_and_can_be_written_again(
        self, tier: Tier, buffer: FrameBuffer
    ) -> None:
        keys = [key_of(number) for number in range(3)]
        for key in keys:
            tier.write(*buffer.fill(key, 6000))
        tier.delete([keys[1], key_of(99)])
        assert tier.contains(keys) == [True, False, True]
        assert tier.read(keys[1], buffer.header, buffer.payload) == 0
        tier.write(*buffer.fill(keys[1], 7000, version=1))
        length = tier.read(keys[1], buffer.header, buffer.payload)
        assert buffer.version_of(keys[1], length, versions=2) == 1

    def test_flush_clear_and_listing(self, tier: Tier, buffer: FrameBuffer) -> None:
        keys = {key_of(number) for number in range(5)}
        for key in keys:
            tier.write(*buffer.fill(key, 3000))
        tier.flush()
        try:
            listed = list(tier.keys())
        except NotImplementedError:
            pytest.skip("this tier cannot list")
        assert len(listed) == len(keys)
        assert set(listed) == keys
        tier.clear()
        assert list(tier.keys()) == []
        assert tier.contains(sorted(keys)) == [False] * len(keys)
        tier.write(*buffer.fill(key_of(1), 3000))
        assert tier.contains([key_of(1)]) == [True]

    def test_stats_count_the_stored_blocks(self, tier: Tier, buffer: FrameBuffer) -> None:
        tier.write(*buffer.fill(key_of(1), 64 * KIB))
        stats = self.settled_stats(tier)
        assert stats["blocks"] == 1
        assert stats["evictions"] == 0
        assert 64 * KIB <= float(stats["bytes_used"]) <= float(stats["bytes_capacity"])

    def test_a_closed_tier_raises(self, tmp_path: Path, buffer: FrameBuffer) -> None:
        tier = self.open_tier(tmp_path, self.capacity_bytes)
        tier.close()
        calls: list[Callable[[], object]] = [
            lambda: tier.contains([key_of(1)]),
            lambda: tier.read(key_of(1), buffer.header, buffer.payload),
            lambda: tier.write(*buffer.fill(key_of(1), 100)),
            lambda: tier.delete([key_of(1)]),
        ]
        for call in calls:
            with pytest.raises(TierError):
                call()
        tier.close()

    # ------------------------------------------------------------------ room

    def test_capacity_is_kept_by_evicting(self, tmp_path: Path, buffer: FrameBuffer) -> None:
        if not self.limited:
            pytest.skip("this tier has no size limit")
        tier = self.open_tier(tmp_path, self.small_capacity_bytes)
        nbytes = self.small_capacity_bytes // 40
        keys = [key_of(number) for number in range(120)]
        for key in keys:
            tier.write(*buffer.fill(key, nbytes))
            assert tier.contains([key]) == [True]
            assert float(tier.stats()["bytes_used"]) <= self.small_capacity_bytes
        kept = [key for key, has in zip(keys, tier.contains(keys), strict=True) if has]
        assert len(kept) >= 10, "more was evicted than necessary"
        for key in kept:
            assert buffer.version_of(key, tier.read(key, buffer.header, buffer.payload)) == 0
        stats = tier.stats()
        assert stats["blocks"] == len(kept)
        assert stats["evictions"] == len(keys) - len(kept)
        tier.close()

    def test_a_frame_larger_than_the_tier_is_rejected(
        self, tmp_path: Path, buffer: FrameBuffer
    ) -> None:
        if not self.limited:
            pytest.skip("this tier has no size limit")
        tier = self.open_tier(tmp_path, self.small_capacity_bytes)
        tier.write(*buffer.fill(key_of(1), 5000))
        large = FrameBuffer(self.small_capacity_bytes + IO_ALIGNMENT)
        with pytest.raises(TierError):
            tier.write(*large.fill(key_of(2), len(large.payload)))
        assert tier.contains([key_of(1), key_of(2)]) == [True, False]
        tier.close()

    # ------------------------------------------------------------------ many callers

    def test_racing_writers_of_one_key_have_one_winner(self, tier: Tier) -> None:
        """Concurrent readers see a complete frame or none, always the same one."""
        nbytes = 300 * KIB
        for round_ in range(6):
            key = key_of(round_)
            start = threading.Barrier(2 * self.racers)

            def write(version: int, key: Key = key, start: threading.Barrier = start) -> None:
                mine = FrameBuffer(nbytes)
                frame = mine.fill(key, nbytes, version)
                start.wait()
                tier.write(*frame)
                assert tier.contains([key]) == [True], "acknowledged, but absent"

            def read(_: int, key: Key = key, start: threading.Barrier = start) -> set[int]:
                mine = FrameBuffer(nbytes)
                seen: set[int] = set()
                start.wait()
                for _ in range(40):
                    length = tier.read(key, mine.header, mine.payload)
                    if length:
                        seen.add(mine.version_of(key, length, self.racers))
                return seen

            with ThreadPoolExecutor(2 * self.racers) as pool:
                writes = [pool.submit(write, version) for version in range(self.racers)]
                reads = [pool.submit(read, number) for number in range(self.racers)]
                for each in writes:
                    each.result()
                seen = set().union(*(each.result() for each in reads))
            mine = FrameBuffer(nbytes)
            length = tier.read(key, mine.header, mine.payload)
            assert seen | {mine.version_of(key, length, self.racers)} == {
                mine.version_of(key, length, self.racers)
            }

    def test_readers_writers_and_deleters_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        """Under pressure: the tier is too small for the written blocks."""
        capacity = self.small_capacity_bytes if self.limited else self.capacity_bytes
        tier = self.open_tier(tmp_path, capacity)
        keys = [key_of(number) for number in range(60)]
        size_of = {key: (1 + 7 * number % 60) * KIB for number, key in enumerate(keys)}

        def work(turn: int) -> int:
            mine = FrameBuffer(max(size_of.values()))
            found = 0
            for step in range(150):
                key = keys[(step * 7 + turn * 13) % len(keys)]
                if step % 3 == 0:
                    tier.write(*mine.fill(key, size_of[key]))
                elif step % 25 == 1:
                    tier.delete([key])
                else:
                    length = tier.read(key, mine.header, mine.payload)
                    if length:
                        found += 1
                        self.check_racing_read(mine, key, length)
            return found

        with ThreadPoolExecutor(self.racers) as pool:
            assert sum(pool.map(work, range(self.racers))) > 0
        tier.close()

    def check_racing_read(self, buffer: FrameBuffer, key: Key, length: int) -> None:
        """Check a read that raced with deletions: it must be a complete frame."""
        assert buffer.version_of(key, length) == 0

    # ------------------------------------------------------------------ at rest

    def test_blocks_survive_a_restart(self, tmp_path: Path, buffer: FrameBuffer) -> None:
        if not self.persistent:
            pytest.skip("this tier exists only in its process")
        tier = self.open_tier(tmp_path, self.capacity_bytes)
        keys = [key_of(number) for number in range(12)]
        for number, key in enumerate(keys):
            tier.write(*buffer.fill(key, 1 + number * 9000))
        tier.delete(keys[3:5])
        for expected in (10, 12):
            tier.close()
            tier = self.open_tier(tmp_path, self.capacity_bytes)
            found = tier.contains(keys)
            assert sum(found) == expected
            for key, has in zip(keys, found, strict=True):
                length = tier.read(key, buffer.header, buffer.payload)
                assert bool(length) == has
                if has:
                    assert buffer.version_of(key, length, 2) == (
                        key in keys[3:5] and expected == 12
                    )
            for key in keys[3:5]:
                tier.write(*buffer.fill(key, 5000, version=1))
        tier.close()

    def test_stored_bytes_are_the_payload_and_nothing_executable(
        self, tmp_path: Path, buffer: FrameBuffer
    ) -> None:
        tier = self.open_tier(tmp_path, self.capacity_bytes)
        key = key_of(1)
        tier.write(*buffer.fill(key, 20_000))
        tier.flush()
        stored = self.stored_bytes(tmp_path)
        if stored is None:
            tier.close()
            pytest.skip("this tier's bytes at rest cannot be read")
        assert block_of(key, 20_000) in stored, "the payload is not stored in one part"
        assert key.hash in stored
        tier.close()
