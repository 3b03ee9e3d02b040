"""What L2 takes and drops, for whoever publishes it. Nobody listening costs nothing.

Called under the brain's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.blocks.key import Key

CHANGES_MAX: Final = 1 << 16
"""Changes kept until they are taken; when there are more, all that is there is told anew."""


@dataclass(frozen=True)
class Told:
    """changes: key, and whether it lies in L2 from now on, in their order. whole: nothing else
    does; what was told before is void."""

    changes: list[tuple[Key, bool]]
    whole: bool


class Changes:
    """See the module. resident: every key that lies in L2 now."""

    def __init__(self, resident: Callable[[], Iterable[Key]]) -> None:
        self._resident = resident
        self._listening = False
        self._lost = False
        self._changes: list[tuple[Key, bool]] = []

    def listen(self) -> None:
        """Keep changes from now on; the first `take` tells all that is there."""
        self._listening = self._lost = True

    def moved(self, key: Key, there: bool) -> None:
        """A block came, or went."""
        if not self._listening or self._lost:
            return
        self._changes.append((key, there))
        if len(self._changes) > CHANGES_MAX:
            self._changes.clear()
            self._lost = True

    def take(self) -> Told:
        """What changed since the last call."""
        if self._lost:
            self._lost = False
            return Told([(key, True) for key in self._resident()], whole=True)
        told = Told(self._changes, whole=False)
        self._changes = []
        return told
