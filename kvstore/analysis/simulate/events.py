"""Requests from what an engine's prefix cache said it stored: KV events, as vLLM publishes them.

A row is a batch `[time, [event, ...], rank]`, events being maps or arrays (`kvstore.events.codec`),
or an object with one under "decoded". A file of msgpack batches end to end is read as well.

A request is a chain of blocks, from the first: what was stored, and by "parent_block_hash" all that
lies in front. Further blocks on a chain's end within SAME_REQUEST_S belong to the same request (its
prompt came in parts, or it went on to decode). So a request whose blocks were all there leaves no
event, and is not seen: the true hit rate is higher. Blocks removed count for nothing: a replay
decides itself what is evicted. Of several groups of layers, and of media, the first counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvstore.analysis.simulate.traces import Asked, ends_of
from kvstore.errors import FrameInvalid
from kvstore.events.codec import BlockName, BlockStored, decode, short_name

SAME_REQUEST_S: Final = 2.0
"""Decoding a block of 16 to 64 tokens takes less, reading an answer and writing to it more."""
DEVICE_MEDIA: Final = (None, "GPU")


@dataclass
class _Chain:
    """A request under way: its blocks, when it began, and when its end was stored."""

    run: list[int]
    began_s: float
    stored_s: float


class EventRows:
    """Rows that are batches of events."""

    format = "vllm kv events"

    def __init__(self, wanted: int | None) -> None:
        self.block_tokens = wanted or 0
        self._wanted = wanted
        self._parents: dict[int, int | None] = {}
        self._open: dict[int, _Chain] = {}
        """By the name of their last block, the one stored longest ago first."""
        self._start_s: float | None = None
        self._group: int | None = None

    def take(self, row: Any) -> Iterable[Asked]:
        """Requests that are over by this batch. Raises ValueError saying what is wrong with it."""
        try:
            batch = decode(msgpack.packb(_batch_of(row)))
        except (FrameInvalid, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if self._start_s is None:
            self._start_s = batch.time_s
        now_s = batch.time_s - self._start_s
        over = [end for end, c in self._open.items() if now_s - c.stored_s > SAME_REQUEST_S]
        done = [self._asked(self._open.pop(end)) for end in over]
        for event in batch.events:
            if isinstance(event, BlockStored) and event.medium in DEVICE_MEDIA:
                self._stored(event, now_s)
        return sorted(done, key=lambda request: request.time_s)

    def finish(self) -> Iterable[Asked]:
        """The requests that were under way when the trace ended."""
        chains = sorted(self._open.values(), key=lambda chain: chain.began_s)
        self._open.clear()
        return [self._asked(chain) for chain in chains]

    def _stored(self, event: BlockStored, now_s: float) -> None:
        group = event.group_idx or 0
        if self._group is None:
            self._group = group
        if group != self._group or not event.block_hashes:
            return
        if not self.block_tokens and event.block_size > 0:
            self.block_tokens = event.block_size
        if event.block_size != self.block_tokens:
            raise ValueError(
                f"a block of {event.block_size} tokens; those before have {self.block_tokens}"
            )
        names = [_name(block) for block in event.block_hashes]
        parent = None if event.parent_block_hash is None else _name(event.parent_block_hash)
        before = parent
        for name in names:
            self._parents[name] = before
            before = name
        chain = self._open.pop(parent, None) if parent is not None else None
        if chain is None:
            chain = _Chain(self._path(parent), now_s, now_s)
        chain.run += names
        chain.stored_s = now_s
        self._open[names[-1]] = chain

    def _path(self, end: int | None) -> list[int]:
        """The blocks up to this one, from the first that is known."""
        path: list[int] = []
        seen: set[int] = set()
        while end is not None and end not in seen:
            seen.add(end)
            path.append(end)
            end = self._parents.get(end)
        return path[::-1]

    def _asked(self, chain: _Chain) -> Asked:
        tokens = len(chain.run) * self.block_tokens
        ends = ends_of(len(chain.run), self.block_tokens, tokens)
        return Asked(tuple(chain.run), ends, tokens, time_s=chain.began_s)


def is_batch(row: Any) -> bool:
    """Whether a row looks like a batch of events."""
    if isinstance(row, dict):
        return isinstance(row.get("decoded"), list)
    return isinstance(row, list) and len(row) in (2, 3) and isinstance(row[1], list)


def _batch_of(row: Any) -> Any:
    """The batch itself, hashes that JSON had to write as hex being bytes again."""
    batch = row.get("decoded") if isinstance(row, dict) else row
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("is no batch of events; [time, [event, ...], rank] is right")
    return [batch[0], [_event(event) for event in batch[1]], *batch[2:]]


def _event(event: Any) -> Any:
    if isinstance(event, dict):
        return {key: _unhexed(key, value) for key, value in event.items()}
    if isinstance(event, list) and len(event) > 2:
        return [
            event[0],
            _unhexed("block_hashes", event[1]),
            _unhexed("parent", event[2]),
            *event[3:],
        ]
    return event


def _unhexed(field: str, value: Any) -> Any:
    if field == "block_hashes" and isinstance(value, list):
        return [bytes.fromhex(each) if isinstance(each, str) else each for each in value]
    if field.startswith("parent") and isinstance(value, str):
        return bytes.fromhex(value)
    return value


def _name(block: BlockName) -> int:
    return short_name(block) >> 1
