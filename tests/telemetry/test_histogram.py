"""Histograms: every value in one bucket, the right one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.telemetry.histogram import LATENCY_BOUNDS_S, Histogram


@settings(deadline=None)
@given(st.lists(st.floats(0, 10) | st.sampled_from(LATENCY_BOUNDS_S)))
def test_counts(observed: list[float]) -> None:
    histogram = Histogram()
    for value in observed:
        histogram.observe(value)
    numbers = histogram.snapshot()
    edges = [float("-inf"), *LATENCY_BOUNDS_S, float("inf")]
    for low, high, count in zip(edges, edges[1:], numbers["counts"], strict=False):
        assert count == sum(low < value <= high for value in observed)
    assert numbers["count"] == len(observed)
    assert abs(numbers["sum"] - sum(observed)) < 1e-6
