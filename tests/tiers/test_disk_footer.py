"""A footer that another process wrote into a segment in use hides no frame that follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_rig import MIB, SECTOR_BYTES, left_by_a_kill, open_disk, put, readable_keys, segment_files
from fork_rig import IGNORE_FORK_WARNING, in_child

from kvstore.errors import TierError
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.base import Tier
from kvstore.tiers.disk.files import Files
from kvstore.tiers.disk.recover import RecoveryResult, _load_entries
from kvstore.tiers.disk.segment import Segment
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.disk.verify import verify

pytestmark = pytest.mark.filterwarnings(IGNORE_FORK_WARNING)

CAPACITY = 64 * MIB
"""One segment has room for everything here."""


def seal_newest(directory: Path) -> None:
    """Seal a segment that a tier is using, as the close of a forked child did in a release before
    this one."""
    files = Files()
    segment = Segment.open(files, str(segment_files(directory)[-1]))
    _load_entries(files, segment, RecoveryResult())
    segment.seal(files)
    files.close(segment.fd)


def first_sectors(tier: Tier) -> list[int]:
    assert isinstance(tier, DiskTier)
    [segment] = tier._state.segments.values()
    return sorted(segment.entries.first_sectors)


def test_frames_after_a_footer_are_found(tmp_path: Path) -> None:
    buffer = FrameBuffer(20_000)
    tier = open_disk(tmp_path / "a", capacity=CAPACITY)
    before = put(tier, buffer, range(20))
    tier.delete(before[:3])
    seal_newest(tmp_path / "a")
    after = put(tier, buffer, range(100, 130))
    killed = left_by_a_kill(tmp_path / "a", tmp_path / "b")
    report = verify([str(killed)])
    assert (report.frames, report.corrupt_count) == (47, 0)
    with_more = open_disk(killed, capacity=CAPACITY)
    assert readable_keys(with_more, buffer, [*before, *after]) == [*before[3:], *after]
    assert with_more.stats()["torn"] == 0
    # It is used like any other afterwards: frames are appended, it is sealed, and opened again.
    more = put(with_more, buffer, range(200, 210))
    with_more.close()
    again = open_disk(killed, capacity=CAPACITY)
    assert readable_keys(again, buffer, [*before, *after, *more]) == [*before[3:], *after, *more]
    again.close()
    tier.close()


def test_a_torn_frame_after_a_footer_does_not_hide_those_behind_it(tmp_path: Path) -> None:
    buffer = FrameBuffer(20_000)
    tier = open_disk(tmp_path / "a", capacity=CAPACITY)
    before = put(tier, buffer, range(20))
    seal_newest(tmp_path / "a")
    after = put(tier, buffer, range(100, 110))
    killed = left_by_a_kill(tmp_path / "a", tmp_path / "b")
    torn = first_sectors(tier)[20]
    with segment_files(killed)[-1].open("r+b") as file:
        file.seek(torn * SECTOR_BYTES)
        file.write(bytes(3 * SECTOR_BYTES))
    recovered = open_disk(killed, capacity=CAPACITY)
    assert readable_keys(recovered, buffer, [*before, *after]) == [*before, *after[1:]]
    recovered.close()
    tier.close()


def test_a_sealed_segment_costs_a_bounded_look(tmp_path: Path) -> None:
    """A large segment with few frames is not read to its end."""

    class CountedFiles(Files):
        nbytes = 0

        def read_at(self, fd: int, views: list[memoryview], offset: int) -> int:
            got = super().read_at(fd, views, offset)
            self.nbytes += got
            return got

    buffer = FrameBuffer(20_000)
    tier = open_disk(tmp_path, capacity=256 * MIB, segment=100 * MIB)
    keys = put(tier, buffer, range(20))
    tier.close()
    files = CountedFiles()
    tier = open_disk(tmp_path, files=files, capacity=256 * MIB, segment=100 * MIB)
    assert files.nbytes < 8 * MIB
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


@pytest.mark.parametrize("direct_io", [True, False])
def test_a_tier_in_a_child_lets_go(tmp_path: Path, direct_io: bool) -> None:
    buffer = FrameBuffer(20_000)
    tier = open_disk(tmp_path / "a", direct_io=direct_io)
    before = put(tier, buffer, range(20))

    def use() -> list[str]:
        said = []
        key = key_of(0)
        for call in (
            lambda: tier.contains([key]),
            lambda: tier.read(key, buffer.header, buffer.payload),
            lambda: tier.write(*buffer.fill(key_of(50), 20_000)),
            lambda: tier.delete([key]),
            lambda: tier.usage(),
            tier.clear,
            tier.flush,
        ):
            with pytest.raises(TierError) as raised:
                call()
            said.append(str(raised.value))
        tier.close()
        return said

    assert isinstance(tier, DiskTier)
    with tier._lock:
        said = in_child(use)
    assert all("fork" in each for each in said), said
    after = put(tier, buffer, range(100, 120))
    killed = open_disk(left_by_a_kill(tmp_path / "a", tmp_path / "b"))
    assert readable_keys(killed, buffer, [*before, *after]) == [*before, *after]
    killed.close()
    tier.close()
