"""Nodes of the radix tree in order of last use.

The list is linked through the nodes themselves. A path is moved to the young end with the deepest
node first. So a parent is always younger than its children, and the oldest node is always a leaf.
Nodes that move together stay adjacent, so most of a path is one stretch of the list. A stretch is
moved in one operation, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.engine.radix_node import LRULink, Node


class Recency:
    """A list from oldest to youngest. A node is in at most one list; `in` tests for any list."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        # The list is a ring: this link is between the youngest and the oldest node.
        self._ends = LRULink()
        self._ends.older = self._ends.younger = self._ends

    def oldest(self) -> Node | None:
        """Return the least recent node, or None if the list is empty."""
        link = self._ends.younger
        return None if link is self._ends else link  # type: ignore[return-value]

    def add(self, node: Node) -> None:
        """Add a node, which must be in no list, at the young end."""
        assert node.older is None, "a node in two lists"
        ends = self._ends
        last = ends.older
        node.older, node.younger = last, ends
        last.younger = ends.older = node  # type: ignore[union-attr]

    def remove(self, node: Node) -> None:
        """Remove a node."""
        older, younger = node.older, node.younger
        assert older is not None, "a node in no list"
        assert younger is not None, "a node with only one neighbour"
        older.younger, younger.older = younger, older
        node.older = node.younger = None

    def touch(self, path: list[Node]) -> None:
        """Move a path, given from its top and all in this list, to the young end."""
        ends = self._ends
        at = len(path) - 1
        while at >= 0:
            first = last = path[at]
            at -= 1
            while at >= 0 and last.younger is path[at]:
                last = path[at]
                at -= 1
            before, after = first.older, last.younger
            before.younger, after.older = after, before  # type: ignore[union-attr]
            youngest = ends.older
            youngest.younger, first.older = first, youngest  # type: ignore[union-attr]
            last.younger, ends.older = ends, last

    def __contains__(self, node: Node) -> bool:
        return node.older is not None

    def __iter__(self) -> Iterator[Node]:
        link = self._ends.younger
        while link is not self._ends:
            assert isinstance(link, Node)
            yield link
            link = link.younger

    def __len__(self) -> int:
        return sum(1 for _ in self)
