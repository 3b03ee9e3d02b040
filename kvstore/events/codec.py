"""KV events: what an engine's prefix cache took and dropped, in the format vLLM publishes.

A batch is the msgpack array `[timestamp, [event, ...], data_parallel_rank]`. An event is a map with
its "type" and the fields that differ from their defaults; until June 2026 it was an array, the type
and the fields in their order. Both are read here; maps are written. A block is named by the low 64
bits of its hash, as an integer, or by the whole hash, as bytes.

Fields and their order are those of vLLM's `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, TypeAlias

import msgpack

from kvstore.errors import FrameInvalid

MAX_PAYLOAD_BYTES: Final = 64 << 20
MAX_EVENTS: Final = 1 << 16
"""Events of one batch."""
LOW_BITS: Final = (1 << 64) - 1

BlockName: TypeAlias = int | bytes


def short_name(name: BlockName) -> int:
    """The low 64 bits, by which either form of a name is known."""
    return (name if isinstance(name, int) else int.from_bytes(name, "big")) & LOW_BITS


@dataclass(frozen=True)
class BlockStored:
    """Blocks that are held from now on, each the child of the one before it.

    token_ids: of all of them, `block_size` each; may be empty; what it lists is not looked at.
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
    """Blocks that are held no longer."""

    block_hashes: tuple[BlockName, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is held any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

_KINDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_ALWAYS: Final[Mapping[type[Any], int]] = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0}
"""Leading fields that vLLM writes whatever they are; later ones only when they say something."""


def _is_name(told: Any) -> bool:
    return type(told) is int or isinstance(told, bytes)


_RIGHT: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "tuple[BlockName, ...]": (
        "a list of integers or bytes",
        lambda told: isinstance(told, tuple) and all(map(_is_name, told)),
    ),
    "BlockName | None": ("an integer or bytes", lambda told: told is None or _is_name(told)),
    "tuple[int, ...]": ("a list", lambda told: isinstance(told, tuple)),
    "tuple[Any, ...] | None": ("a list", lambda told: told is None or isinstance(told, tuple)),
    "int": ("an integer", lambda told: type(told) is int),
    "int | None": ("an integer", lambda told: told is None or type(told) is int),
    "str | None": ("a text", lambda told: told is None or isinstance(told, str)),
}
"""By a field's type: its name for people, and whether a value is one."""


@dataclass(frozen=True)
class Batch:
    """Events of one engine's step, oldest first. time_s: since the epoch."""

    time_s: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None


def encode(batch: Batch) -> bytes:
    """A batch as vLLM publishes it."""
    events = [_as_map(event) for event in batch.events]
    parts: list[Any] = [batch.time_s, events]
    if batch.data_parallel_rank is not None:
        parts.append(batch.data_parallel_rank)
    packed: bytes = msgpack.packb(parts)
    return packed


def decode(payload: bytes) -> Batch:
    """A batch as an engine published it; events of kinds unknown here are left out.

    Raises:
        FrameInvalid: it is no such batch; one line says why.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameInvalid(f"a batch of {len(payload)} bytes; {MAX_PAYLOAD_BYTES} is the most")
    try:
        parts = msgpack.unpackb(payload, strict_map_key=False, use_list=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        # TypeError: a map with a map among its keys.
        raise FrameInvalid(f"a batch of events that is not msgpack: {error}") from None
    if not isinstance(parts, tuple) or len(parts) < 2 or not isinstance(parts[1], tuple):
        raise FrameInvalid("a batch of events is [time, events, rank]")
    if len(parts[1]) > MAX_EVENTS:
        raise FrameInvalid(f"a batch of {len(parts[1])} events; {MAX_EVENTS} is the most")
    rank = parts[2] if len(parts) > 2 else None
    if not isinstance(parts[0], int | float) or not (rank is None or type(rank) is int):
        raise FrameInvalid("a batch of events is [time, events, rank]")
    events = [_event_of(each) for each in parts[1]]
    return Batch(float(parts[0]), tuple(event for event in events if event is not None), rank)


def _as_map(event: Event) -> dict[str, Any]:
    kind = type(event)
    told: dict[str, Any] = {"type": kind.__name__}
    for number, each in enumerate(fields(kind)):
        value = getattr(event, each.name)
        if number < _ALWAYS[kind] or value is not None:
            told[each.name] = value
    return told


def _event_of(told: Any) -> Event | None:
    """One event, from a map or an array."""
    if isinstance(told, Mapping):
        name = told.get("type")
    elif isinstance(told, tuple) and told:
        name = told[0]
    else:
        raise FrameInvalid("an event is a map with a type, or an array that begins with it")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    known = fields(kind)
    if not isinstance(told, Mapping):
        told = {each.name: value for each, value in zip(known, told[1:], strict=False)}
    values = {each.name: told[each.name] for each in known if each.name in told}
    for each in known:
        what, right = _RIGHT[str(each.type)]
        value = values.get(each.name, each.default)
        if value is MISSING or not right(value):
            raise FrameInvalid(f"{each.name} is {what}; a {name} has another, or none")
    event: Event = kind(**values)
    return event
