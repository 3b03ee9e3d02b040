"""The radix cache against a plain reference that keeps one entry per page-aligned prefix."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvstore.engine.pages import PagePool
from kvstore.engine.radix import NO_ROOT, RadixCache
from kvstore.engine.radix_node import Node

POOL_PAGES = 24
ROOTS = [("", ""), ("adapter", ""), ("", "salt")]
Prefix = tuple[tuple[str, str], tuple[int, ...]]
"""A root and whole pages of tokens: names the last of these pages."""


def array(tokens: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, np.int32)


def nodes_of(cache: RadixCache) -> list[tuple[Prefix, Node]]:
    """Every node with the prefix it ends at, parents first; read from the tree's insides."""
    found: list[tuple[Prefix, Node]] = [((name, ()), top) for name, top in cache._roots.items()]
    for (name, before), node in found:
        for child in node.children.values():
            edge = tuple(np.frombuffer(child.edge, np.int32).tolist())
            found.append(((name, before + edge), child))
    return found[len(cache._roots) :]


def contents(cache: RadixCache) -> tuple[dict[Prefix, int], set[Prefix]]:
    """(page of every prefix on the device, every prefix marked as stored)."""
    on_device: dict[Prefix, int] = {}
    stored: set[Prefix] = set()
    for (name, tokens), node in nodes_of(cache):
        start, size = len(tokens) - node.tokens, cache.page_tokens
        ends = range(start + size, len(tokens) + 1, size)
        if node.pages is not None:
            page_ids = np.frombuffer(node.pages, np.int32).tolist()
            on_device.update(
                {(name, tokens[:end]): page for end, page in zip(ends, page_ids, strict=True)}
            )
        kept = start + node.stored_bytes // 4
        stored.update((name, tokens[:end]) for end in ends if end <= kept)
    return on_device, stored


