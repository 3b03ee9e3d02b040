"""The prefixes that clients look up, as chains of blocks; the dashboard shows them.

The store knows blocks by key, but not their order in a prompt. The lookups give the order.
Connections queue lookups without waiting (`record_lookup`), and a background thread processes them
(`process_lookups`). The queue and the number of blocks are bounded. So under heavy load this is a
sample, and the least recently looked-up blocks are dropped first. Nothing depends on it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.blocks.key import Key

MAX_BLOCKS: Final = 16_384
"""Maximum number of blocks."""
MAX_PREFIX_BLOCKS: Final = 4096
"""Maximum number of blocks of one lookup, from its front."""
MAX_WAITING: Final = 128
"""Maximum number of queued lookups; more are dropped and counted."""


class Node:
    """A block that was looked up. lookups: number of lookups that contained it."""

    __slots__ = ("children", "key", "lookups", "parent")

    def __init__(self, key: Key, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lookups = 0


@dataclass
class Chain:
    """Consecutive blocks with the same number of lookups, and the chains that follow.

    keys: first to last. depth: blocks before the first. more: following chains that were left out.
    """

    keys: list[Key]
    depth: int
    lookups: int
    children: list[Chain] = field(default_factory=list)
    more: int = 0


class PrefixIndex:
    """A tree of the blocks looked up; see the module's docstring."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._waiting: deque[tuple[str, str, Sequence[bytes]]] = deque()
        self._lock = threading.Lock()
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        """Least recently looked up first. A lookup of a block contains all blocks before it, and
        those are moved after it. So the first node is always a leaf."""
        self._lookups = 0
        self._dropped = 0

    def record_lookup(self, tenant: str, namespace: str, hashes: Sequence[bytes]) -> None:
        """Queue a client's lookup. From any thread; returns at once."""
        if len(self._waiting) < MAX_WAITING:
            # A queued lookup keeps only the blocks that will be processed.
            front = hashes if len(hashes) <= MAX_PREFIX_BLOCKS else hashes[:MAX_PREFIX_BLOCKS]
            self._waiting.append((tenant, namespace, front))
        else:
            self._dropped += 1  # a statistic: two threads may lose an increment

    def process_lookups(self) -> None:
        """Process the queued lookups. From one thread."""
        for _ in range(len(self._waiting)):
            tenant, namespace, hashes = self._waiting.popleft()
            with self._lock:
                self._lookups += 1
                self._add(tenant, namespace, hashes)

    def counts(self) -> dict[str, int]:
        """Number of blocks, of lookups processed, and of lookups dropped."""
        with self._lock:
            return {
                "blocks": len(self._nodes),
                "lookups": self._lookups,
                "dropped": self._dropped,
            }

    def prefix_to(self, key: Key) -> list[bytes]:
        """The hashes of the prefix that ends with this block; empty if the block is unknown."""
        with self._lock:
            node = self._nodes.get(key)
            names = [each.key.hash for each in _upwards(node)]
        return names[::-1]

    def tree(self, most: int, may_see: Callable[[str], bool]) -> tuple[list[Chain], int]:
        """At most `most` of the hottest chains as trees, hottest first; number of trees left out.

        may_see: whether to include a tenant's chains. Heat is blocks times lookups. A chain is
        shown only below its parent.
        """
        with self._lock:
            roots = [
                node
                for node in self._nodes.values()
                if node.parent is None and may_see(node.key.tenant)
            ]
            order = itertools.count()
            waiting: list[tuple[int, int, Chain, list[Node], Chain | None]] = []
            shown: list[Chain] = []
            for node in roots:
                chain, ends = _chain_of(node, 0)
                heapq.heappush(waiting, (-_heat(chain), next(order), chain, ends, None))
            left, trees_more = most, 0
            while waiting:
                _, _, chain, ends, parent = heapq.heappop(waiting)
                if not left:
                    if parent is None:
                        trees_more += 1
                    else:
                        parent.more += 1
                    continue
                left -= 1
                (shown if parent is None else parent.children).append(chain)
                for child in ends:
                    below, further = _chain_of(child, chain.depth + len(chain.keys))
                    heapq.heappush(waiting, (-_heat(below), next(order), below, further, chain))
            return shown, trees_more

    def _add(self, tenant: str, namespace: str, hashes: Sequence[bytes]) -> None:
        parent: Node | None = None
        prefix: list[Node] = []
        for name in hashes:
            key = Key(tenant, namespace, name)
            node = self._nodes.get(key)
            new = node is None
            if node is None:
                node = self._nodes[key] = Node(key, None)
            if node.parent is None and parent is not None and (new or not _is_above(node, parent)):
                # A new node, or one whose earlier lookups began with it: now its place is known.
                node.parent = parent
                parent.children[name] = node
            node.lookups += 1
            prefix.append(node)
            parent = node
        for node in reversed(prefix):
            self._nodes.move_to_end(node.key)
        if prefix:
            for node in _upwards(prefix[0].parent):
                self._nodes.move_to_end(node.key)
        while len(self._nodes) > self._max_blocks:
            self._remove(next(iter(self._nodes.values())))

    def _remove(self, node: Node) -> None:
        del self._nodes[node.key]
        if node.parent is not None:
            del node.parent.children[node.key.hash]
        for child in node.children.values():
            child.parent = None


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _is_above(node: Node, other: Node) -> bool:
    """Whether `other` is below `node`: hashes invented by a client can form a cycle."""
    return any(each is node for each in _upwards(other))


def _chain_of(first: Node, depth: int) -> tuple[Chain, list[Node]]:
    """The chain that begins with a node, and the nodes that follow its end."""
    keys, node = [first.key], first
    while len(node.children) == 1:
        [child] = node.children.values()
        if child.lookups != first.lookups:
            break
        keys.append(child.key)
        node = child
    return Chain(keys, depth, first.lookups), list(node.children.values())


def _heat(chain: Chain) -> int:
    return len(chain.keys) * chain.lookups
