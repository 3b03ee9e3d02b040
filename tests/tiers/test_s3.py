"""The S3 tier on a real service: the common tier tests, packing, names and deletions."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("boto3")

from s3_rig import FaultProxy, S3Server, readable_keys, write_together

from kvstore.errors import TierFull
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers.base import Tier
from kvstore.tiers.s3.tier import S3Tier

BLOCK_BYTES = 50_000
FRAME_BYTES = 4096 + 13 * 4096
MIB = 1 << 20


class TestS3(TierSuite):
    persistent = True
    server: ClassVar[S3Server]
    buckets: ClassVar[dict[Path, str]] = {}

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        type(self).server = s3_server

    def bucket_of(self, tmp_path: Path) -> str:
        if tmp_path not in self.buckets:
            self.buckets[tmp_path] = self.server.new_bucket()
        return self.buckets[tmp_path]

    def open_tier(self, tmp_path: Path, capacity_bytes: int) -> Tier:
        return self.server.open(self.bucket_of(tmp_path), capacity=capacity_bytes)

    def stored_bytes(self, tmp_path: Path) -> bytes:
        return b"".join(self.server.objects(self.bucket_of(tmp_path)).values())


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.new_bucket()


def open_packing(server: S3Server, bucket: str, **changed: object) -> S3Tier:
    """A tier that waits for eight writers."""
    return server.open(bucket, **{"writer_threads": 8, "linger": "10s", **changed})


def test_writers_that_wait_together_share_one_object(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = open_packing(s3_server, bucket)
    keys = [key_of(number) for number in range(16)]
    write_together(tier, keys[:8])
    assert len(s3_server.names(bucket)) == 1
    write_together(tier, keys[8:])
    objects = s3_server.objects(bucket)
    assert len(objects) == 2
    assert sum(map(len, objects.values())) == tier.stats()["bytes_used"]
    assert all(8 * FRAME_BYTES < len(body) < 8 * FRAME_BYTES + 2000 for body in objects.values())
    assert all(name.startswith("kvstore/") for name in objects)
    assert readable_keys(tier, buffer, keys) == keys
    assert tier.stats()["groups"] == 2
    tier.close()


def test_a_new_node_finds_everything_by_the_footers_alone(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = open_packing(s3_server, bucket, segment=4 * FRAME_BYTES, shards=4)
    keys = [key_of(number, tenant=f"t{number % 3}") for number in range(16)]
    write_together(tier, keys[:8])
    write_together(tier, keys[8:])
    names = s3_server.names(bucket)
    assert len(names) >= 4
    # Also with another number of shards.
    fresh = s3_server.open(bucket, shards=1)
    requests = int(fresh.stats()["requests"])
    assert requests <= 1 + 4 + len(names), "one for the list of folders, one per folder and footer"
    assert fresh.contains(keys) == [True] * 16
    assert dict(fresh.usage()) == dict.fromkeys(keys, FRAME_BYTES)
    assert int(fresh.stats()["requests"]) == requests, "contains and usage send no requests"
    assert readable_keys(fresh, buffer, keys) == keys
    assert int(fresh.stats()["requests"]) == requests + 16, "one request per block"
    tier.close()
    fresh.close()


def test_a_footer_larger_than_the_guess_is_read_whole(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = s3_server.open(bucket, writer_threads=150, linger="10s")
    keys = [key_of(n, tenant=f"tenant {n} " * 20, namespace=f"{n}" * 20) for n in range(150)]
    write_together(tier, keys, 100)
    assert len(s3_server.names(bucket)) == 1
    tier.close()
    fresh = s3_server.open(bucket)
    assert readable_keys(fresh, buffer, keys) == keys
    fresh.close()


def test_a_round_changes_nothing_of_what_is_known(s3_server: S3Server, bucket: str) -> None:
    """Also for large objects, which have another kind of ETag."""
    buffer = FrameBuffer(9 * MIB)
    tier = s3_server.open(bucket)
    for number, nbytes in enumerate((100, 300_000, 9 * MIB)):
        tier.write(*buffer.fill(key_of(number), nbytes))
    tier.reconcile()
    before = int(tier.stats()["requests"])
    tier.reconcile()
    assert int(tier.stats()["requests"]) - before <= 3, "no object is read again"
    assert tier.stats()["vanished"] == 0
    assert len(readable_keys(tier, buffer, [key_of(number) for number in range(3)])) == 3
    tier.close()


def test_the_same_blocks_have_the_same_name_and_are_put_once(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """By two nodes without contact: as single blocks, and as a group in another order."""
    one, two = open_packing(s3_server, bucket), open_packing(s3_server, bucket)
    keys = [key_of(number) for number in range(8)]
    write_together(one, keys)
    names = s3_server.names(bucket)
    assert two.contains(keys) == [False] * 8
    write_together(two, keys[::-1])
    assert s3_server.names(bucket) == names
    assert readable_keys(two, buffer, keys) == keys
    assert one.stats()["bytes_used"] == two.stats()["bytes_used"]
    one.close()
    two.close()


def test_what_somebody_else_put_long_ago_is_not_relied_on(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """An old segment may be collected at any time, so the block is put under another name."""
    one = s3_server.open(bucket)
    careful = s3_server.open(bucket, list_interval=50, gc_grace=100)
    careful._reconciler.stop()  # so that it does not find the other node's segment
    one.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    wait_out_the_second()
    careful.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    assert len(s3_server.names(bucket)) == 2
    assert readable_keys(careful, buffer, [key_of(1)])
    one.close()
    careful.close()


def test_deletions_in_a_shared_segment_outlive_the_process(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = open_packing(s3_server, bucket)
    keys = [key_of(number) for number in range(8)]
    write_together(tier, keys)
    tier.delete(keys[:2])
    tier.delete(keys[2:3])
    tombstones = [name for name in s3_server.names(bucket) if ".dead-" in name]
    assert len(tombstones) == 1, "a later tombstone replaces an earlier one"
    for _ in range(2):
        assert readable_keys(tier, buffer, keys) == keys[3:]
        tier.close()
        tier = open_packing(s3_server, bucket)
    tier.delete(keys[3:])
    assert s3_server.names(bucket) == [], (
        "a segment without live blocks is deleted with its tombstone"
    )
    write_together(tier, keys)
    tier.close()
    tier = s3_server.open(bucket)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_deletions_at_the_same_time_in_one_segment_are_all_kept(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """A later tombstone, with more sectors, is written before an earlier one."""
    keys = [key_of(number) for number in range(8)]
    with FaultProxy(s3_server.port) as proxy, ThreadPoolExecutor(1) as pool:
        tier = open_packing(s3_server, bucket, endpoint=proxy.endpoint)
        write_together(tier, keys)
        proxy.strike("hold", b"PUT ")
        first = pool.submit(tier.delete, keys[:1])
        assert proxy.request_waiting.wait(60)
        proxy.strike("")
        tier.delete(keys[1:2])
        proxy.release()
        first.result()
        tier.close()
    fresh = s3_server.open(bucket)
    assert readable_keys(fresh, buffer, keys) == keys[2:]
    fresh.close()


def test_an_old_tombstone_does_not_apply_to_a_new_segment_of_the_same_name(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = open_packing(s3_server, bucket, list_interval=50, gc_grace=50)
    keys = [key_of(number) for number in range(8)]
    write_together(tier, keys)
    tier.delete(keys[:1])
    old = {name: body for name, body in s3_server.objects(bucket).items() if ".dead-" in name}
    tier.clear()
    write_together(tier, keys)
    tier.close()
    for name, body in old.items():  # as if its deletion had failed
        s3_server.client.put_object(Bucket=bucket, Key=name, Body=body)
    tier = s3_server.open(bucket)
    assert readable_keys(tier, buffer, keys) == keys
    tier.close()


def test_clear_leaves_what_is_not_ours(s3_server: S3Server, bucket: str) -> None:
    others = ["kvstore/notes.txt", "kvstore/00/x.seg", "kvstore2/a", "a"]
    for name in others:
        s3_server.client.put_object(Bucket=bucket, Key=name, Body=b"mine")
    tier = open_packing(s3_server, bucket)
    write_together(tier, [key_of(number) for number in range(8)])
    tier.delete([key_of(1)])
    assert len(s3_server.names(bucket)) == len(others) + 2
    tier.clear()
    assert s3_server.names(bucket) == sorted(others)
    assert tier.stats()["blocks"] == tier.stats()["bytes_used"] == 0
    tier.close()


def test_two_prefixes_of_a_bucket_do_not_see_each_other(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    one, two = s3_server.open(bucket, prefix="one"), s3_server.open(bucket, prefix="")
    one.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    two.write(*buffer.fill(key_of(2), BLOCK_BYTES))
    two.reconcile()
    one.reconcile()
    assert one.contains([key_of(1), key_of(2)]) == [True, False]
    assert two.contains([key_of(1), key_of(2)]) == [False, True]
    two.clear()
    assert readable_keys(one, buffer, [key_of(1)])
    one.close()
    two.close()


def test_usage_is_most_recently_used_first(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = s3_server.open(bucket)
    keys = [key_of(number) for number in range(4)]
    for key in keys:
        tier.write(*buffer.fill(key, BLOCK_BYTES))
    tier.read(keys[1], buffer.header, buffer.payload)
    assert [key for key, _ in tier.usage()] == [keys[1], keys[3], keys[2], keys[0]]
    tier.close()


def test_capacity_counts_whole_objects_and_the_least_used_goes(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = s3_server.open(bucket, capacity=MIB)
    keys = [key_of(number) for number in range(30)]
    for key in keys:
        tier.write(*buffer.fill(key, BLOCK_BYTES))
        assert tier.read(keys[0], buffer.header, buffer.payload), "recently read blocks stay"
        sizes = sum(map(len, s3_server.objects(bucket).values()))
        assert sizes == tier.stats()["bytes_used"]
        assert sizes <= MIB
    assert readable_keys(tier, buffer, keys) == [keys[0], *keys[-17:]]
    tier.close()


def test_what_another_node_has_just_written_makes_no_room(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    one = s3_server.open(bucket, capacity=MIB)
    keys = [key_of(number) for number in range(16)]
    for key in keys:
        one.write(*buffer.fill(key, BLOCK_BYTES))
    two = s3_server.open(bucket, capacity=MIB)
    with pytest.raises(TierFull, match="younger than gc_grace"):
        two.write(*buffer.fill(key_of(100), 4 * BLOCK_BYTES))
    two.write(*buffer.fill(key_of(101), BLOCK_BYTES))
    two.write(*buffer.fill(key_of(102), 2 * BLOCK_BYTES))
    assert two.contains([key_of(101), key_of(102)]) == [False, True], (
        "the node evicts its own segments"
    )
    one.reconcile()
    assert readable_keys(one, buffer, keys) == keys
    one.close()
    two.close()


def wait_out_the_second() -> None:
    """The service reports the age of objects in whole seconds."""
    time.sleep(1.1)
