"""The catalogue against plain sets: what it shows is there, what it says is nowhere is nowhere."""

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
from kvstore.shm import shared_index as catalog_module
from kvstore.shm.shared_index import SALT_BYTES, WAYS, Catalog, CatalogView

SPACES = (("a", "n1"), ("a", "n2"), ("b", "n1"))
MIB = 1 << 20


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    made = Catalog(64, 64, MIB)
    yield made
    made.close()


def view_of(catalog: Catalog, tenant: str = "a", namespace: str = "n1") -> CatalogView:
    return CatalogView(catalog.fd, catalog.salt(tenant, namespace))


def name(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def key(number: int, tenant: str = "a", namespace: str = "n1") -> Key:
    return Key(tenant, namespace, name(number))


def nothing() -> None:
    """There is no slab whose blocks could be listed."""


def test_what_is_shown_is_a_run_until_it_is_taken_off(catalog: Catalog) -> None:
    view = view_of(catalog)
    names = [name(n) for n in range(10)]
    assert view.run(names) == view.run([]) == 0
    for n in range(8):
        catalog.show(key(n))
    assert (view.run(names), view.run(names[:8]), view.run(names[3:5])) == (8, 8, 2)
    catalog.show(key(2))
    catalog.take_off(key(2))
    assert view.run(names) == 2, "shown twice is shown once"
    catalog.take_off(key(2))
    assert view_of(catalog, "b").run(names) == view_of(catalog, "a", "n2").run(names) == 0


def test_nothing_is_absent_before_the_first_listing(catalog: Catalog) -> None:
    view = view_of(catalog)
    assert not view.absent(name(1))
    catalog.renew(nothing, [key(2)])
    assert view.absent(name(1))
    assert not view.absent(name(2))
    assert view_of(catalog, "b").absent(name(2))
    catalog.show(key(1))
    assert not view.absent(name(1))
    catalog.take_off(key(1))
    assert not view.absent(name(1)), "it may lie in a tier"


operations = st.lists(
    st.tuples(
        st.sampled_from(["show", "off", "spill", "forget", "renew"]),
        st.integers(0, 11),
        st.sampled_from(SPACES),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_it_tells_no_lies(steps: Sequence[tuple[str, int, tuple[str, str]]]) -> None:
    """Against a set of what L2 holds and one of what a tier holds."""
    catalog = Catalog(64, 64, MIB)
    views = {space: view_of(catalog, *space) for space in SPACES}
    l2: set[Key] = set()
    tier: set[Key] = set()
    certain = False

    def list_l2() -> None:
        for each in l2:
            catalog.show(each)

    for what, number, space in steps:
        block = key(number, *space)
        if what == "show":
            l2.add(block)
            catalog.show(block)
        elif what == "off" and block in l2:
            l2.remove(block)
            catalog.take_off(block)
        elif what == "spill":
            tier |= {block} & l2
        elif what == "forget":
            tier.discard(block)
        elif what == "renew":
            catalog.renew(list_l2, sorted(tier))
            certain = True
        view = views[space]
        for n in range(12):
            held = key(n, *space) in l2 | tier
            assert not (held and view.absent(name(n)))
            assert view.run([name(n)]) == (key(n, *space) in l2)
    if certain:
        assert sum(view.absent(name(n)) for view in views.values() for n in range(100, 200)) > 290
    catalog.close()


def test_a_ninth_block_of_a_bucket_is_asked_for(catalog: Catalog) -> None:
    view = view_of(catalog)
    catalog.renew(nothing, ())
    crowd = [struct.pack("<4Q", n, 7, 0, 0) for n in range(WAYS + 1)]
    for each in crowd:
        catalog.show(Key("a", "n1", each))
    shown = [view.run([each]) for each in crowd]
    assert shown == [1] * WAYS + [0]
    assert not view.absent(crowd[WAYS])
    catalog.take_off(Key("a", "n1", crowd[WAYS]))
    catalog.take_off(Key("a", "n1", crowd[0]))
    assert [view.run([each]) for each in crowd] == [0] + [1] * (WAYS - 1) + [0]


@pytest.mark.parametrize("sizes", [[5], [8], [16], [20], [64], [33, 31], [1, 64]])
def test_hashes_of_any_length(catalog: Catalog, sizes: list[int]) -> None:
    view = view_of(catalog)
    names = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    catalog.renew(nothing, ())
    assert all(view.absent(each) for each in names)
    for at, each in enumerate(names):
        assert view.run(names) == at
        catalog.show(Key("a", "n1", each))
    assert view.run(names) == len(names)


def test_a_crowded_filter_is_called_out_and_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog_module, "CELLS_LEAST", 256)
    catalog = Catalog(8, 0, 512)
    assert catalog.cells == 256
    told: list[int] = []
    catalog.crowded = lambda: told.append(1)
    view = view_of(catalog)
    catalog.renew(nothing, ())
    for n in range(31):
        catalog.show(key(n))
        catalog.take_off(key(n))
    assert not told
    for n in range(31, 60):
        catalog.show(key(n))
        catalog.take_off(key(n))
    assert len(told) == 2, "each sixteen more once it is crowded"
    catalog.renew(nothing, [key(59)])
    assert not view.absent(name(59))
    assert sum(view.absent(name(n)) for n in range(59)) > 50, "what went is forgotten"
    catalog.close()


def test_what_comes_while_it_is_made_anew_is_in_it(catalog: Catalog) -> None:
    view = view_of(catalog)
    catalog.renew(nothing, ())

    def below() -> Iterator[Key]:
        for n in range(100):
            catalog.show(key(1000 + n))
            catalog.take_off(key(1000 + n))
            assert not view.absent(name(1000 + n)), "the filter in force knows it too"
            yield key(n)

    catalog.renew(nothing, below())
    assert not any(view.absent(name(n)) for n in (*range(100), *range(1000, 1100)))


def test_a_listing_that_fails_leaves_the_old_filter_in_force(catalog: Catalog) -> None:
    view = view_of(catalog)
    catalog.renew(nothing, [key(1)])

    def broken() -> Iterator[Key]:
        yield key(2)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        catalog.renew(nothing, broken())
    assert view.absent(name(2))
    catalog.show(key(3))
    assert not view.absent(name(1))
    assert not view.absent(name(3))


def test_readers_see_whole_marks_while_others_come_and_go(catalog: Catalog) -> None:
    view = view_of(catalog)
    steady = [name(n) for n in range(16)]
    for n in range(16):
        catalog.show(key(n))
    catalog.renew(lambda: [catalog.show(key(n)) for n in range(16)] and None, ())
    stop = threading.Event()

    def churn() -> None:
        n = 100
        while not stop.is_set():
            catalog.show(key(n))
            catalog.take_off(key(n))
            n += 1

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        for _ in range(2000):
            assert view.run(steady) == 16
            assert not view.absent(steady[3])
    finally:
        stop.set()
        writer.join()


def test_clients_cannot_write_to_it(catalog: Catalog) -> None:
    kernel = tuple(map(int, os.uname().release.split(".")[:2]))
    if kernel < (5, 1):
        pytest.skip("a kernel before 5.1 cannot seal a file against later mappings")
    with pytest.raises(PermissionError):
        mmap.mmap(catalog.fd, catalog.nbytes)
    with pytest.raises(PermissionError):
        os.ftruncate(catalog.fd, 0)


def test_a_file_that_is_none(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="salt of 3"):
        CatalogView(catalog.fd, b"abc")
    fd = os.memfd_create("other")
    salt = bytes(SALT_BYTES)
    try:
        with pytest.raises(ConfigError, match="of 0 bytes"):
            CatalogView(fd, salt)
        os.ftruncate(fd, 8192)
        with pytest.raises(ConfigError, match="that is none"):
            CatalogView(fd, salt)
        os.pwrite(fd, struct.pack("<8sQQ", b"KVCATLG1", 1 << 20, 1 << 16), 0)
        with pytest.raises(ConfigError, match="that is none"):
            CatalogView(fd, salt)
    finally:
        os.close(fd)


def test_a_closed_one_is_certain_of_nothing() -> None:
    catalog = Catalog(8, 8, MIB)
    view = view_of(catalog)
    catalog.renew(nothing, ())
    assert view.absent(name(1))
    catalog.close()
    assert not view.absent(name(1))
    catalog.take_off(key(1))
    catalog.show(key(1))
