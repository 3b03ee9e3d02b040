"""Checks the invariants of a radix tree by walking all of it. For tests and idle engines."""

from __future__ import annotations

import numpy as np

from kvstore.engine.radix import RadixCache
from kvstore.engine.radix_node import PAGE_ID_BYTES, TOKEN_BYTES, Node, Root


def check_tree(cache: RadixCache) -> None:
    """Raise AssertionError if an invariant is violated. Takes time in proportion to the tree."""
    nodes = _nodes(cache)
    on_device = [node for node in nodes if node.pages is not None]
    stored_only = [node for node in nodes if node.pages is None]
    for node in nodes:
        _check_node(node, cache.page_tokens * TOKEN_BYTES)
    _check_sums(cache, on_device, stored_only)
    _check_order(list(cache._device_order), [n for n in on_device if not n.locks], on_device)
    _check_order(list(cache._stored_order), stored_only, stored_only)


def _nodes(cache: RadixCache) -> list[Node]:
    """Return all nodes but the roots, parents first. Checks the roots."""
    nodes: list[Node] = []
    for name, top in cache._roots.items():
        assert top.name == name, "a root under the wrong name"
        assert (top.parent, top.edge, top.pages) == (None, b"", b""), "a root with an edge"
        assert top.children, "a root without children"
        nodes.extend(top.children.values())
        assert all(child.parent is top for child in top.children.values()), "a wrong parent"
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _check_node(node: Node, key_bytes: int) -> None:
    parent = node.parent
    assert parent is not None, "a node without a parent"
    assert node.edge, "an empty edge"
    assert len(node.edge) % key_bytes == 0, "an edge with a partial page"
    assert parent.children.get(node.edge[:key_bytes]) is node, "a child under the wrong key"
    assert all(child.parent is node for child in node.children.values()), "a wrong parent"
    locked_children = sum(child.locks > 0 for child in node.children.values())
    assert node.locks >= locked_children, "a locked child that its parent does not count"
    assert node.stored_bytes % key_bytes == 0, "a stored length with a partial page"
    assert 0 <= node.stored_bytes <= len(node.edge), "a stored length past the edge"
    if node.pages is None:
        assert node.locks == 0, "a locked node without pages"
        assert node.stored_bytes == len(node.edge), "a node neither on the device nor stored"
    else:
        assert len(node.pages) // PAGE_ID_BYTES == len(node.edge) // key_bytes, "wrong page count"
        assert parent.pages is not None, "a node on the device below one that is not"
    if node.stored_bytes and not isinstance(parent, Root):
        assert parent.stored_bytes == len(parent.edge), "a stored node below one that is not"


def _check_sums(cache: RadixCache, on_device: list[Node], stored_only: list[Node]) -> None:
    ids = np.frombuffer(b"".join(node.pages or b"" for node in on_device), np.int32)
    locked = sum(len(node.pages or b"") // PAGE_ID_BYTES for node in on_device if node.locks)
    assert len(np.unique(ids)) == len(ids), "a page in two places"
    assert all(cache.pool.count(int(page)) > 0 for page in ids), "a free page in the tree"
    assert cache._device_pages == len(ids), "wrong count of pages"
    assert cache._locked_pages == locked, "wrong count of locked pages"
    tokens = sum(node.tokens for node in stored_only)
    assert cache.stored_only_tokens == tokens, "wrong count of stored-only tokens"
    assert tokens <= cache.max_stored_tokens, "too many stored-only tokens"
    cache.pool.check()


def _check_order(order: list[Node], least: list[Node], most: list[Node]) -> None:
    """Check that `order` has all of `least`, only nodes of `most`, and unlocked parents after
    their children."""
    place = {node: index for index, node in enumerate(order)}
    assert len(place) == len(order)
    assert place.keys() <= set(most), "a node in the wrong order"
    assert place.keys() >= set(least), "a node missing in its order"
    for node in least:
        parent = node.parent
        if parent in place and parent is not None and not parent.locks:
            assert place[parent] > place[node], "a parent older than its child"
