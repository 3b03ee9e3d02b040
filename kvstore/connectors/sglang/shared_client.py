"""One store's verbs for several threads of SGLang.

SGLang asks from one thread, reads from another and writes from a third, and a store is spoken to
from one at a time. Whoever waits for a ticket polls the store for everybody meanwhile; the others
wait for its word, and one of them takes over when it has what it came for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvstore.interface import BlockStore, Load, Match, Save, SlotBuffer
from kvstore.ipc.client import Client


class Desk:
    """See the module's text. No method raises for a fault of the store.

    store: bound to one namespace; the desk owns and closes it.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._client = store if isinstance(store, Client) else None
        self._verbs = threading.Lock()
        self._turns = threading.Condition()
        self._polled = False

    @property
    def slab(self) -> SlotBuffer | None:
        """The slab of the store that is there now; another one after each reconnect."""
        return self._store.slab

    @property
    def slots(self) -> int:
        """Slots of the store's slab; 0 while it cannot be reached."""
        slab = self.slab
        return slab.slots if slab is not None else 0

    def slab_of(self, ticket: Load | Save) -> SlotBuffer:
        return self._store.slab_of(ticket)

    def lacks(self, first: bytes, run: Callable[[], Sequence[bytes]]) -> bool:
        """Whether a run's first block is held nowhere, for certain and without a word to the store;
        which is then told of the run when it is next spoken to. False says nothing."""
        if self._client is None or not self._client.lacks(first):
            return False
        self._client.note(run)
        return True

    def known(self, joined: bytes, size: int, run: Callable[[], Sequence[bytes]]) -> int | None:
        """Length of a run that is held, where that is certain without a word to the store, which is
        told of the run later; else None. joined: its hashes, `size` bytes each."""
        known = None if self._client is None else self._client.known(joined, size)
        if known is not None and self._client is not None:
            self._client.note(run)
        return known

    def states(self, hashes: Sequence[bytes]) -> list[bool | None]:
        """For each block whether the store holds it, as far as that is known without a word to it;
        None where it is not."""
        return [None] * len(hashes) if self._client is None else self._client.states(hashes)

    def match(self, hashes: Sequence[bytes]) -> Match:
        with self._verbs:
            return self._store.match(hashes)

    def load(self, hashes: Sequence[bytes]) -> Load:
        with self._verbs:
            return self._store.load(hashes)

    def save(self, hashes: Sequence[bytes]) -> Save:
        with self._verbs:
            return self._store.save(hashes)

    def commit(self, ticket: Save) -> None:
        with self._verbs:
            self._store.commit(ticket)

    def release(self, ticket: Load | Save) -> None:
        with self._verbs:
            self._store.release(ticket)

    def confirm(self, deadline_s: float) -> bool:
        """Whether the store has handled everything said so far: commits count from then on.

        An empty question is answered after all that was said before it.
        """
        ticket = self.match(())
        return self.wait(lambda: ticket.done, deadline_s) and not ticket.fault

    def wait(self, true: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until `true()`, which reads tickets; False when the deadline (monotonic) is first.

        `true` is asked again under the lock before anybody polls: what a poll of another thread
        has taken, it took before it let go of its turn.
        """
        while not true():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            with self._turns:
                if true():
                    return True
                if self._polled:
                    self._turns.wait(left_s)
                    continue
                self._polled = True
            try:
                self._store.poll(left_s)
            finally:
                with self._turns:
                    self._polled = False
                    self._turns.notify_all()
        return True

    def close(self) -> None:
        """Hand back every lease. No call is under way."""
        with self._verbs:
            self._store.close()

    def __repr__(self) -> str:
        return repr(self._store)
