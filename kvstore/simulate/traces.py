"""Request traces: one JSON object a line, in arrival order, blocks named by their ids.

    {"input_length": 6758, "hash_ids": [0, 1, 2, ...]}

Equal ids mean equal prefixes. The block length is `block_size`, or a list `block_tokens` where
blocks differ, or what the reader is told (Mooncake's traces do not say: 512).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError

MOONCAKE_BLOCK_TOKENS: Final = 512


@dataclass(frozen=True)
class Asked:
    """One request. run: its blocks, from the first. ends: prompt tokens before each block, and up
    to the end of the last. tokens: of the prompt."""

    run: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int


def read_trace(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[Asked]:
    """The requests of a trace. Raises ConfigError naming the first line that is none."""
    requests = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read a trace from {str(path)!r}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_request(json.loads(line), block_tokens))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f'line {number} of {str(path)!r} is no request; {{"input_length": tokens, '
                    '"hash_ids": [...]}} is right'
                ) from None
    return requests


def _request(row: dict[str, object], block_tokens: int) -> Asked:
    run, total, sizes = row["hash_ids"], row["input_length"], row.get("block_tokens")
    if not isinstance(run, list) or not isinstance(total, int):
        raise TypeError
    if not isinstance(sizes, list):
        sizes = [row.get("block_size", block_tokens)] * len(run)
    ends = (min(end, total) for end in itertools.accumulate(sizes[: len(run)]))
    return Asked(tuple(map(int, run)), (0, *ends), total)
