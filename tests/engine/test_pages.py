"""The page pool counts references and rejects invalid calls."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.engine.pages import OutOfPages, PagePool


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_alloc_gives_distinct_pages_until_the_pool_is_empty() -> None:
    pool = PagePool(10)
    taken = np.concatenate([pool.alloc(4), pool.alloc(0), pool.alloc(6)])
    assert sorted(taken.tolist()) == list(range(10))
    assert taken.dtype == np.int32
    assert pool.free == 0
    with pytest.raises(OutOfPages, match="1 pages needed, 0 of 10 free"):
        pool.alloc(1)


def test_a_failed_alloc_takes_no_pages() -> None:
    pool = PagePool(3)
    with pytest.raises(OutOfPages):
        pool.alloc(4)
    assert pool.free == 3
    pool.check()


def test_a_page_is_free_after_its_last_reference() -> None:
    pool = PagePool(4)
    pages = pool.alloc(3)
    pool.add_ref(pages[:2])
    assert pool.drop_ref(pages) == 1
    assert pool.free == 2
    assert [pool.count(int(page)) for page in pages] == [1, 1, 0]
    assert pool.drop_ref(pages[:2]) == 2
    assert pool.free == 4
    pool.check()


@pytest.mark.parametrize("operation", ["add_ref", "drop_ref"])
def test_references_to_a_free_page_are_rejected(operation: str) -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.drop_ref(pages[:1])
    with pytest.raises(AssertionError, match=f"page {pages[0]} is free"):
        getattr(pool, operation)(pages)
    assert pool.count(int(pages[1])) == 1, "the call that failed changed nothing"
    pool.check()


@pytest.mark.parametrize("operation", ["add_ref", "drop_ref"])
def test_a_duplicate_page_in_one_call_is_rejected(operation: str) -> None:
    pool = PagePool(4)
    page = int(pool.alloc(1)[0])
    pool.add_ref(ids(page))
    with pytest.raises(AssertionError, match="twice"):
        getattr(pool, operation)(ids(page, page))
    assert pool.count(page) == 2, "the call that failed changed nothing"


def test_pages_outside_the_pool_are_rejected() -> None:
    pool = PagePool(4)
    pool.alloc(4)
    for pages in (ids(4), ids(0, 4), ids(-1, 0), ids(2_000_000_000)):
        with pytest.raises(IndexError):
            pool.drop_ref(pages)
    with pytest.raises(AssertionError, match="below 0"):
        pool.drop_ref(ids(-1))
    assert [pool.count(page) for page in range(4)] == [1] * 4


def test_allocated_ids_do_not_change_later() -> None:
    pool = PagePool(4)
    first = pool.alloc(2)
    given = first.tolist()
    pool.drop_ref(first)
    pool.alloc(4)
    assert first.tolist() == given
