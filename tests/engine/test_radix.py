"""The radix cache against a reference with one entry per page-aligned prefix."""

from __future__ import annotations

import numpy as np
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
from radix_reference import Prefix, Reference, array, contents

from kvstore.engine.pages import PagePool
from kvstore.engine.radix import RadixCache
from kvstore.engine.radix_check import check_tree
from kvstore.engine.radix_node import Node

POOL_PAGES = 24
ROOTS = [("", ""), ("adapter", ""), ("", "salt")]

# Pages as tokens: 0 to 2 agree in all but their last token, 3 differs from the first on.
# Most prompts are prefixes of a few long ones, so that paths are shared, split and revisited.
LONG = [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 0, 2, 0, 3, 0, 0], [3, 0, 0, 0, 0, 0, 0]]
page_kinds = st.one_of(
    st.builds(lambda kinds, end: kinds[:end], st.sampled_from(LONG), st.integers(0, 7)),
    st.lists(st.integers(0, 3), max_size=7),
)

places = st.tuples(st.integers(0, 8), st.integers(0, 15))
"""A position in a prompt: whole pages and remaining tokens."""


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
            self.pool.drop_ref(pages)
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

    @rule(lock=consumes(locked))
    def unlock(self, lock: tuple[Node, Prefix]) -> None:
        self.cache.unlock(lock[0])
        self.plain.unlock(lock[1])

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
        self.pool.drop_ref(array(self.plain.outside))
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
        lock = self.plain.locked()
        self.plain.page = {p: page for p, page in self.plain.page.items() if p in lock}

    def settle_bound(self) -> None:
        """Above the bound, stored-only pages are dropped: no more than needed, never inside a run.

        `test_radix_cases` tests the order.
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
        check_tree(self.cache)


RadixMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRadixMachine = RadixMachine.TestCase
