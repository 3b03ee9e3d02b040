"""What the scheduler's side tells the workers each step, and what they tell back.

The scheduler decides, in its process; each worker has a connection of its own to the store and
asks it by hash. No slot, lease or address crosses between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

IDLE_WAIT_S: Final = 0.001
"""How long either side waits for the store in a step that computes nothing: without it vLLM's loop
spins, and takes the time that answers and copies need."""
CONNECTED: Final = "store_connected"
"""Among a side's counts: 1 while it has a slab of the store's, else 0."""
IDLE_STEP_S: Final = 0.002
"""A step that lasts less has computed nothing: a model's forward pass takes longer."""


class IdleSteps:
    """Tells steps that compute nothing where vLLM does not say so, by how soon they follow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stepped_s = clock()

    def wait_s(self, waiting: bool) -> float:
        """How long this step may wait. waiting: something of the store's is under way."""
        idle = self._clock() - self._stepped_s < IDLE_STEP_S
        return IDLE_WAIT_S if idle and waiting else 0.0

    def stepped(self) -> None:
        """This step's own work is done; what follows up to the next `wait_s` is vLLM's."""
        self._stepped_s = self._clock()


@dataclass(slots=True)
class Blocks:
    """Blocks of one request: the store's hash and the engine's block id of each.

    left_ms: what is left of the request's deadline; of loads only.
    number: tells a save from all others; of saves only.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    left_ms: float = 0.0
    number: int = 0

    def __post_init__(self) -> None:
        assert len(self.hashes) == len(self.block_ids), "a block id for each hash"


@dataclass(slots=True)
class StepPlan:
    """One step of the engine.

    loads: to bring in now. saves: full when this step's computation has ended.
    preempted: requests whose blocks may be overwritten by this very step.
    finishing: requests that have ended, whose blocks wait for their saves to end.
    idle: nothing is computed in this step, so a worker may wait a moment.
    """

    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    finishing: frozenset[str] = frozenset()
    idle: bool = False


@dataclass(slots=True)
class StepReport:
    """What became of earlier plans.

    recved: requests whose load has ended. sent: those of `finishing` whose saves have ended.
    bad_blocks: engine's ids of blocks that a load did not fill.
    failed: requests of `recved` that lack a block.
    saved: saves that have ended, well or not: request and number.
    """

    recved: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    saved: list[tuple[str, int]] = field(default_factory=list)
