"""The contract of a codec: pure functions from view to view, no state between calls.

`encode` and `decode` write into the caller's buffer and return how many bytes they wrote. A codec
may be called from several threads at once. A codec that does not pay for a block says so by
returning 0 from `encode`, and the block is kept as it is (identity).

The name in a frame's header, `codec.name`, carries every parameter that decoding needs
("zstd-planes/2": two-byte elements), so a frame is readable by whoever knows the name:
`codecs.open(name)`.
"""

from __future__ import annotations

from typing import Protocol


class Codec(Protocol):
    """Encodes blocks for rest and transport."""

    frame_id: str

    def bound(self, raw_bytes: int) -> int:
        """Most bytes `encode` may write for a block of `raw_bytes`."""
        ...

    def encode(self, source: memoryview, target: memoryview) -> int:
        """Encode all of `source` into the front of `target`; 0 when it does not pay."""
        ...

    def decode(self, source: memoryview, target: memoryview) -> int:
        """Decode all of `source` into the front of `target`.

        Raises FrameInvalid when `source` is not what encode wrote, or does not fit; never writes
        outside `target`.
        """
        ...
