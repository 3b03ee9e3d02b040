"""The engine's prefix cache: a radix tree over token ids whose nodes have pages of KV.

The scheduler calls it on the engine's loop thread. There is one tree per pool, and one root per
(LoRA name, cache salt), so prompts of different roots share nothing.

Only whole pages match: a prompt matches up to its last page that is completely equal, and nodes are
split at page boundaries. A node's KV is on the device (the node has pages), or a lower tier is
believed to have it (stored), or both. All ancestors of a node on the device are on the device. All
tokens before a stored token are stored. A node that loses its pages stays in the tree as
*stored-only* while a lower tier is believed to have it.

Recency needs no clock and no heap: the order is a list (`radix_recency`). An operation that touches
a path (match, insert, unlock) moves its nodes to the young end, deepest first. So a parent is
always younger than its children, and the oldest node is always a leaf, the least recent one.

A node returned by `match` or `insert` is valid until the next call that changes the tree, so lock
it first. A locked node stays, keeps its pages, and keeps its tokens when other nodes are split.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.engine.pages import PageIds, PagePool
from kvstore.engine.radix_node import (
    PAGE_ID_BYTES,
    TOKEN_BYTES,
    Node,
    Root,
    common_bytes,
    ids_of,
)
from kvstore.engine.radix_recency import Recency
from kvstore.engine.radix_result import (
    NO_ROOT,
    Insert,
    RadixMatch,
    RootName,
    TokenIds,
    raw_ids,
)

__all__ = ["MAX_STORED_TOKENS", "NO_ROOT", "Insert", "RadixCache", "RadixMatch", "RootName"]

MAX_STORED_TOKENS = 16 * 1024 * 1024
"""Default limit of stored-only tokens. They take 4 bytes each, and about 500 bytes per node."""

ROUND_PAGES = 16 * 1024
"""Pages that eviction frees at a time, so that its arrays stay in the processor's cache."""


