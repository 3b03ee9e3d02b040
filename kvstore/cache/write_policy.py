"""When a block goes from L2 to the tiers below.

`write_through`: as soon as it is published. `selective`: when it has been asked for often enough.
`write_back`: when L2 is about to evict it. Whatever the policy, a write is behind the engine's
back, in a bounded queue, and may be dropped; dropped is counted. Under `write_back` that is so when
the tiers are stuck: L2 then evicts unwritten blocks rather than take no saves.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from kvstore.errors import ConfigError

DEFAULT_SELECTIVE_HITS: Final = 2
CLEAN_SHARE: Final = 8
"""write_back keeps one slot in this many free or clean, so that a burst finds room."""
AHEAD_MAX: Final = 128
"""Blocks that write_back has on their way down ahead of need, at most: fewer than a queue takes."""


@dataclass(frozen=True)
class WritePolicy:
    """One of the three, as the brain asks it.

    name: write_through, selective or write_back.
    hits: `selective`: hits of a block that send it down; a hit is a load of it, or an offer of it
        by another request that computed it too.
    """

    name: str = "write_through"
    hits: int = DEFAULT_SELECTIVE_HITS

    @property
    def on_commit(self) -> bool:
        """Write when a block is published."""
        return self.name == "write_through"

    @property
    def on_evict(self) -> bool:
        """Write when a block is about to leave L2."""
        return self.name == "write_back"

    def clean_floor(self, slots: int) -> int:
        """Slots of so many to keep free, clean or on their way to be."""
        return min(max(1, slots // CLEAN_SHARE), AHEAD_MAX) if self.on_evict else 0

    def on_hit(self, hits: int) -> bool:
        """Write now that a block has been hit so often."""
        return self.name == "selective" and hits >= self.hits


WRITE_POLICIES: Final = ("write_through", "selective", "write_back")


def write_policy(name: str, *, selective_hits: int = DEFAULT_SELECTIVE_HITS) -> WritePolicy:
    """The policy of this name.

    Raises ConfigError: an unknown name (says the nearest right one), or hits below 1.
    """
    if name not in WRITE_POLICIES:
        near = difflib.get_close_matches(name, WRITE_POLICIES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown write policy {name!r}; the nearest is {near!r}")
    if selective_hits < 1:
        raise ConfigError(f"selective_hits is {selective_hits}; it must be at least 1")
    return WritePolicy(name, selective_hits)
