"""Parse and format sizes and durations with units."""

from __future__ import annotations

import re

from kvstore.errors import ConfigError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_SECOND_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

MAX_BYTES = 2**63 - 1
_LOGIN = re.compile(r"(://)[^/?#\s]*@")


def parse_bytes(text: str | int) -> int:
    """Return the bytes of "200GiB", "2 TB", "1.5MiB" or a plain number.

    KiB is 1,024 bytes, kB is 1,000 bytes.

    Raises:
        ConfigError: the text is not a size, or not a whole number of bytes.
    """
    match = _QUANTITY.fullmatch(str(text))
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"invalid size {text!r}: use a number with a unit, such as 512MiB or 2TB")
    whole, _, part = match[1].partition(".")
    scale: int = 10 ** len(part)
    size, rest = divmod(int(whole + part) * unit, scale)
    if (rest and unit == 1) or size > MAX_BYTES:
        raise ConfigError(
            f"invalid size {text!r}: use a whole number of bytes, at most {MAX_BYTES}"
        )
    return size


def format_bytes(size: int) -> str:
    """Format a size with binary units and at most two decimals: 131072 -> "128 KiB"."""
    sign, value = ("-", float(-size)) if size < 0 else ("", float(size))
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    index = 0
    # 1023.995 and above would appear as "1024" of the smaller unit.
    while value >= 1023.995 and index < len(units) - 1:
        value /= 1024
        index += 1
    return f"{sign}{value:.2f}".rstrip("0").rstrip(".") + f" {units[index]}"


def parse_duration_s(text: str | int | float) -> float:
    """Return the seconds of "250ms", "1.5s", "10m", "2h", "1d" or a plain number of seconds.

    Raises:
        ConfigError: the text is not a duration.
    """
    match = _QUANTITY.fullmatch(str(text))
    unit = _SECOND_UNITS.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"invalid duration {text!r}: use a number with a unit, such as 250ms or 2h"
        )
    return float(match[1]) * unit


def parse_ms(value: str | float) -> float:
    """Return the milliseconds of "250ms", "1.5s", "2m" or a plain number of milliseconds.

    Raises:
        ConfigError: the value is not a duration, or it is negative.
    """
    try:
        number = float(value)
    except ValueError:
        return parse_duration_s(value) * 1e3
    if not 0 <= number < float("inf"):
        raise ConfigError(
            f"invalid duration {value!r}: use a number with a unit, such as '250ms', '1.5s' or '2m'"
        )
    return number


def without_login(text: str) -> str:
    """Mask the login of an address: "http://user:secret@host" -> "http://***@host"."""
    return _LOGIN.sub(r"\1***@", text)


def spell_bytes(size: int) -> str:
    """Format a size for a configuration file: 131072 -> "128KiB", 1000 -> "1000B".

    The unit is the largest one that divides the size. `parse_bytes` reads back the same number.
    """
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTE_UNITS[unit.lower()] == 0:
            return f"{size // _BYTE_UNITS[unit.lower()]}{unit}"
    return f"{size}B" if size else "0"


def spell_ms(ms: float) -> str:
    """Format a duration for a configuration file: 5000.0 -> "5s", 250.0 -> "250ms", 0.0 -> "0"."""
    for unit, unit_ms in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms and ms % unit_ms == 0:
            return f"{ms / unit_ms:g}{unit}"
    return f"{ms!r}ms".replace(".0ms", "ms") if ms else "0"
