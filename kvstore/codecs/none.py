"""No compression: blocks are stored as they are."""

from __future__ import annotations

from typing import Final

from kvstore.codecs.base import UNCOMPRESSED_ID, Codec
from kvstore.config.settings import Section
from kvstore.errors import FrameInvalid

KIND: Final = "none"
FRAME_ID: Final = UNCOMPRESSED_ID


class Config(Section):
    """This codec has no parameters."""

    @classmethod
    def for_dtype(cls, dtype: str) -> Config:
        return cls()

    @classmethod
    def for_parameter(cls, parameter: str) -> Config:
        if parameter:
            raise ValueError(f"{FRAME_ID} has no parameter (got {parameter!r})")
        return cls()


class Uncompressed:
    """Copies blocks. Also the reference implementation of a codec in tests."""

    kind = KIND
    frame_id = FRAME_ID

    def bound(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, source: memoryview, target: memoryview) -> int:
        """Copy `source`; returns 0 if `target` is shorter."""
        if len(source) > len(target):
            return 0
        target[: len(source)] = source
        return len(source)

    def decode(self, source: memoryview, target: memoryview) -> int:
        """Copy `source`. Raises FrameInvalid: `target` is shorter."""
        if len(source) > len(target):
            raise FrameInvalid(f"{len(source)} stored bytes for a block of {len(target)} bytes")
        target[: len(source)] = source
        return len(source)


def open(config: Config) -> Codec:
    return Uncompressed()