class RadixCache:
    """A radix tree over the pages of `pool`, `page_tokens` tokens each. Used from one thread.

    max_stored_tokens: limit of the tokens in stored-only nodes. Beyond it, the least recent go.
    """

    def __init__(
        self, pool: PagePool, page_tokens: int, *, max_stored_tokens: int = MAX_STORED_TOKENS
    ) -> None:
        assert page_tokens > 0, f"a page of {page_tokens} tokens"
        assert max_stored_tokens >= 0, f"a bound of {max_stored_tokens} tokens"
        self.pool = pool
        self.page_tokens = page_tokens
        self.max_stored_tokens = max_stored_tokens
        self._key_bytes = page_tokens * TOKEN_BYTES
        self._roots: dict[RootName, Root] = {}
        # Contains every unlocked node on the device, and some locked ones.
        self._device_order = Recency()
        self._stored_order = Recency()
        self._device_pages = 0
        self._locked_pages = 0
        self._stored_only_bytes = 0

    # ---- queries ----

    @property
    def device_pages(self) -> int:
        """Pages on which the tree has a reference."""
        return self._device_pages

    @property
    def evictable_pages(self) -> int:
        """Pages of unlocked nodes, which `evict` can release. Exact.

        A page with other references becomes free only when those are dropped.
        """
        return self._device_pages - self._locked_pages

    @property
    def stored_only_tokens(self) -> int:
        """Tokens of nodes without pages, at most `max_stored_tokens` after a call."""
        return self._stored_only_bytes // TOKEN_BYTES

    def match(self, tokens: TokenIds, root: RootName = NO_ROOT) -> RadixMatch:
        """Return the longest prefix of `tokens` (int32, one dimension) in the tree, in whole pages.

        Splits the node on the device in which the match ends. Touches the path.
        """
        data = raw_ids(tokens)
        top = self._roots.get(root)
        if top is None:
            return RadixMatch(Root(root), 0, [], 0)
        key_bytes = self._key_bytes
        path: list[Node] = []
        children = top.children
        at = 0
        while (child := children.get(data[at : at + key_bytes])) is not None:
            edge = child.edge
            if data.startswith(edge, at):
                path.append(child)
                at += len(edge)
                children = child.children
                continue
            common = common_bytes(data, at, edge, key_bytes)
            path.append(child if child.pages is None else self._split(child, common))
            at += common
            break
        self._touch(path)
        stored_tokens = tokens_here = at // TOKEN_BYTES
        if path and path[-1].pages is None:
            path = [node for node in path if node.pages is not None]
            tokens_here = sum(node.tokens for node in path)
        parts = [node.pages for node in path]
        return RadixMatch(path[-1] if path else top, tokens_here, parts, stored_tokens)

    # ---- insert ----

    def insert(self, tokens: TokenIds, pages: PageIds, root: RootName = NO_ROOT) -> Insert:
        """Insert `tokens` (a multiple of the page) with their KV in `pages`, in order.

        The tree takes a reference on each page it takes over, but not where it already has a page
        for the tokens. A stored-only node gets the pages. Touches the path.
        """
        data, ids, key_bytes = raw_ids(tokens), raw_ids(pages), self._key_bytes
        assert len(data) % key_bytes == 0, f"{len(tokens)} tokens with a partial page"
        assert len(ids) * self.page_tokens == len(data), f"{len(pages)} pages, {len(tokens)} tokens"
        top = self._roots.get(root) or Root(root)
        if not data:
            return Insert(top, 0)
        self._roots[root] = top
        path: list[Node] = []
        node: Node = top
        at = matched = 0
        while at < len(data):
            child = node.children.get(data[at : at + key_bytes])
            if child is None:
                child = Node(node, data[at:], None)
                node.children[data[at : at + key_bytes]] = child
            else:
                common = common_bytes(data, at, child.edge, key_bytes)
                if common < len(child.edge):
                    child = self._split(child, common)
            end = at + len(child.edge)
            if child.pages is None:
                self._set_pages(child, ids[self._page_bytes(at) : self._page_bytes(end)])
            else:
                matched = end
            path.append(child)
            node, at = child, end
        self.pool.add_ref(ids_of(ids[self._page_bytes(matched) :]))
        self._touch(path)
        return Insert(node, matched // TOKEN_BYTES)

    def mark_stored(self, tokens: TokenIds, root: RootName, tokens_stored: int) -> None:
        """Record that a lower tier has the whole pages of `tokens[:tokens_stored]`.

        Marks those in the tree. Adds and touches nothing.
        """
        whole = tokens_stored // self.page_tokens * self._key_bytes
        for node, _start, common in self._walk(raw_ids(tokens)[:whole], root):
            node.stored_bytes = max(node.stored_bytes, common)

    def forget_stored(self, tokens: TokenIds, root: RootName, from_token: int) -> None:
        """Record that the lower tiers lost the page with token `from_token` of `tokens`.

        It and all its continuations no longer count as stored. Their stored-only nodes are removed.
        No effect if the token is beyond `tokens`, or if `tokens` are not in the tree.
        """
        cut = from_token // self.page_tokens * self._key_bytes
        for node, start, common in self._walk(raw_ids(tokens), root):
            if start + common > cut:
                self._forget(node, cut - start)
                return

    # ---- locks ----

    def lock(self, node: Node) -> None:
        """Keep this node and its ancestors on the device until `unlock`. Locks are counted.

        A node counts its own locks and its locked children, so a lock stops at the first ancestor
        that is locked already.
        """
        assert node.pages is not None, "lock of a node that has left the device"
        node.locks += 1
        while node.locks == 1 and node.parent is not None:
            self._locked_pages += len(node.pages or b"") // PAGE_ID_BYTES
            node = node.parent
            node.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Nodes that become unlocked are the most recent.

        Each of them that is the only child of its parent is merged with it. So a prompt that was
        inserted in parts becomes one node again.
        """
        order = self._device_order
        unlocked: list[Node] = []
        above: Node | None = node
        while above is not None:
            assert above.locks > 0, "unlocked more often than locked"
            above.locks -= 1
            if above.locks or above.parent is None:
                break
            self._locked_pages -= len(above.pages or b"") // PAGE_ID_BYTES
            if above.older is None:  # Eviction removed it from the list while it was locked.
                order.add(above)
            unlocked.append(above)
            above = above.parent
        if unlocked:
            order.touch(unlocked[::-1])
            self._merge(unlocked)

    # ---- eviction ----

    def evict(self, pages: int) -> int:
        """Release least recent unlocked leaves, from their ends, until `pages` pages are free.

        Returns the number of freed pages, smaller only if no unlocked node is left on the device.
        Pages with other references are released but not counted.
        """
        freed = 0
        while freed < pages and (gone := self._detach(min(pages - freed, ROUND_PAGES))):
            freed += self.pool.drop_ref(ids_of(b"".join(gone)))
        self._bound_stored()
        return freed

    def clear(self) -> None:
        """Remove everything that is not locked, and all stored marks."""
        for top in list(self._roots.values()):
            for child in list(top.children.values()):
                self._forget(child, 0)
        while gone := self._detach(ROUND_PAGES):
            self.pool.drop_ref(ids_of(b"".join(gone)))

    def __repr__(self) -> str:
        return (
            f"RadixCache({self._device_pages} pages, {self._locked_pages} locked, "
            f"{self.stored_only_tokens}/{self.max_stored_tokens} tokens stored only)"
        )

    # ---- internal ----

    def _page_bytes(self, edge_bytes: int) -> int:
        """Return the offset in raw page ids for an offset in raw token ids."""
        return edge_bytes // self._key_bytes * PAGE_ID_BYTES

    def _walk(self, data: bytes, root: RootName) -> Iterator[tuple[Node, int, int]]:
        """Yield the nodes along `data`: (node, start of its edge, matched bytes; never zero)."""
        node: Node | None = self._roots.get(root)
        at = 0
        while node is not None:
            node = node.children.get(data[at : at + self._key_bytes])
            if node is None:
                return
            common = common_bytes(data, at, node.edge, self._key_bytes)
            yield node, at, common
            if common < len(node.edge):
                return
            at += common

    def _touch(self, path: list[Node]) -> None:
        """Make these nodes, given from the top, the most recent, and parents more than children.

        A locked node moves when it is unlocked.
        """
        locked = 0
        if path and path[-1].pages is None:
            here = [node for node in path if node.pages is not None]
            self._stored_order.touch(path[len(here) :])
            path = here
        while locked < len(path) and path[locked].locks:
            locked += 1
        self._device_order.touch(path[locked:] if locked else path)

    def _split(self, node: Node, at: int) -> Node:
        """Split `node`'s edge after `at` bytes and return the new upper part.

        The lower part stays the same object, so locks on it still cover the same tokens. The caller
        must touch the upper part, which is younger than its place in the list.
        """
        upper = node.split(at, self._key_bytes)
        if upper.pages is None:
            self._stored_order.add(upper)
        elif not upper.locks:
            self._device_order.add(upper)
        return upper

    def _set_pages(self, node: Node, ids: bytes) -> None:
        """Give pages to a node without pages: a new one, or a stored-only one."""
        if node.stored_bytes:
            self._stored_order.remove(node)
            self._stored_only_bytes -= len(node.edge)
        node.pages = ids
        self._device_order.add(node)
        self._device_pages += len(ids) // PAGE_ID_BYTES

    def _merge(self, unlocked: list[Node]) -> None:
        """Merge nodes of `unlocked`, a path from below, with parents that have no other child."""
        first = 0
        for end in range(1, len(unlocked) + 1):
            if end < len(unlocked) and len(unlocked[end].children) == 1:
                continue
            if end - first > 1:
                for gone in unlocked[first + 1 : end]:
                    self._device_order.remove(gone)
                unlocked[first].absorb(unlocked[first + 1 : end], self._key_bytes)
            first = end

    def _detach(self, pages: int) -> list[bytes]:
        """Detach up to `pages` pages from the least recent unlocked leaves. Returns raw ids."""
        order = self._device_order
        gone: list[bytes] = []
        while pages > 0 and (node := order.oldest()) is not None:
            if node.locks:
                order.remove(node)  # `unlock` adds it again.
                continue
            assert node.pages is not None, "a node without pages in the device order"
            take = min(pages, len(node.pages) // PAGE_ID_BYTES)
            pages -= take
            self._device_pages -= take
            gone.append(node.pages[len(node.pages) - take * PAGE_ID_BYTES :])
            if len(gone[-1]) < len(node.pages):
                self._shorten(node, take)
                continue
            order.remove(node)
            if not node.stored_bytes:
                self._remove(node)
                continue
            node.pages = None
            node.edge = node.edge[: node.stored_bytes]
            self._stored_order.add(node)
            self._stored_only_bytes += len(node.edge)
        return gone

    def _shorten(self, node: Node, pages: int) -> None:
        """Remove the last `pages` pages of a leaf. Their stored part stays below it."""
        assert node.pages is not None
        keep = len(node.edge) - pages * self._key_bytes
        if node.stored_bytes > keep:
            self._stored_only_bytes += node.stored_bytes - keep
            lower = node.push_down(keep, self._key_bytes)
            if lower in self._stored_order:
                self._stored_order.remove(lower)
            self._stored_order.add(lower)
            node.stored_bytes = keep
        node.edge = node.edge[:keep]
        node.pages = node.pages[: -pages * PAGE_ID_BYTES]

    def _remove(self, node: Node) -> None:
        """Remove a node without children, and its root if this was the last child."""
        top = node.parent
        assert top is not None
        assert not node.locks, "a locked node is removed"
        del top.children[node.edge[: self._key_bytes]]
        node.parent = node.pages = None
        if isinstance(top, Root) and not top.children:
            self._roots.pop(top.name, None)

    def _forget(self, node: Node, keep: int) -> None:
        """Unmark as stored: `node`'s edge after `keep` bytes, and all nodes below it."""
        if node.stored_bytes <= keep:
            return
        doomed = [node]
        for below in doomed:
            doomed.extend(child for child in below.children.values() if child.stored_bytes)
        for below in reversed(doomed[1:]):
            self._unstore(below, 0)
        self._unstore(node, keep)

    def _unstore(self, node: Node, keep: int) -> None:
        """Keep only `keep` bytes of one node stored. Without pages, shorten the node to that."""
        if node.pages is None:
            self._stored_only_bytes -= len(node.edge) - keep
            if not keep:
                self._stored_order.remove(node)
                self._remove(node)
                return
            node.edge = node.edge[:keep]
        node.stored_bytes = keep

    def _bound_stored(self) -> None:
        """Remove the least recent stored-only tokens, whole pages from the ends of leaves."""
        page_bytes = self._key_bytes
        while (over := self._stored_only_bytes - self.max_stored_tokens * TOKEN_BYTES) > 0:
            node = self._stored_order.oldest()
            assert node is not None, "stored-only tokens in no node"
            assert not node.children, "a stored-only parent is older than its child"
            drop = -(-over // page_bytes) * page_bytes
            self._unstore(node, max(0, len(node.edge) - drop))
