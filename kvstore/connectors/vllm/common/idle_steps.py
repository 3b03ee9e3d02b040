"""How long vLLM's scheduler may wait for the store in a step that computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

IDLE_WAIT_S: Final = 0.001
"""How long one side waits for the store in a step that computes nothing. Without this wait vLLM's
loop spins and takes CPU time from the threads that answer and copy."""
IDLE_STEP_S: Final = 0.002
"""A step shorter than this has computed nothing: a model's forward pass takes longer."""


class IdleSteps:
    """Detects steps that compute nothing by their length, where vLLM does not report them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step_ended_s = clock()

    def wait_s(self, waiting: bool) -> float:
        """Seconds that this step may wait. waiting: an operation of the store is under way."""
        idle = self._clock() - self._step_ended_s < IDLE_STEP_S
        return IDLE_WAIT_S if idle and waiting else 0.0

    def end_step(self) -> None:
        """The tier's work of this step is done; time until the next `wait_s` is vLLM's."""
        self._step_ended_s = self._clock()
