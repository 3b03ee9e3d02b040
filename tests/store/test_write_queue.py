"""The write queue: bounded in blocks and in seconds of a measured rate, and never shut for good."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.key import Key
from kvstore.cache.commands import Spill
from kvstore.store.write_queue import Flush, WriteQueue

MIB = 1 << 20


def spill(nbytes: int = MIB) -> Spill:
    return Spill(Key("t", "n", b"h"), 0, nbytes, 0)


def test_before_anything_is_measured_only_the_number_is_bounded() -> None:
    queue = WriteQueue(blocks=3, seconds=1.0, workers=2)
    assert [queue.offer(spill()) for _ in range(4)] == [True, True, True, False]
    assert queue.room() == 0


def test_a_slow_tier_has_no_more_waiting_than_its_seconds() -> None:
    queue = WriteQueue(blocks=100, seconds=2.0, workers=2)
    queue.wrote(MIB, 0.5)  # 2 MiB a second each, 4 MiB a second together
    assert queue.bytes_per_s == 4 * MIB
    taken = sum(queue.offer(spill()) for _ in range(20))
    assert taken == 8
    assert queue.room() == 0
    queue.pop()
    assert queue.room() == 1


def test_a_block_finds_place_in_an_empty_queue_however_slow_the_tier() -> None:
    queue = WriteQueue(blocks=4, seconds=0.001, workers=1)
    queue.wrote(MIB, 100.0)
    assert queue.offer(spill())
    assert not queue.offer(spill())
    queue.pop()
    queue.wrote(MIB, 0.0001)  # fast again
    for _ in range(20):
        queue.wrote(MIB, 0.0001)
    assert [queue.offer(spill()) for _ in range(5)] == [True] * 4 + [False]


def test_no_seconds_is_no_such_bound() -> None:
    queue = WriteQueue(blocks=10, seconds=0.0, workers=1)
    queue.wrote(MIB, 1000.0)
    assert sum(queue.offer(spill()) for _ in range(20)) == 10


def test_cancelled_spills_make_room() -> None:
    queue = WriteQueue(blocks=2, seconds=0.0, workers=1)
    first, second = spill(), spill()
    assert queue.offer(first)
    assert queue.offer(second)
    first.cancelled = True
    third = spill()
    assert queue.offer(third)
    assert [queue.pop(), queue.pop()] == [second, third]


def test_a_flush_finds_place_always() -> None:
    queue = WriteQueue(blocks=1, seconds=0.0, workers=1)
    assert queue.offer(spill())
    flush = Flush()
    queue.flush(flush)
    assert queue.drain()[1:] == [flush]
    assert len(queue) == 0
    assert queue.offer(spill())


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("offer"), st.integers(1, 5)),
            st.tuples(st.just("pop"), st.just(0)),
            st.tuples(st.just("wrote"), st.integers(1, 20)),
        ),
        max_size=80,
    )
)
def test_in_order_and_within_its_bounds(steps: list[tuple[str, int]]) -> None:
    queue = WriteQueue(blocks=6, seconds=1.0, workers=1)
    model: deque[Spill] = deque()
    for verb, number in steps:
        if verb == "offer":
            job = spill(number)
            waiting = sum(each.nbytes for each in model)
            if queue.offer(job):
                model.append(job)
                assert len(model) <= 6
                assert (
                    len(model) == 1
                    or not queue.bytes_per_s
                    or (waiting + number <= queue.bytes_per_s)
                )
            else:
                assert model, "refused by an empty queue"
        elif verb == "pop" and model:
            assert queue.pop() is model.popleft()
        elif verb == "wrote":
            queue.wrote(number, 1.0)
        assert len(queue) == len(model)
