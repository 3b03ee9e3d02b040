"""Which block follows which in a chain, so that the end of a prefix is evicted before its front.

A hash does not show the hash before it. The order of the blocks in a save, a load or a lookup does.
The links are between blocks in L2 only. Call it under the L2 manager's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.cache.block import Block

VICTIM_SCAN_MAX: Final = 256
"""Maximum blocks of chains in use that are passed over to find a block to evict."""


class Chains:
    """The links are `parent` and `children` of the blocks."""

    def __init__(self) -> None:
        self._path: list[Block] = []
        """See `_deepest`."""

    def link(self, parent: Block | None, block: Block) -> None:
        """Record that `block` follows `parent`, unless its parent is known."""
        if block.parent is None and parent is not None and parent is not block:
            block.parent = parent
            if parent.children is None:
                parent.children = {}
            parent.children[block.slot] = block

    def unlink(self, block: Block) -> None:
        """Remove the links of a block that leaves L2."""
        if block.parent is not None and block.parent.children is not None:
            del block.parent.children[block.slot]
            block.parent = None
        for child in (block.children or {}).values():
            child.parent = None
        block.children = None

    def pick_victim(self, blocks: Iterable[Block], keep: Block | None) -> Block | None:
        """The block to evict: the first evictable one of `blocks` or, if blocks that follow it are
        in L2, the deepest of these, because they are worthless without it.

        A block that only L2 has is not evicted for a block that follows it (`keep`, and the parents
        of blocks that are being filled), and only if need be while a block that follows it is in
        use. At most VICTIM_SCAN_MAX such blocks are passed over.
        """
        kept: set[int] = set()
        seen: set[int] = set()
        spare, scanned = None, 0
        for block in blocks:
            if not block.evictable or block.slot in seen:
                continue
            if not block.children and block is not keep:
                return block
            leaf = self._deepest(block, seen)
            below = _newest_child(leaf)
            if leaf.in_tiers or (below is None and leaf is not keep):
                return leaf
            if below is None or not below.ready or below.slot in kept:
                kept.update(each.slot for each in self._path)
            else:
                spare = spare or leaf
            scanned += 1
            if scanned >= VICTIM_SCAN_MAX:
                break
        return spare

    def _deepest(self, block: Block, seen: set[int]) -> Block:
        """The last evictable block of the chain from `block` on, which is evictable itself.

        The way there is kept: if the end of a chain is evicted block by block, each step is short.
        seen: the slots of the way are added, and it ends at one that is in the set.
        """
        path = self._path if self._path and self._path[0] is block else [block]
        while len(path) > 1 and not path[-1].evictable:
            path.pop()
        seen.add(block.slot)
        seen.add(path[-1].slot)
        while (child := _newest_child(path[-1])) is not None:
            if not child.evictable or child.slot in seen:
                break
            seen.add(child.slot)
            path.append(child)
        self._path = path
        return path[-1]


def _newest_child(block: Block) -> Block | None:
    return next(reversed(block.children.values())) if block.children else None
