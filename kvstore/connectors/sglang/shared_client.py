"""One store for several threads of SGLang.

SGLang looks up, reads and writes on three threads, but a store may be called by only one at a time.
One of the threads that wait for an operation polls the store for all of them. The others wait for
its notification; when its own operation is done, another one polls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.forks import on_fork
from kvstore.interface import BlockStore, Load, Match, Save, SlabView
from kvstore.ipc.client import Client

RECONNECT_WAIT_S: Final = 5.0
"""How long after a loss of the sidecar saves wait for it to come back. Later ones fail at once:
SGLang's host memory stays locked while a save waits."""
RECONNECT_POLL_S: Final = 0.01


class SharedClient:
    """See the module's text. No method raises for an error of the store.

    store: bound to one namespace; the shared client owns and closes it.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._client = store if isinstance(store, Client) else None
        self._call_lock = threading.Lock()
        self._turns = threading.Condition()
        self._is_polling = False
        on_fork(self._let_go)
        self._lost_at_s = 0.0
        self._lost_connections = 0

    @property
    def slab(self) -> SlabView | None:
        """The store's current slab. A reconnect replaces it."""
        return self._store.slab

    @property
    def slots(self) -> int:
        """Number of slots of the store's slab; 0 while the store is unreachable or hung."""
        slab = self.slab
        return slab.slots if slab is not None and self.is_responsive else 0

    @property
    def is_responsive(self) -> bool:
        """False while the sidecar is absent, or is known to be hung."""
        return self._client is None or self._client.connected

    def slab_of(self, operation: Load | Save) -> SlabView:
        return self._store.slab_of(operation)

    def is_absent(self, first: bytes, hashes: Callable[[], Sequence[bytes]]) -> bool:
        """True if the shared index shows that no tier has the first block. False: unknown. If True,
        the next message to the sidecar reports the lookup of `hashes()`."""
        if self._client is None or not self._client.is_absent(first):
            return False
        self._client.queue_lookup_report(hashes)
        return True

    def cached_prefix_len(
        self, joined: bytes, size: int, hashes: Callable[[], Sequence[bytes]]
    ) -> int | None:
        """Number of leading cached blocks, if the shared index has the answer; else None. With an
        answer, a later message reports the lookup. joined: concatenated hashes of `size` bytes.
        """
        length = (
            None if self._client is None else self._client.cached_prefix_len_packed(joined, size)
        )
        if length is not None and self._client is not None:
            self._client.queue_lookup_report(hashes)
        return length

    def block_states(self, hashes: Sequence[bytes]) -> list[bool | None]:
        """For each block, whether a tier has it; None if the shared index does not show that."""
        return [None] * len(hashes) if self._client is None else self._client.block_states(hashes)

    def match(self, hashes: Sequence[bytes]) -> Match:
        with self._call_lock:
            return self._store.match(hashes)

    def load(self, hashes: Sequence[bytes]) -> Load:
        with self._call_lock:
            return self._store.load(hashes)

    def save(self, hashes: Sequence[bytes]) -> Save:
        with self._call_lock:
            return self._store.save(hashes)

    def commit(self, save: Save) -> None:
        with self._call_lock:
            self._store.commit(save)

    def release(self, operation: Load | Save) -> None:
        with self._call_lock:
            self._store.release(operation)

    def confirm(self, deadline_s: float) -> bool:
        """True if the store has processed all earlier calls, and so has accepted their commits.

        The store answers an empty match after all calls before it.
        """
        match = self.match(())
        return self.wait(lambda: match.done, deadline_s) and not match.fault

    def wait(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until `condition()`, which reads operations; False at the deadline (monotonic).

        `condition` is checked again under the lock before a thread polls, because the poll of
        another thread may just have updated the operation.
        """
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            with self._turns:
                if condition():
                    return True
                if self._is_polling:
                    self._turns.wait(left_s)
                    continue
                self._is_polling = True
            try:
                self._store.poll(left_s)
            finally:
                with self._turns:
                    self._is_polling = False
                    self._turns.notify_all()
        return True

    def wait_for_reconnect(self, slab: SlabView | None, deadline_s: float) -> bool:
        """True if the store was lost and is back, with another slab than `slab`.

        Waits for it up to the deadline (monotonic), and up to RECONNECT_WAIT_S after the loss was
        noticed. Does not wait for a sidecar that was never there, or is hung.
        """
        if self._client is None:
            return False
        connections = self._client.stats()["connections"]
        if self.slab is None and connections != self._lost_connections:
            self._lost_at_s, self._lost_connections = time.monotonic(), connections
        deadline_s = min(deadline_s, self._lost_at_s + RECONNECT_WAIT_S)
        while self.slab is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(left_s, RECONNECT_POLL_S))
        return self.slab is not slab

    def close(self) -> None:
        """Release every lease. No call may be under way."""
        with self._call_lock:
            self._store.close()

    def _let_go(self) -> None:
        """In a forked child: forget the turns of threads that only the parent has."""
        self._call_lock, self._turns = threading.Lock(), threading.Condition()
        self._is_polling = False

    def __repr__(self) -> str:
        return repr(self._store)
