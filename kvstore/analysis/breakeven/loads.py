"""Measures how long an engine takes to load blocks from a tier, by number of blocks.

It opens a separate store over the tier. Blocks are saved, written to the tier and dropped from L2.
Then it matches a sequence of them, loads it (read, verify, decode into slots) and copies it out of
the slots once, as an engine on this machine would. Finally it deletes the blocks.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.blocks.key import Key, Namespace
from kvstore.errors import ConfigError, KVStoreError
from kvstore.interface import Operation
from kvstore.prefetch.costs import TierSpeed
from kvstore.shm.slab import Slab
from kvstore.store.limits import StoreLimits
from kvstore.store.store import Store
from kvstore.tiers.base import IO_ALIGNMENT, Tier

L2: Final = "l2"
SPARE_SLOTS: Final = 32
"""Slots beyond the blocks: for the workers and for the store's minimum of free slots."""
WAIT_S: Final = 120.0
"""Maximum seconds to write or to load one sequence of blocks."""
MARK_BYTES: Final = 32


class LoadFailed(KVStoreError):
    """The tier did not return the blocks that were written to it."""


@dataclass(frozen=True)
class Loads:
    """A tier's measured loads. points: (blocks, seconds), the fastest of the repeats."""

    name: str
    block_bytes: int
    points: tuple[tuple[int, float], ...]

    def speed(self) -> TierSpeed:
        """Fit match_s + bytes / bytes_per_s to the points, by least squares of relative errors.

        Neither term is negative. If the intercept would be, the line goes through the origin.
        """
        blocks = np.array([n for n, _ in self.points], dtype=float)
        seconds = np.array([s for _, s in self.points], dtype=float)
        start, slope = 0.0, 0.0
        if len(self.points) > 1:
            sides = np.stack([1 / seconds, blocks / seconds], axis=1)
            start, slope = np.linalg.lstsq(sides, np.ones(len(seconds)), rcond=None)[0]
        if start < 0 or slope <= 0:
            ratios = blocks / seconds
            start, slope = 0.0, float(ratios.sum() / (ratios * ratios).sum())
        return TierSpeed(self.name, self.block_bytes / slope, match_s=float(start))


