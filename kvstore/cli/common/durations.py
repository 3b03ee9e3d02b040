"""Durations as options of commands."""

from __future__ import annotations

from kvstore.config.units import parse_duration_s
from kvstore.errors import ConfigError


def seconds_of(flag: str, text: str) -> float:
    """Seconds of text such as "500ms" or "2m"; a bare number is seconds.

    Raises ConfigError: `text` is not a duration. The message names `flag`.
    """
    try:
        return parse_duration_s(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
