"""Transfers one block between a slot and a tier: pack or verify, encode or decode.

These functions run in a worker's thread and use that worker's staging buffers. They know nothing of
leases or operations. A block from a tier is verified before and after decoding, and only a verified
block counts as loaded.
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
from kvstore.cache.commands import LoadOutcome
from kvstore.codecs.base import UNCOMPRESSED_ID as UNCOMPRESSED_ID
from kvstore.codecs.base import Codec
from kvstore.codecs.chooser import Cost
from kvstore.errors import (
    FrameInvalid,
    FrameTooLarge,
    FrameUnsupported,
    TierError,
    TierUnavailable,
)
from kvstore.tiers.base import IO_ALIGNMENT, ErrorClass, Tier
from kvstore.tiers.unsupported import UnsupportedFrames

log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_MAGIC = bytes(len(frame.MAGIC))
"""Start of a header that the tier has not returned."""
_checking: set[tuple[int, Key]] = set()
"""(id of a tier, key) of each corrupt block that a thread re-reads before deleting it."""
_checking_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of one transfer: outcome, bytes read from or written to the tier, and cost."""

    outcome: LoadOutcome
    stored_bytes: int = 0
    reason: str = ""
    cost: Cost | None = None


class StagingBuffers:
    """One worker's buffers: a header of one sector and a payload of the maximum size."""

    def __init__(self, slot_bytes: int) -> None:
        self.header = frame.aligned_buffer(IO_ALIGNMENT)
        self.payload = frame.aligned_buffer(max_payload_bytes(slot_bytes))


def max_payload_bytes(slot_bytes: int) -> int:
    """Maximum payload size that any codec makes of one slot, in whole sectors."""
    bounds = [
        codecs.codec_for(kind, dtype).bound(slot_bytes)
        for kind in codecs.kinds()
        for dtype in DTYPE_BYTES
    ]
    return frame.padded_bytes(max(slot_bytes, *bounds))


def read_block(
    tier: Tier, key: Key, nbytes: int, slot: memoryview, staging: StagingBuffers, *, direct: bool
) -> TransferResult:
    """Read a block of `nbytes` raw bytes into `slot`, which no other thread uses yet.

    direct: the tier stores blocks uncompressed, so read the payload directly into the slot.
    Never raises for an error of the tier: the result contains it.
    """

    def read() -> TransferResult:
        target = slot if direct else staging.payload
        started_s = time.perf_counter()
        staging.header[: len(_NO_MAGIC)] = _NO_MAGIC
        try:
            length = tier.read(key, staging.header, target)
        except FrameTooLarge as error:
            _check_too_large(staging.header, error)
            # In this release no block of the key has that size.
            raise FrameInvalid(str(error)) from None
        if length == 0:
            return TransferResult(LoadOutcome.MISSING, reason="missing")
        tier_s = time.perf_counter() - started_s
        started_cpu_s = time.thread_time()
        header = frame.parse_header(staging.header, key)
        if header.raw_bytes != nbytes:
            raise FrameInvalid(
                f"block of {header.raw_bytes} bytes where {nbytes} bytes are expected"
            )
        if direct and header.codec != UNCOMPRESSED_ID:
            staging.payload[:length] = target[:length]
            target = staging.payload
        unpack_block(header, target[:length], slot)
        codec_s = time.thread_time() - started_cpu_s
        move_s = time.perf_counter() - started_s
        cost = Cost(header.codec, nbytes, length, tier_s, codec_s, move_s)
        return TransferResult(LoadOutcome.LOADED, length + IO_ALIGNMENT, cost=cost)

    try:
        return _read_verified(tier, key, read)
    except FrameUnsupported as error:
        return TransferResult(LoadOutcome.UNSUPPORTED, reason=str(error))
    except FrameInvalid as error:
        return TransferResult(LoadOutcome.CORRUPT, reason=str(error))
    except Exception as error:
        return TransferResult(LoadOutcome.UNAVAILABLE, reason=_describe_error(tier, error))


def read_frame(tier: Tier, key: Key, header: memoryview, payload: memoryview) -> int:
    """Read a frame and verify its stored bytes. Returns the payload's length, 0 for a miss.

    Raises FrameInvalid: the frame is corrupt, or of another release (FrameUnsupported). Passes on
    the tier's errors.
    """

    def read() -> int:
        header[: len(_NO_MAGIC)] = _NO_MAGIC
        try:
            length = tier.read(key, header, payload)
        except FrameTooLarge as error:
            _check_too_large(header, error)
            raise
        if length:
            parsed = frame.parse_header(header, key)
            frame.verify_stored(parsed, payload[:length])
            codecs.codec_by_frame_id(parsed.codec)
        return length

    return _read_verified(tier, key, read)


def _read_verified(tier: Tier, key: Key, read: Callable[[], T]) -> T:
    """The result of `read`. A block that is corrupt in two reads is deleted; one of another release
    never is.

    A tier deletes by key. Between a corrupt read and the delete, another reader may have deleted
    the block and a good copy may have been written. So the block is read again before it is
    deleted, by one thread per key at a time: a key is not written again before it is deleted.
    (If the tier evicts the corrupt block at that moment, a new good copy can be deleted; that is a
    miss.)

    Raises FrameInvalid: the first read was corrupt; the caller counts it. Passes on the tier's
    errors.
    """
    try:
        return read()
    except FrameUnsupported as error:
        if isinstance(tier, UnsupportedFrames):
            tier.hide(key, error)
        raise
    except FrameInvalid as error:
        log.warning("tier %s: corrupt block: %s", tier.name, error)
        checked = (id(tier), key)
        with _checking_lock:
            if checked in _checking:
                raise
            _checking.add(checked)
        try:
            read()
        except FrameUnsupported:
            pass  # another process has replaced the block
        except FrameInvalid:
            _try_delete(tier, key)
        finally:
            with _checking_lock:
                _checking.discard(checked)
        raise


