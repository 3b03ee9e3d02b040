"""Write policies: when a block is written from L2 to the tiers.

- `write_through`: when it is published.
- `selective`: when it has enough hits.
- `write_back`: before L2 evicts it.

The engine never waits for a write. Writes go through a bounded queue and may be dropped; dropped
writes are counted. Under `write_back` they are dropped only when the tiers are stuck: L2 then
evicts unwritten blocks, because the alternative is to drop new saves.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from kvstore.errors import ConfigError

DEFAULT_SELECTIVE_HITS: Final = 2
CLEAN_ONE_IN: Final = 8
"""write_back keeps one slot in this many free or clean, so that a burst of saves finds room."""
PRECLEAN_MAX: Final = 128
"""Maximum writes that write_back has in flight ahead of need; fewer than a write queue takes."""


@dataclass(frozen=True)
class WritePolicy:
    """name: write_through, selective or write_back.

    hits: `selective` writes a block at this number of hits. A hit is a load of the block, or a save
        of it by another request that computed it too.
    """

    name: str = "write_through"
    hits: int = DEFAULT_SELECTIVE_HITS

    @property
    def on_commit(self) -> bool:
        """Whether to write a block when it is published."""
        return self.name == "write_through"

    @property
    def on_evict(self) -> bool:
        """Whether to write a block before it is evicted."""
        return self.name == "write_back"

    def min_clean_slots(self, slots: int) -> int:
        """Number of slots to keep free, clean or in a write; `slots`: slots of the slab."""
        return min(max(1, slots // CLEAN_ONE_IN), PRECLEAN_MAX) if self.on_evict else 0

    def on_hit(self, hits: int) -> bool:
        """Whether to write a block that has this many hits."""
        return self.name == "selective" and hits >= self.hits


WRITE_POLICIES: Final = ("write_through", "selective", "write_back")


def write_policy(name: str, *, selective_hits: int = DEFAULT_SELECTIVE_HITS) -> WritePolicy:
    """The policy of this name.

    Raises ConfigError: unknown name (suggests the closest one), or hits below 1.
    """
    if name not in WRITE_POLICIES:
        near = difflib.get_close_matches(name, WRITE_POLICIES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown write policy {name!r}: did you mean {near!r}?")
    if selective_hits < 1:
        raise ConfigError(f"selective_hits must be at least 1 (got {selective_hits})")
    return WritePolicy(name, selective_hits)
