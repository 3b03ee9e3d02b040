"""Requests that name their blocks: Mooncake's traces, Qwen-Bailian's, and those of the same make.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

Equal ids mean equal prefixes; the last block may be a part of one. A block has 512 tokens, unless
the row says otherwise ("block_size", or a list "block_tokens" where they differ), or it is one of
Qwen-Bailian's ("chat_id", "parent_chat_id", ...), whose blocks have 16. Timestamps are in
milliseconds, Qwen-Bailian's in seconds. All tokens of a prompt may hit, which is how rates over
these traces are counted (a store would leave the last token to be computed).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from typing import Any, Final

from kvstore.analysis.simulate.traces import (
    MOONCAKE_BLOCK_TOKENS,
    WHOLE_MAX,
    Asked,
    ends_of,
    short,
    time_of,
    whole,
)

QWEN_BLOCK_TOKENS: Final = 16


class HashIdRows:
    """Rows with "hash_ids".

    wanted: tokens of a block as the user has them. Where the trace does not say how long its
        blocks are, this does. Where it does, `wanted` must be that, or a multiple: so many blocks
        are then taken as one, named by the last of them.
    """

    def __init__(self, first: dict[str, Any], wanted: int | None) -> None:
        self.qwen = "parent_chat_id" in first or "chat_id" in first
        self.format = "qwen-bailian" if self.qwen else "mooncake"
        self._wanted = wanted
        self._unit_s = 1.0 if self.qwen else 1e-3
        told = QWEN_BLOCK_TOKENS if self.qwen else first.get("block_size")
        self.block_tokens: int = wanted or told or MOONCAKE_BLOCK_TOKENS

    def take(self, row: Any) -> Iterable[Asked]:
        """The request of a row. Raises ValueError saying what is wrong with it."""
        if not isinstance(row, dict) or "hash_ids" not in row or "input_length" not in row:
            raise ValueError('is no request; {"input_length": tokens, "hash_ids": [...]} is right')
        tokens, ids = whole(row, "input_length"), row["hash_ids"]
        try:
            run = tuple(array("q", ids))
        except (TypeError, OverflowError):
            raise ValueError(
                f"'hash_ids' is {short(ids)}; a list of whole numbers below 2^63 is right"
            ) from None
        sizes = row.get("block_tokens")
        if sizes is not None:
            ends = self._unequal(sizes, row, len(run), tokens)
        else:
            size = row.get("block_size", QWEN_BLOCK_TOKENS if self.qwen else None)
            run, ends = self._equal(run, size, tokens)
        yield Asked(
            run,
            ends,
            tokens,
            time_s=time_of(row, self._unit_s),
            output_tokens=whole(row, "output_length", 0),
        )

    def finish(self) -> Iterable[Asked]:
        """Nothing is left over."""
        return ()

    def _equal(
        self, run: tuple[int, ...], size: Any, tokens: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if size is None:
            return run, ends_of(len(run), self.block_tokens, tokens)
        if type(size) is not int or not 1 <= size <= WHOLE_MAX:
            raise ValueError(f"'block_size' is {short(size)}; tokens of a block are right")
        if self._wanted is None or self._wanted == size:
            return run, ends_of(len(run), size, tokens)
        if self._wanted % size:
            raise ValueError(
                f"its blocks have {size} tokens; {self._wanted} is no multiple of that"
            )
        each = self._wanted // size
        merged = run[each - 1 :: each] + (run[-1:] if len(run) % each else ())
        return merged, ends_of(len(merged), self._wanted, tokens)

    def _unequal(
        self, sizes: Any, row: dict[str, Any], blocks: int, tokens: int
    ) -> tuple[int, ...]:
        right = isinstance(sizes, list) and all(
            type(size) is int and 0 < size <= WHOLE_MAX for size in sizes
        )
        if not right or len(sizes) < blocks:
            raise ValueError(
                f"'block_tokens' is {short(sizes)}; the tokens of each of its {blocks} blocks "
                "are right"
            )
        if self._wanted is not None and self._wanted != row.get("block_size", self._wanted):
            raise ValueError("its blocks differ in length; they cannot be made into others")
        ends = itertools.accumulate(sizes[:blocks])
        return (0, *(min(end, tokens) for end in ends))