def _check_too_large(header: memoryview, error: FrameTooLarge) -> None:
    """Raise FrameUnsupported for a frame of another release that does not fit into the buffer. A
    later release may store more bytes for the same block."""
    if header[: len(_NO_MAGIC)] == _NO_MAGIC:
        raise FrameUnsupported(f"frame of an unknown format: {error}") from None
    codecs.check_supported(header)


def unpack_block(header: FrameHeader, payload: memoryview, slot: memoryview) -> None:
    """Verify a frame's payload, decode it into the front of `slot`, and verify that.

    An uncompressed payload may already be in the slot. Raises FrameInvalid; FrameUnsupported: the
    codec is unknown.
    """
    frame.verify_stored(header, payload)
    stored = payload[: header.stored_bytes]
    if header.codec == UNCOMPRESSED_ID:
        if header.stored_bytes != header.raw_bytes or header.stored_sum != header.raw_sum:
            raise FrameInvalid("stored and raw bytes of an uncompressed frame differ")
        if payload.obj is not slot.obj:
            slot[: header.raw_bytes] = stored
        return
    decoded = codecs.codec_by_frame_id(header.codec).decode(stored, slot[: header.raw_bytes])
    if decoded != header.raw_bytes:
        raise FrameInvalid(f"{decoded} bytes decoded where {header.raw_bytes} bytes are expected")
    frame.verify_raw(header, slot)


def pack_block(
    key: Key, nbytes: int, slot: memoryview, codec: Codec, staging: StagingBuffers
) -> memoryview:
    """Encode a leased block and write its header to staging. Returns the padded payload.

    If the codec does not shrink the block, the payload is the slot itself, uncompressed.
    """
    raw = slot[:nbytes]
    raw_sum = frame.checksum(raw)
    stored_bytes = 0 if codec.frame_id == UNCOMPRESSED_ID else codec.encode(raw, staging.payload)
    if stored_bytes:
        payload, name = staging.payload, codec.frame_id
        stored_sum = frame.checksum(payload[:stored_bytes])
    else:
        payload, name, stored_bytes, stored_sum = slot, UNCOMPRESSED_ID, nbytes, raw_sum
    end = frame.padded_bytes(stored_bytes)
    # A frame's padding must be zero. The bytes of a slot after its block are unused.
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
    tier: Tier, key: Key, nbytes: int, slot: memoryview, codec: Codec, staging: StagingBuffers
) -> TransferResult:
    """Write a block to a tier. LOADED means that the tier contains it, also if it did before."""
    try:
        if tier.local_index and tier.contains([key])[0]:
            if isinstance(tier, UnsupportedFrames):
                tier.check_stored(key, staging.header)
            return TransferResult(LoadOutcome.LOADED)
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        payload = pack_block(key, nbytes, slot, codec, staging)
        codec_s = time.thread_time() - started_cpu_s
        tier_started_s = time.perf_counter()
        tier.write(key, staging.header, payload)
        ended_s = time.perf_counter()
        cost = Cost(
            codec.frame_id,
            nbytes,
            len(payload),
            ended_s - tier_started_s,
            codec_s,
            ended_s - started_s,
        )
        return TransferResult(LoadOutcome.LOADED, len(payload) + IO_ALIGNMENT, cost=cost)
    except FrameUnsupported as error:
        return TransferResult(LoadOutcome.UNSUPPORTED, reason=str(error))
    except Exception as error:
        return TransferResult(LoadOutcome.UNAVAILABLE, reason=_describe_error(tier, error))


def _try_delete(tier: Tier, key: Key) -> None:
    """Delete a corrupt block. A failed delete is only logged, because every read is verified."""
    try:
        tier.delete([key])
    except Exception as error:
        log.warning("tier %s: cannot delete a corrupt block: %s", tier.name, error)


def checked_contains(tier: Tier, keys: Sequence[Key]) -> list[bool]:
    """`tier.contains`, all False if the tier fails. The error is logged."""
    found, result = tier_contains(tier, keys)
    if result.outcome is not LoadOutcome.LOADED:
        log.warning("tier %s: contains failed: %s", tier.name, result.reason)
    return found


def tier_contains(tier: Tier, keys: Sequence[Key]) -> tuple[list[bool], TransferResult]:
    """`tier.contains` with its result. All False if the tier fails."""
    try:
        return tier.contains(keys), TransferResult(LoadOutcome.LOADED)
    except Exception as error:
        failed = TransferResult(LoadOutcome.UNAVAILABLE, reason=_describe_error(tier, error))
        return [False] * len(keys), failed


def _describe_error(tier: Tier, error: Exception) -> str:
    """One line about a tier's error. An unexpected error is logged with its traceback."""
    if isinstance(error, TierUnavailable):
        return f"unavailable: {error}"
    if isinstance(error, TierError):
        return str(error)
    if tier.classify_error(error) is ErrorClass.PERMANENT:
        log.error("tier %s: unexpected error", tier.name, exc_info=error)
    return f"{type(error).__name__}: {error}"
