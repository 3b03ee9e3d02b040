"""Codecs pass what every codec must, and pay where they promise to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore import codecs
from kvstore.codecs.base import Codec
from kvstore.codecs.zstd_planes import SLICE_ELEMENTS
from kvstore.errors import ConfigError, FrameInvalid
from kvstore.testing.codec_suite import CodecSuite


class TestIdentity(CodecSuite):
    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("identity")


class TestZstdPlanes1(CodecSuite):
    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("zstd-planes/1")


class TestZstdPlanes2(CodecSuite):
    largest = 700_000

    def codec(self) -> Codec:
        return codecs.codec_by_frame_id("zstd-planes/2")


class TestZstdPlanes4(CodecSuite):
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


def test_names_say_all_that_decoding_needs() -> None:
    assert codecs.codec_for("auto", "bfloat16").frame_id == "zstd-planes/2"
    assert codecs.codec_for("auto", "float32").frame_id == "zstd-planes/4"
    assert codecs.codec_for("zstd-planes", "fp8_e4m3").frame_id == "zstd-planes/1"
    assert codecs.codec_for("zstd", "int8").frame_id == "zstd"
    assert codecs.codec_for("identity", "float16").frame_id == "identity"
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
    + ["identity/1", "os", "../identity", "auto", "zstd-planes/2/2"],
)
def test_a_name_from_a_frame_that_is_none_of_ours_is_frame_invalid(name: str) -> None:
    with pytest.raises(FrameInvalid):
        codecs.codec_by_frame_id(name)


def test_a_users_mistake_is_one_line_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'zstd-planes'"):
        codecs.codec_for("zstd-plane", "bfloat16")
    with pytest.raises(ConfigError, match="'identity'"):
        codecs.codec_for("identitty", "bfloat16")
    with pytest.raises(ConfigError, match="bfloat16"):
        codecs.codec_for("auto", "bf16")


@pytest.fixture(autouse=True)
def no_codec_is_kept() -> Iterator[None]:
    yield
    codecs.codec_by_frame_id.cache_clear()
