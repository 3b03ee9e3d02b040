"""Reads a trace, from a file or stdin, as numbered rows.

A trace has JSON values, one per line or all in one list, or concatenated msgpack values. It is
streamed, except for a JSON list over several lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack

from kvstore.errors import ConfigError

LINE_BYTES_MAX: Final = 64 << 20
"""Maximum length of a line. A million token ids take about 7 MB."""
LIST_BYTES_MAX: Final = 1 << 30
"""Maximum size of a trace that is one JSON list over several lines."""
READ_BYTES: Final = 1 << 20

Rows = Iterator[tuple[int, Any]]
"""(line, counted from 1; value)."""


class Source:
    """An open trace. name: for messages. read: bytes so far. total: file size, None for stdin."""

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
            raise ConfigError(f"cannot read trace {where!r}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file. Stdin stays open."""
        if self._file is not sys.stdin.buffer:
            self._file.close()

    def rows(self) -> Rows:
        """Yield the values. Raises ConfigError with file, line and reason."""
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
            raise ConfigError(f"{self.name}:{number}: cannot read: {error.strerror}") from None
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"{self.name}:{number}: line is longer than {LINE_BYTES_MAX} bytes")
        self.read += len(line)
        return line

    def _json(self, text: bytes, number: int) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            at = number + error.lineno - 1
            raise ConfigError(f"{self.name}:{at}: invalid JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.name}:{number}: invalid JSON: {error}") from None

    def _list(self, first: bytes, number: int) -> Rows:
        rest = self._file.read(LIST_BYTES_MAX + 1)
        if len(rest) > LIST_BYTES_MAX:
            raise ConfigError(
                f"{self.name}: a JSON list over several lines is limited to {LIST_BYTES_MAX} "
                "bytes; write one value per line instead"
            )
        self.read += len(rest)
        values = self._json(first + rest, number)
        assert isinstance(values, list)
        for value in values:
            yield number, value

    def _packed(self, first: bytes) -> Rows:
        """Yield msgpack values. The "line" is then the number of the value."""
        unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=LINE_BYTES_MAX)
        number, data = 0, first
        try:
            while data:
                unpacker.feed(data)
                for value in unpacker:
                    number += 1
                    yield number, value
                data = self._file.read(READ_BYTES)
                self.read += len(data)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise ConfigError(
                f"{self.name}:{number + 1}: value {number + 1} is invalid msgpack: {error}"
            ) from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


Progress = Callable[[int, int | None], None]
"""Called with the bytes read so far and the total, None if unknown."""
