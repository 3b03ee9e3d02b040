"""Plain zstd over a whole block: for bytes whose redundancy is not in one plane.

What pays for 1-byte elements, and for blocks that are padded or repeat themselves; of KV in bf16,
float16 or float32 `zstd-planes` makes less, and faster.

Encoded block: a u64, little endian, of raw bytes, then one zstd frame. The length is our own, so
that nothing a hostile frame says of itself is believed.
"""

from __future__ import annotations

import struct
import threading

import zstandard

from kvstore.codecs.base import Codec
from kvstore.config.settings import Section
from kvstore.errors import FrameInvalid

MIN_SAVING = 1 / 20
"""Least part of a block that must be saved for encoding to pay for the decoding."""

LEVEL = 1
_WINDOW_LOG = 19
"""Level 1's own window: repeats further apart than half a MiB are not looked for, and no frame may
ask for more memory than that."""
_HEAD = struct.Struct("<Q")


class Config(Section):
    """Nothing to set."""

    @classmethod
    def for_dtype(cls, dtype: str) -> Config:
        return cls()

    @classmethod
    def for_parameter(cls, parameter: str) -> Config:
        if parameter:
            raise ValueError(f"zstd takes no parameter, not {parameter!r}")
        return cls()


class _Tools(threading.local):
    """zstd's contexts, one of each for a thread."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, window_log=_WINDOW_LOG, write_content_size=True, write_checksum=False
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


class Zstd:
    """Codec "zstd" for blocks of any length and dtype."""

    frame_id = "zstd"

    def __init__(self) -> None:
        self._tools = _Tools()

    def bound(self, raw_bytes: int) -> int:
        return _HEAD.size + raw_bytes

    def encode(self, source: memoryview, target: memoryview) -> int:
        """Encode; 0 when less than `PAYS_FROM` is saved, or when it does not fit in `target`."""
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
        """Decode exactly as many bytes as the head says, of exactly one zstd frame."""
        if len(source) < _HEAD.size:
            raise FrameInvalid(f"an encoded block of {len(source)} bytes")
        (raw_bytes,) = _HEAD.unpack_from(source)
        if raw_bytes > len(target):
            raise FrameInvalid(f"an encoded block of {raw_bytes} bytes for {len(target)}")
        body = source[_HEAD.size :]
        length = 0
        try:
            if zstandard.get_frame_parameters(body).content_size != raw_bytes:
                raise FrameInvalid("an encoded block of another length than its frame")
            reader = self._tools.decompressor.stream_reader(body)
            while length < raw_bytes:
                got = reader.readinto(target[length:raw_bytes])
                if got == 0:
                    raise FrameInvalid("a compressed block that ends early")
                length += got
            if reader.read(1):
                raise FrameInvalid("a compressed block that is too long")
        except zstandard.ZstdError as error:
            raise FrameInvalid(f"a damaged compressed block: {error}") from None
        return int(raw_bytes)


def open(config: Config) -> Codec:
    return Zstd()
