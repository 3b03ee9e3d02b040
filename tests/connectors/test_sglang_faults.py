"""Faults of the SGLang backend: corrupt pages are misses that the next set repairs. A sidecar that
is missing, killed, hung or full costs hits, but never returns wrong bytes and never raises."""

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
from kvstore.connectors.sglang.page_pool import PagePool, hashes_of
from kvstore.connectors.sglang.settings import MaxWaitSettings
from kvstore.testing.frames import FrameBuffer
from kvstore.tiers import disk as disk_tier

PAGES = 6
GUARD = MaxWaitSettings(base=60_000, max=60_000)
WRECKED = b"\xa5"


class Wreck:
    """A sidecar's disk tier with pages that are corrupted while the sidecar is down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self.sidecar = ForkedSidecar(folder, {**slots(64), **disk(self.folder, codec="none")})
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
        """Run the body while the sidecar is down. L2 is empty afterwards."""
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

    def check(self, corrupt: Sequence[int]) -> None:
        """Only these pages are misses, and no byte of them is copied to the host pool. The next set
        repairs them permanently."""
        right = [number not in corrupt for number in range(PAGES)]
        targets = range(PAGES, 2 * PAGES)
        with self.rank() as rank:
            for target in targets:
                self.host.overwrite(target, WRECKED * PAGE_BYTES)
            assert rank.get(self.keys, targets) == right
            for number, target in enumerate(targets):
                expected = self.right[number] if right[number] else WRECKED * PAGE_BYTES
                assert self.host.page(target) == expected, number
            assert rank.cached_prefix_len(self.keys) == min(corrupt), "deleted when it was found"
            assert rank.set(self.keys, range(PAGES)) == [True] * PAGES
            flush(self.sidecar)
        with self.down():
            pass
        with self.rank() as rank:
            assert rank.cached_prefix_len(self.keys) == PAGES
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
        lost = [number for number in range(PAGES) if _is_after(wreck, number, path, at)]
    wreck.check(lost)


def _is_after(wreck: Wreck, number: int, path: Path, at: int) -> bool:
    try:
        where, begins = wreck.find(number)
    except AssertionError:
        return True
    return where == path and begins >= at


def test_a_name_without_its_data(wreck: Wreck) -> None:
    """After a crash between a rename and the data, the file has its size, but only zeros."""
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


def test_a_set_over_a_corrupt_page_repairs_it(wreck: Wreck) -> None:
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


@pytest.mark.parametrize("call", ["get", "set"])
def test_a_kill_in_the_middle_of_a_batch(tmp_path: Path, call: str) -> None:
    """64 pages go in parts of 16 through a slab of 64; the sidecar dies in the second part."""
    sidecar = ForkedSidecar(tmp_path, {**slots(64), **disk(tmp_path / "disk", codec="none")})
    host = HostMemory(128)
    host.fill(12)
    keys = keys_of("killed", 64)
    right = [host.page(number) for number in range(64)]
    untouched = [host.page(number) for number in range(64, 128)]
    namespace = Namespace(model="k", layers=2, kv_heads=2, head_dim=64, block_tokens=4)
    client = kvstore.connect(sidecar.socket, namespace)
    extents = HostPool(host, "kv").extents
    healthy, killing = Copies(2), KillingCopies(sidecar, 2)
    pool, dying = PagePool(client, healthy, GUARD), PagePool(client, killing, GUARD)
    if call == "get":
        assert pool.set(keys, extents(host.indices(range(64)))) == [True] * 64
        flush(sidecar)
        got = dying.get(keys, extents(host.indices(range(64, 128))))
        assert got[:16] == [True] * 16, "copied before"
        assert not all(got), "it died before the last part"
        for number, is_loaded in enumerate(got):
            expected = right[number] if is_loaded else untouched[number]
            assert host.page(64 + number) == expected, number
    else:
        stored = dying.set(keys, extents(host.indices(range(64))))
        assert stored == [False] * 64, "the sidecar has not confirmed them"
    assert pool.cached_prefix_len(keys) == 0, "no sidecar"
    sidecar.start()
    wait_until(lambda: client.connected, "the client has reconnected")
    if call == "set":
        assert pool.set(keys, extents(host.indices(range(64)))) == [True] * 64
    assert pool.cached_prefix_len(keys) == 64
    assert pool.get(keys, extents(host.indices(range(64, 128)))) == [True] * 64
    assert [host.page(number) for number in range(64, 128)] == right
    assert client.stats()["open_operations"] == 0, "every operation was released"
    pool.close()
    healthy.close()
    killing.close()
    assert sidecar.stop() == 0


def test_no_sidecar_is_a_miss_until_there_is_one(tmp_path: Path) -> None:
    host = HostMemory(4)
    host.fill(13)
    keys = keys_of("absent", 2)
    with Rank(settings(str(tmp_path / "kv.sock")), host) as rank:
        assert rank.cached_prefix_len(keys) == 0
        assert rank.set(keys, [0, 1]) == [False, False]
        assert rank.get(keys, [2, 3]) == [False, False]
        sidecar = ForkedSidecar(tmp_path, slots(64))
        wait_until(lambda: all(rank.set(keys, [0, 1])), "the sidecar is found")
        assert rank.get(keys, [2, 3]) == [True, True]
    assert sidecar.stop() == 0


def test_a_hung_sidecar_costs_a_call_no_more_than_its_maximum_wait(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, slots(64))
    host = HostMemory(4)
    host.fill(14)
    keys = keys_of("hung", 2)
    short = {"base": 50, "max": 200}
    with Rank(settings(sidecar.socket, max_wait=short), host) as rank:
        wait_until(lambda: all(rank.set(keys, [0, 1])), "set")
        sidecar.suspend()
        was = host.page(2)
        try:
            assert rank.cached_prefix_len(keys) == 2, "the shared index is still readable"
            for _ in range(3):
                assert rank.get(keys, [2, 3]) == [False, False]
                assert rank.set(keys, [0, 1]) == [False, False]
        finally:
            sidecar.resume()
        assert host.page(2) == was
        wait_until(lambda: all(rank.get(keys, [2, 3])), "it answers again")
        assert host.page(2) == host.page(0)
        wait_until(lambda: not operations_in_flight(sidecar), "late operations are released")
    assert sidecar.stop() == 0


def operations_in_flight(sidecar: ForkedSidecar) -> int:
    """Operations that clients have not released."""
    clients = sidecar.stats()["service"]["clients"].values()
    return sum(client["operations_in_flight"] for client in clients)


def test_a_batch_waits_for_leased_slots(tmp_path: Path) -> None:
    """It waits up to max_wait. After that the batch is a miss, and nothing stays leased."""
    sidecar = ForkedSidecar(tmp_path, slots(8))
    host = HostMemory(8)
    host.fill(15)
    keys, greedy_keys = keys_of("full", 4), keys_of("greedy", 8)
    namespace = Namespace(model="g", layers=2, kv_heads=2, head_dim=64, block_tokens=4)
    greedy = kvstore.connect(sidecar.socket, namespace)
    save = greedy.save(hashes_of(greedy_keys))
    wait_until(lambda: greedy.poll(0.1) is not None and save.done, "slots assigned")
    assert len(save.slot_assignments) == 8
    short = {"base": 100, "max": 100}
    with Rank(settings(sidecar.socket, max_wait=short), host) as rank:
        assert rank.set(keys, range(4)) == [False] * 4
    with Rank(settings(sidecar.socket), host) as rank:
        stored: list[list[bool]] = []
        thread = threading.Thread(target=lambda: stored.append(rank.set(keys, range(4))))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "it waits"
        greedy.release(save)
        thread.join(60)
        assert stored == [[True] * 4]
        assert rank.get(keys, range(4, 8)) == [True] * 4
    greedy.close()
    wait_until(lambda: sidecar.stats()["l2"]["slots_leased"] == 0, "nothing stays leased")
    assert sidecar.stop() == 0


def test_an_invalid_call_copies_nothing(tmp_path: Path) -> None:
    """Too few token slots, or an unknown pool: rejected before any byte is copied."""
    sidecar = ForkedSidecar(tmp_path, slots(64))
    host = HostMemory(4)
    keys = keys_of("wrong", 2)
    with Rank(settings(sidecar.socket), host) as rank:
        calls: list[Callable[[], object]] = [
            lambda: rank.page_pools.get_addressed("kv", keys, host.indices([0])),
            lambda: rank.page_pools.set_addressed("kv", keys, None),
            lambda: rank.page_pools.get_addressed("swa", keys, host.indices([0, 1])),
        ]
        for call in calls:
            with pytest.raises(AssertionError):
                call()
        assert rank.cached_prefix_len(keys) == 0
    assert sidecar.stop() == 0
