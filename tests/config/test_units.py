from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config.units import MAX_BYTES, format_bytes, parse_bytes, parse_duration_s
from kvstore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GiB", 200 * 2**30),
        ("2TiB", 2**41),
        ("2 TB", 2 * 10**12),
        ("1.5MiB", 3 * 2**19),
        ("0.1kB", 100),
        ("512", 512),
        (512, 512),
        (" 7 b ", 7),
        ("4gib", 2**32),
        ("0", 0),
        ("8191.99999999999999991PiB", None),
        ("9223372036854775807", MAX_BYTES),
    ],
)
def test_sizes(text: str | int, size: int | None) -> None:
    assert parse_bytes(text) == (size if size is not None else 8192 * 2**50 - 1)


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 GiBB", "1e9", "1.5", "1,5GiB", "0x10", "1..5MB", "8192PiB", "٣GiB"]
)
def test_what_is_no_size_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid size") as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (131_072, "128 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1 MiB"),
        (200 * 2**30, "200 GiB"),
        (2**60, "1024 PiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_printed_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, MAX_BYTES // 2))
def test_a_printed_size_reads_back_within_its_digits(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size).replace(" ", "")) - size) <= max(0, size * 0.006)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("1.5s", 1.5), ("10m", 600), ("2h", 7200), ("1d", 86_400), ("3", 3), (4, 4)],
)
def test_durations(text: str | int, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "1w", "-1s", "1s2"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid duration"):
        parse_duration_s(text)