@dataclass
class Reference:
    """Obviously right, and slow: every page is an entry of its own, every question a scan."""

    page_tokens: int
    page: dict[Prefix, int] = field(default_factory=dict)
    touched: dict[Prefix, int] = field(default_factory=dict)
    stored: set[Prefix] = field(default_factory=set)
    locks: list[Prefix] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    now: int = 0

    def path(self, at: Prefix) -> list[Prefix]:
        """The whole-page prefixes of `at`, shortest first."""
        name, tokens = at
        size = self.page_tokens
        return [(name, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def touch(self, prefixes: list[Prefix]) -> None:
        self.now += 1
        self.touched.update(dict.fromkeys(prefixes, self.now))

    def on_device(self, at: Prefix) -> list[Prefix]:
        return [prefix for prefix in self.path(at) if prefix in self.page]

    def match(self, at: Prefix) -> tuple[list[int], int]:
        hit = self.on_device(at)
        self.touch(hit)
        known = [prefix for prefix in self.path(at) if prefix in self.page or prefix in self.stored]
        return [self.page[prefix] for prefix in hit], len(known) * self.page_tokens

    def insert(self, at: Prefix, pages: list[int]) -> int:
        matched = len(self.on_device(at))
        for prefix, page in zip(self.path(at), pages, strict=True):
            self.page.setdefault(prefix, page)
        self.touch(self.path(at))
        return matched * self.page_tokens

    def locked(self) -> set[Prefix]:
        return {prefix for at in self.locks for prefix in self.path(at)}

    def unlock(self, at: Prefix) -> None:
        self.locks.remove(at)
        self.touch([prefix for prefix in self.path(at) if prefix not in self.locked()])

    def victim(self) -> Prefix | None:
        """The least recent page that nobody locks and that no page on the device continues."""
        size = self.page_tokens
        inner = {(name, tokens[:-size]) for name, tokens in self.page}
        leaves = self.page.keys() - inner - self.locked()
        return min(leaves, key=self.touched.__getitem__, default=None)

    def evict(self, pages: int) -> int:
        freed = 0
        while freed < pages and (prefix := self.victim()) is not None:
            freed += self.page.pop(prefix) not in self.outside
        return freed

    def mark_stored(self, at: Prefix, tokens_stored: int) -> None:
        here = [p for p in self.path(at) if len(p[1]) <= tokens_stored]
        self.stored |= {p for p in here if p in self.page}

    def forget_stored(self, at: Prefix, from_token: int) -> None:
        lost = (from_token // self.page_tokens + 1) * self.page_tokens
        name, tokens = at
        if lost <= len(tokens):
            self.stored = {p for p in self.stored if p[0] != name or p[1][:lost] != tokens[:lost]}

    def stored_only(self) -> set[Prefix]:
        return self.stored - self.page.keys()


# Pages as tokens: 0 to 2 agree in all but their last token, 3 differs from the first on.
# Most prompts are cut from a few long ones, so that paths are shared, split and met again.
LONG = [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 0, 2, 0, 3, 0, 0], [3, 0, 0, 0, 0, 0, 0]]
page_kinds = st.one_of(
    st.builds(lambda kinds, end: kinds[:end], st.sampled_from(LONG), st.integers(0, 7)),
    st.lists(st.integers(0, 3), max_size=7),
)

places = st.tuples(st.integers(0, 8), st.integers(0, 15))
"""Somewhere in a prompt: pages, and tokens more."""


class RadixMachine(RuleBasedStateMachine):
    locked = Bundle("locked")

    @initialize(page_tokens=st.sampled_from([1, 3, 4, 16]), bound_pages=st.sampled_from([0, 5, 99]))
    def start(self, page_tokens: int, bound_pages: int) -> None:
        self.size = page_tokens
        self.pool = PagePool(POOL_PAGES)
        self.bound = bound_pages * page_tokens
        self.cache = RadixCache(self.pool, page_tokens, max_stored_tokens=self.bound)
        self.plain = Reference(page_tokens)

    def tokens(self, kinds: list[int]) -> tuple[int, ...]:
        ends = {kind: (9,) * (self.size - 1) + (kind,) for kind in range(3)}
        ends[3] = (7,) * self.size
        return tuple(token for kind in kinds for token in ends[kind])

    def token_at(self, place: tuple[int, int]) -> int:
        return place[0] * self.size + place[1] % self.size

    @rule(
        target=locked,
        root=st.sampled_from(ROOTS),
        kinds=page_kinds,
        keep=st.booleans(),
        lock=st.booleans(),
    )
    def insert(self, root: tuple[str, str], kinds: list[int], keep: bool, lock: bool):
        at = (root, self.tokens(kinds))
        if self.pool.free < len(kinds):
            self.evict(len(kinds) - self.pool.free)
        if self.pool.free < len(kinds):
            return multiple()
        pages = self.pool.alloc(len(kinds))
        done = self.cache.insert(array(at[1]), pages, root)
        assert done.matched_tokens == self.plain.insert(at, pages.tolist())
        if keep:
            self.plain.outside += pages.tolist()
        else:
            self.pool.drop(pages)
        return self.lock(done.node, at) if lock else multiple()

    def lock(self, node: Node, at: Prefix) -> tuple[Node, Prefix]:
        self.cache.lock(node)
        self.plain.locks.append(at)
        return node, at

    @rule(
        target=locked,
        root=st.sampled_from(ROOTS),
        kinds=page_kinds,
        extra=st.integers(0, 15),
        lock=st.booleans(),
    )
    def match(self, root: tuple[str, str], kinds: list[int], extra: int, lock: bool):
        tokens = self.tokens(kinds) + (9,) * (extra % self.size)
        found = self.cache.match(array(tokens), root)
        pages, known = self.plain.match((root, tokens))
        assert found.pages.tolist() == pages
        assert found.pages.dtype == np.int32
        assert found.tokens == len(pages) * self.size
        assert found.stored_tokens == known
        at = (root, tokens[: found.tokens])
        return self.lock(found.node, at) if lock else multiple()

    @rule(held=consumes(locked))
    def unlock(self, held: tuple[Node, Prefix]) -> None:
        self.cache.unlock(held[0])
        self.plain.unlock(held[1])

    @rule(pages=st.integers(0, 9))
    def evict(self, pages: int) -> None:
        free = self.pool.free
        freed = self.cache.evict(pages)
        assert freed == self.plain.evict(pages)
        assert self.pool.free == free + freed
        self.settle_bound()

    @rule()
    def let_go(self) -> None:
        """The engine's own references end, as when saves are done."""
        self.pool.drop(array(self.plain.outside))
        self.plain.outside = []

    @rule(root=st.sampled_from(ROOTS), kinds=page_kinds, place=places)
    def mark_stored(self, root: tuple[str, str], kinds: list[int], place: tuple[int, int]) -> None:
        tokens, stored = self.tokens(kinds), self.token_at(place)
        self.cache.mark_stored(array(tokens), root, stored)
        self.plain.mark_stored((root, tokens), stored)

    @rule(root=st.sampled_from(ROOTS), kinds=page_kinds, place=places)
    def forget_stored(
        self, root: tuple[str, str], kinds: list[int], place: tuple[int, int]
    ) -> None:
        tokens, first = self.tokens(kinds), self.token_at(place)
        self.cache.forget_stored(array(tokens), root, first)
        self.plain.forget_stored((root, tokens), first)

    @rule(sure=st.integers(0, 5))
    def clear(self, sure: int) -> None:
        if sure:
            return
        self.cache.clear()
        self.plain.stored = set()
        held = self.plain.locked()
        self.plain.page = {p: page for p, page in self.plain.page.items() if p in held}

    def settle_bound(self) -> None:
        """Past the bound stored-only pages go: no more than must, and never the middle of a run.

        Which are the oldest is `test_the_oldest_stored_only_tokens_are_dropped_first`.
        """
        _, stored = contents(self.cache)
        over = len(self.plain.stored_only()) - self.bound // self.size
        gone = self.plain.stored - stored
        assert len(gone) == max(0, over)
        assert gone <= self.plain.stored_only()
        self.plain.stored = {p for p in self.plain.stored if p not in gone}

    @invariant()
    def equal(self) -> None:
        on_device, stored = contents(self.cache)
        assert on_device == self.plain.page
        assert stored == self.plain.stored
        assert self.cache.device_pages == len(on_device)
        assert self.cache.evictable_pages == len(on_device) - len(self.plain.locked())
        assert self.cache.stored_only_tokens == len(self.plain.stored_only()) * self.size
        for page in range(POOL_PAGES):
            holders = list(on_device.values()).count(page) + self.plain.outside.count(page)
            assert self.pool.count(page) == holders
        assert self.pool.free == sum(self.pool.count(page) == 0 for page in range(POOL_PAGES))
        self.cache.check()


RadixMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRadixMachine = RadixMachine.TestCase


# ---- what the machine does not say in so many words ----


class Tree:
    """A cache with its pool, filled by what prompts would leave behind."""

    def __init__(self, page_tokens: int = 1, pages: int = 100, **limits: int) -> None:
        self.pool = PagePool(pages)
        self.cache = RadixCache(self.pool, page_tokens, **limits)

    def put(self, tokens: list[int], root: tuple[str, str] = NO_ROOT) -> Node:
        pages = self.pool.alloc(len(tokens) // self.cache.page_tokens)
        node = self.cache.insert(array(tokens), pages, root).node
        self.pool.drop(pages)
        return node

    def hit(self, tokens: list[int], root: tuple[str, str] = NO_ROOT) -> int:
        return self.cache.match(array(tokens), root).tokens


def test_divergence_inside_a_page_gives_two_children_with_a_common_beginning() -> None:
    tree = Tree(page_tokens=4)
    tree.put([1, 2, 3, 4, 5, 6, 7, 8])
    tree.put([1, 2, 3, 4, 5, 6, 9, 9])
    assert tree.hit([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert tree.hit([1, 2, 3, 4, 5, 6, 9, 9]) == 8
    assert tree.hit([1, 2, 3, 4, 5, 6, 7, 9]) == 4
    assert tree.hit([1, 2, 3]) == 0
    assert tree.cache.device_pages == 3
    tree.cache.check()


def test_roots_do_not_meet_and_leave_nothing_behind() -> None:
    tree = Tree(pages=10)
    for number in range(100):
        root = ("", f"salt {number}")
        assert tree.hit([1, 2, 3], root) == 0
        if tree.pool.free < 3:
            assert tree.cache.evict(3) == 3
        tree.put([1, 2, 3], root)
        assert tree.hit([1, 2, 3], root) == 3
    assert len(tree.cache._roots) == 3
    tree.cache.check()


def test_a_missed_root_can_be_locked_until_the_prompt_is_there() -> None:
    tree = Tree()
    first = tree.cache.match(array([1, 2]), ("a", ""))
    tree.cache.lock(first.node)
    node = tree.put([1, 2], ("a", ""))
    tree.cache.lock(node)
    tree.cache.unlock(first.node)
    assert tree.cache.evict(2) == 0
    tree.cache.unlock(node)
    assert tree.cache.evict(2) == 2
    tree.cache.check()


def test_a_lock_keeps_its_tokens_through_a_split_and_no_others() -> None:
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


def test_locks_count_and_end_once() -> None:
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


def test_a_node_that_left_the_device_is_not_locked() -> None:
    tree = Tree()
    node = tree.put([1, 2])
    tree.cache.evict(2)
    with pytest.raises(AssertionError, match="left the device"):
        tree.cache.lock(node)


def test_eviction_goes_by_recency_and_from_the_end() -> None:
    tree = Tree()
    for branch in (1, 2, 3):
        tree.put([0, branch, 7, 7])
    tree.hit([0, 1, 7, 7])
    tree.hit([0, 2])
    assert tree.cache.evict(1) == 1
    assert [tree.hit([0, branch, 7, 7]) for branch in (3, 1, 2)] == [4, 4, 3]
    assert tree.cache.evict(4) == 4, "all of branch 3, then the end of branch 1"
    assert [tree.hit([0, branch, 7, 7]) for branch in (1, 2, 3)] == [3, 3, 1]


def test_locked_leaves_are_looked_at_once_not_at_every_eviction() -> None:
    tree = Tree(pages=400)
    held = [tree.put([number, number]) for number in range(100)]
    for node in held:
        tree.cache.lock(node)
    tree.put(list(range(1000, 1100)))
    tree.cache.evict(1)
    assert len(tree.cache._device_order) == 1
    for node in held:
        tree.cache.unlock(node)
    assert tree.cache.evict(99) == 99, "unlocking was the last use: the other goes first"
    assert all(tree.hit([number, number]) == 2 for number in range(100))


def test_a_page_held_by_others_is_let_go_but_not_counted() -> None:
    tree = Tree(pages=6)
    pages = tree.pool.alloc(3)
    tree.cache.insert(array([1, 2, 3]), pages)
    tree.put([4])
    assert tree.cache.evict(1) == 1
    assert tree.cache.device_pages == 0
    assert tree.pool.free == 3
    tree.pool.drop(pages)
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
    tree.cache.check()


def test_a_leaf_evicted_page_by_page_leaves_one_stored_only_node() -> None:
    tree = Tree()
    tree.put(list(range(50)))
    tree.cache.mark_stored(array(range(50)), NO_ROOT, 50)
    for _ in range(49):
        assert tree.cache.evict(1) == 1
    assert [node.tokens for _, node in nodes_of(tree.cache)] == [1, 49]
    assert tree.cache.match(array(range(50))).stored_tokens == 50
    tree.cache.check()


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
    tree.cache.check()


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
    tree.cache.check()


def test_a_stored_only_tail_grows_young_with_every_page_it_gains() -> None:
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


def test_forgetting_needs_a_prompt_that_reaches_the_lost_page() -> None:
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


def test_a_prompt_inserted_in_pieces_is_one_node_once_nobody_runs_it() -> None:
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
    tree.cache.check()


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
    tree.cache.check()


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


def test_the_callers_pages_are_the_callers_own() -> None:
    tree = Tree()
    tree.put([1, 2, 3])
    found = tree.cache.match(array([1, 2, 3]))
    kept = found.pages.tolist()
    found.pages[:] = -1
    assert tree.cache.match(array([1, 2, 3])).pages.tolist() == kept


def test_what_is_not_whole_pages_of_int32_is_our_own_mistake() -> None:
    tree = Tree(page_tokens=4)
    with pytest.raises(AssertionError, match="not whole pages"):
        tree.cache.insert(array([1, 2, 3]), array([0]))
    with pytest.raises(AssertionError, match="2 pages, 4 tokens"):
        tree.cache.insert(array([1, 2, 3, 4]), array([0, 1]))
    with pytest.raises(AssertionError, match="int64"):
        tree.cache.match(np.arange(4))
