"""Codecs pass what every codec must, and pay where they promise to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore import codecs
from kvstore.blocks.frame import parse_header
from kvstore.blocks.key import Key
from kvstore.codecs.base import Codec
from kvstore.codecs.byteshuffle_zstd import SLICE_ELEMENTS
from kvstore.errors import ConfigError, FrameInvalid
from kvstore.store.block_io import StagingBuffers, pack_block, unpack_block
from kvstore.testing.codec_suite import CodecSuite


class TestNone(CodecSuite):
    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("identity")


class TestByteshuffleZstd1(CodecSuite):
    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("zstd-planes/1")


class TestByteshuffleZstd2(CodecSuite):
    largest = 700_000

    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("zstd-planes/2")


class TestByteshuffleZstd4(CodecSuite):
    largest = 1_200_000

    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("zstd-planes/4")


class TestZstd(CodecSuite):
    largest = 1_200_000

    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("zstd")


def kv_like(elements: int, seed: int = 0) -> np.ndarray:
    """float32 values spread as KV is: normal, of another width in each channel."""
    rng = np.random.default_rng(seed)
    widths = np.exp(rng.normal(0, 0.7, 64)).astype(np.float32)
    return rng.normal(size=(elements // 64, 64)).astype(np.float32) * widths


def bf16(values: np.ndarray) -> memoryview:
    return memoryview((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def encoded(codec: Codec, block: memoryview) -> bytes:
    target = memoryview(bytearray(codec.bound(len(block))))
    return bytes(target[: codec.encode(block, target)])


@pytest.mark.parametrize(
    ("dtype", "least"), [("bfloat16", 1.4), ("float32", 1.15), ("float16", 1.1)]
)
def test_kv_shrinks_and_comes_back(dtype: str, least: float) -> None:
    values = kv_like(3 * SLICE_ELEMENTS + 64)
    block = {
        "bfloat16": bf16(values),
        "float32": memoryview(values.tobytes()),
        "float16": memoryview(values.astype(np.float16).tobytes()),
    }[dtype]
    codec = codecs.codec_for("auto", dtype)
    stored = encoded(codec, block)
    assert len(block) / len(stored) > least
    back = bytearray(len(block))
    assert codec.decode(memoryview(stored), memoryview(back)) == len(block)
    assert back == block


@pytest.mark.parametrize("name", ["zstd", "zstd-planes/1", "zstd-planes/2", "zstd-planes/4"])
def test_noise_is_bypassed(name: str) -> None:
    noise = np.random.default_rng(0).bytes(600_000)
    assert encoded(codecs.codec_by_frame_id(name), memoryview(noise)) == b""


def test_a_zstd_bomb_is_refused() -> None:
    """A plane that would decompress to more than its slice."""
    codec = codecs.codec_by_frame_id("zstd-planes/2")
    large, small = bytes(8 * SLICE_ELEMENTS), bytes(2000)
    stored, honest = encoded(codec, memoryview(large)), encoded(codec, memoryview(small))
    count = 4 * 2
    first = int.from_bytes(stored[8:12], "little")
    bodies = 8 + 4 * count
    bomb = stored[bodies : bodies + first]
    low = honest[-1000:]
    lengths = len(bomb).to_bytes(4, "little") + (1000).to_bytes(4, "little")
    forged = (2000).to_bytes(8, "little") + lengths + bomb + low
    with pytest.raises(FrameInvalid, match="too long"):
        codec.decode(memoryview(forged), memoryview(bytearray(2000)))


def test_what_is_not_one_whole_zstd_frame_is_refused() -> None:
    """More or fewer bytes than the head says, a second frame, junk behind it, another head."""
    codec = codecs.codec_by_frame_id("zstd")
    stored = encoded(codec, memoryview(bytes(100_000)))
    body = stored[8:]
    back = memoryview(bytearray(200_000))
    assert codec.decode(memoryview(stored), back) == 100_000
    for forged in (
        (99_999).to_bytes(8, "little") + body,
        (100_001).to_bytes(8, "little") + body,
        (200_000).to_bytes(8, "little") + body + body,
        stored + body,
        stored + b"junk",
        stored[:-1],
        stored[:8],
        stored[:7],
        (1 << 63).to_bytes(8, "little") + body,
    ):
        with pytest.raises(FrameInvalid):
            codec.decode(memoryview(forged), back)


@pytest.mark.parametrize("name", ["zstd", "zstd-planes/2"])
def test_threads_share_a_codec(name: str) -> None:
    codec = codecs.codec_by_frame_id(name)
    blocks = [bf16(kv_like(SLICE_ELEMENTS + 64 * n, seed=n)) for n in range(4)]
    start = threading.Barrier(4)

    def work(block: memoryview) -> bool:
        start.wait()
        for _ in range(10):
            stored = encoded(codec, block)
            back = bytearray(len(block))
            codec.decode(memoryview(stored), memoryview(back))
            if back != block:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, blocks))


FRAME_IDS = {
    ("none", "float32"): "identity",
    ("none", "bfloat16"): "identity",
    ("none", "int8"): "identity",
    ("zstd", "float32"): "zstd",
    ("zstd", "bfloat16"): "zstd",
    ("zstd", "int8"): "zstd",
    ("byteshuffle-zstd", "float32"): "zstd-planes/4",
    ("byteshuffle-zstd", "bfloat16"): "zstd-planes/2",
    ("byteshuffle-zstd", "float16"): "zstd-planes/2",
    ("byteshuffle-zstd", "fp8_e4m3"): "zstd-planes/1",
    ("byteshuffle-zstd", "fp8_e5m2"): "zstd-planes/1",
    ("byteshuffle-zstd", "int8"): "zstd-planes/1",
    ("auto", "bfloat16"): "zstd-planes/2",
    ("auto", "float32"): "zstd-planes/4",
}
"""(kind in the configuration, dtype): the ID in frame headers, which other releases read."""


@pytest.mark.parametrize(("kind", "dtype"), FRAME_IDS)
def test_the_id_in_frames_never_changes(kind: str, dtype: str) -> None:
    key = Key("default", "namespace", b"hash")
    block = memoryview(bytearray(8192))
    codec = codecs.codec_for(kind, dtype)
    staging = StagingBuffers(len(block))
    payload = pack_block(key, len(block), block, codec, staging)
    header = parse_header(staging.header, key)
    assert header.codec == FRAME_IDS[kind, dtype]
    assert codec.kind == ("byteshuffle-zstd" if kind == "auto" else kind)
    back = memoryview(bytearray(len(block)))
    unpack_block(header, payload, back)
    assert back == block


def test_a_block_that_no_codec_shrinks_is_stored_uncompressed() -> None:
    key = Key("default", "namespace", b"hash")
    noise = memoryview(bytearray(np.random.default_rng(0).bytes(8192)))
    staging = StagingBuffers(len(noise))
    pack_block(key, len(noise), noise, codecs.codec_for("auto", "bfloat16"), staging)
    assert parse_header(staging.header, key).codec == "identity"


def test_kinds_are_the_names_of_modules() -> None:
    assert codecs.kinds() == ["byteshuffle-zstd", "none", "zstd"]
    for kind in codecs.kinds():
        assert codecs.codec_for(kind, "bfloat16").kind == kind


def test_a_frame_id_is_all_that_decoding_needs() -> None:
    block = bf16(kv_like(6400))
    stored = encoded(codecs.codec_for("auto", "bfloat16"), block)
    back = bytearray(len(block))
    codecs.codec_by_frame_id("zstd-planes/2").decode(memoryview(stored), memoryview(back))
    assert back == block


@pytest.mark.parametrize(
    "name",
    [
        "",
        "base",
        "chooser",
        "zstd/1",
        "zstd-planes",
        "zstd-planes/3",
        "zstd-planes/02",
        "zstd_planes/2",
    ]
    + ["identity/1", "os", "../identity", "auto", "zstd-planes/2/2"]
    + ["none", "byteshuffle-zstd", "byteshuffle-zstd/2"],
)
def test_a_name_from_a_frame_that_is_none_of_ours_is_frame_invalid(name: str) -> None:
    with pytest.raises(FrameInvalid):
        codecs.codec_by_frame_id(name)


def test_a_users_mistake_is_one_line_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="the closest one is 'byteshuffle-zstd'"):
        codecs.codec_for("byteshufle", "bfloat16")
    with pytest.raises(ConfigError, match="the closest one is 'none'"):
        codecs.codec_for("non", "bfloat16")
    with pytest.raises(ConfigError, match="bfloat16"):
        codecs.codec_for("auto", "bf16")


@pytest.mark.parametrize(
    ("old", "new"), [("identity", "none"), ("zstd-planes", "byteshuffle-zstd")]
)
def test_an_old_name_in_the_configuration_is_refused_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigError) as caught:
        codecs.codec_for(old, "bfloat16")
    assert str(caught.value) == f"codec {old!r} is now {new!r}"


@pytest.fixture(autouse=True)
def no_codec_is_kept() -> Iterator[None]:
    yield
    codecs.codec_by_frame_id.cache_clear()
