"""Moving one block between a slot and a tier: pack or verify, encode or decode.

Pure hands: they run in a worker's thread, own that worker's staging buffers, and know nothing of
leases or tickets. What comes from a tier is checked before and after decoding; only what is whole
is reported as arrived.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore import codecs
from kvstore.blocks import frame
from kvstore.blocks.frame import FrameHeader
from kvstore.blocks.key import DTYPE_BYTES, Key
from kvstore.cache.commands import Landing
from kvstore.codecs.base import Codec
from kvstore.codecs.chooser import IDENTITY as IDENTITY
from kvstore.codecs.chooser import Cost
from kvstore.errors import FrameInvalid, FrameTooLarge, TierError, TierUnavailable
from kvstore.tiers.base import PAGE_BYTES, Judgement, Tier

log = logging.getLogger(__name__)

T = TypeVar("T")

_checking: set[tuple[int, Key]] = set()
"""(id of a tier, key) of each block that somebody reads again before deleting it."""
_checking_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Moved:
    """How one move ended, the bytes that crossed to or from the tier, and what that has cost."""

    landing: Landing
    stored_bytes: int = 0
    reason: str = ""
    cost: Cost | None = None


class Staging:
    """One worker's buffers, born at start: a header page, and the largest payload there can be."""

    def __init__(self, slot_bytes: int) -> None:
        self.header = frame.aligned_buffer(PAGE_BYTES)
        self.payload = frame.aligned_buffer(payload_bound(slot_bytes))


def payload_bound(slot_bytes: int) -> int:
    """Bytes of the largest payload that any codec makes of a slot, in whole pages."""
    bounds = [
        codecs.codec_for(kind, dtype).bound(slot_bytes)
        for kind in codecs.kinds()
        for dtype in DTYPE_BYTES
    ]
    return frame.padded(max(slot_bytes, *bounds))


def read_block(
    tier: Tier, key: Key, nbytes: int, slot: memoryview, staging: Staging, *, direct: bool
) -> Moved:
    """Fetch a block of `nbytes` raw bytes into `slot`, which nobody else sees yet.

    direct: the tier keeps blocks as they are, so read the payload straight into the slot.
    Never raises for a fault of the tier: the answer says what happened.
    """

    def fetch() -> Moved:
        target = slot if direct else staging.payload
        began_s = time.perf_counter()
        try:
            length = tier.read(key, staging.header, target)
        except FrameTooLarge as error:  # whatever it is, it is no block of this key
            raise FrameInvalid(str(error)) from None
        if length == 0:
            return Moved(Landing.MISSING, reason="missing")
        tier_s = time.perf_counter() - began_s
        began_cpu_s = time.thread_time()
        header = frame.parse_header(staging.header, key)
        if header.raw_bytes != nbytes:
            raise FrameInvalid(f"a block of {header.raw_bytes} bytes where {nbytes} are right")
        if direct and header.codec != IDENTITY:
            staging.payload[:length] = target[:length]
            target = staging.payload
        unpack_block(header, target[:length], slot)
        codec_s = time.thread_time() - began_cpu_s
        move_s = time.perf_counter() - began_s
        cost = Cost(header.codec, nbytes, length, tier_s, codec_s, move_s)
        return Moved(Landing.ARRIVED, length + PAGE_BYTES, cost=cost)

    try:
        return _whole(tier, key, fetch)
    except FrameInvalid as error:
        return Moved(Landing.CORRUPT, reason=str(error))
    except Exception as error:
        return Moved(Landing.UNAVAILABLE, reason=_reason(tier, error))


def read_frame(tier: Tier, key: Key, header: memoryview, payload: memoryview) -> int:
    """A frame as the tier keeps it, its stored bytes verified; payload bytes, 0 for a miss.

    Raises FrameInvalid for a damaged one, and what the tier raises.
    """

    def fetch() -> int:
        length = tier.read(key, header, payload)
        if length:
            frame.verify_stored(frame.parse_header(header, key), payload[:length])
        return length

    return _whole(tier, key, fetch)


def _whole(tier: Tier, key: Key, fetch: Callable[[], T]) -> T:
    """What `fetch` reads. A damaged block is deleted if it is damaged when read again too.

    A tier deletes by key, not what was read: whoever read the damaged block before another reader
    deleted it would delete the good one that was written since. So a deleter reads again first,
    and one at a time for each key: a key is not written anew before it is deleted. (Unless the
    tier evicts it just then; that good block is lost, which is a miss.)

    Raises FrameInvalid when the first read was damaged, so that it is counted, and what the tier
    raises.
    """
    try:
        return fetch()
    except FrameInvalid as error:
        log.warning("%s: a damaged block: %s", tier.name, error)
        checked = (id(tier), key)
        with _checking_lock:
            if checked in _checking:
                raise
            _checking.add(checked)
        try:
            fetch()
        except FrameInvalid:
            _delete_quietly(tier, key)
        finally:
            with _checking_lock:
                _checking.discard(checked)
        raise


