"""Loads in progress: at most one for each key, and so many from each tier."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.blocks.key import Key
from kvstore.cache.commands import Flight
from kvstore.cache.slots import SlotTable


class FlightTable:
    """Called under the brain's lock.

    tiers: how many there are. most: flights from one tier at once.
    """

    def __init__(self, tiers: int, most: int) -> None:
        assert most >= 0
        self._most = most
        self._of_key: dict[Key, Flight] = {}
        self._from_tier = [0] * tiers

    def __len__(self) -> int:
        return len(self._of_key)

    def __contains__(self, key: object) -> bool:
        return key in self._of_key

    def __iter__(self) -> Iterator[Key]:
        return iter(self._of_key)

    def get(self, key: Key) -> Flight | None:
        """The flight that brings this key."""
        return self._of_key.get(key)

    def all(self) -> list[Flight]:
        """Every flight."""
        return list(self._of_key.values())

    def full(self, tier: int) -> bool:
        """This tier has as many as it may."""
        return self._from_tier[tier] >= self._most

    def start(self, flight: Flight) -> None:
        """A new flight, from a tier that is not full."""
        assert flight.key not in self._of_key, "two flights of one key"
        assert not self.full(flight.tier)
        self._of_key[flight.key] = flight
        self._from_tier[flight.tier] += 1

    def redirect(self, flight: Flight, tier: int) -> None:
        """The flight goes on from another tier, where no worker has begun it."""
        self._from_tier[flight.tier] -= 1
        self._from_tier[tier] += 1
        flight.tier = tier
        flight.started = False

    def end(self, flight: Flight) -> None:
        """The flight is over, however it went."""
        ended = self._of_key.pop(flight.key)
        assert ended is flight
        self._from_tier[flight.tier] -= 1

    def check(self, table: SlotTable) -> None:
        """Assert every invariant; for tests."""
        assert sum(self._from_tier) == len(self._of_key)
        assert all(count >= 0 for count in self._from_tier)
        for key, flight in self._of_key.items():
            assert table.at(flight.slot).key == key
            assert not flight.cancelled
