"""Frames, segments and tombstones as release 0.1 wrote them are read by every later release.

    python tests/tiers/test_golden_frames.py FILE     writes them anew with this release

`tests/data/golden_0_1.json` has values of Redis, the files of a disk tier's directory and the
objects of a bucket, compressed. It is never written anew: a new format gets a new file beside it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvstore import codecs
from kvstore.blocks import frame
from kvstore.blocks.key import Key
from kvstore.store import block_io
from kvstore.store.block_io import StagingBuffers
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.state import DiskLimits

GOLDEN = Path(__file__).parents[1] / "data" / "golden_0_1.json"
FRAME_IDS = ("identity", "zstd", "zstd-planes/1", "zstd-planes/2", "zstd-planes/4")
BLOCK_BYTES = 6000
SEGMENT_BYTES = 128 << 10
KEYS = {
    number: Key(("acme", "übung")[number % 2], "0123456789abcdef" * 2, bytes([number]) * 32)
    for number in range(3 * len(FRAME_IDS))
}
DELETED = 7
"""The number of a block that was deleted."""


def block_of(key: Key) -> bytes:
    """The block of a key; every codec compresses it."""
    noise = hashlib.shake_128(key.hash).digest(BLOCK_BYTES // 4)
    return b"".join(bytes([0x3F, byte & 7, 0, byte & 3]) for byte in noise)


def write_all(tier: Tier, numbers: range) -> None:
    """Write the frames of these blocks, with all codecs in turn."""
    staging, slot = StagingBuffers(8192), frame.aligned_buffer(8192)
    for number in numbers:
        key = KEYS[number]
        slot[:BLOCK_BYTES] = block_of(key)
        codec = codecs.codec_by_frame_id(FRAME_IDS[number % len(FRAME_IDS)])
        payload = block_io.pack_block(key, BLOCK_BYTES, slot, codec, staging)
        assert frame.decode_header(staging.header).codec == codec.frame_id
        tier.write(key, staging.header, payload)


def read_all(tier: Tier) -> list[int]:
    """Numbers of the blocks that the tier has, each read, decoded and compared."""
    staging, slot = StagingBuffers(8192), frame.aligned_buffer(8192)
    found = []
    for number, key in KEYS.items():
        result = block_io.read_block(tier, key, BLOCK_BYTES, slot, staging, direct=False)
        if result.cost is not None:
            assert bytes(slot[:BLOCK_BYTES]) == block_of(key)
            assert result.cost.frame_id == FRAME_IDS[number % len(FRAME_IDS)]
            found.append(number)
        else:
            assert result.reason == "missing"
    return found


EXPECTED = [number for number in KEYS if number != DELETED]


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, bytes]]:
    return {
        place: {name: _unpack(text) for name, text in files.items()}
        for place, files in json.loads(GOLDEN.read_text()).items()
        if place != "about"
    }


def test_a_directory(golden: Mapping[str, Mapping[str, bytes]], tmp_path: Path) -> None:
    """A full segment with a deletion in its index, and one left by a kill, with a checkpoint."""
    for name, content in golden["disk"].items():
        (tmp_path / name).write_bytes(content)
    limits = DiskLimits(16 * SEGMENT_BYTES, SEGMENT_BYTES)
    for _ in range(2):
        tier = DiskTier([str(tmp_path)], limits)
        assert read_all(tier) == EXPECTED
        assert tier.stats()["torn"] == 0
        tier.close()


def test_values_of_redis(golden: Mapping[str, Mapping[str, bytes]], tmp_path: Path) -> None:
    from redis_rig import Server, valkey_binary

    from kvstore.tiers import redis as redis_tier

    server = Server(tmp_path / "server", valkey_binary())
    try:
        client = server.client()
        for name, value in golden["redis"].items():
            client.set(bytes.fromhex(name), value)
        url = f"redis://{server.address}"
        tier = redis_tier.open(redis_tier.Config(url=url, timeout=20_000))
        assert read_all(tier) == EXPECTED
        tier.close()
    finally:
        server.stop()


def test_objects_of_a_bucket(golden: Mapping[str, Mapping[str, bytes]], s3_server: Any) -> None:
    bucket = s3_server.new_bucket()
    for name, content in golden["s3"].items():
        s3_server.client.put_object(Bucket=bucket, Key=name, Body=content)
    tier = s3_server.open(bucket)
    assert read_all(tier) == EXPECTED
    tier.close()


def test_frames_are_written_as_before(golden: Mapping[str, Mapping[str, bytes]]) -> None:
    for value in golden["redis"].values():
        old = frame.decode_header(memoryview(value)[:4096])
        header = memoryview(bytearray(4096))
        frame.pack_header(
            header,
            key=old.key,
            codec=old.codec,
            raw_bytes=old.raw_bytes,
            stored_bytes=old.stored_bytes,
            raw_sum=old.raw_sum,
            stored_sum=old.stored_sum,
        )
        assert bytes(header) == value[:4096]


# ------------------------------------------------------------------ writing the file


def _pack(content: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(19).compress(content)).decode()


def _unpack(text: str) -> bytes:
    return zstandard.ZstdDecompressor().decompress(base64.b64decode(text))


def _disk_files(directory: Path) -> dict[str, bytes]:
    """The files of a directory while its tier is open, as a kill leaves them."""
    limits = DiskLimits(16 * SEGMENT_BYTES, SEGMENT_BYTES, checkpoint_bytes=4096)
    tier = DiskTier([str(directory)], limits)
    write_all(tier, range(9))
    tier.flush()
    tier.delete([KEYS[DELETED]])
    write_all(tier, range(9, 13))
    tier.flush()
    write_all(tier, range(13, len(KEYS)))
    tier.flush()
    files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
    tier.close()
    return files


def _redis_values(directory: Path) -> dict[str, bytes]:
    from redis_rig import Server, valkey_binary

    from kvstore.tiers import redis as redis_tier

    server = Server(directory, valkey_binary())
    try:
        url = f"redis://{server.address}"
        tier = redis_tier.open(redis_tier.Config(url=url, timeout=20_000))
        write_all(tier, range(len(KEYS)))
        tier.delete([KEYS[DELETED]])
        client = server.client()
        names = client.keys("*")
        tier.close()
        return {name.hex(): client.get(name) for name in sorted(names)}
    finally:
        server.stop()


def _objects() -> dict[str, bytes]:
    from s3_rig import running_server

    with running_server() as server:
        bucket = server.new_bucket()
        tier = server.open(bucket, linger="1s")
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(KEYS)) as pool:
            list(pool.map(lambda number: write_all(tier, range(number, number + 1)), KEYS))
        tier.delete([KEYS[DELETED]])
        tier.close()
        return server.objects(bucket)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        found = {
            "disk": _disk_files(Path(place) / "disk"),
            "redis": _redis_values(Path(place) / "redis"),
            "s3": _objects(),
        }
    about = "Files, values (names in hex) and objects of release 0.1: zstd, then base64."
    packed = {
        place: {name: _pack(content) for name, content in files.items()}
        for place, files in found.items()
    }
    Path(sys.argv[1]).write_text(json.dumps({"about": about, **packed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
