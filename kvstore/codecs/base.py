"""The contract of a codec: pure functions from buffer to buffer, without state between calls.

`encode` and `decode` write into the caller's buffer and return the number of bytes written. Several
threads may use a codec at the same time. `encode` returns 0 if the codec does not pay for a block;
the block is then stored uncompressed.

A codec has two names:

    kind       the name in the configuration and in statistics, such as "byteshuffle-zstd"
    frame_id   the name in frame headers, such as "zstd-planes/2", with all parameters of decoding

Frame IDs never change: other releases read and write frames of the same tier.
"""

from __future__ import annotations

from typing import Final, Protocol

UNCOMPRESSED_ID: Final = "identity"
"""Frame ID of an uncompressed block."""


class Codec(Protocol):
    """Encodes blocks for storage in a tier."""

    kind: str
    frame_id: str

    def bound(self, raw_bytes: int) -> int:
        """Maximum bytes that `encode` writes for a block of `raw_bytes`."""
        ...

    def encode(self, source: memoryview, target: memoryview) -> int:
        """Encode all of `source` into the front of `target`; returns 0 if it does not pay."""
        ...

    def decode(self, source: memoryview, target: memoryview) -> int:
        """Decode all of `source` into the front of `target`; never writes outside of it.

        Raises FrameInvalid: `encode` did not write `source`, or the block does not fit.
        """
        ...
