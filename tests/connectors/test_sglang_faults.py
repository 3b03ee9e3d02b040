"""The SGLang backend when things go wrong: damaged pages are misses that the next set heals, and a
sidecar that is absent, killed, hung or full costs hits, never bytes and never an exception."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from sglang_rig import PAGE_BYTES, HostMemory, Rank, config, flush, keys_of, settings, slots
from sidecar_rig import ForkedSidecar, disk, wait_until

import kvstore
from kvstore.blocks.key import Key, Namespace
from kvstore.connectors.sglang.copies import Copies, Extents
from kvstore.connectors.sglang.namespace import EXTENTS, HostPool, namespace_of
from kvstore.connectors.sglang.page_pool import Shelf, hashes_of
from kvstore.connectors.sglang.settings import DeadlineSettings
from kvstore.testing.frames import FrameBuffer
from kvstore.tiers import disk as disk_tier

PAGES = 6
GUARD = DeadlineSettings(base_ms=60_000, cap_ms=60_000)
WRECKED = b"\xa5"


class Wreck:
    """A sidecar's disk tier with pages on it, damaged while the sidecar is down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self.sidecar = ForkedSidecar(folder, {**slots(64), **disk(self.folder, codec="identity")})
        self.host = HostMemory(2 * PAGES)
        self.host.fill(11)
        self.keys = keys_of("wreck", PAGES)
        self.right = [self.host.page(number) for number in range(PAGES)]
        with self.rank() as rank:
            assert rank.set(self.keys, range(PAGES)) == [True] * PAGES
            flush(self.sidecar)

    def rank(self) -> Rank:
        return Rank(settings(self.sidecar.socket), self.host)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Meanwhile the sidecar is down; what it had in memory is gone after."""
        assert self.sidecar.stop() == 0
        yield
        self.sidecar.start()

    def segments(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kvseg"))

    def find(self, number: int) -> tuple[Path, int]:
        """The file of a page and where its bytes begin in it."""
        for path in self.segments():
            at = path.read_bytes().find(self.right[number])
            if at >= 0:
                return path, at
        raise AssertionError(f"page {number} is in no segment")

    def write(self, number: int, offset: int, data: bytes) -> None:
        """Overwrite a page's bytes on the medium, from `offset` on."""
        path, at = self.find(number)
        with path.open("r+b") as file:
            file.seek(at + offset)
            file.write(data)

    def check(self, damaged: Sequence[int]) -> None:
        """These pages, and no others, are misses; not a byte of them lands in the host pool; the
        next set heals them, for good."""
        right = [number not in damaged for number in range(PAGES)]
        targets = range(PAGES, 2 * PAGES)
        with self.rank() as rank:
            for target in targets:
                self.host.overwrite(target, WRECKED * PAGE_BYTES)
            assert rank.get(self.keys, targets) == right
            for number, target in enumerate(targets):
                expected = self.right[number] if right[number] else WRECKED * PAGE_BYTES
                assert self.host.page(target) == expected, number
            assert rank.run(self.keys) == min(damaged), "forgotten where it was found"
            assert rank.set(self.keys, range(PAGES)) == [True] * PAGES
            flush(self.sidecar)
        with self.down():
            pass
        with self.rank() as rank:
            assert rank.run(self.keys) == PAGES
            assert rank.get(self.keys, targets) == [True] * PAGES
            assert [self.host.page(target) for target in targets] == self.right
        assert self.sidecar.stop() == 0


@pytest.fixture
def wreck(tmp_path: Path) -> Wreck:
    return Wreck(tmp_path)


def test_a_flipped_bit(wreck: Wreck) -> None:
    with wreck.down():
        was = wreck.right[3][1000]
        wreck.write(3, 1000, bytes([was ^ 4]))
    wreck.check([3])


def test_a_truncated_object(wreck: Wreck) -> None:
    with wreck.down():
        path, at = wreck.find(PAGES - 1)
        with path.open("r+b") as file:
            file.truncate(at + 50)
        lost = [number for number in range(PAGES) if _lies_behind(wreck, number, path, at)]
    wreck.check(lost)


def _lies_behind(wreck: Wreck, number: int, path: Path, at: int) -> bool:
    try:
        where, begins = wreck.find(number)
    except AssertionError:
        return True
    return where == path and begins >= at


