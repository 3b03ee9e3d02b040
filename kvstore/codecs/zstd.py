"""Plain zstd over a whole block, for blocks whose redundancy is not in one byte plane.

It suits 1-byte elements, and blocks that are padded or repetitive. For KV in bf16, float16 or
float32 `byteshuffle-zstd` is smaller and faster.

Encoded block: the number of raw bytes (u64, little endian), then one zstd frame. The decoder uses
this length and does not trust the length in the zstd frame, which may be hostile.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import zstandard

from kvstore.codecs.base import Codec
from kvstore.config.settings import Section
from kvstore.errors import FrameInvalid

KIND: Final = "zstd"
FRAME_ID: Final = "zstd"

MIN_SAVING = 1 / 20
"""Minimum fraction of a block that encoding must save to pay for decoding."""

LEVEL = 1
_WINDOW_LOG = 19
"""The window of level 1. Matches further apart than 512 KiB are not found, and a frame cannot make
the decoder allocate more memory than that."""
_HEAD = struct.Struct("<Q")


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


class _Tools(threading.local):
    """One compressor and one decompressor for each thread."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, window_log=_WINDOW_LOG, write_content_size=True, write_checksum=False
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


class Zstd:
    """Codec "zstd", for blocks of any length and dtype."""

    kind = KIND
    frame_id = FRAME_ID

    def __init__(self) -> None:
        self._tools = _Tools()

    def bound(self, raw_bytes: int) -> int:
        return _HEAD.size + raw_bytes

    def encode(self, source: memoryview, target: memoryview) -> int:
        """Encode; returns 0 if it saves less than `MIN_SAVING` or does not fit into `target`."""
        raw_bytes = len(source)
        room = min(len(target), int(raw_bytes * (1 - MIN_SAVING)))
        if raw_bytes == 0 or room <= _HEAD.size:
            return 0
        reader = self._tools.compressor.stream_reader(source, size=raw_bytes)
        at = _HEAD.size
        while at < room:
            got = reader.readinto(target[at:room])
            if got == 0:
                _HEAD.pack_into(target, 0, raw_bytes)
                return at
            at += got
        return 0

    def decode(self, source: memoryview, target: memoryview) -> int:
        """Decode exactly one zstd frame of exactly the recorded length. Raises FrameInvalid."""
        if len(source) < _HEAD.size:
            raise FrameInvalid(f"encoded block of {len(source)} bytes is too short")
        (raw_bytes,) = _HEAD.unpack_from(source)
        if raw_bytes > len(target):
            raise FrameInvalid(
                f"encoded block of {raw_bytes} raw bytes does not fit into {len(target)}"
            )
        body = source[_HEAD.size :]
        length = 0
        try:
            if zstandard.get_frame_parameters(body).content_size != raw_bytes:
                raise FrameInvalid("the zstd frame has another length than the block")
            reader = self._tools.decompressor.stream_reader(body)
            while length < raw_bytes:
                got = reader.readinto(target[length:raw_bytes])
                if got == 0:
                    raise FrameInvalid("the compressed block is too short")
                length += got
            if reader.read(1):
                raise FrameInvalid("the compressed block is too long")
        except zstandard.ZstdError as error:
            raise FrameInvalid(f"corrupt compressed block: {error}") from None
        return int(raw_bytes)


def open(config: Config) -> Codec:
    return Zstd()
