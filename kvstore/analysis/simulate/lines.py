"""A trace's file, or stdin, as numbered rows: JSON values, one a line or all in one list, or
msgpack values end to end. Streamed; only a list that goes over several lines is read at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack

from kvstore.errors import ConfigError

LINE_BYTES_MAX: Final = 64 << 20
"""Longest line of a trace; a million token ids take about 7 MB."""
LIST_BYTES_MAX: Final = 1 << 30
"""Most that is read of a trace which is one JSON list over several lines."""
READ_BYTES: Final = 1 << 20

Rows = Iterator[tuple[int, Any]]
"""(line, counted from 1; value)."""


class Source:
    """An open trace. name: for messages. `read`: bytes so far; `total`: of all, None for stdin."""

    def __init__(self, where: str) -> None:
        self.name = "stdin" if where == "-" else where
        self.read = 0
        self.total: int | None = None
        self._file: BinaryIO
        if where == "-":
            self._file = sys.stdin.buffer
            return
        path = Path(where)
        try:
            self._file = path.open("rb")
            self.total = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"cannot read a trace from {where!r}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file; stdin stays."""
        if self._file is not sys.stdin.buffer:
            self._file.close()

    def rows(self) -> Rows:
        """Its values, one after another. Raises ConfigError: file, line, what is wrong there."""
        first = self._line(1)
        if first[:1] >= b"\x80" and first[:1] < b"\xa0":
            yield from self._packed(first)
            return
        number = 1
        while first and not first.strip():
            number += 1
            first = self._line(number)
        if first.lstrip()[:1] == b"[" and not _is_json(first):
            yield from self._list(first, number)
            return
        line = first
        while line:
            if line.strip():
                yield number, self._json(line, number)
            number += 1
            line = self._line(number)

    def _line(self, number: int) -> bytes:
        try:
            line = self._file.readline(LINE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"{self.name}:{number}: cannot be read: {error.strerror}") from None
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"{self.name}:{number}: is longer than {LINE_BYTES_MAX} bytes")
        self.read += len(line)
        return line

    def _json(self, text: bytes, number: int) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            at = number + error.lineno - 1
            raise ConfigError(f"{self.name}:{at}: is no JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.name}:{number}: is no JSON: {error}") from None

    def _list(self, first: bytes, number: int) -> Rows:
        rest = self._file.read(LIST_BYTES_MAX + 1)
        if len(rest) > LIST_BYTES_MAX:
            raise ConfigError(
                f"{self.name}: a list over several lines may take {LIST_BYTES_MAX} bytes; "
                "one value a line may take any number of lines"
            )
        self.read += len(rest)
        values = self._json(first + rest, number)
        assert isinstance(values, list)
        for value in values:
            yield number, value

    def _packed(self, first: bytes) -> Rows:
        """msgpack values; "line" then counts values."""
        unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=LINE_BYTES_MAX)
        number, piece = 0, first
        try:
            while piece:
                unpacker.feed(piece)
                for value in unpacker:
                    number += 1
                    yield number, value
                piece = self._file.read(READ_BYTES)
                self.read += len(piece)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise ConfigError(
                f"{self.name}:{number + 1}: value {number + 1} is no msgpack: {error}"
            ) from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


Progress = Callable[[int, int | None], None]
"""Told bytes read so far, and of all where that is known."""
