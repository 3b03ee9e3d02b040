"""The dull twin: a block is stored as it is."""

from __future__ import annotations

from kvstore.codecs.base import Codec
from kvstore.config.settings import Section
from kvstore.errors import FrameInvalid


class Config(Section):
    """Nothing to set."""

    @classmethod
    def for_dtype(cls, dtype: str) -> Config:
        return cls()

    @classmethod
    def for_parameter(cls, parameter: str) -> Config:
        if parameter:
            raise ValueError(f"identity takes no parameter, not {parameter!r}")
        return cls()


class Uncompressed:
    """Copies; `encode` therefore always pays nothing, but says how much it wrote."""

    frame_id = "identity"

    def bound(self, raw_bytes: int) -> int:
        return raw_bytes

    def encode(self, source: memoryview, target: memoryview) -> int:
        """Copy `source`; 0 when `target` is shorter."""
        if len(source) > len(target):
            return 0
        target[: len(source)] = source
        return len(source)

    def decode(self, source: memoryview, target: memoryview) -> int:
        """Copy `source`; raises FrameInvalid when `target` is shorter."""
        if len(source) > len(target):
            raise FrameInvalid(f"{len(source)} stored bytes for a block of {len(target)}")
        target[: len(source)] = source
        return len(source)


def open(config: Config) -> Codec:
    return Uncompressed()
