"""Requests from KV events: what vLLM's prefix cache publishes when it stores blocks.

A row is a batch `[time, [event, ...], rank]` with events as maps or arrays (see
`kvstore.events.codec`), or an object with such a batch under "decoded". A file of concatenated
msgpack batches works too.

A request is a chain of blocks: the stored blocks, and all blocks in front of them by
"parent_block_hash". Blocks added to the end of a chain within SAME_REQUEST_S belong to the same
request: its prompt came in parts, or it went on to decode. A request whose blocks were all cached
leaves no event, so the replay does not see it and the true hit rate is higher. Events of removed
blocks are ignored: the replay decides what to evict. With several groups of layers or media, only
the first counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvstore.analysis.simulate.traces import TraceRequest, ends_of
from kvstore.errors import FrameInvalid
from kvstore.events.codec import BlockName, BlockStored, decode, short_name

SAME_REQUEST_S: Final = 2.0
"""Decoding a block of 16 to 64 tokens takes less. Reading an answer and replying takes more."""
DEVICE_MEDIA: Final = (None, "GPU")


@dataclass
class _Chain:
    """An open request: its blocks, its start time, and the time its last block was stored."""

    run: list[int]
    began_s: float
    stored_s: float


class EventRows:
    """Reader of rows that are batches of events."""

    format = "vllm kv events"

    def __init__(self, wanted: int | None) -> None:
        self.block_tokens = wanted or 0
        self._wanted = wanted
        self._parents: dict[int, int | None] = {}
        self._open: dict[int, _Chain] = {}
        """Chains by the id of their last block, the least recently extended first."""
        self._start_s: float | None = None
        self._group: int | None = None

    def take(self, row: Any) -> Iterable[TraceRequest]:
        """Return the requests that are complete. Raises ValueError if the batch is invalid."""
        try:
            batch = decode(msgpack.packb(_batch_of(row)))
        except (FrameInvalid, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if self._start_s is None:
            self._start_s = batch.time_s
        now_s = batch.time_s - self._start_s
        over = [end for end, c in self._open.items() if now_s - c.stored_s > SAME_REQUEST_S]
        done = [self._request(self._open.pop(end)) for end in over]
        for event in batch.events:
            if isinstance(event, BlockStored) and event.medium in DEVICE_MEDIA:
                self._stored(event, now_s)
        return sorted(done, key=lambda request: request.time_s)

    def finish(self) -> Iterable[TraceRequest]:
        """Return the requests that are open at the end of the trace."""
        chains = sorted(self._open.values(), key=lambda chain: chain.began_s)
        self._open.clear()
        return [self._request(chain) for chain in chains]

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
                f"the block has {event.block_size} tokens; earlier blocks have {self.block_tokens}"
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
        """Return the blocks up to `end`, from the first known one."""
        path: list[int] = []
        seen: set[int] = set()
        while end is not None and end not in seen:
            seen.add(end)
            path.append(end)
            end = self._parents.get(end)
        return path[::-1]

    def _request(self, chain: _Chain) -> TraceRequest:
        tokens = len(chain.run) * self.block_tokens
        ends = ends_of(len(chain.run), self.block_tokens, tokens)
        return TraceRequest(tuple(chain.run), ends, tokens, time_s=chain.began_s)


def is_batch(row: Any) -> bool:
    """Return whether a row looks like a batch of events."""
    if isinstance(row, dict):
        return isinstance(row.get("decoded"), list)
    return isinstance(row, list) and len(row) in (2, 3) and isinstance(row[1], list)


def _batch_of(row: Any) -> Any:
    """Return the batch with hashes as bytes. JSON has them as hex."""
    batch = row.get("decoded") if isinstance(row, dict) else row
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("not a batch of events; expected [time, [event, ...], rank]")
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