def test_a_name_without_its_data(wreck: Wreck) -> None:
    """What a crash between a rename and the data leaves: the file has its size, and zeros."""
    with wreck.down():
        wreck.write(2, 0, bytes(PAGE_BYTES))
        wreck.write(4, PAGE_BYTES // 2, bytes(PAGE_BYTES // 2))
    wreck.check([2, 4])


@pytest.mark.parametrize("nbytes", [PAGE_BYTES // 2, 2 * PAGE_BYTES], ids=["short", "oversized"])
def test_an_object_of_another_size_under_the_key(wreck: Wreck, nbytes: int) -> None:
    with wreck.down():
        namespace = namespace_of(
            HostPool(wreck.host, "kv"), config(), EXTENTS, model="m", revision="r"
        )
        key = Key("default", namespace.digest, hashes_of(wreck.keys)[1])
        settings_ = disk_tier.Config(directory=str(wreck.folder), capacity="64MiB")
        tier = disk_tier.open(settings_)
        assert tier.contains([key]) == [True]
        tier.delete([key])
        tier.write(*FrameBuffer(nbytes).fill(key, nbytes))
        tier.close()
    wreck.check([1])


def test_a_set_over_a_damaged_page_serves_what_was_set(wreck: Wreck) -> None:
    with wreck.down():
        wreck.write(0, 0, bytes(64))
    with wreck.rank() as rank:
        assert rank.set(wreck.keys, range(PAGES)) == [True] * PAGES
        assert rank.get(wreck.keys, range(PAGES, 2 * PAGES)) == [True] * PAGES
        assert [wreck.host.page(n) for n in range(PAGES, 2 * PAGES)] == wreck.right
    with wreck.down():
        pass
    wreck.check([0])


class KillingCopies(Copies):
    """Kills the sidecar when the copies of one part of a batch are about to run."""

    def __init__(self, sidecar: ForkedSidecar, at: int) -> None:
        super().__init__(2)
        self._sidecar, self._left = sidecar, at

    def to_host(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        self._countdown()
        super().to_host(slots, pages)

    def to_slots(self, slots: Sequence[memoryview], pages: Sequence[Extents]) -> None:
        self._countdown()
        super().to_slots(slots, pages)

    def _countdown(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._sidecar.kill()


@pytest.mark.parametrize("verb", ["get", "set"])
def test_a_kill_in_the_middle_of_a_batch(tmp_path: Path, verb: str) -> None:
    """64 pages go in parts of 16 through a slab of 64; the sidecar dies in the second part."""
    sidecar = ForkedSidecar(tmp_path, {**slots(64), **disk(tmp_path / "disk", codec="identity")})
    host = HostMemory(128)
    host.fill(12)
    keys = keys_of("killed", 64)
    right = [host.page(number) for number in range(64)]
    untouched = [host.page(number) for number in range(64, 128)]
    namespace = Namespace(model="k", layers=2, kv_heads=2, head_dim=64, block_tokens=4)
    client = kvstore.connect(sidecar.socket, namespace)
    where = HostPool(host, "kv").extents
    healthy, killing = Copies(2), KillingCopies(sidecar, 2)
    shelf, dying = Shelf(client, healthy, GUARD), Shelf(client, killing, GUARD)
    if verb == "get":
        assert shelf.set(keys, where(host.indices(range(64)))) == [True] * 64
        flush(sidecar)
        got = dying.get(keys, where(host.indices(range(64, 128))))
        assert got[:16] == [True] * 16, "copied before"
        assert not all(got), "it died before the last part"
        for number, came in enumerate(got):
            expected = right[number] if came else untouched[number]
            assert host.page(64 + number) == expected, number
    else:
        kept = dying.set(keys, where(host.indices(range(64))))
        assert kept == [False] * 64, "nobody has confirmed them"
    assert shelf.run(keys) == 0, "no sidecar"
    sidecar.start()
    wait_until(lambda: client.connected, "the client is back by itself")
    if verb == "set":
        assert shelf.set(keys, where(host.indices(range(64)))) == [True] * 64
    assert shelf.run(keys) == 64
    assert shelf.get(keys, where(host.indices(range(64, 128)))) == [True] * 64
    assert [host.page(number) for number in range(64, 128)] == right
    assert client.stats()["outstanding"] == 0, "every ticket was handed back"
    shelf.close()
    healthy.close()
    killing.close()
    assert sidecar.stop() == 0


def test_no_sidecar_is_a_miss_until_there_is_one(tmp_path: Path) -> None:
    host = HostMemory(4)
    host.fill(13)
    keys = keys_of("absent", 2)
    with Rank(settings(str(tmp_path / "kv.sock")), host) as rank:
        assert rank.run(keys) == 0
        assert rank.set(keys, [0, 1]) == [False, False]
        assert rank.get(keys, [2, 3]) == [False, False]
        sidecar = ForkedSidecar(tmp_path, slots(64))
        wait_until(lambda: all(rank.set(keys, [0, 1])), "the sidecar is found")
        assert rank.get(keys, [2, 3]) == [True, True]
    assert sidecar.stop() == 0


def test_a_hung_sidecar_costs_a_call_no_more_than_its_deadline(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, slots(64))
    host = HostMemory(4)
    host.fill(14)
    keys = keys_of("hung", 2)
    short = {"base_ms": 50, "cap_ms": 200}
    with Rank(settings(sidecar.socket, deadline=short), host) as rank:
        wait_until(lambda: all(rank.set(keys, [0, 1])), "set")
        sidecar.suspend()
        was = host.page(2)
        try:
            assert rank.run(keys) == 2, "what it shows in memory is there as ever"
            for _ in range(3):
                assert rank.get(keys, [2, 3]) == [False, False]
                assert rank.set(keys, [0, 1]) == [False, False]
        finally:
            sidecar.resume()
        assert host.page(2) == was
        wait_until(lambda: all(rank.get(keys, [2, 3])), "it answers again")
        assert host.page(2) == host.page(0)
        wait_until(lambda: not tickets_out(sidecar), "what was late is handed back")
    assert sidecar.stop() == 0


def tickets_out(sidecar: ForkedSidecar) -> int:
    """Tickets that clients have not handed back."""
    clients = sidecar.stats()["service"]["clients"].values()
    return sum(client["tickets"] for client in clients)


def test_slots_that_others_hold_are_waited_for(tmp_path: Path) -> None:
    """Within the deadline; past it the batch is a miss, and nothing stays leased."""
    sidecar = ForkedSidecar(tmp_path, slots(8))
    host = HostMemory(8)
    host.fill(15)
    keys, greedy_keys = keys_of("full", 4), keys_of("greedy", 8)
    namespace = Namespace(model="g", layers=2, kv_heads=2, head_dim=64, block_tokens=4)
    greedy = kvstore.connect(sidecar.socket, namespace)
    save = greedy.save(hashes_of(greedy_keys))
    wait_until(lambda: greedy.poll(0.1) is not None and save.done, "granted")
    assert len(save.grants) == 8
    short = {"base_ms": 100, "cap_ms": 100}
    with Rank(settings(sidecar.socket, deadline=short), host) as rank:
        assert rank.set(keys, range(4)) == [False] * 4
    with Rank(settings(sidecar.socket), host) as rank:
        kept: list[list[bool]] = []
        thread = threading.Thread(target=lambda: kept.append(rank.set(keys, range(4))))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "it waits"
        greedy.release(save)
        thread.join(60)
        assert kept == [[True] * 4]
        assert rank.get(keys, range(4, 8)) == [True] * 4
    greedy.close()
    wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "nothing stays leased")
    assert sidecar.stop() == 0


def test_a_wrong_call_is_no_copy(tmp_path: Path) -> None:
    """Fewer token slots than pages, or a pool that is not there: refused before a byte moves."""
    sidecar = ForkedSidecar(tmp_path, slots(64))
    host = HostMemory(4)
    keys = keys_of("wrong", 2)
    with Rank(settings(sidecar.socket), host) as rank:
        calls: list[Callable[[], object]] = [
            lambda: rank.shelves.get_addressed("kv", keys, host.indices([0])),
            lambda: rank.shelves.set_addressed("kv", keys, None),
            lambda: rank.shelves.get_addressed("swa", keys, host.indices([0, 1])),
        ]
        for call in calls:
            with pytest.raises(AssertionError):
                call()
        assert rank.run(keys) == 0
    assert sidecar.stop() == 0
