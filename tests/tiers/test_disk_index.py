"""The disk tier's index, packed and in memory."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.testing.frames import key_of
from kvstore.tiers.disk.index import Entries, Index, pack_location, unpack_location


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "ü"]),
            st.sampled_from(["n", "m"]),
            st.binary(min_size=1, max_size=64),
        ),
        max_size=30,
        unique=True,
    ),
    st.integers(0, 4095),
)
@settings(deadline=None)
def test_packed_entries_come_back(rows: list[tuple[str, str, bytes]], slot: int) -> None:
    entries = Entries()
    for number, row in enumerate(rows):
        entries.add(Key(*row), 1 + number * 9, 9)
    back = Entries.unpack(entries.pack())
    assert list(back) == list(entries)
    assert [unpack_location(place) for place in back.locations(slot)] == [
        (slot, page, pages) for _, page, pages in entries
    ]


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_noise_is_no_index(noise: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError):
        Entries.unpack(noise)


def test_the_index_forgets_only_what_still_lies_there() -> None:
    index = Index()
    index.put(key_of(1), pack_location(0, 1, 2))
    index.put(key_of(1), pack_location(1, 5, 2))
    assert not index.remove(key_of(1), pack_location(0, 1, 2))
    assert len(index) == 1
    assert index.remove(key_of(1), pack_location(1, 5, 2))
    assert len(index) == 0
    assert key_of(1) not in index


def test_a_run_and_mixed_keys_are_looked_up_alike() -> None:
    index = Index()
    keys = [key_of(number, tenant=tenant) for number in range(5) for tenant in ("a", "b")]
    for key in keys[:7]:
        index.put(key, pack_location(0, 1, 2))
    for asked in ([], keys, keys[::2], keys[1::2], [key_of(0, tenant="c")], keys[6:8]):
        assert index.contains_each(asked) == [key in index for key in asked]
    assert index.contains_each(keys) == [True] * 7 + [False] * 3
