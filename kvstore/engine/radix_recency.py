"""Nodes of the radix tree in the order in which they were last used.

A list linked through the nodes themselves: a path is moved to its young end with the deepest node
first, so a parent is always younger than its children and the old end is always a leaf. What moved
together stays together, so most of a path is one stretch of the list, and a stretch is moved as a
whole, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.engine.radix_node import Link, Node


class Recency:
    """Oldest to youngest. A node is in one such list at most; `in` asks whether it is in any."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        # Younger than the youngest and older than the oldest: the list is a ring.
        self._ends = Link()
        self._ends.older = self._ends.younger = self._ends

    def oldest(self) -> Node | None:
        """The least recent node, or None when there is none."""
        link = self._ends.younger
        return None if link is self._ends else link  # type: ignore[return-value]

    def add(self, node: Node) -> None:
        """Put a node that is in no list at the young end."""
        assert node.older is None, "a node in two orders"
        ends = self._ends
        last = ends.older
        node.older, node.younger = last, ends
        last.younger = ends.older = node  # type: ignore[union-attr]

    def remove(self, node: Node) -> None:
        """Take a node out."""
        older, younger = node.older, node.younger
        assert older is not None, "a node that is in no order"
        assert younger is not None, "half a node is in an order"
        older.younger, younger.older = younger, older
        node.older = node.younger = None

    def touch(self, path: list[Node]) -> None:
        """Move these nodes, a path given from its top and all in this list, to the young end."""
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
