"""Opens a trace. The first row tells which of the known formats it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from kvstore.analysis.simulate.events import EventRows, is_batch
from kvstore.analysis.simulate.hash_ids import HashIdRows
from kvstore.analysis.simulate.lines import Progress, Rows, Source
from kvstore.analysis.simulate.prompts import PromptRows, is_prompt, load_tokenizer
from kvstore.analysis.simulate.traces import TraceRequest, shorten
from kvstore.errors import ConfigError

PROGRESS_ROWS = 256
"""Number of rows between two progress reports."""


class RowReader(Protocol):
    """Makes requests from the rows of one format."""

    format: str
    block_tokens: int

    def take(self, row: Any) -> Iterable[TraceRequest]:
        """Return the requests that this row completes. Raises ValueError if the row is invalid."""
        ...

    def finish(self) -> Iterable[TraceRequest]:
        """Return the requests that are incomplete after the last row."""
        ...


class Trace:
    """An open trace. requests: an iterator in arrival order, to be read once.

    block_tokens: tokens per block, or the maximum if the blocks differ.

    Raises ConfigError: the trace has no requests, or the first one is invalid.
    """

    def __init__(self, source: Source, rows: Rows, reader: RowReader, progress: Progress) -> None:
        self.name = source.name
        self.format = reader.format
        self._source = source
        self._rows = rows
        self._reader = reader
        self._progress = progress
        rest = self._read()
        first = next(rest, None)
        if first is None:
            raise ConfigError(f"{source.name} has no requests")
        self.requests: Iterator[TraceRequest] = chain((first,), rest)

    @property
    def block_tokens(self) -> int:
        return self._reader.block_tokens

    def _read(self) -> Iterator[TraceRequest]:
        reader, source = self._reader, self._source
        for count, (number, row) in enumerate(self._rows):
            try:
                yield from reader.take(row)
            except ValueError as error:
                raise ConfigError(f"{source.name}:{number}: {error}") from None
            if not count % PROGRESS_ROWS:
                self._progress(source.read, source.total)
        yield from reader.finish()
        self._progress(source.read, source.total)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._source.close()


def open_trace(
    where: str,
    *,
    block_tokens: int | None = None,
    tokenizer: Path | None = None,
    keep_ids: bool = False,
    progress: Progress = lambda read, total: None,
) -> Trace:
    """Open a trace from a file, or from stdin for "-".

    block_tokens: tokens per block, for a trace that does not say. tokenizer: for text, see
    `prompts`. keep_ids: give each request its token ids, if the trace has them.

    Raises:
        ConfigError: the trace cannot be read, is empty, or has no known format. An error found
            while reading names the file and the line.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"block_tokens must be at least 1 (got {block_tokens})")
    source = Source(where)
    try:
        rows = source.rows()
        number, first = next(rows, (0, None))
        if not number:
            raise ConfigError(f"{source.name} has no requests")
        reader: RowReader
        if is_batch(first):
            reader = EventRows(block_tokens)
        elif isinstance(first, dict) and "hash_ids" in first:
            reader = HashIdRows(first, block_tokens)
        elif is_prompt(first):
            encode = load_tokenizer(tokenizer) if tokenizer is not None else None
            reader = PromptRows(first, block_tokens, encode, keep_ids=keep_ids)
        else:
            raise ConfigError(
                f"{source.name}:{number}: {shorten(first)} is not a request; "
                'expected {"input_length": tokens, "hash_ids": [...]}, token ids, '
                '{"prompt": text} or a batch of KV events'
            )
        return Trace(source, chain(((number, first),), rows), reader, progress)
    except BaseException:
        source.close()
        raise


def read_trace(path: Path, block_tokens: int | None = None) -> list[TraceRequest]:
    """Return all requests of a trace. Raises ConfigError naming the first invalid line."""
    with open_trace(str(path), block_tokens=block_tokens) as trace:
        return list(trace.requests)
