"""Reference model of the radix cache: one entry per page-aligned prefix, every query a scan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.engine.radix import RadixCache
from kvstore.engine.radix_node import Node

Prefix = tuple[tuple[str, str], tuple[int, ...]]
"""A root and whole pages of tokens; identifies the last of these pages."""


def array(tokens: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, np.int32)


def nodes_of(cache: RadixCache) -> list[tuple[Prefix, Node]]:
    """Return every node with its prefix, parents first, from the tree's private fields."""
    found: list[tuple[Prefix, Node]] = [((name, ()), top) for name, top in cache._roots.items()]
    for (name, before), node in found:
        for child in node.children.values():
            edge = tuple(np.frombuffer(child.edge, np.int32).tolist())
            found.append(((name, before + edge), child))
    return found[len(cache._roots) :]


def contents(cache: RadixCache) -> tuple[dict[Prefix, int], set[Prefix]]:
    """Return (page of every prefix on the device, every prefix marked as stored)."""
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
    """Simple and slow: every page is a separate entry, every query is a scan."""

    page_tokens: int
    page: dict[Prefix, int] = field(default_factory=dict)
    touched: dict[Prefix, int] = field(default_factory=dict)
    stored: set[Prefix] = field(default_factory=set)
    locks: list[Prefix] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    now: int = 0

    def path(self, at: Prefix) -> list[Prefix]:
        """Return the whole-page prefixes of `at`, shortest first."""
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
        """Return the least recent unlocked page without a following page on the device."""
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
