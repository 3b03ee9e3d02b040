"""How long blocks take from a tier into an engine's reach, by how many there are.

A store of its own over one tier: blocks are saved, written down and dropped from L2; then a run of
them is matched, loaded (read, verified, decoded into slots) and copied out of the slots once, as
an engine on this machine would. What was written is deleted again.
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
from kvstore.interface import Ticket
from kvstore.prefetch.costs import TierSpeed
from kvstore.shm.slab import Slab
from kvstore.store.limits import Budgets
from kvstore.store.store import Store
from kvstore.tiers.base import PAGE_BYTES, Tier

L2: Final = "l2"
SPARE_SLOTS: Final = 32
"""For workers' hands and the store's own floors."""
WAIT_S: Final = 120.0
"""Longest wait for one run to be written or loaded."""
MARK_BYTES: Final = 32


class LoadFailed(KVStoreError):
    """A tier did not give back what was written to it."""


@dataclass(frozen=True)
class Loads:
    """A tier's measured loads. points: (blocks, seconds), the best of the repeats."""

    name: str
    block_bytes: int
    points: tuple[tuple[int, float], ...]

    def speed(self) -> TierSpeed:
        """match_s + bytes / bytes_per_s through the points, by least squares of relative errors.

        Neither is below zero: where the line would begin below, it begins at nothing.
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
    """Loads of runs of so many blocks. open_tier: makes the tier; None: L2 itself.

    Raises:
        ConfigError: the tier cannot be opened.
        LoadFailed: it does not take or give the blocks.
    """
    most = max(lengths)
    # A revision of its own: nothing that anybody else has is read, or left behind.
    space = Namespace(**{**_fields(namespace), "revision": f"breakeven-{secrets.token_hex(8)}"})
    slot_bytes = -(-space.block_bytes // PAGE_BYTES) * PAGE_BYTES
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
    with Store(slab, tiers, codecs=codecs, budgets=Budgets(queue_blocks=slots)) as store:
        yield store, tier


def _save(store: Store, session: Any, hashes: list[bytes], space: Namespace) -> None:
    """Every block is in L2, and written to the tier below."""
    save = session.save(hashes)
    if len(save.grants) < len(hashes):
        raise LoadFailed(f"only {len(save.grants)} of {len(hashes)} blocks found a slot")
    content = kv_like(space)
    for index, slot in save.grants:
        view = np.frombuffer(session.slab.view(slot), np.uint8)
        view[: len(content)] = content
        view[:MARK_BYTES] = np.frombuffer(hashes[index], np.uint8)
    session.commit(save)
    if not store.flush(WAIT_S):
        raise LoadFailed(f"{store!r}: not everything was written within {WAIT_S:g} s")


def _load_s(
    store: Store, session: Any, run: list[bytes], target: npt.NDArray[np.uint8], name: str
) -> float:
    """Seconds from the question to the last byte copied out."""
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
        raise LoadFailed(f"{name} gave {tiers.count(name)} of {len(run)} blocks: {fault or tiers}")
    for place in (0, len(run) // 2, len(run) - 1):
        assert target[place, :MARK_BYTES].tobytes() == run[place], "wrong bytes"
    return took_s


def _until_done(session: Any, ticket: Ticket) -> None:
    end_s = time.monotonic() + WAIT_S
    while not ticket.done:
        if time.monotonic() > end_s:
            raise LoadFailed(f"a run of {len(ticket.hashes)} blocks took over {WAIT_S:g} s")
        session.poll(0.5)


def kv_like(space: Namespace) -> npt.NDArray[np.uint8]:
    """One block of normally distributed numbers of the namespace's dtype: to a codec about as
    real KV, whose sign and exponent vary little and whose last bits are noise."""
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
    """How many blocks these numbers of tokens are, those that fit into so many bytes of L2.

    Raises ConfigError where not even two lengths fit: a line needs two points.
    """
    slot_bytes = -(-namespace.block_bytes // PAGE_BYTES) * PAGE_BYTES
    most = memory // slot_bytes - SPARE_SLOTS
    wanted = sorted({max(1, tokens // namespace.block_tokens) for tokens in lengths})
    fitting = [blocks for blocks in wanted if blocks <= most]
    if len(fitting) < 2:
        need = (wanted[min(1, len(wanted) - 1)] + SPARE_SLOTS) * slot_bytes
        raise ConfigError(
            f"--memory {memory:,} bytes holds {max(0, most)} blocks of {slot_bytes:,} bytes beside "
            f"{SPARE_SLOTS} spare ones; two lengths must fit: at least {need:,} is right"
        )
    return fitting
