"""Opens a trace, whatever of the known formats it is in: told by its first row."""

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
from kvstore.analysis.simulate.traces import Asked, short
from kvstore.errors import ConfigError

PROGRESS_ROWS = 256
"""Rows between two reports of progress."""


class RowReader(Protocol):
    """Makes requests of a format's rows."""

    format: str
    block_tokens: int

    def take(self, row: Any) -> Iterable[Asked]:
        """The requests that this row completes. Raises ValueError saying what is wrong with it."""
        ...

    def finish(self) -> Iterable[Asked]:
        """The requests that the last row left incomplete."""
        ...


class Trace:
    """An open trace. requests: to be read once, in arrival order.

    block_tokens: of its blocks, or the most a block has where they differ.

    Raises ConfigError: it holds no request, or the first one is wrong.
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
            raise ConfigError(f"{source.name} holds no request")
        self.requests: Iterator[Asked] = chain((first,), rest)

    @property
    def block_tokens(self) -> int:
        return self._reader.block_tokens

    def _read(self) -> Iterator[Asked]:
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
    """A trace from a file, or from stdin for "-".

    block_tokens: of a block, where the trace leaves it open. tokenizer: for text; see `prompts`.
    keep_ids: requests carry their prompts' token ids where the trace has them.

    Raises:
        ConfigError: it cannot be read, holds nothing, or is in no known format. While it is read:
            file, line, and what is wrong there.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}; it must be at least 1")
    source = Source(where)
    try:
        rows = source.rows()
        number, first = next(rows, (0, None))
        if not number:
            raise ConfigError(f"{source.name} holds no request")
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
                f"{source.name}:{number}: {short(first)} is no request; "
                '{"input_length": tokens, "hash_ids": [...]}, token ids, {"prompt": text} '
                "or a batch of KV events is right"
            )
        return Trace(source, chain(((number, first),), rows), reader, progress)
    except BaseException:
        source.close()
        raise
