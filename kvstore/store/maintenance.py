"""Maintenance of L2: pin a prefix, warm L2 from the tiers below, and expire blocks by age.

Engine operations use none of this. Pinning waits for loads, so its caller must be a thread that may
block. Warming and expiry run in their own threads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.blocks import frame
from kvstore.blocks.key import Key
from kvstore.cache.commands import InFlightLoad, TierWrite
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import WORKERS
from kvstore.errors import FrameInvalid, FrameUnsupported
from kvstore.interface import Operation
from kvstore.shm.slab import Slab
from kvstore.store import block_io
from kvstore.store.block_io import StagingBuffers
from kvstore.store.session import Session
from kvstore.tiers.base import Tier

log = logging.getLogger(__name__)

Dispatch = Callable[[Iterable[InFlightLoad], Iterable[TierWrite]], None]
"""Queues loads and writes for the workers of their tiers."""

PIN_BATCH: Final = 64
"""Blocks loaded and pinned per batch. Each leases a slot meanwhile."""
POLL_S: Final = 0.05
WARM_THREADS: Final = 4
MAX_WARM_BATCHES: Final = 4
"""Maximum batches of blocks. A further batch fills the slots that unsupported frames left free."""
EXPIRY_STEPS: Final = 8
"""Expiry checks per time to live. A block expires at most 1/8 of the time to live late."""


@dataclass(frozen=True)
class PinResult:
    """Number of blocks pinned of a prefix. reason: why not all; "" if all blocks are pinned."""

    wanted: int
    pinned: int
    reason: str


def pin_prefix(
    manager: L2Manager,
    session: Session,
    hashes: Sequence[bytes],
    deadline_s: float,
    dispatch: Dispatch,
) -> PinResult:
    """Load a prefix into L2 and pin it, up to the first block that is missing.

    session: a session of the prefix's tenant and namespace, used only by this call.
    deadline_s: monotonic time.
    """
    namespace = session.namespace
    match = session.match(hashes)
    _wait_done(session, match, deadline_s)
    done = 0
    while done < len(hashes):
        batch = hashes[done : done + PIN_BATCH]
        load = session.load(batch)
        try:
            _wait_done(session, load, deadline_s)
            loaded = batch[: len(load.slots)]
            keys = [Key(session.tenant, namespace.digest, name) for name in loaded]
            pinned, writes = manager.pin(keys, namespace.block_bytes)
        finally:
            session.release(load)
        dispatch((), writes)
        done += pinned
        if pinned < len(keys):
            limit = manager.stats()["max_pinned"]
            reason = f"at most {limit} blocks may be pinned (l2.max_pinned_fraction)"
            return PinResult(len(hashes), done, reason)
        if pinned < len(batch):
            reason = load.fault or "timeout"
            return PinResult(len(hashes), done, f"block {done} of the prefix not loaded: {reason}")
    return PinResult(len(hashes), done, "")


def _wait_done(session: Session, operation: Operation, deadline_s: float) -> None:
    while not operation.done and time.monotonic() < deadline_s:
        session.poll(POLL_S)


class TTLExpirer:
    """Evicts blocks that have been in L2 for `ttl_s` seconds, until `close`."""

    def __init__(self, manager: L2Manager, ttl_s: float, dispatch: Dispatch) -> None:
        assert ttl_s > 0
        self.ttl_s = ttl_s
        self._manager = manager
        self._dispatch = dispatch
        self._step_s = ttl_s / EXPIRY_STEPS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ttl-expirer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._step_s):
            _, writes = self._manager.evict_expired(EXPIRY_STEPS)
            self._dispatch((), writes)


class WorkList(Iterator[tuple[Tier, Key]]):
    """An iterator that several threads may share."""

    def __init__(self, items: Iterable[tuple[Tier, Key]]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> tuple[Tier, Key]:
        with self._lock:
            return next(self._items)


class Warmer:
    """Fills free slots with blocks from the tiers: fastest tier first, recently used blocks first.

    The warmer evicts nothing and writes nothing. It stops when the given fraction of the slab is
    full. It skips tiers that cannot list their keys, and blocks that it cannot read.
    """

    def __init__(self, manager: L2Manager, slab: Slab, tiers: Sequence[Tier]) -> None:
        self._manager = manager
        self._slab = slab
        self.tiers = list(tiers)
        self._stop = threading.Event()
        self._turn = threading.Lock()

    def start(self, fraction: float) -> None:
        """Run `warm` in a separate thread."""
        threading.Thread(target=self.warm, args=(fraction,), name="warmer", daemon=True).start()

    def warm(self, fraction: float) -> int:
        """Fill up to this fraction of the slab; return the number of blocks loaded. Concurrent
        calls run one after the other."""
        with self._turn:
            spare = self._slab.slots - int(fraction * self._slab.slots)
            before = self._manager.stats()
            candidates = self._missing_blocks()
            for _ in range(MAX_WARM_BATCHES):
                room = max(0, self._manager.stats()["slots_free"] - spare)
                missing = list(itertools.islice(candidates, room))
                # The coldest block first, so that the hottest ends as the most recently used.
                missing.reverse()
                if not self._load(missing, spare):
                    break
            warmed: int = self._manager.stats()["warmed"] - before["warmed"]
        log.info("L2 warmed: %d blocks loaded", warmed)
        return warmed

    def close(self, deadline_s: float) -> bool:
        """Stop warming. False when a thread still hangs in a tier at `deadline_s`."""
        self._stop.set()
        idle = self._turn.acquire(timeout=max(0.0, deadline_s - time.monotonic()))
        if idle:
            self._turn.release()
        return idle

    def _load(self, blocks: Sequence[tuple[Tier, Key]], spare: int) -> int:
        """Load blocks in several threads; returns the number of frames of other releases."""
        work = WorkList(blocks)
        unsupported: list[Key] = []
        # No executor: its threads would keep the process from ending while a tier hangs.
        threads = [
            threading.Thread(
                target=self._run_worker,
                args=(work, spare, unsupported),
                name=f"warmer-{number}",
                daemon=True,
            )
            for number in range(WARM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(unsupported)

    def _missing_blocks(self) -> Iterator[tuple[Tier, Key]]:
        """Blocks that are in a tier but not in L2, each once."""
        seen: set[Key] = set()
        for tier in self.tiers:
            try:
                for key, _ in tier.usage():
                    if key not in seen and self._manager.is_absent(key):
                        seen.add(key)
                        yield tier, key
            except NotImplementedError:
                continue
            except Exception as error:
                log.warning("tier %s: cannot list blocks for warming: %s", tier.name, error)

    def _run_worker(
        self, blocks: Iterable[tuple[Tier, Key]], spare: int, unsupported: list[Key]
    ) -> None:
        staging = StagingBuffers(self._slab.slot_bytes)
        for tier, key in blocks:
            if self._stop.is_set():
                return
            try:
                self._warm_block(tier, key, staging, spare)
            except FrameUnsupported:
                unsupported.append(key)  # a miss; the tier has counted it
            except Exception as error:
                log.warning("tier %s: cannot load a block for warming: %s", tier.name, error)

    def _warm_block(self, tier: Tier, key: Key, staging: StagingBuffers, spare: int) -> None:
        length = block_io.read_frame(tier, key, staging.header, staging.payload)
        if not length:
            return
        header = frame.parse_header(staging.header, key)
        if header.raw_bytes > self._slab.slot_bytes:
            raise FrameInvalid(
                f"block of {header.raw_bytes} bytes does not fit in a slot of "
                f"{self._slab.slot_bytes}"
            )
        slot = self._manager.reserve_for_warm(key, header.raw_bytes, spare)
        if slot is None:
            return
        try:
            block_io.unpack_block(header, staging.payload[:length], self._slab.view(slot))
        except BaseException:
            self._manager.abandon(WORKERS, [slot])
            raise
        self._manager.publish_warmed(slot)
