"""KV events: blocks stored in and removed from an engine's prefix cache, in vLLM's format.

A batch is the msgpack array `[timestamp, [event, ...], data_parallel_rank]`. An event is a map with
its "type" and the fields that differ from their defaults. Until June 2026 an event was an array of
the type and the fields in order. This module reads both forms, and writes maps. A block's name is
the low 64 bits of its hash, as an integer, or the whole hash, as bytes.

The fields and their order are those of vLLM's `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, TypeAlias

import msgpack

from kvstore.errors import FrameInvalid

MAX_PAYLOAD_BYTES: Final = 64 << 20
MAX_EVENTS: Final = 1 << 16
"""Maximum number of events in one batch."""
LOW_BITS: Final = (1 << 64) - 1

BlockName: TypeAlias = int | bytes


def short_name(name: BlockName) -> int:
    """The low 64 bits of a name, the same for both forms."""
    return (name if isinstance(name, int) else int.from_bytes(name, "big")) & LOW_BITS


@dataclass(frozen=True)
class BlockStored:
    """Blocks that are now cached, each the child of the one before it.

    token_ids: of all blocks, `block_size` each; may be empty; kvstore does not read it.
    medium: "GPU", "CPU", "STORAGE".
    """

    block_hashes: tuple[BlockName, ...]
    parent_block_hash: BlockName | None = None
    token_ids: tuple[int, ...] = ()
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that are not cached any more."""

    block_hashes: tuple[BlockName, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """The cache is empty."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

_KINDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_LEADING: Final[Mapping[type[Any], int]] = {
    BlockStored: 7,
    BlockRemoved: 2,
    AllBlocksCleared: 0,
}
"""Number of leading fields that vLLM always writes; it writes later fields only if not None."""


def _is_name(value: Any) -> bool:
    return type(value) is int or isinstance(value, bytes)


_CHECKS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "tuple[BlockName, ...]": (
        "a list of integers or bytes",
        lambda value: isinstance(value, tuple) and all(map(_is_name, value)),
    ),
    "BlockName | None": ("an integer or bytes", lambda value: value is None or _is_name(value)),
    "tuple[int, ...]": ("a list", lambda value: isinstance(value, tuple)),
    "tuple[Any, ...] | None": ("a list", lambda value: value is None or isinstance(value, tuple)),
    "int": ("an integer", lambda value: type(value) is int),
    "int | None": ("an integer", lambda value: value is None or type(value) is int),
    "str | None": ("text", lambda value: value is None or isinstance(value, str)),
}
"""By a field's type: its name in messages, and a check of a value."""


@dataclass(frozen=True)
class Batch:
    """Events of one engine's step, oldest first. time_s: since the epoch."""

    time_s: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None


def encode(batch: Batch) -> bytes:
    """Encode a batch as vLLM publishes it."""
    events = [_as_map(event) for event in batch.events]
    parts: list[Any] = [batch.time_s, events]
    if batch.data_parallel_rank is not None:
        parts.append(batch.data_parallel_rank)
    packed: bytes = msgpack.packb(parts)
    return packed


def decode(payload: bytes) -> Batch:
    """Decode a batch that an engine published. Events of unknown kinds are left out.

    Raises:
        FrameInvalid: the payload is not a valid batch; one line gives the reason.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameInvalid(f"event batch of {len(payload)} bytes: maximum {MAX_PAYLOAD_BYTES}")
    try:
        parts = msgpack.unpackb(payload, strict_map_key=False, use_list=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        # TypeError: a map with a map among its keys.
        raise FrameInvalid(f"event batch is not msgpack: {error}") from None
    if not isinstance(parts, tuple) or len(parts) < 2 or not isinstance(parts[1], tuple):
        raise FrameInvalid("event batch must be [time, events, rank]")
    if len(parts[1]) > MAX_EVENTS:
        raise FrameInvalid(f"event batch of {len(parts[1])} events: maximum {MAX_EVENTS}")
    rank = parts[2] if len(parts) > 2 else None
    if not isinstance(parts[0], int | float) or not (rank is None or type(rank) is int):
        raise FrameInvalid("event batch must be [time, events, rank]")
    events = [_event_of(each) for each in parts[1]]
    return Batch(float(parts[0]), tuple(event for event in events if event is not None), rank)


def _as_map(event: Event) -> dict[str, Any]:
    kind = type(event)
    fields_by_name: dict[str, Any] = {"type": kind.__name__}
    for number, each in enumerate(fields(kind)):
        value = getattr(event, each.name)
        if number < _LEADING[kind] or value is not None:
            fields_by_name[each.name] = value
    return fields_by_name


def _event_of(item: Any) -> Event | None:
    """One event, from a map or an array. None for an unknown kind."""
    if isinstance(item, Mapping):
        name = item.get("type")
    elif isinstance(item, tuple) and item:
        name = item[0]
    else:
        raise FrameInvalid("event must be a map with a type, or an array that begins with the type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    known = fields(kind)
    if not isinstance(item, Mapping):
        item = {each.name: value for each, value in zip(known, item[1:], strict=False)}
    values = {each.name: item[each.name] for each in known if each.name in item}
    for each in known:
        what, is_valid = _CHECKS[str(each.type)]
        value = values.get(each.name, each.default)
        if value is MISSING or not is_valid(value):
            raise FrameInvalid(f"event {name}: field {each.name!r} must be {what}")
    event: Event = kind(**values)
    return event
