"""Single cases of the radix cache's contract."""

from __future__ import annotations

import numpy as np
import pytest
from radix_reference import array, nodes_of

from kvstore.engine.pages import PagePool
from kvstore.engine.radix import NO_ROOT, RadixCache
from kvstore.engine.radix_check import check_tree
from kvstore.engine.radix_node import Node


class Tree:
    """A cache with its pool, filled as finished prompts would fill it."""

    def __init__(self, page_tokens: int = 1, pages: int = 100, **limits: int) -> None:
        self.pool = PagePool(pages)
        self.cache = RadixCache(self.pool, page_tokens, **limits)

    def put(self, tokens: list[int], root: tuple[str, str] = NO_ROOT) -> Node:
        pages = self.pool.alloc(len(tokens) // self.cache.page_tokens)
        node = self.cache.insert(array(tokens), pages, root).node
        self.pool.drop_ref(pages)
        return node

    def hit(self, tokens: list[int], root: tuple[str, str] = NO_ROOT) -> int:
        return self.cache.match(array(tokens), root).tokens


def test_divergence_inside_a_page_gives_two_children_with_a_common_start() -> None:
    tree = Tree(page_tokens=4)
    tree.put([1, 2, 3, 4, 5, 6, 7, 8])
    tree.put([1, 2, 3, 4, 5, 6, 9, 9])
    assert tree.hit([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert tree.hit([1, 2, 3, 4, 5, 6, 9, 9]) == 8
    assert tree.hit([1, 2, 3, 4, 5, 6, 7, 9]) == 4
    assert tree.hit([1, 2, 3]) == 0
    assert tree.cache.device_pages == 3
    check_tree(tree.cache)


def test_roots_share_nothing_and_are_removed_when_empty() -> None:
    tree = Tree(pages=10)
    for number in range(100):
        root = ("", f"salt {number}")
        assert tree.hit([1, 2, 3], root) == 0
        if tree.pool.free < 3:
            assert tree.cache.evict(3) == 3
        tree.put([1, 2, 3], root)
        assert tree.hit([1, 2, 3], root) == 3
    assert len(tree.cache._roots) == 3
    check_tree(tree.cache)


def test_an_absent_root_can_be_locked_until_the_prompt_is_inserted() -> None:
    tree = Tree()
    first = tree.cache.match(array([1, 2]), ("a", ""))
    tree.cache.lock(first.node)
    node = tree.put([1, 2], ("a", ""))
    tree.cache.lock(node)
    tree.cache.unlock(first.node)
    assert tree.cache.evict(2) == 0
    tree.cache.unlock(node)
    assert tree.cache.evict(2) == 2
    check_tree(tree.cache)


def test_a_lock_keeps_only_its_own_tokens_through_a_split() -> None:
    tree = Tree()
    node = tree.put([1, 2, 3, 4])
    tree.cache.lock(node)
    tree.put([1, 2, 9])
    tree.put([1, 2, 3, 4, 5])
    assert tree.cache.evictable_pages == 2
    assert tree.cache.evict(9) == 2
    assert tree.hit([1, 2, 3, 4, 5]) == 4
    tree.cache.unlock(node)
    assert tree.cache.evict(9) == 4


def test_locks_are_counted() -> None:
    tree = Tree()
    node = tree.put([1, 2])
    tree.cache.lock(node)
    tree.cache.lock(node)
    tree.cache.unlock(node)
    assert tree.cache.evictable_pages == 0
    tree.cache.unlock(node)
    assert tree.cache.evictable_pages == 2
    with pytest.raises(AssertionError, match="more often than locked"):
        tree.cache.unlock(node)


def test_a_node_locked_twice_is_unlocked_whole_after_a_split() -> None:
    tree = Tree()
    node = tree.put([1, 2, 3, 4])
    tree.cache.lock(node)
    tree.cache.lock(node)
    tree.hit([1, 2])
    tree.cache.unlock(node)
    assert tree.cache.evictable_pages == 0
    tree.cache.unlock(node)
    assert tree.cache.evict(4) == 4


def test_a_node_without_pages_cannot_be_locked() -> None:
    tree = Tree()
    node = tree.put([1, 2])
    tree.cache.evict(2)
    with pytest.raises(AssertionError, match="left the device"):
        tree.cache.lock(node)


def test_eviction_takes_the_oldest_branch_from_its_end() -> None:
    tree = Tree()
    for branch in (1, 2, 3):
        tree.put([0, branch, 7, 7])
    tree.hit([0, 1, 7, 7])
    tree.hit([0, 2])
    assert tree.cache.evict(1) == 1
    assert [tree.hit([0, branch, 7, 7]) for branch in (3, 1, 2)] == [4, 4, 3]
    assert tree.cache.evict(4) == 4, "all of branch 3, then the end of branch 1"
    assert [tree.hit([0, branch, 7, 7]) for branch in (1, 2, 3)] == [3, 3, 1]


def test_locked_leaves_are_examined_once_not_at_every_eviction() -> None:
    tree = Tree(pages=400)
    locked = [tree.put([number, number]) for number in range(100)]
    for node in locked:
        tree.cache.lock(node)
    tree.put(list(range(1000, 1100)))
    tree.cache.evict(1)
    assert len(tree.cache._device_order) == 1
    for node in locked:
        tree.cache.unlock(node)
    assert tree.cache.evict(99) == 99, "unlock counts as use: the other node is evicted first"
    assert all(tree.hit([number, number]) == 2 for number in range(100))


def test_use_below_a_locked_node_refreshes_its_recency() -> None:
    tree = Tree()
    locked = tree.put([1])
    tree.cache.lock(locked)
    tree.put([1, 2])
    tree.put([1, 3])
    tree.hit([1, 2])
    assert tree.cache.evict(1) == 1
    assert [tree.hit([1, end]) for end in (2, 3)] == [2, 1]
    tree.cache.unlock(locked)


def test_a_page_with_other_references_is_evicted_but_not_counted() -> None:
    tree = Tree(pages=6)
    pages = tree.pool.alloc(3)
    tree.cache.insert(array([1, 2, 3]), pages)
    tree.put([4])
    assert tree.cache.evict(1) == 1
    assert tree.cache.device_pages == 0
    assert tree.pool.free == 3
    tree.pool.drop_ref(pages)
    assert tree.pool.free == 6


def test_a_stored_node_stays_without_pages_and_takes_new_ones() -> None:
    tree = Tree(page_tokens=2)
    prompt = [1, 2, 3, 4, 5, 6]
    tree.put(prompt)
    tree.cache.mark_stored(array(prompt), NO_ROOT, 5)
    assert tree.cache.evict(3) == 3
    found = tree.cache.match(array(prompt))
    assert (found.tokens, found.stored_tokens) == (0, 4)
    pages = tree.pool.alloc(1)
    done = tree.cache.insert(array([1, 2]), pages)
    assert done.matched_tokens == 0
    found = tree.cache.match(array(prompt))
    assert (found.tokens, found.stored_tokens) == (2, 4)
    assert found.pages.tolist() == pages.tolist()
    tree.cache.forget_stored(array(prompt), NO_ROOT, 3)
    assert tree.cache.match(array(prompt)).stored_tokens == 2
    check_tree(tree.cache)


def test_a_leaf_evicted_page_by_page_leaves_one_stored_only_node() -> None:
    tree = Tree()
    tree.put(list(range(50)))
    tree.cache.mark_stored(array(range(50)), NO_ROOT, 50)
    for _ in range(49):
        assert tree.cache.evict(1) == 1
    assert [node.tokens for _, node in nodes_of(tree.cache)] == [1, 49]
    assert tree.cache.match(array(range(50))).stored_tokens == 50
    check_tree(tree.cache)


def test_a_stored_tail_above_several_children_keeps_them() -> None:
    tree = Tree()
    for end in (8, 9):
        tree.put([1, 2, 3, end])
        tree.cache.mark_stored(array([1, 2, 3, end]), NO_ROOT, 4)
    assert tree.cache.evict(2 + 1) == 3
    for end in (8, 9):
        found = tree.cache.match(array([1, 2, 3, end]))
        assert (found.tokens, found.stored_tokens) == (2, 4)
    assert tree.cache.stored_only_tokens == 3
    check_tree(tree.cache)


def test_the_oldest_stored_only_tokens_are_dropped_first() -> None:
    tree = Tree(max_stored_tokens=6)
    for branch in (1, 2, 3):
        prompt = array([branch, 5, 5])
        tree.put(prompt.tolist())
        tree.cache.mark_stored(prompt, NO_ROOT, 3)
    tree.cache.evict(6)
    tree.cache.match(array([1, 5, 5]))
    tree.cache.evict(2)
    lengths = [tree.cache.match(array([b, 5, 5])).stored_tokens for b in (1, 2, 3)]
    assert lengths == [3, 1, 3], "2 was the oldest and lost two tokens from its end"
    assert tree.cache.stored_only_tokens == 6
    check_tree(tree.cache)


def test_a_stored_only_tail_is_refreshed_by_every_page_it_gains() -> None:
    tree = Tree(max_stored_tokens=2)
    for branch in (1, 2):
        tree.put([branch, 5, 5])
        tree.cache.mark_stored(array([branch, 5, 5]), NO_ROOT, 3)
    tree.cache.evict(1)
    tree.hit([1, 5])
    tree.cache.evict(1)
    tree.hit([2, 5])
    tree.cache.evict(1)
    lengths = [tree.cache.match(array([b, 5, 5])).stored_tokens for b in (1, 2)]
    assert lengths == [3, 2], "1 lost a page last"


def test_forget_stored_needs_a_prompt_that_reaches_the_lost_page() -> None:
    tree = Tree()
    prompt = array([1, 2, 3, 4])
    tree.put(prompt.tolist())
    tree.cache.mark_stored(prompt, NO_ROOT, 4)
    tree.cache.forget_stored(array([1, 2, 9, 4]), NO_ROOT, 3)
    tree.cache.forget_stored(array([1, 2]), NO_ROOT, 2)
    tree.cache.evict(4)
    assert tree.cache.match(prompt).stored_tokens == 4
    tree.cache.forget_stored(array([1, 2, 3, 9]), NO_ROOT, 2)
    assert tree.cache.match(prompt).stored_tokens == 2


def test_a_prompt_inserted_in_pieces_merges_after_its_last_unlock() -> None:
    tree = Tree(page_tokens=2)
    prompt = list(range(40))
    node = tree.put(prompt[:2])
    tree.cache.lock(node)
    for end in range(4, 41, 2):
        longer = tree.put(prompt[:end])
        tree.cache.lock(longer)
        tree.cache.unlock(node)
        node = longer
    assert [part.tokens for _, part in nodes_of(tree.cache)] == [2] * 20, "no piece was copied"
    tree.cache.unlock(node)
    assert [part.tokens for _, part in nodes_of(tree.cache)] == [40]
    assert tree.hit(prompt) == 40
    check_tree(tree.cache)


def test_merging_stops_where_paths_part_and_where_one_is_locked() -> None:
    tree = Tree()
    other = tree.put([1])
    tree.cache.lock(other)
    tree.put([1, 2, 3])
    tree.put([1, 2, 8])
    node = tree.put([1, 2, 3, 4])
    tree.cache.lock(node)
    tree.cache.unlock(node)
    assert sorted(part.tokens for _, part in nodes_of(tree.cache)) == [1, 1, 1, 2]
    tree.cache.unlock(other)
    check_tree(tree.cache)


def test_clear_keeps_what_is_locked() -> None:
    tree = Tree()
    node = tree.put([1, 2])
    tree.cache.lock(node)
    tree.put([1, 2, 3])
    tree.put([4], ("", "salt"))
    tree.cache.mark_stored(array([1, 2, 3]), NO_ROOT, 3)
    tree.cache.clear()
    assert repr(tree.cache) == "RadixCache(2 pages, 2 locked, 0/16777216 tokens stored only)"
    assert tree.hit([1, 2, 3]) == 2
    tree.cache.unlock(node)
    tree.cache.clear()
    assert not tree.cache._roots
    assert tree.pool.free == 100


def test_the_cache_does_not_change_the_callers_arrays() -> None:
    tree = Tree()
    tree.put([1, 2, 3])
    found = tree.cache.match(array([1, 2, 3]))
    kept = found.pages.tolist()
    found.pages[:] = -1
    assert found.pages.tolist() == [-1] * 3
    assert tree.cache.match(array([1, 2, 3])).pages.tolist() == kept


def test_partial_pages_and_other_dtypes_fail_an_assertion() -> None:
    tree = Tree(page_tokens=4)
    with pytest.raises(AssertionError, match="partial page"):
        tree.cache.insert(array([1, 2, 3]), array([0]))
    with pytest.raises(AssertionError, match="2 pages, 4 tokens"):
        tree.cache.insert(array([1, 2, 3, 4]), array([0, 1]))
    with pytest.raises(AssertionError, match="int64"):
        tree.cache.match(np.arange(4))
