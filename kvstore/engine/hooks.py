"""What the engine asks of whoever keeps KV for it. Five verbs, none of which blocks or raises, and
one word from the engine, `computed`: how long its steps take.

Called from the engine's loop thread only. `connectors/reference` implements them over a store or a
client; `NoHooks` is the dull twin: an engine without kvstore.

Life of a request, seen from here:

1. On arrival and again whenever the scheduler considers the request: `match`. PENDING means "ask
   again, start nobody on my account"; the engine keeps the request waiting and runs others. PENDING
   with `compute` means "start it: its next blocks are sooner computed, and what follows them is on
   its way"; the engine computes so many blocks at most, and asks again, before each further step of
   this request. HIT means that `blocks` blocks from `first_block` on lie in L2 under lease, until
   `load` or `abort`; with `more`, that it pays to ask again once they are loaded.
2. The engine takes pages for them and calls `load`; the pages are the connector's until the
   `Loaded` event. `Loaded.blocks` may be fewer than asked for: the engine computes the rest, each
   layer after that layer of the load.
3. As blocks fill, `save`. The pages must stay as they are until the `Saved` event with the same
   `save_id`: the engine keeps a reference on each until then.
4. `abort` when the request ends early (also between match and load). Each `load` and `save` still
   reports exactly once, and only then may its pages be reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.interface import MISS, HookMatch


class LayerArrival(Protocol):
    """One layer of a load that is on its way into its pages."""

    def order(self) -> None:
        """Have what this thread queues on its device from here on run after this layer is there.

        Does not wait where a device can: the layer's copy runs under the computing of earlier ones.
        """
        ...


@dataclass(slots=True)
class Loaded:
    """The first `blocks` blocks of a load lie in their pages.

    layers: one for each layer of the model, where the copy is still running on the device: whoever
    reads or writes these pages in layer i calls `layers[i].order()` first. Empty: it has ended.
    """

    request_id: str
    blocks: int
    layers: Sequence[LayerArrival] = field(default=(), compare=False)


@dataclass(slots=True)
class Saved:
    """The pages of this save are free to change. `blocks` were taken (the rest were held already,
    or dropped)."""

    save_id: int
    blocks: int


HookEvent = Loaded | Saved


class KVHooks(Protocol):
    """The engine's side of the data path."""

    block_tokens: int
    """Tokens of one block; a whole multiple of the engine's page."""
    wants_times: bool
    """Call `computed`. A device is waited for to know a step's time, so only who uses it asks."""

    def match(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        first_block: int,
        *,
        can_start: bool,
    ) -> HookMatch:
        """How many blocks from `first_block` on can be loaded for this request.

        hashes: the prompt's whole chain; only hashes[first_block:] is asked for.
        can_start: the engine could start this request now (best_effort answers with what is there).
        Past the connector's deadline, counted from the request's first match, never PENDING
        without `compute`, and with it only up to blocks that are there.
        A later call with another `first_block` (L1 changed meanwhile, or blocks were computed) goes
        on or starts over within the same deadline.
        """
        ...

    def load(self, request_id: str, pages: Sequence[int], blocks: int) -> None:
        """Copy the first `blocks` blocks of the last HIT into pages.

        pages: blocks * pages_per_block page ids in token order; -1: leave this page out (the
        engine has it already).
        """
        ...

    def save(self, request_id: str, hashes: Sequence[bytes], pages: Sequence[int]) -> int:
        """Offer full blocks. pages: pages_per_block ids for each hash. Returns the save_id."""
        ...

    def computed(self, start: int, tokens: int, seconds: float) -> None:
        """A step took so long for a request's `tokens` tokens behind `start` others: several, so
        prefill. Together with whatever else ran in that step. Only with `wants_times`."""
        ...

    def poll(self, timeout_s: float = 0.0) -> list[HookEvent]:
        """What ended since the last poll; waits up to timeout_s for the first event or for a
        pending match to move."""
        ...

    def abort(self, request_id: str) -> None:
        """The request is over or given up: forget its match and its leases. Safe to call at any
        time, for unknown ids too; every request ends with one."""
        ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None:
        """Wait for running copies and hand back every lease."""
        ...


@dataclass
class NoHooks:
    """An engine without kvstore: everything misses, saves end at once."""

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
        self._saved.append(Saved(self._next_id, 0))
        return self._next_id

    def computed(self, start: int, tokens: int, seconds: float) -> None:
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
