"""Sizes and durations as people write them."""

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
    """Bytes of "200GiB", "2 TB", "1.5MiB" or a plain number; KiB is 1,024 bytes and kB 1,000.

    Raises:
        ConfigError: no such size, or a part of a byte.
    """
    match = _QUANTITY.fullmatch(str(text))
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is no size; write a number and a unit, such as 512MiB or 2TB")
    whole, _, part = match[1].partition(".")
    scale: int = 10 ** len(part)
    size, rest = divmod(int(whole + part) * unit, scale)
    if (rest and unit == 1) or size > MAX_BYTES:
        raise ConfigError(f"{text!r} is no size; it must be whole bytes, at most {MAX_BYTES}")
    return size


def format_bytes(size: int) -> str:
    """A size for people, with binary units and at most two decimals: 131072 -> "128 KiB"."""
    sign, value = ("-", float(-size)) if size < 0 else ("", float(size))
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    index = 0
    # 1023.995 and above would be printed as "1024" of the smaller unit.
    while value >= 1023.995 and index < len(units) - 1:
        value /= 1024
        index += 1
    return f"{sign}{value:.2f}".rstrip("0").rstrip(".") + f" {units[index]}"


def parse_duration_s(text: str | int | float) -> float:
    """Seconds of "250ms", "1.5s", "10m", "2h", "1d" or a plain number of seconds.

    Raises:
        ConfigError: no such duration.
    """
    match = _QUANTITY.fullmatch(str(text))
    unit = _SECOND_UNITS.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{text!r} is no duration; write a number and a unit, such as 250ms or 2h"
        )
    return float(match[1]) * unit


def without_login(text: str) -> str:
    """An address as it may be shown: "http://user:secret@host" -> "http://***@host"."""
    return _LOGIN.sub(r"\1***@", text)


def spell_bytes(size: int) -> str:
    """A size as configuration files have it: text that `parse_bytes` reads back as the same
    number, in the largest unit that divides it: 131072 -> "128KiB", 1000 -> "1000B"."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTE_UNITS[unit.lower()] == 0:
            return f"{size // _BYTE_UNITS[unit.lower()]}{unit}"
    return f"{size}B" if size else "0"


def spell_ms(ms: float) -> str:
    """A time as configuration files have it: 5000.0 -> "5s", 250.0 -> "250ms", 0.0 -> "0"."""
    for unit, unit_ms in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms and ms % unit_ms == 0:
            return f"{ms / unit_ms:g}{unit}"
    return f"{ms!r}ms".replace(".0ms", "ms") if ms else "0"
