"""The blocks of a save that got no slot: a caller that may wait saves them again.

A save takes no slot of a block that a tier still has to write. It gets such slots once the blocks
are written, so a later save of the same blocks may succeed.
"""

from __future__ import annotations

from typing import Final

from kvstore.interface import Save

RETRY_S: Final = 0.01
"""Time between two saves of the same blocks."""


def first_dropped(save: Save) -> int:
    """Index of the first block to save again. Slots are assigned in order, so the blocks that got
    none come after the last one that got one; some of them may be cached already."""
    assert save.dropped, "every block has a slot or is cached"
    return save.slot_assignments[-1][0] + 1 if save.slot_assignments else 0
