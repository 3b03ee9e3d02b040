"""Looking after L2: pinning a run, warming it from the tiers below, and letting blocks grow old.

Nothing here is on an engine's path. Pinning waits for loads, so it is called from a thread that
may wait; warming and ageing have threads of their own.
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
from kvstore.cache.commands import Flight, Spill
from kvstore.cache.manager import L2Manager
from kvstore.cache.slots import WORKERS
from kvstore.errors import FrameInvalid
from kvstore.interface import Ticket
from kvstore.shm.slab import Slab
from kvstore.store import block_io
from kvstore.store.block_io import Staging
from kvstore.store.session import Session
from kvstore.tiers.base import Tier

log = logging.getLogger(__name__)

CarryOut = Callable[[Iterable[Flight], Iterable[Spill]], None]
"""Gives the brain's plans to the workers."""

PIN_PART: Final = 64
"""Blocks of a run that are loaded and pinned at a time: each has a slot leased meanwhile."""
POLL_S: Final = 0.05
WARM_THREADS: Final = 4
AGE_STEPS: Final = 8
"""Looks at the age of blocks in one time to live: a block goes at most an eighth of it late."""


@dataclass(frozen=True)
class Pinned:
    """How much of a run is pinned. reason: why not all of it; "" when all is."""

    wanted: int
    pinned: int
    reason: str


def pin_run(
    brain: L2Manager,
    session: Session,
    hashes: Sequence[bytes],
    deadline_s: float,
    carry_out: CarryOut,
) -> Pinned:
    """Bring a run into L2 and pin it, block by block from its first, until something is missing.

    session: of the run's tenant and namespace, for this call alone. deadline_s: monotonic.
    carry_out: gives the brain's plans to the workers.
    """
    space = session.namespace
    match = session.match(hashes)
    _await(session, match, deadline_s)
    done = 0
    while done < len(hashes):
        part = hashes[done : done + PIN_PART]
        load = session.load(part)
        try:
            _await(session, load, deadline_s)
            keys = [Key(session.tenant, space.digest, name) for name in part[: len(load.slots)]]
            pinned, spills = brain.pin(keys, space.block_bytes)
        finally:
            session.release(load)
        carry_out((), spills)
        done += pinned
        if pinned < len(keys):
            most = brain.stats()["pins_max"]
            return Pinned(len(hashes), done, f"at most {most} blocks may be pinned (l2.pin_share)")
        if pinned < len(part):
            reason = load.fault or "it was not there in time"
            return Pinned(len(hashes), done, f"block {done} of the run does not come: {reason}")
    return Pinned(len(hashes), done, "")


def _await(session: Session, ticket: Ticket, deadline_s: float) -> None:
    while not ticket.done and time.monotonic() < deadline_s:
        session.poll(POLL_S)


class Ageing:
    """Evicts from L2 what has been there for `ttl_s` seconds, until `close`."""

    def __init__(self, brain: L2Manager, ttl_s: float, carry_out: CarryOut) -> None:
        assert ttl_s > 0
        self.ttl_s = ttl_s
        self._brain = brain
        self._carry_out = carry_out
        self._step_s = ttl_s / AGE_STEPS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ageing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._step_s):
            _, spills = self._brain.age(AGE_STEPS)
            self._carry_out((), spills)


class Shared(Iterator[tuple[Tier, Key]]):
    """A list that several threads work off, in its order."""

    def __init__(self, items: Iterable[tuple[Tier, Key]]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> tuple[Tier, Key]:
        with self._lock:
            return next(self._items)


class Warmer:
    """Fills free slots with what the tiers hold, the most recently used of the fastest first.

    Evicts nothing, writes nothing, and stops at the share of the slab it was given. Tiers that
    cannot list their keys, and blocks that do not come whole, are passed over.
    """

    def __init__(self, brain: L2Manager, slab: Slab, tiers: Sequence[Tier]) -> None:
        self._brain = brain
        self._slab = slab
        self.tiers = list(tiers)
        self._stop = threading.Event()
        self._turn = threading.Lock()

    def start(self, share: float) -> None:
        """`warm` in a thread of its own."""
        threading.Thread(target=self.warm, args=(share,), name="warmer", daemon=True).start()

    def warm(self, share: float) -> int:
        """Fill up to this share of the slab; blocks brought. One call at a time; more wait."""
        with self._turn:
            spare = self._slab.slots - int(share * self._slab.slots)
            before = self._brain.stats()
            wanted = list(itertools.islice(self._lacking(), max(0, before["slots_free"] - spare)))
            # The coldest first, so that the hottest is the most recent when all are there.
            wanted.reverse()
            queue = Shared(wanted)
            # Not an executor's threads: those would keep a process from ending while a tier hangs.
            threads = [
                threading.Thread(
                    target=self._bring, args=(queue, spare), name=f"warmer-{number}", daemon=True
                )
                for number in range(WARM_THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            brought: int = self._brain.stats()["warmed"] - before["warmed"]
        log.info("warmed L2 with %d blocks", brought)
        return brought

    def close(self, deadline_s: float) -> bool:
        """Bring nothing more; False when a call still hangs in a tier at `deadline_s`."""
        self._stop.set()
        idle = self._turn.acquire(timeout=max(0.0, deadline_s - time.monotonic()))
        if idle:
            self._turn.release()
        return idle

    def _lacking(self) -> Iterator[tuple[Tier, Key]]:
        """What the tiers hold and L2 does not, each block once."""
        seen: set[Key] = set()
        for tier in self.tiers:
            try:
                for key, _ in tier.usage():
                    if key not in seen and self._brain.lacks(key):
                        seen.add(key)
                        yield tier, key
            except NotImplementedError:
                continue
            except Exception as error:
                log.warning("%s cannot be listed for warming: %s", tier.name, error)

    def _bring(self, wanted: Iterable[tuple[Tier, Key]], spare: int) -> None:
        staging = Staging(self._slab.slot_bytes)
        for tier, key in wanted:
            if self._stop.is_set():
                return
            try:
                self._bring_one(tier, key, staging, spare)
            except Exception as error:
                log.warning("%s: a block for warming did not come: %s", tier.name, error)

    def _bring_one(self, tier: Tier, key: Key, staging: Staging, spare: int) -> None:
        length = block_io.read_frame(tier, key, staging.header, staging.payload)
        if not length:
            return
        header = frame.parse_header(staging.header, key)
        if header.raw_bytes > self._slab.slot_bytes:
            raise FrameInvalid(f"a block of {header.raw_bytes} bytes does not fit in a slot")
        slot = self._brain.adopt(key, header.raw_bytes, spare)
        if slot is None:
            return
        try:
            block_io.unpack_block(header, staging.payload[:length], self._slab.view(slot))
        except BaseException:
            self._brain.abandon(WORKERS, [slot])
            raise
        self._brain.adopted(slot)
