"""Requests with block ids: traces of Mooncake, Qwen-Bailian and others in the same format.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

Equal ids mean equal prefixes. The last block may be partial. A block has 512 tokens by default. A
row can say otherwise: "block_size", or a list "block_tokens" if the blocks differ. Qwen-Bailian's
blocks have 16 tokens ("chat_id" or "parent_chat_id" in a row marks that format). Timestamps are in
milliseconds, Qwen-Bailian's in seconds. All tokens of a prompt can hit, as in published hit rates
over these traces. A store would leave the last token to be computed.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from typing import Any, Final

from kvstore.analysis.simulate.traces import (
    MOONCAKE_BLOCK_TOKENS,
    WHOLE_MAX,
    TraceRequest,
    ends_of,
    int_field,
    shorten,
    time_of,
)

QWEN_BLOCK_TOKENS: Final = 16


class HashIdRows:
    """Reader of rows with "hash_ids".

    wanted: tokens per block, given by the user. It applies if the trace does not state the size.
        If the trace does, `wanted` must be that size or a multiple. Several blocks then count as
        one, with the id of the last.
    """

    def __init__(self, first: dict[str, Any], wanted: int | None) -> None:
        self.qwen = "parent_chat_id" in first or "chat_id" in first
        self.format = "qwen-bailian" if self.qwen else "mooncake"
        self._wanted = wanted
        self._unit_s = 1.0 if self.qwen else 1e-3
        told = QWEN_BLOCK_TOKENS if self.qwen else first.get("block_size")
        self.block_tokens: int = wanted or told or MOONCAKE_BLOCK_TOKENS

    def take(self, row: Any) -> Iterable[TraceRequest]:
        """Return the request of a row. Raises ValueError if the row is invalid."""
        if not isinstance(row, dict) or "hash_ids" not in row or "input_length" not in row:
            raise ValueError('not a request; expected {"input_length": tokens, "hash_ids": [...]}')
        tokens, ids = int_field(row, "input_length"), row["hash_ids"]
        try:
            run = tuple(array("q", ids))
        except (TypeError, OverflowError):
            raise ValueError(
                f"'hash_ids' must be a list of integers below 2^63 (got {shorten(ids)})"
            ) from None
        sizes = row.get("block_tokens")
        if sizes is not None:
            ends = self._unequal(sizes, row, len(run), tokens)
        else:
            size = row.get("block_size", QWEN_BLOCK_TOKENS if self.qwen else None)
            run, ends = self._equal(run, size, tokens)
        yield TraceRequest(
            run,
            ends,
            tokens,
            time_s=time_of(row, self._unit_s),
            output_tokens=int_field(row, "output_length", 0),
        )

    def finish(self) -> Iterable[TraceRequest]:
        """Return nothing: every row is complete."""
        return ()

    def _equal(
        self, run: tuple[int, ...], size: Any, tokens: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if size is None:
            return run, ends_of(len(run), self.block_tokens, tokens)
        if type(size) is not int or not 1 <= size <= WHOLE_MAX:
            raise ValueError(f"'block_size' must be the tokens per block (got {shorten(size)})")
        if self._wanted is None or self._wanted == size:
            return run, ends_of(len(run), size, tokens)
        if self._wanted % size:
            raise ValueError(f"blocks have {size} tokens, and {self._wanted} is not a multiple")
        each = self._wanted // size
        merged = run[each - 1 :: each] + (run[-1:] if len(run) % each else ())
        return merged, ends_of(len(merged), self._wanted, tokens)

    def _unequal(
        self, sizes: Any, row: dict[str, Any], blocks: int, tokens: int
    ) -> tuple[int, ...]:
        valid = isinstance(sizes, list) and all(
            type(size) is int and 0 < size <= WHOLE_MAX for size in sizes
        )
        if not valid or len(sizes) < blocks:
            raise ValueError(
                f"'block_tokens' must be a list with the tokens of each of the {blocks} blocks "
                f"(got {shorten(sizes)})"
            )
        if self._wanted is not None and self._wanted != row.get("block_size", self._wanted):
            raise ValueError("blocks of different lengths cannot be merged")
        ends = itertools.accumulate(sizes[:blocks])
        return (0, *(min(end, tokens) for end in ends))
