"""A bucket that a later release uses too: its segments and tombstones stay as they are."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("boto3")

from s3_rig import S3Server, readable_keys, write_together

from kvstore.blocks.frame import checksum
from kvstore.errors import FrameTooLarge
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.s3 import layout
from kvstore.tiers.s3.tier import S3Tier

KEYS = [key_of(number) for number in range(6)]


def of_later_version(content: bytes, *, resum: bool = True) -> bytes:
    """A segment or a tombstone with version 2."""
    start = 0 if content.startswith(b"KVS3DEAD") else len(content) - layout.TRAILER_BYTES
    changed = bytearray(content)
    struct.pack_into("<I", changed, start + 8, 2)
    if resum and start:
        changed[-8:] = struct.pack("<Q", checksum(bytes(changed[start:-8])))
    return bytes(changed)


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(1 << 20)


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.new_bucket()


@pytest.fixture
def tier(s3_server: S3Server, bucket: str) -> Iterator[S3Tier]:
    tier = s3_server.open(bucket, linger="1s")
    yield tier
    tier.close()


def put(server: S3Server, bucket: str, name: str, content: bytes) -> None:
    server.client.put_object(Bucket=bucket, Key=name, Body=content)


@pytest.mark.parametrize("resum", [True, False])
def test_a_segment_of_a_later_version_is_left(
    s3_server: S3Server, bucket: str, tier: S3Tier, buffer: FrameBuffer, resum: bool
) -> None:
    """Also if its checksum is computed in another way."""
    write_together(tier, KEYS)
    (name,) = s3_server.names(bucket)
    tier.close()
    later = of_later_version(s3_server.objects(bucket)[name], resum=resum)
    put(s3_server, bucket, name, later)
    other = s3_server.open(bucket)
    assert other.contains(KEYS) == [False] * 6
    stats = other.stats()
    assert (stats["segments_unsupported"], stats["corrupt_segments"]) == (1, 0)
    requests = int(other.stats()["requests"])
    other.reconcile()
    assert int(other.stats()["requests"]) <= requests + 3, "read once"
    for key in KEYS:
        other.write(*buffer.fill(key, 50_000))
    assert readable_keys(other, buffer, KEYS) == KEYS, "in a segment of another name"
    other.close()
    quick = {"list_interval": "50ms", "gc_grace": "50ms"}
    other = s3_server.open(bucket, capacity=1 << 20, ttl="1s", **quick)
    for number in range(30):
        other.write(*buffer.fill(key_of(100 + number), 50_000))
    time.sleep(2.1)
    other.reconcile()
    assert s3_server.objects(bucket) == {name: later}, "not by age, nor to make room"
    other.clear()
    assert s3_server.names(bucket) == [], "on request"
    assert other.stats()["segments_unsupported"] == 0
    other.close()


def test_an_object_that_replaced_our_segment_is_not_deleted_with_it(
    s3_server: S3Server, bucket: str, tier: S3Tier
) -> None:
    write_together(tier, KEYS)
    (name,) = s3_server.names(bucket)
    later = of_later_version(s3_server.objects(bucket)[name])
    put(s3_server, bucket, name, later)
    tier.delete(KEYS)
    tier.reconcile()
    assert s3_server.objects(bucket)[name] == later
    assert tier.stats()["segments_unsupported"] == 1


def test_a_tombstone_of_a_later_version_is_neither_applied_nor_deleted(
    s3_server: S3Server, bucket: str, tier: S3Tier, buffer: FrameBuffer
) -> None:
    write_together(tier, KEYS)
    (segment,) = s3_server.names(bucket)
    tier.delete(KEYS[:1])
    name = next(name for name in s3_server.names(bucket) if name != segment)
    content = s3_server.objects(bucket)[name]
    later_name = f"{layout.tombstone_stem(segment)}{'0' * 16}"
    s3_server.client.delete_object(Bucket=bucket, Key=name)
    put(s3_server, bucket, later_name, of_later_version(content))
    other = s3_server.open(bucket)
    assert readable_keys(other, buffer, KEYS) == KEYS
    requests = int(other.stats()["requests"])
    other.reconcile()
    assert int(other.stats()["requests"]) <= requests + 3, "read once"
    # Another deletion writes a tombstone beside it. The last one deletes the segment.
    other.delete(KEYS[1:2])
    assert len(s3_server.names(bucket)) == 3
    other.delete(KEYS)
    other.close()
    # A new tier finds the orphan.
    put(s3_server, bucket, name, content)
    time.sleep(1.1)
    other = s3_server.open(bucket, list_interval="50ms", gc_grace="50ms")
    other.reconcile()
    assert s3_server.names(bucket) == [later_name], "ours is garbage, the other is not"
    other.close()


def test_a_frame_that_does_not_fit_shows_its_header(tier: S3Tier, buffer: FrameBuffer) -> None:
    key, header, payload = buffer.fill(KEYS[0], 50_000)
    written = bytes(header)
    tier.write(key, header, payload)
    header[:] = bytes(4096)
    with pytest.raises(FrameTooLarge):
        tier.read(key, header, payload[:4096])
    assert bytes(header) == written
