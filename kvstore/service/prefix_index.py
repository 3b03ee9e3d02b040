"""Which prefixes clients ask for, as chains of blocks: what the dashboard shows of the cache.

The store knows blocks by key and not what follows what; the runs that clients ask for tell it.
Connections hand runs over without waiting (`asked`), a background thread takes them in (`digest`).
Both the waiting runs and the blocks remembered are bounded: under much load this is a sample, and
the blocks asked for longest ago are forgotten first. Nothing here decides anything.
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
"""Blocks remembered."""
MAX_RUN: Final = 4096
"""Blocks taken of one run, from its front."""
MAX_WAITING: Final = 128
"""Runs that wait to be taken in; more are counted and left out."""


class Node:
    """A block that was asked for. asks: runs it stood in."""

    __slots__ = ("asks", "children", "key", "parent")

    def __init__(self, key: Key, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.asks = 0


@dataclass
class Chain:
    """Blocks that follow each other and were asked for equally often, and what branches off.

    keys: first to last. depth: blocks before the first. more: chains below that were left out.
    """

    keys: list[Key]
    depth: int
    asks: int
    children: list[Chain] = field(default_factory=list)
    more: int = 0


class PrefixIndex:
    """See the module's text."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._waiting: deque[tuple[str, str, Sequence[bytes]]] = deque()
        self._lock = threading.Lock()
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        """Least recently asked for first. Who asks for a block asks for all before it, and those
        are moved after it: the first is always a leaf."""
        self._runs = 0
        self._skipped = 0

    def asked(self, tenant: str, namespace: str, hashes: Sequence[bytes]) -> None:
        """A client asks for a run. From any thread; returns at once."""
        if len(self._waiting) < MAX_WAITING:
            # What waits is kept no longer than what is taken of it.
            front = hashes if len(hashes) <= MAX_RUN else hashes[:MAX_RUN]
            self._waiting.append((tenant, namespace, front))
        else:
            self._skipped += 1  # a statistic: two threads may lose a step

    def digest(self) -> None:
        """Take in what was asked for. From one thread."""
        for _ in range(len(self._waiting)):
            tenant, namespace, hashes = self._waiting.popleft()
            with self._lock:
                self._runs += 1
                self._take(tenant, namespace, hashes)

    def counts(self) -> dict[str, int]:
        """blocks remembered, runs taken in, runs skipped."""
        with self._lock:
            return {"blocks": len(self._nodes), "runs": self._runs, "skipped": self._skipped}

    def run_to(self, key: Key) -> list[bytes]:
        """Hashes of the run that ends with this block; empty when it is not known."""
        with self._lock:
            node = self._nodes.get(key)
            names = [each.key.hash for each in _upwards(node)]
        return names[::-1]

    def tree(self, most: int, may_see: Callable[[str], bool]) -> tuple[list[Chain], int]:
        """The hottest chains, at most so many, as trees, the hottest first; trees left out.

        may_see: whether a tenant's are wanted. Heat is blocks times asks; a chain is shown only
        below its parent.
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

    def _take(self, tenant: str, namespace: str, hashes: Sequence[bytes]) -> None:
        parent: Node | None = None
        run: list[Node] = []
        for name in hashes:
            key = Key(tenant, namespace, name)
            node = self._nodes.get(key)
            new = node is None
            if node is None:
                node = self._nodes[key] = Node(key, None)
            if node.parent is None and parent is not None and (new or not _is_above(node, parent)):
                # New, or met before in a run that began with it: now its place is known.
                node.parent = parent
                parent.children[name] = node
            node.asks += 1
            run.append(node)
            parent = node
        for node in reversed(run):
            self._nodes.move_to_end(node.key)
        if run:
            for node in _upwards(run[0].parent):
                self._nodes.move_to_end(node.key)
        while len(self._nodes) > self._max_blocks:
            self._forget(next(iter(self._nodes.values())))

    def _forget(self, node: Node) -> None:
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
    """Whether `other` hangs below `node`: hashes that a client made up can follow in a circle."""
    return any(each is node for each in _upwards(other))


def _chain_of(first: Node, depth: int) -> tuple[Chain, list[Node]]:
    """The chain that begins with a block, and the blocks that follow its end."""
    keys, node = [first.key], first
    while len(node.children) == 1:
        [child] = node.children.values()
        if child.asks != first.asks:
            break
        keys.append(child.key)
        node = child
    return Chain(keys, depth, first.asks), list(node.children.values())


def _heat(chain: Chain) -> int:
    return len(chain.keys) * chain.asks
