"""The engine's interface to its KV store. None of its operations blocks or raises.

The engine's loop thread calls them. `connectors/reference` implements them over a store or a
client. `NoHooks` is for an engine without kvstore.

Life of a request:

1. The engine calls `match` on arrival, and whenever the scheduler considers the request. PENDING
   means "ask again, do not start this request now": the engine keeps it waiting and runs others.
   PENDING with `compute` means "start it". Its next blocks are faster to compute than to load, and
   later ones are being loaded. The engine computes at most that many blocks, and asks again before
   each further step of the request. HIT means that `blocks` blocks from `first_block` on are leased
   in L2, until `load` or `abort`. With `more`, ask again after they are loaded.
2. The engine allocates pages for the blocks and calls `load`. The connector owns the pages until
   the `LoadDone` event. `LoadDone.blocks` can be smaller than requested: the engine computes the
   rest, each layer after that layer of the load.
3. The engine calls `save` as blocks become full. The pages must not change until the `SaveDone`
   event with the same `save_id`. The engine keeps a reference on each page until then.
4. The engine calls `abort` when the request ends, also between match and load. Each `load` and
   `save` still reports exactly once. Only then can its pages be reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.interface import MISS, HookMatch


class LayerArrival(Protocol):
    """One layer of a load in progress."""

    def order(self) -> None:
        """Make later work of this thread on its device run after this layer has arrived.

        It does not block if the device can order work. The layer's copy then overlaps with the
        computing of earlier layers.
        """
        ...


@dataclass(slots=True)
class LoadDone:
    """The first `blocks` blocks of a load are in their pages.

    layers: one for each layer of the model, if the copy is still running on the device. Before
    reading or writing these pages in layer i, call `layers[i].order()`. Empty: the copy has ended.
    """

    request_id: str
    blocks: int
    layers: Sequence[LayerArrival] = field(default=(), compare=False)


@dataclass(slots=True)
class SaveDone:
    """The pages of this save can change again. blocks: the number of stored blocks. The others
    were cached already, or dropped."""

    save_id: int
    blocks: int


HookEvent = LoadDone | SaveDone


class KVHooks(Protocol):
    """Operations of the store that the engine calls."""

    block_tokens: int
    """Tokens per block; a multiple of the engine's page."""
    wants_times: bool
    """Call `record_prefill`. Measuring a step waits for the device, so it is off by default."""

    def match(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        first_block: int,
        *,
        can_start: bool,
    ) -> HookMatch:
        """Return how many blocks from `first_block` on can be loaded for this request.

        hashes: the prompt's whole chain. Only hashes[first_block:] is looked up.
        can_start: the engine could start this request now (best_effort then returns the cached
        blocks).
        After the connector's deadline, counted from the request's first match, the result is never
        PENDING without `compute`. With `compute`, it then covers only blocks that are cached.
        A later call with another `first_block` (L1 has changed, or blocks were computed) continues
        or starts again within the same deadline.
        """
        ...

    def load(self, request_id: str, pages: Sequence[int], blocks: int) -> None:
        """Copy the first `blocks` blocks of the last HIT into pages.

        pages: blocks * pages_per_block page ids in token order. -1: skip this page, because the
        engine already has it.
        """
        ...

    def save(self, request_id: str, hashes: Sequence[bytes], pages: Sequence[int]) -> int:
        """Save full blocks. pages: pages_per_block ids for each hash. Returns the save_id."""
        ...

    def record_prefill(self, start: int, tokens: int, seconds: float) -> None:
        """Record the duration of a step with prefill, with all other work in that step.

        The step computed `tokens` tokens of a request after `start` others. Called only with
        `wants_times`.
        """
        ...

    def poll(self, timeout_s: float = 0.0) -> list[HookEvent]:
        """Return the events since the last poll. Waits up to timeout_s for the first event, or for
        progress of a pending match."""
        ...

    def abort(self, request_id: str) -> None:
        """Discard the request's match and leases. Safe at any time and for unknown ids. Every
        request ends with this call."""
        ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None:
        """Wait for running copies and release all leases."""
        ...


@dataclass
class NoHooks:
    """An engine without kvstore: all lookups miss, saves end at once."""

    block_tokens: int = 16
    wants_times: bool = False
    _saved: list[HookEvent] = field(default_factory=list)
    _next_id: int = 0

    def match(
        self, request_id: str, hashes: Sequence[bytes], first_block: int, *, can_start: bool
    ) -> HookMatch:
        return MISS

    def load(self, request_id: str, pages: Sequence[int], blocks: int) -> None:
        raise AssertionError("load without a hit")

    def save(self, request_id: str, hashes: Sequence[bytes], pages: Sequence[int]) -> int:
        self._next_id += 1
        self._saved.append(SaveDone(self._next_id, 0))
        return self._next_id

    def record_prefill(self, start: int, tokens: int, seconds: float) -> None:
        return None

    def poll(self, timeout_s: float = 0.0) -> list[HookEvent]:
        events, self._saved = self._saved, []
        return events

    def abort(self, request_id: str) -> None:
        return None

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return None
