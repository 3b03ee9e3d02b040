"""The shared index, compared with plain sets: every answer of it is true."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.errors import ConfigError
from kvstore.shm import shared_index as index_module
from kvstore.shm.shared_index import BUCKET_MARKS, SEED_BYTES, SharedIndex, SharedIndexView

SPACES = (("a", "n1"), ("a", "n2"), ("b", "n1"))
MIB = 1 << 20


@pytest.fixture
def index() -> Iterator[SharedIndex]:
    shared_index = SharedIndex(64, 64, MIB)
    yield shared_index
    shared_index.close()


def view_of(index: SharedIndex, tenant: str = "a", namespace: str = "n1") -> SharedIndexView:
    return SharedIndexView(index.fd, index.seed(tenant, namespace))


def name(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def key(number: int, tenant: str = "a", namespace: str = "n1") -> Key:
    return Key(tenant, namespace, name(number))


def nothing() -> None:
    """Insert no READY blocks: there is no slab."""


def test_inserted_blocks_are_a_prefix_until_one_is_removed(index: SharedIndex) -> None:
    view = view_of(index)
    names = [name(n) for n in range(10)]
    assert view.cached_prefix_len(names) == view.cached_prefix_len([]) == 0
    for n in range(8):
        index.insert(key(n))
    assert (
        view.cached_prefix_len(names),
        view.cached_prefix_len(names[:8]),
        view.cached_prefix_len(names[3:5]),
    ) == (8, 8, 2)
    index.insert(key(2))
    index.remove(key(2))
    assert view.cached_prefix_len(names) == 2, "two inserts count once"
    index.remove(key(2))
    assert (
        view_of(index, "b").cached_prefix_len(names)
        == view_of(index, "a", "n2").cached_prefix_len(names)
        == 0
    )


def test_no_block_is_absent_before_the_first_rebuild(index: SharedIndex) -> None:
    view = view_of(index)
    assert not view.is_absent(name(1))
    index.rebuild_filter(nothing, [key(2)])
    assert view.is_absent(name(1))
    assert not view.is_absent(name(2))
    assert view_of(index, "b").is_absent(name(2))
    index.insert(key(1))
    assert not view.is_absent(name(1))
    index.remove(key(1))
    assert not view.is_absent(name(1)), "it may be in a tier"


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "remove", "write", "delete", "rebuild"]),
        st.integers(0, 11),
        st.sampled_from(SPACES),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_every_answer_is_true(steps: Sequence[tuple[str, int, tuple[str, str]]]) -> None:
    """Compared with the set of blocks in L2 and the set of blocks in a tier."""
    index = SharedIndex(64, 64, MIB)
    views = {space: view_of(index, *space) for space in SPACES}
    l2: set[Key] = set()
    tier: set[Key] = set()
    certain = False

    def list_l2() -> None:
        for each in l2:
            index.insert(each)

    for what, number, space in steps:
        block = key(number, *space)
        if what == "insert":
            l2.add(block)
            index.insert(block)
        elif what == "remove" and block in l2:
            l2.remove(block)
            index.remove(block)
        elif what == "write":
            tier |= {block} & l2
        elif what == "delete":
            tier.discard(block)
        elif what == "rebuild":
            index.rebuild_filter(list_l2, sorted(tier))
            certain = True
        view = views[space]
        for n in range(12):
            cached = key(n, *space) in l2 | tier
            assert not (cached and view.is_absent(name(n)))
            assert view.cached_prefix_len([name(n)]) == (key(n, *space) in l2)
    if certain:
        assert (
            sum(view.is_absent(name(n)) for view in views.values() for n in range(100, 200)) > 290
        )
    index.close()


def test_a_ninth_block_of_a_bucket_gets_no_mark(index: SharedIndex) -> None:
    view = view_of(index)
    index.rebuild_filter(nothing, ())
    crowd = [struct.pack("<4Q", n, 7, 0, 0) for n in range(BUCKET_MARKS + 1)]
    for each in crowd:
        index.insert(Key("a", "n1", each))
    shown = [view.cached_prefix_len([each]) for each in crowd]
    assert shown == [1] * BUCKET_MARKS + [0]
    assert not view.is_absent(crowd[BUCKET_MARKS])
    index.remove(Key("a", "n1", crowd[BUCKET_MARKS]))
    index.remove(Key("a", "n1", crowd[0]))
    assert [view.cached_prefix_len([each]) for each in crowd] == [0] + [1] * (BUCKET_MARKS - 1) + [
        0
    ]


@pytest.mark.parametrize("sizes", [[5], [8], [16], [20], [64], [33, 31], [1, 64]])
def test_hashes_of_any_length(index: SharedIndex, sizes: list[int]) -> None:
    view = view_of(index)
    names = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    index.rebuild_filter(nothing, ())
    assert all(view.is_absent(each) for each in names)
    for at, each in enumerate(names):
        assert view.cached_prefix_len(names) == at
        index.insert(Key("a", "n1", each))
    assert view.cached_prefix_len(names) == len(names)


def test_a_full_filter_is_reported_and_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "MIN_CELLS", 256)
    index = SharedIndex(8, 0, 512)
    assert index.cells == 256
    calls: list[int] = []
    index.on_filter_full = lambda: calls.append(1)
    view = view_of(index)
    index.rebuild_filter(nothing, ())
    for n in range(31):
        index.insert(key(n))
        index.remove(key(n))
    assert not calls
    for n in range(31, 60):
        index.insert(key(n))
        index.remove(key(n))
    assert len(calls) == 2, "one call per 16 more blocks once it is full"
    index.rebuild_filter(nothing, [key(59)])
    assert not view.is_absent(name(59))
    assert sum(view.is_absent(name(n)) for n in range(59)) > 50, "removed blocks are absent again"
    index.close()


def test_a_block_inserted_during_a_rebuild_is_in_the_new_filter(index: SharedIndex) -> None:
    view = view_of(index)
    index.rebuild_filter(nothing, ())

    def tier_keys() -> Iterator[Key]:
        for n in range(100):
            index.insert(key(1000 + n))
            index.remove(key(1000 + n))
            assert not view.is_absent(name(1000 + n)), "the valid filter has it too"
            yield key(n)

    index.rebuild_filter(nothing, tier_keys())
    assert not any(view.is_absent(name(n)) for n in (*range(100), *range(1000, 1100)))


def test_a_failed_rebuild_keeps_the_old_filter(index: SharedIndex) -> None:
    view = view_of(index)
    index.rebuild_filter(nothing, [key(1)])

    def broken() -> Iterator[Key]:
        yield key(2)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        index.rebuild_filter(nothing, broken())
    assert view.is_absent(name(2))
    index.insert(key(3))
    assert not view.is_absent(name(1))
    assert not view.is_absent(name(3))


def test_readers_see_complete_marks_during_changes(index: SharedIndex) -> None:
    view = view_of(index)
    steady = [name(n) for n in range(16)]
    for n in range(16):
        index.insert(key(n))
    index.rebuild_filter(lambda: [index.insert(key(n)) for n in range(16)] and None, ())
    stop = threading.Event()

    def churn() -> None:
        n = 100
        while not stop.is_set():
            index.insert(key(n))
            index.remove(key(n))
            n += 1

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        for _ in range(2000):
            assert view.cached_prefix_len(steady) == 16
            assert not view.is_absent(steady[3])
    finally:
        stop.set()
        writer.join()


def test_clients_cannot_write_to_the_index(index: SharedIndex) -> None:
    kernel = tuple(map(int, os.uname().release.split(".")[:2]))
    if kernel < (5, 1):
        pytest.skip("a kernel before 5.1 cannot seal a file against later mappings")
    with pytest.raises(PermissionError):
        mmap.mmap(index.fd, index.nbytes)
    with pytest.raises(PermissionError):
        os.ftruncate(index.fd, 0)


def test_an_invalid_file_is_rejected(index: SharedIndex) -> None:
    with pytest.raises(ConfigError, match="seed of 3"):
        SharedIndexView(index.fd, b"abc")
    fd = os.memfd_create("other")
    seed = bytes(SEED_BYTES)
    try:
        with pytest.raises(ConfigError, match="of 0 bytes"):
            SharedIndexView(fd, seed)
        os.ftruncate(fd, 8192)
        with pytest.raises(ConfigError, match="not a shared index"):
            SharedIndexView(fd, seed)
        os.pwrite(fd, struct.pack("<8sQQ", b"KVCATLG1", 1 << 20, 1 << 16), 0)
        with pytest.raises(ConfigError, match="not a shared index"):
            SharedIndexView(fd, seed)
    finally:
        os.close(fd)


def test_no_block_is_absent_in_a_closed_index() -> None:
    index = SharedIndex(8, 8, MIB)
    view = view_of(index)
    index.rebuild_filter(nothing, ())
    assert view.is_absent(name(1))
    index.close()
    assert not view.is_absent(name(1))
    index.remove(key(1))
    index.insert(key(1))
