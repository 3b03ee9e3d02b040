"""Which block follows which in a chain, so that the end of a prefix is evicted before its front.

A hash does not show the hash before it. The order of the blocks in a save, a load or a lookup does.
The links are between blocks in L2 only. Call it under the L2 manager's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Final

from kvstore.cache.block import Block

PASSED_OVER_MAX: Final = 256
"""Maximum blocks that are passed over to find one to evict."""
CHILDREN_MAX: Final = 16
"""Maximum blocks after one block that are examined, the newest first."""


class Chains:
    """The links are `parent`, `child`, `older` and `newer` of the blocks."""

    def __init__(self) -> None:
        self._path: list[Block] = []
        """See `_deepest`."""

    def link(self, parent: Block | None, block: Block) -> None:
        """Record that `block` follows `parent`, unless its parent is known."""
        if block.parent is None and parent is not None and parent is not block:
            block.parent = parent
            older = parent.child
            if older is not None:
                block.older, older.newer = older, block
            parent.child = block

    def unlink(self, block: Block) -> None:
        """Remove the links of a block that leaves L2."""
        parent, older, newer = block.parent, block.older, block.newer
        if parent is not None:
            if newer is None:
                parent.child = older
            else:
                newer.older = older
            if older is not None:
                older.newer = newer
            block.parent = block.older = block.newer = None
        if block.child is not None:
            self._path = []
            for child in list(_children(block)):
                child.parent = child.older = child.newer = None
            block.child = None

    def pick_victim(self, blocks: Iterable[Block], keep: Block | None) -> Block | None:
        """The block to evict: the first evictable one of `blocks` or, if blocks that follow it are
        in L2, the deepest of these, because they are worthless without it.

        A block that only L2 has is not evicted for a block that follows it: `keep`, or a block
        before one that is being filled. At most PASSED_OVER_MAX such blocks are passed over.
        """
        rest = iter(blocks)
        for block in rest:
            if block.evictable:
                if block.child is None and block is not keep:
                    return block
                return self._pick_in_chains(chain((block,), rest), keep)
        return None

    def _pick_in_chains(self, blocks: Iterable[Block], keep: Block | None) -> Block | None:
        kept: set[int] = set() if keep is None else {keep.slot}
        seen: set[int] = set()
        passed_over = 0
        for block in blocks:
            if not block.evictable or block.slot in seen:
                continue
            leaf = self._deepest(block, seen)
            below = islice(_children(leaf), CHILDREN_MAX)
            is_kept = leaf is keep or any(not c.ready or c.slot in kept for c in below)
            if leaf.in_tiers or not is_kept:
                return leaf
            kept.update(each.slot for each in self._path)
            passed_over += 1
            if passed_over >= PASSED_OVER_MAX:
                break
        return None

    def _deepest(self, block: Block, seen: set[int]) -> Block:
        """The last evictable block of the chain from `block` on, which is evictable itself.

        The way there is kept: if the end of a chain is evicted block by block, each step is short.
        seen: the slots of the way are added, and it ends before those that are in the set.
        """
        path = self._path if self._path and self._path[0] is block else [block]
        while len(path) > 1 and not path[-1].evictable:
            path.pop()
        node = path[-1]
        seen.add(block.slot)
        seen.add(node.slot)
        while (child := node.child) is not None:
            if child.slot in seen or not child.evictable:
                children = islice(_children(node), CHILDREN_MAX)
                others = (c for c in children if c.evictable and c.slot not in seen)
                child = next(others, node)
                if child is node:
                    break
            seen.add(child.slot)
            path.append(child)
            node = child
        self._path = path
        return node


def _children(block: Block) -> Iterator[Block]:
    """The blocks in L2 that follow a block, the newest first."""
    child = block.child
    while child is not None:
        yield child
        child = child.older
