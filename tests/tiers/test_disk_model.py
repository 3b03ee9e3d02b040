"""A disk tier against a model: directories are added, removed and fail; the process is killed."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from disk_rig import MIB, FaultyFiles
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.errors import TierUnavailable
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers import disk
from kvstore.tiers.base import Tier

DIRECTORIES = 3
BROKEN = ("read", "write", "sync", "create")
NUMBER = st.integers(0, 9)


class NoSync(FaultyFiles):
    """Other tests cover stable storage. Here it would only take time."""

    def sync(self, fd: int) -> None:
        self._fail("sync", fd)

    def sync_directory(self, path: str) -> None:
        return None


class StripedTier(RuleBasedStateMachine):
    """`alive`: written and not deleted. `maybe`: the delete may not be on disk."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.places = [self.root / str(number) for number in range(DIRECTORIES)]
        self.alive: set[int] = set()
        self.maybe: set[int] = set()
        self.used: set[Path] = set()
        self.buffer = FrameBuffer(20_000)
        self.copies = 0
        self.open(self.places)

    def open(self, places: list[Path]) -> None:
        self.present = places
        self.broken: Path | None = None
        self.used |= set(places)
        self.files = NoSync()
        self.files.direct_io = False
        config = disk.Config(
            directory=tuple(map(str, places)), capacity=len(places) * 8 * MIB, segment=MIB
        )
        self.tier: Tier = disk.open(config, files=self.files)

    @rule(numbers=st.sets(NUMBER, min_size=1))
    def write(self, numbers: set[int]) -> None:
        for number in sorted(numbers):
            key, header, payload = self.buffer.fill(key_of(number), 1 + 2099 * number)
            try:
                self.tier.write(key, header, payload)
            except TierUnavailable:
                assert self.present == [self.broken], "a working directory is not used"
            else:
                self.alive.add(number)
                assert self.tier.contains([key]) == [True] or self.broken

    @rule(number=NUMBER)
    def delete(self, number: int) -> None:
        there = self.tier.contains([key_of(number)])[0]
        self.tier.delete([key_of(number)])
        assert self.tier.contains([key_of(number)]) == [False]
        if number not in self.alive:
            return
        if self.whole() and there:
            self.alive.discard(number)
            self.maybe.discard(number)
        else:
            self.alive.discard(number)
            self.maybe.add(number)

    @rule(order=st.permutations(range(DIRECTORIES)), count=st.integers(1, DIRECTORIES))
    def reopen(self, order: list[int], count: int) -> None:
        self.tier.close()
        self.open([self.places[number] for number in order[:count]])

    @rule(order=st.permutations(range(DIRECTORIES)))
    def kill(self, order: list[int]) -> None:
        """Continue with the files as they are now, as after a kill."""
        self.copies += 1
        for place in self.used:
            shutil.copytree(place, self.root / f"copy {self.copies}" / place.name)
        self.files.failing.clear()
        self.tier.close()
        for place in self.used:
            shutil.rmtree(place)
            (self.root / f"copy {self.copies}" / place.name).rename(place)
        self.open([self.places[number] for number in order])

    @precondition(lambda self: self.broken is None)
    @rule(which=st.integers(0, DIRECTORIES - 1))
    def break_one(self, which: int) -> None:
        self.broken = self.present[which % len(self.present)]
        self.files.only = str(self.broken)
        self.files.failing = dict.fromkeys(BROKEN, errno.EIO)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        if self.whole():
            self.alive.clear()
            self.maybe.clear()
        else:
            self.maybe |= self.alive
            self.alive.clear()

    def whole(self) -> bool:
        """Whether every directory used so far is present and works."""
        return self.broken is None and self.used <= set(self.present)

    @invariant()
    def what_is_named_is_right(self) -> None:
        keys = {key_of(number): number for number in range(10)}
        named = [key for key, has in zip(keys, self.tier.contains(list(keys)), strict=True) if has]
        for key in named:
            try:
                length = self.tier.read(key, self.buffer.header, self.buffer.payload)
            except TierUnavailable:
                assert self.present == [self.broken]
                continue
            if length:
                assert self.buffer.version_of(key, length) == 0
            else:
                assert self.broken is not None, "listed, but not readable"
        numbers = {keys[key] for key in named}
        assert numbers <= self.alive | self.maybe, "a deleted block reappeared"
        if self.whole():
            assert self.alive <= numbers, "an acknowledged block is lost"
        assert len(list(self.tier.keys())) >= len(numbers)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.files.failing.clear()
            self.tier.close()
            shutil.rmtree(self.root)


StripedTier.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, print_blob=True
)
TestStripedTier = StripedTier.TestCase
