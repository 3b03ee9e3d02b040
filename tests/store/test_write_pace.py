"""Writers of a slow tier, and the next try after a failure, on a simulated clock."""

from __future__ import annotations

from kvstore.store.write_pace import RETRY_FIRST_S, RETRY_MAX_S, SLOW_WRITE_S, WritePace

WRITERS = 16


class Link:
    """A tier that passes `bytes_per_s`, shared by its writers; each writes 1 byte."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.now_s = 0.0

    def write_round(self, pace: WritePace) -> float:
        """All writers that may write do. Returns the time of a write."""
        writers = 0
        while pace.may_write(self.now_s, writers):
            writers += 1
        started_s = self.now_s
        self.now_s += writers / self.bytes_per_s
        for _ in range(writers):
            pace.record_success(started_s, self.now_s)
        return self.now_s - started_s


def test_a_fast_tier_keeps_all_writers() -> None:
    pace, link = WritePace(WRITERS), Link(1000.0)
    for _ in range(100):
        link.write_round(pace)
    assert pace.writers == WRITERS


def test_a_slow_tier_gets_fewer_writers_and_never_none() -> None:
    for bytes_per_s, least, most in ((2.0, 1, 4), (0.1, 1, 1), (0.001, 1, 1)):
        pace, link = WritePace(WRITERS), Link(bytes_per_s)
        times = [link.write_round(pace) for _ in range(60)]
        assert least <= pace.writers <= most
        assert pace.may_write(link.now_s, 0)
        assert max(times[10:]) <= max(SLOW_WRITE_S, 1 / bytes_per_s) * 1.01


def test_writers_come_back_when_the_tier_is_fast_again() -> None:
    pace, link = WritePace(WRITERS), Link(0.1)
    for _ in range(20):
        link.write_round(pace)
    link.bytes_per_s = 1000.0
    for _ in range(WRITERS):
        link.write_round(pace)
    assert pace.writers == WRITERS


def test_after_failures_one_write_at_a_time_at_growing_intervals() -> None:
    pace = WritePace(WRITERS)
    now_s, waits = 100.0, []
    for _ in range(8):
        for _ in range(5):  # several writes fail together
            pace.record_failure(now_s, now_s + 1.0)
        waits.append(pace.retry_at_s - now_s - 1.0)
        assert not pace.may_write(pace.retry_at_s - 0.001, 0)
        now_s = pace.retry_at_s
        assert pace.may_write(now_s, 0)
        assert not pace.may_write(now_s, 1)
    assert waits[:3] == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S]
    assert waits[-1] == RETRY_MAX_S
    pace.record_success(now_s, now_s + 0.1)
    assert not pace.failing
    assert pace.retry_at_s == 0.0
    for _ in range(WRITERS):
        now_s += 1.0
        pace.record_success(now_s, now_s + 0.1)
    assert pace.may_write(now_s, WRITERS - 1)
