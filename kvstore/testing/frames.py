"""Frames with bytes derived from their key, so that a reader can check them."""

from __future__ import annotations

import hashlib

import numpy as np

from kvstore.blocks.frame import (
    HEADER_BYTES,
    aligned_buffer,
    checksum,
    pack_header,
    padded_bytes,
    parse_header,
    verify_stored,
)
from kvstore.blocks.key import Key


def key_of(number: int, *, tenant: str = "tenant", namespace: str = "ab" * 16) -> Key:
    """Return a key, different for each number."""
    return Key(tenant, namespace, hashlib.sha256(b"%d" % number).digest())


def block_of(key: Key, nbytes: int, version: int = 0) -> bytes:
    """Return the block of this key and version: noise that no codec or file system compresses."""
    text = f"{key.tenant} {key.namespace} {version} ".encode() + key.hash
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    return np.random.Generator(np.random.SFC64(seed)).bytes(nbytes)


class FrameBuffer:
    """An aligned buffer for header and payload, which is reused."""

    def __init__(self, payload_bytes: int) -> None:
        self.header = aligned_buffer(HEADER_BYTES)
        self.payload = aligned_buffer(payload_bytes)

    def fill(self, key: Key, nbytes: int, version: int = 0) -> tuple[Key, memoryview, memoryview]:
        """Make the frame of `key`. Returns the arguments for a tier's `write`."""
        block = block_of(key, nbytes, version)
        total = checksum(block)
        self.payload[:nbytes] = block
        self.payload[nbytes : padded_bytes(nbytes)] = bytes(padded_bytes(nbytes) - nbytes)
        pack_header(
            self.header,
            key=key,
            codec="identity",
            raw_bytes=nbytes,
            stored_bytes=nbytes,
            raw_sum=total,
            stored_sum=total,
        )
        return key, self.header, self.payload[: padded_bytes(nbytes)]

    def version_of(self, key: Key, length: int, versions: int = 1) -> int:
        """Return the version of `key` in the buffers, after a read of `length` bytes.

        Raises FrameInvalid if it is not a complete frame of that key, and AssertionError if its
        bytes were never written.
        """
        parsed = parse_header(self.header, key)
        assert length == parsed.payload_bytes, "payload length differs from the header's"
        verify_stored(parsed, self.payload[:length])
        block = bytes(self.payload[: parsed.stored_bytes])
        for version in range(versions):
            if block == block_of(key, parsed.stored_bytes, version):
                return version
        raise AssertionError("bytes that were never written")
