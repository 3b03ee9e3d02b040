"""Several nodes on one bucket without a coordinator: writes, listings and garbage collection."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("boto3")

from s3_node import Node
from s3_rig import FaultProxy, S3Server, readable_keys, write_together

from kvstore.errors import TierError, TierUnavailable
from kvstore.testing.frames import FrameBuffer, key_of

BLOCK_BYTES = 50_000
MIB = 1 << 20
NUMBERS = list(range(12))


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.new_bucket()


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(MIB)


@pytest.fixture
def nodes(s3_server: S3Server, bucket: str) -> Iterator[list[Node]]:
    made = [Node(s3_server.values(bucket)) for _ in range(2)]
    yield made
    for node in made:
        node.close()


def wait_out_the_second() -> None:
    """The service reports the age of objects in whole seconds."""
    time.sleep(1.1)


def test_what_one_node_writes_the_other_finds(
    s3_server: S3Server, bucket: str, nodes: list[Node]
) -> None:
    one, two = nodes
    assert one.do("write", NUMBERS, BLOCK_BYTES) == 12
    assert two.do("contains", NUMBERS) == []
    two.do("reconcile")
    assert two.do("read", NUMBERS) == NUMBERS
    # The listing also finds a deletion, and a later write.
    two.do("delete", NUMBERS[:4])
    one.do("reconcile")
    assert one.do("contains", NUMBERS) == NUMBERS[4:]
    one.do("write", NUMBERS[:2], BLOCK_BYTES)
    two.do("reconcile")
    assert two.do("read", NUMBERS) == NUMBERS[:2] + NUMBERS[4:]


def test_a_reader_that_loses_a_race_has_a_miss(nodes: list[Node]) -> None:
    one, two = nodes
    one.do("write", NUMBERS, BLOCK_BYTES)
    two.do("reconcile")
    one.do("delete", NUMBERS)
    assert two.do("contains", NUMBERS) == NUMBERS
    assert two.do("read", NUMBERS) == []
    assert two.do("contains", NUMBERS) == []
    assert two.do("stats")["errors_missing"] == 12


def test_both_write_the_same_keys_at_the_same_time(
    s3_server: S3Server, bucket: str, nodes: list[Node]
) -> None:
    for node in nodes:
        node.start("write", NUMBERS, BLOCK_BYTES)
    assert [node.finish() for node in nodes] == [12, 12]
    assert len(s3_server.names(bucket)) == 12, "each block was uploaded once"
    for node in nodes:
        assert node.do("read", NUMBERS) == NUMBERS


def test_a_running_node_learns_by_itself(s3_server: S3Server, bucket: str) -> None:
    one = Node(s3_server.values(bucket))
    two = Node(s3_server.values(bucket, list_interval="100ms"))
    one.do("write", NUMBERS, BLOCK_BYTES)
    deadline_s = time.monotonic() + 60
    while two.do("contains", NUMBERS) != NUMBERS:
        assert time.monotonic() < deadline_s, "the node did not find the block"
        time.sleep(0.05)
    one.close()
    two.close()


def test_two_collectors_under_pressure(s3_server: S3Server, bucket: str) -> None:
    """Both nodes write more than the capacity and reconcile all the time. Reads are correct (each
    node compares them), no call raises, and in the end the bucket is within the capacity."""
    config = s3_server.values(bucket, capacity=MIB, list_interval="50ms", gc_grace="50ms")
    pair = [Node(config), Node(config)]
    for number, node in enumerate(pair):
        node.start("churn", list(range(6 * number, 6 * number + 20)), BLOCK_BYTES, 3)
    hits = [node.finish() for node in pair]
    assert all(hits), "no read hit"
    wait_out_the_second()
    for node in pair:
        node.do("reconcile")
    assert sum(map(len, s3_server.objects(bucket).values())) <= MIB
    everything = list(range(40))
    found = []
    for node in pair:
        node.do("reconcile")
        found.append(node.do("read", everything))
        node.close()
    assert found[0] == found[1]
    assert found[0], "the nodes have deleted all blocks"


# -------------------------------------------------------------------- acknowledged blocks


def test_a_node_that_makes_room_removes_no_block_that_another_acknowledged(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """Both nodes saved the same block. The first one then evicts its segment."""
    one = s3_server.open(bucket, capacity=MIB)
    two = s3_server.open(bucket, capacity=4 * MIB)
    one.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    two.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    for number in range(2, 30):
        one.write(*buffer.fill(key_of(number), BLOCK_BYTES))
    assert one.contains([key_of(1)]) == [False]
    assert readable_keys(two, buffer, [key_of(1)])
    two.reconcile()
    assert readable_keys(two, buffer, [key_of(1)])
    one.close()
    two.close()


def test_any_number_of_nodes_may_save_the_same_block_at_once(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    nodes = [s3_server.open(bucket, capacity=4 * MIB) for _ in range(6)]
    for node in nodes:
        node.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    assert len(s3_server.names(bucket)) == 6
    for node in nodes:
        node.reconcile()
        assert readable_keys(node, buffer, [key_of(1)])
        node.close()


# -------------------------------------------------------------------- garbage collection


def test_duplicates_are_removed_once_they_are_old_and_never_both(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """One node packed the blocks together, the other each in its own segment. Both collect."""
    keys = [key_of(number) for number in range(8)]
    short = {"gc_grace": "1s", "list_interval": "1s"}
    one = s3_server.open(bucket, writer_threads=8, linger="10s")
    two = s3_server.open(bucket)
    write_together(one, keys)
    for key in keys:
        two.write(*buffer.fill(key, BLOCK_BYTES))
    assert len(s3_server.names(bucket)) == 9
    one.reconcile()
    two.reconcile()
    assert len(s3_server.names(bucket)) == 9, "too young"
    one.close()
    two.close()
    time.sleep(2.1)
    pair = [s3_server.open(bucket, **short) for _ in range(2)]
    for _ in range(2):
        for tier in pair:
            tier.reconcile()
            tier._index.check_invariants()
            assert readable_keys(tier, buffer, keys) == keys
            assert all(segment.primary_count for segment in tier._index.segments.values())
    assert len(s3_server.names(bucket)) == len(pair[0]._index.segments) < 9
    assert sum(int(tier.stats()["duplicates"]) for tier in pair) >= 1
    pair[0].delete(keys[:1])
    pair[1].reconcile()
    assert readable_keys(pair[1], buffer, keys) == keys[1:], "every copy is deleted"
    for tier in pair:
        tier.close()


def test_what_is_expired_is_a_miss_and_is_removed(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = s3_server.open(bucket, ttl="2s")
    tier.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    assert readable_keys(tier, buffer, [key_of(1)])
    other = s3_server.open(bucket)
    time.sleep(3.1)
    assert tier.read(key_of(1), buffer.header, buffer.payload) == 0
    tier.write(*buffer.fill(key_of(2), BLOCK_BYTES))
    tier.reconcile()
    assert tier.contains([key_of(1), key_of(2)]) == [False, True]
    assert len(s3_server.names(bucket)) == 1
    assert tier.stats()["expired"] == 1
    assert other.read(key_of(1), buffer.header, buffer.payload) == 0
    # The block can be written again, with a new TTL.
    tier.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    assert readable_keys(tier, buffer, [key_of(1)])
    tier.close()
    other.close()


def test_an_expired_block_can_be_written_before_it_is_collected(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = s3_server.open(bucket, ttl="2s", gc_grace="1s", list_interval="1s")
    tier._reconciler.stop()
    tier.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    time.sleep(3.1)
    tier.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    assert readable_keys(tier, buffer, [key_of(1)])
    tier.reconcile()
    assert readable_keys(tier, buffer, [key_of(1)])
    assert len(s3_server.names(bucket)) == 1
    tier.close()


def test_an_expired_block_is_absent_and_does_not_hide_what_is_written_since(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """Between two rounds of the reconciler. One block had its own object, the others shared one.
    Each is written again in its own object, whose name may sort before or after the old one."""
    tier = s3_server.open(bucket, ttl="8s", writer_threads=8, linger="10s")
    keys = [key_of(number) for number in range(8)]
    write_together(tier, keys)
    other = s3_server.open(bucket, ttl="8s")
    assert readable_keys(other, buffer, keys) == keys
    time.sleep(9.1)
    assert tier.contains(keys) == [False] * 8
    for key in keys:
        assert not other.read(key, buffer.header, buffer.payload)
        other.write(*buffer.fill(key, BLOCK_BYTES))
    assert readable_keys(other, buffer, keys) == keys
    other.reconcile()
    assert readable_keys(other, buffer, keys) == keys
    assert len(s3_server.names(bucket)) == 8
    tier.close()
    other.close()


def test_an_expired_segment_of_another_node_is_not_relied_on(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    one, two = s3_server.open(bucket, ttl="4s"), s3_server.open(bucket, ttl="4s")
    one.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    time.sleep(5.1)
    two.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    assert readable_keys(two, buffer, [key_of(1)])
    one.close()
    two.close()


def test_a_tombstone_without_its_segment_is_deleted_when_it_is_old(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    tier = s3_server.open(bucket, writer_threads=8, linger="10s")
    write_together(tier, [key_of(number) for number in range(8)])
    tier.delete([key_of(1)])
    for name in s3_server.names(bucket):
        if name.endswith(".seg"):
            s3_server.client.delete_object(Bucket=bucket, Key=name)
    tier.reconcile()
    assert len(s3_server.names(bucket)) == 1, "too young"
    tier.close()
    time.sleep(2.1)
    tier = s3_server.open(bucket, gc_grace="1s", list_interval="1s")
    assert s3_server.names(bucket) == []
    tier.close()


def test_deletions_that_could_not_be_told_are_told_later(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """Of a block in a shared segment, and of one in its own segment."""
    with FaultProxy(s3_server.port) as proxy:
        values = {
            "endpoint": proxy.endpoint,
            "writer_threads": 8,
            "linger": "200ms",
            "timeout": "5s",
        }
        tier = s3_server.open(bucket, **values)
        keys = [key_of(number) for number in range(8)]
        write_together(tier, keys)
        tier.write(*buffer.fill(key_of(8), BLOCK_BYTES))
        proxy.answer("503 Slow Down", "SlowDown")
        for key in (keys[0], key_of(8)):
            with pytest.raises(TierUnavailable):
                tier.delete([key])
        assert tier.contains([keys[0], key_of(8)]) == [False, False]
        assert tier.stats()["segments_pending_delete"] == 1
        assert len(s3_server.names(bucket)) == 2
        proxy.strike("")
        tier.reconcile()
        assert tier.stats()["segments_pending_delete"] == 0
        assert readable_keys(tier, buffer, [*keys, key_of(8)]) == keys[1:]
        fresh = s3_server.open(bucket)
        assert readable_keys(fresh, buffer, [*keys, key_of(8)]) == keys[1:]
        fresh.close()
        tier.close()


def test_a_segment_that_must_not_be_removed_counts_until_it_is(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    """A node that cannot delete objects stays within its capacity too."""
    with FaultProxy(s3_server.port) as proxy:
        tier = s3_server.open(bucket, endpoint=proxy.endpoint, capacity=MIB)
        proxy.answer("403 Forbidden", "AccessDenied", having=b"DELETE ")
        refused = 0
        for number in range(30):
            try:
                tier.write(*buffer.fill(key_of(number), BLOCK_BYTES))
            except TierError:
                refused += 1
        assert refused
        assert sum(map(len, s3_server.objects(bucket).values())) <= MIB
        assert float(tier.stats()["bytes_used"]) <= MIB
        proxy.strike("")
        tier.reconcile()
        tier.write(*buffer.fill(key_of(99), BLOCK_BYTES))
        assert readable_keys(tier, buffer, [key_of(99)])
        tier.close()


def test_a_name_that_was_put_anew_is_not_removed_by_who_knew_the_old_one(
    s3_server: S3Server, bucket: str, buffer: FrameBuffer
) -> None:
    one = s3_server.open(bucket)
    one.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    two = s3_server.open(bucket)
    two.delete([key_of(1)])
    two.write(*buffer.fill(key_of(1), BLOCK_BYTES))
    assert one.contains([key_of(1)]) == [True]
    one.delete([key_of(1)])  # a delete for the missing segment
    assert readable_keys(two, buffer, [key_of(1)])
    one.reconcile()
    assert readable_keys(one, buffer, [key_of(1)])
    one.close()
    two.close()
