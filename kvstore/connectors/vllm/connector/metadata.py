"""Messages between the scheduler's side and the workers in each step.

The scheduler decides in its process. Each worker has its own connection to the store and sends
hashes to it. No slot, lease or address passes between scheduler and workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

CONNECTED: Final = "store_connected"
"""Key in the counts of both sides: 1 while the store's slab is mapped, else 0."""


@dataclass(slots=True)
class RequestBlocks:
    """Blocks of one request: hash in the store and block id in the engine of each.

    max_wait_ms: rest of the request's maximum wait; loads only.
    save_number: unique number of a save; saves only.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    max_wait_ms: float = 0.0
    save_number: int = 0

    def __post_init__(self) -> None:
        assert len(self.hashes) == len(self.block_ids), "a block id for each hash"


@dataclass(slots=True)
class StepMetadata:
    """Work of the workers in one step of the engine.

    loads: blocks to load now. saves: blocks that are full when this step's computation has ended.
    preempted: requests whose blocks may be overwritten in this step.
    finishing: requests that have ended, whose blocks stay until their saves have ended.
    idle: nothing is computed in this step, so a worker may wait briefly.
    """

    loads: list[RequestBlocks] = field(default_factory=list)
    saves: list[RequestBlocks] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    finishing: frozenset[str] = frozenset()
    idle: bool = False


@dataclass(slots=True)
class StepResult:
    """Loads and saves that ended since the last step.

    recved: requests whose load has ended. sent: those of `finishing` whose saves have ended.
    bad_blocks: the engine's ids of blocks that a load did not fill.
    failed: requests of `recved` with missing blocks.
    saved: saves that have ended, successful or not: request and save number.
    """

    recved: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    saved: list[tuple[str, int]] = field(default_factory=list)