def measure(
    namespace: Namespace,
    lengths: Sequence[int],
    open_tier: Callable[[], Tier] | None,
    *,
    codec: str = "auto",
    repeats: int,
    on_done: Callable[[], None],
) -> Loads:
    """Measure loads of the given numbers of blocks. open_tier: opens the tier. None: L2 itself.

    Raises:
        ConfigError: the tier cannot be opened.
        LoadFailed: the tier does not store or return the blocks.
    """
    most = max(lengths)
    # A unique revision, so that no other blocks are read and none are left behind.
    space = Namespace(**{**_fields(namespace), "revision": f"breakeven-{secrets.token_hex(8)}"})
    slot_bytes = -(-space.block_bytes // IO_ALIGNMENT) * IO_ALIGNMENT
    with _store(most, slot_bytes, open_tier, codec) as (store, tier):
        session = store.session(space)
        hashes = [hashlib.sha256(f"{n}".encode()).digest() for n in range(most)]
        try:
            _save(store, session, hashes, space)
            name = L2 if tier is None else tier.name
            target = np.empty((most, space.block_bytes), np.uint8)
            points = []
            for blocks in sorted(set(lengths)):
                run = hashes[:blocks]
                times = [_load_s(store, session, run, target, name) for _ in range(repeats)]
                points.append((blocks, min(times)))
                on_done()
            return Loads(name, space.block_bytes, tuple(points))
        finally:
            if tier is not None:
                tier.delete([Key(session.tenant, space.digest, name) for name in hashes])
            session.close()


@contextmanager
def _store(
    blocks: int, slot_bytes: int, open_tier: Callable[[], Tier] | None, codec: str
) -> Iterator[tuple[Store, Tier | None]]:
    tier = None if open_tier is None else open_tier()
    slots = blocks + SPARE_SLOTS
    tiers = [] if tier is None else [tier]
    try:
        slab = Slab.create(slots, slot_bytes)
    except BaseException:
        for each in tiers:
            each.close()
        raise
    codecs = {each.name: codec for each in tiers}
    with Store(slab, tiers, codecs=codecs, limits=StoreLimits(queue_blocks=slots)) as store:
        yield store, tier


def _save(store: Store, session: Any, hashes: list[bytes], space: Namespace) -> None:
    """Save all blocks to L2 and write them to the tier below."""
    save = session.save(hashes)
    if len(save.slot_assignments) < len(hashes):
        raise LoadFailed(f"only {len(save.slot_assignments)} of {len(hashes)} blocks got a slot")
    content = kv_like(space)
    for index, slot in save.slot_assignments:
        view = np.frombuffer(session.slab.view(slot), np.uint8)
        view[: len(content)] = content
        view[:MARK_BYTES] = np.frombuffer(hashes[index], np.uint8)
    session.commit(save)
    if not store.flush(WAIT_S):
        raise LoadFailed(f"{store!r}: not everything was written within {WAIT_S:g} s")
        raise LoadFailed(f"{store!r}: writes not finished within {WAIT_S:g} s")


def _load_s(
    store: Store, session: Any, run: list[bytes], target: npt.NDArray[np.uint8], name: str
) -> float:
    """Return the seconds from the lookup to the last byte copied out of the slots."""
    if name != L2:
        store.clear(L2)
    start_s = time.perf_counter()
    match = session.match(run)
    _until_done(session, match)
    load = session.load(run)
    _until_done(session, load)
    for place, slot in enumerate(load.slots):
        target[place] = np.frombuffer(session.slab.view(slot), np.uint8)[: target.shape[1]]
    took_s = time.perf_counter() - start_s
    tiers, fault = list(load.tiers), load.fault
    session.release(load)
    if tiers != [name] * len(run):
        raise LoadFailed(
            f"{name} returned {tiers.count(name)} of {len(run)} blocks: {fault or tiers}"
        )
    for place in (0, len(run) // 2, len(run) - 1):
        assert target[place, :MARK_BYTES].tobytes() == run[place], "wrong bytes"
    return took_s


def _until_done(session: Any, operation: Operation) -> None:
    end_s = time.monotonic() + WAIT_S
    while not operation.done:
        if time.monotonic() > end_s:
            raise LoadFailed(f"loading {len(operation.hashes)} blocks took over {WAIT_S:g} s")
        session.poll(0.5)


def kv_like(space: Namespace) -> npt.NDArray[np.uint8]:
    """Return one block of normally distributed numbers in the namespace's dtype.

    A codec compresses it about as well as real KV: sign and exponent vary little, the last bits are
    noise.
    """
    draw = np.random.default_rng(0)
    numbers = draw.standard_normal(space.block_bytes, dtype=np.float32)
    if space.dtype == "bfloat16":
        made = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif space.dtype == "float16":
        made = numbers.astype(np.float16).view(np.uint8)
    elif space.dtype == "float32":
        made = numbers.view(np.uint8)
    else:
        made = (numbers * 32).clip(-127, 127).astype(np.int8).view(np.uint8)
    return made[: space.block_bytes]


def _fields(namespace: Namespace) -> dict[str, Any]:
    return {name: getattr(namespace, name) for name in namespace.__dataclass_fields__}


def block_lengths(lengths: Sequence[int], namespace: Namespace, memory: int) -> list[int]:
    """Return the numbers of blocks of these lengths in tokens, as far as they fit into L2.

    memory: bytes of L2. Raises ConfigError if fewer than two fit: a line needs two points.
    """
    slot_bytes = -(-namespace.block_bytes // IO_ALIGNMENT) * IO_ALIGNMENT
    most = memory // slot_bytes - SPARE_SLOTS
    wanted = sorted({max(1, tokens // namespace.block_tokens) for tokens in lengths})
    fitting = [blocks for blocks in wanted if blocks <= most]
    if len(fitting) < 2:
        need = (wanted[min(1, len(wanted) - 1)] + SPARE_SLOTS) * slot_bytes
        raise ConfigError(
            f"--l2 must be at least {need:,} bytes, so that two lengths fit (got {memory:,}: room "
            f"for {max(0, most)} blocks of {slot_bytes:,} bytes and {SPARE_SLOTS} spare ones)"
        )
    return fitting
