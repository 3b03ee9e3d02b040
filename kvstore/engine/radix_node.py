"""One edge of the radix tree, with the operations that need no other part of the tree.

Token ids and page ids are stored as raw bytes of int32 arrays. Comparing an edge with a prompt is
one memcmp (`bytes.startswith` at an offset, no copy). A child is found by one dict lookup of the
bytes of its first page. A token takes 4 bytes, a page 4 more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 4
PAGE_ID_BYTES = 4
NO_PAGES = b""


class LRULink:
    """A position in a recency list (`radix_recency`): its older and its younger neighbour."""

    __slots__ = ("older", "younger")

    older: LRULink | None
    younger: LRULink | None


class Node(LRULink):
    """A sequence of whole pages below `parent`. A root has no parent and an empty edge.

    edge: token ids, int32 as bytes. Empty only in a root.
    pages: page ids of the edge, int32 as bytes, one per page. None: the KV is not on the device.
        The node is then stored-only: a lower tier is believed to have its whole edge.
    children: by the bytes of the tokens of their first page. Two children can share a token prefix
        that is shorter than a page.
    locks: its own locks plus the number of locked children. Locked if above zero.
    stored_bytes: bytes of the edge that a lower tier is believed to have.
    """

    __slots__ = ("children", "edge", "locks", "pages", "parent", "stored_bytes")

    def __init__(
        self, parent: Node | None, edge: bytes, pages: bytes | None, stored_bytes: int = 0
    ) -> None:
        self.older = self.younger = None
        self.parent = parent
        self.edge = edge
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.stored_bytes = stored_bytes

    @property
    def tokens(self) -> int:
        """Length of the edge in tokens."""
        return len(self.edge) // TOKEN_BYTES

    def split(self, at: int, key_bytes: int) -> Node:
        """Split the edge after `at` bytes. Returns the new upper part; this node is the lower.

        If the lower part is locked, the upper part counts it as one locked child.
        """
        assert self.parent is not None
        assert 0 < at < len(self.edge), f"a split at {at} of {len(self.edge)} bytes"
        upper = Node(self.parent, self.edge[:at], None, min(self.stored_bytes, at))
        if self.pages is not None:
            ids_at = at // key_bytes * PAGE_ID_BYTES
            upper.pages, self.pages = self.pages[:ids_at], self.pages[ids_at:]
        upper.locks = 1 if self.locks else 0
        self.parent.children[self.edge[:key_bytes]] = upper
        self.edge = self.edge[at:]
        self.stored_bytes = max(0, self.stored_bytes - at)
        self.parent = upper
        upper.children[self.edge[:key_bytes]] = self
        return upper

    def absorb(self, uppers: list[Node], key_bytes: int) -> None:
        """Take over edges and pages of ancestors without other children, nearest first."""
        whole = [*reversed(uppers), self]
        top = uppers[-1].parent
        assert top is not None
        self.edge = b"".join([node.edge for node in whole])
        self.pages = b"".join([node.pages or NO_PAGES for node in whole])
        self.stored_bytes = sum(node.stored_bytes for node in whole)
        self.parent = top
        top.children[self.edge[:key_bytes]] = self
        for gone in uppers:
            gone.parent = gone.pages = None
            gone.children = {}

    def push_down(self, keep: int, key_bytes: int) -> Node:
        """Move the stored part after `keep` bytes of the edge to a stored-only node; return it.

        An only child takes it in front of its edge. So a leaf that is evicted page by page does
        not leave a chain of nodes. Several children get a new parent. The caller shortens this
        node.
        """
        tail = self.edge[keep : self.stored_bytes]
        if len(self.children) == 1:
            (lower,) = self.children.values()
            lower.edge = tail + lower.edge
        else:
            lower = Node(self, tail, None)
            lower.children = self.children
            for child in lower.children.values():
                child.parent = lower
        lower.stored_bytes = len(lower.edge)
        self.children = {tail[:key_bytes]: lower}
        return lower

    def __repr__(self) -> str:
        where = "stored only" if self.pages is None else f"{len(self.pages) // PAGE_ID_BYTES} pages"
        return f"Node({self.tokens} tokens, {where}, {len(self.children)} children)"


class Root(Node):
    """Start of all prompts with one (LoRA name, cache salt): an empty edge, no parent."""

    __slots__ = ("name",)

    def __init__(self, name: tuple[str, str]) -> None:
        super().__init__(None, b"", NO_PAGES)
        self.name = name


def common_bytes(data: bytes, start: int, edge: bytes, key_bytes: int) -> int:
    """Return the common bytes of `data[start:]` and `edge`, rounded down to whole pages.

    key_bytes: bytes of one page's token ids.
    """
    if data.startswith(edge, start):
        return len(edge)
    tokens = min(len(edge), len(data) - start) // TOKEN_BYTES
    left: NDArray[np.int32] = np.frombuffer(data, np.int32, tokens, start)
    right: NDArray[np.int32] = np.frombuffer(edge, np.int32, tokens)
    differs = left != right
    first = int(differs.argmax()) if tokens else 0
    if tokens and not differs[first]:
        first = tokens
    return first * TOKEN_BYTES // key_bytes * key_bytes


def ids_of(raw: bytes | bytearray) -> NDArray[np.int32]:
    """Return an int32 view of raw ids, read-only if the bytes are."""
    return np.frombuffer(raw, np.int32)
