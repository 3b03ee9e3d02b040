"""The write queue: bounded in blocks and in seconds at a measured rate, never closed forever."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.cache.commands import TierWrite
from kvstore.store.write_queue import Flush, WriteQueue

MIB = 1 << 20


def write(nbytes: int = MIB) -> TierWrite:
    return TierWrite(Key("t", "n", b"h"), 0, nbytes, 0)


def test_before_the_first_write_only_the_number_is_bounded() -> None:
    queue = WriteQueue(max_blocks=3, max_seconds=1.0, workers=2)
    assert [queue.add(write()) for _ in range(4)] == [True, True, True, False]
    assert queue.free_blocks() == 0


def test_the_queue_of_a_slow_tier_is_bounded_in_seconds() -> None:
    queue = WriteQueue(max_blocks=100, max_seconds=2.0, workers=2)
    queue.record_write(MIB, 0.5)  # 2 MiB/s per worker, 4 MiB/s in total
    assert queue.bytes_per_s == 4 * MIB
    accepted = sum(queue.add(write()) for _ in range(20))
    assert accepted == 8
    assert queue.free_blocks() == 0
    queue.pop()
    assert queue.free_blocks() == 1


def test_an_empty_queue_accepts_a_block_however_slow_the_tier() -> None:
    queue = WriteQueue(max_blocks=4, max_seconds=0.001, workers=1)
    queue.record_write(MIB, 100.0)
    assert queue.add(write())
    assert not queue.add(write())
    queue.pop()
    queue.record_write(MIB, 0.0001)  # fast again
    for _ in range(20):
        queue.record_write(MIB, 0.0001)
    assert [queue.add(write()) for _ in range(5)] == [True] * 4 + [False]


def test_zero_seconds_means_no_limit() -> None:
    queue = WriteQueue(max_blocks=10, max_seconds=0.0, workers=1)
    queue.record_write(MIB, 1000.0)
    assert sum(queue.add(write()) for _ in range(20)) == 10


def test_cancelled_writes_make_room() -> None:
    queue = WriteQueue(max_blocks=2, max_seconds=0.0, workers=1)
    first, second = write(), write()
    assert queue.add(first)
    assert queue.add(second)
    first.cancelled = True
    third = write()
    assert queue.add(third)
    assert [queue.pop(), queue.pop()] == [second, third]


def test_a_full_queue_accepts_a_flush() -> None:
    queue = WriteQueue(max_blocks=1, max_seconds=0.0, workers=1)
    assert queue.add(write())
    flush = Flush()
    queue.add_flush(flush)
    assert queue.drain()[1:] == [flush]
    assert len(queue) == 0
    assert queue.add(write())


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 5)),
            st.tuples(st.just("pop"), st.just(0)),
            st.tuples(st.just("wrote"), st.integers(1, 20)),
        ),
        max_size=80,
    )
)
def test_in_order_and_within_its_bounds(steps: list[tuple[str, int]]) -> None:
    queue = WriteQueue(max_blocks=6, max_seconds=1.0, workers=1)
    model: deque[TierWrite] = deque()
    for step, number in steps:
        if step == "add":
            job = write(number)
            waiting = sum(each.nbytes for each in model)
            if queue.add(job):
                model.append(job)
                assert len(model) <= 6
                assert (
                    len(model) == 1
                    or not queue.bytes_per_s
                    or (waiting + number <= queue.bytes_per_s)
                )
            else:
                assert model, "an empty queue rejected a write"
        elif step == "pop" and model:
            assert queue.pop() is model.popleft()
        elif step == "wrote":
            queue.record_write(number, 1.0)
        assert len(queue) == len(model)