def unpack_block(header: FrameHeader, payload: memoryview, slot: memoryview) -> None:
    """Verify a frame's payload, decode it into the front of `slot`, and verify that.

    The payload may lie in the slot itself when it is kept as it is. Raises FrameInvalid.
    """
    frame.verify_stored(header, payload)
    stored = payload[: header.stored_bytes]
    if header.codec == IDENTITY:
        if header.stored_bytes != header.raw_bytes or header.stored_sum != header.raw_sum:
            raise FrameInvalid("an identity frame whose stored and raw bytes differ")
        if payload.obj is not slot.obj:
            slot[: header.raw_bytes] = stored
        return
    decoded = codecs.open(header.codec).decode(stored, slot[: header.raw_bytes])
    if decoded != header.raw_bytes:
        raise FrameInvalid(f"{decoded} bytes decoded where {header.raw_bytes} are right")
    frame.verify_raw(header, slot)


def pack_block(
    key: Key, nbytes: int, slot: memoryview, codec: Codec, staging: Staging
) -> memoryview:
    """Encode a leased block; the header lands in staging. Returns the padded payload.

    A block that the codec does not shrink is sent as it lies in the slot.
    """
    raw = slot[:nbytes]
    raw_sum = frame.checksum(raw)
    stored_bytes = 0 if codec.name == IDENTITY else codec.encode(raw, staging.payload)
    if stored_bytes:
        payload, name = staging.payload, codec.name
        stored_sum = frame.checksum(payload[:stored_bytes])
    else:
        payload, name, stored_bytes, stored_sum = slot, IDENTITY, nbytes, raw_sum
    end = frame.padded(stored_bytes)
    # Past a block's end a slot belongs to nobody; zeros there are what a frame's padding must be.
    payload[stored_bytes:end] = bytes(end - stored_bytes)
    frame.pack_header(
        staging.header,
        key=key,
        codec=name,
        raw_bytes=nbytes,
        stored_bytes=stored_bytes,
        raw_sum=raw_sum,
        stored_sum=stored_sum,
    )
    return payload[:end]


def write_block(
    tier: Tier, key: Key, nbytes: int, slot: memoryview, codec: Codec, staging: Staging
) -> Moved:
    """Keep a block in a tier. ARRIVED when it is there, by us or before us."""
    try:
        if tier.local_index and tier.contains([key])[0]:
            return Moved(Landing.ARRIVED)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        payload = pack_block(key, nbytes, slot, codec, staging)
        codec_s = time.thread_time() - began_cpu_s
        tier_began_s = time.perf_counter()
        tier.write(key, staging.header, payload)
        ended_s = time.perf_counter()
        cost = Cost(
            codec.name, nbytes, len(payload), ended_s - tier_began_s, codec_s, ended_s - began_s
        )
        return Moved(Landing.ARRIVED, len(payload) + PAGE_BYTES, cost=cost)
    except Exception as error:
        return Moved(Landing.UNAVAILABLE, reason=_reason(tier, error))


def _delete_quietly(tier: Tier, key: Key) -> None:
    """Delete what was found damaged; a tier that cannot is only logged: it is never trusted."""
    try:
        tier.delete([key])
    except Exception as error:
        log.warning("%s: cannot delete a damaged block: %s", tier.name, error)


def contained(tier: Tier, keys: Sequence[Key]) -> list[bool]:
    """`tier.contains`; a tier at fault contains nothing."""
    found, moved = asked(tier, keys)
    if moved.landing is not Landing.ARRIVED:
        log.warning("%s: %s", tier.name, moved.reason)
    return found


def asked(tier: Tier, keys: Sequence[Key]) -> tuple[list[bool], Moved]:
    """`tier.contains`, and how that went; a tier at fault contains nothing."""
    try:
        return tier.contains(keys), Moved(Landing.ARRIVED)
    except Exception as error:
        fault = Moved(Landing.UNAVAILABLE, reason=_reason(tier, error))
        return [False] * len(keys), fault


def _reason(tier: Tier, error: Exception) -> str:
    """One line for a tier's fault; what its author did not foresee is logged in full."""
    if isinstance(error, TierUnavailable):
        return f"unavailable: {error}"
    if isinstance(error, TierError):
        return str(error)
    if tier.judge(error) is Judgement.PERMANENT:
        log.error("%s: an unexpected fault", tier.name, exc_info=error)
    return f"{type(error).__name__}: {error}"
