"""How long a request waits for blocks that are on their way from below L2.

A verdict is asked for with what is known at that moment; there is no clock here. Whatever the
policy, no request waits longer than its cap: past that, what has arrived is used and the rest is
computed.
"""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.errors import ConfigError

DEFAULT_CAP_MS: Final = 2000.0
DEFAULT_BASE_MS: Final = 50.0
DEFAULT_PER_KI_TOKEN_MS: Final = 100.0
KI_TOKEN: Final = 1024


class Verdict(enum.Enum):
    """Wait for more, or go with what has arrived."""

    WAIT = "wait"
    GO = "go"


class PrefetchPolicy(Protocol):
    """Decides how long one request's prefetch may take."""

    @property
    def name(self) -> str: ...

    @property
    def cap_ms(self) -> float:
        """No request waits longer."""
        ...

    def verdict(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> Verdict:
        """Wait or go.

        elapsed_ms: since the request first asked.
        tokens_wanted, tokens_ready: of the run asked for, and of its part that has arrived.
        done: no more will arrive.
        can_start: the engine has room for the request now.
        """
        ...


@dataclass(frozen=True)
class BestEffort:
    """Never wait on account of the store: go with what has arrived when the engine could start."""

    cap_ms: float = DEFAULT_CAP_MS
    name: str = "best_effort"

    def verdict(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> Verdict:
        return Verdict.GO if done or can_start or elapsed_ms >= self.cap_ms else Verdict.WAIT


@dataclass(frozen=True)
class WaitComplete:
    """Wait for the whole run, up to the cap."""

    cap_ms: float = DEFAULT_CAP_MS
    name: str = "wait_complete"

    def verdict(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> Verdict:
        return Verdict.GO if done or elapsed_ms >= self.cap_ms else Verdict.WAIT


@dataclass(frozen=True)
class Timeout:
    """Wait for a base time and a part for each 1,024 tokens wanted, up to the cap."""

    base_ms: float = DEFAULT_BASE_MS
    per_ki_token_ms: float = DEFAULT_PER_KI_TOKEN_MS
    cap_ms: float = DEFAULT_CAP_MS
    name: str = "timeout"

    def verdict(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> Verdict:
        allowed_ms = self.base_ms + self.per_ki_token_ms * tokens_wanted / KI_TOKEN
        late = elapsed_ms >= min(allowed_ms, self.cap_ms)
        return Verdict.GO if done or late else Verdict.WAIT


PREFETCH_POLICIES: Final = ("best_effort", "wait_complete", "timeout", "adaptive")


def prefetch_policy(
    name: str,
    *,
    base_ms: float = DEFAULT_BASE_MS,
    per_ki_token_ms: float = DEFAULT_PER_KI_TOKEN_MS,
    cap_ms: float = DEFAULT_CAP_MS,
) -> PrefetchPolicy:
    """The policy of this name; times in milliseconds.

    Raises ConfigError: an unknown name (says the nearest right one), or a time that is negative or
    not finite.
    """
    times = {"base_ms": base_ms, "per_ki_token_ms": per_ki_token_ms, "cap_ms": cap_ms}
    for what, value in times.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"prefetch {what} is {value}; a time of 0 ms or more is right")
    if name == "best_effort":
        return BestEffort(cap_ms)
    if name == "wait_complete":
        return WaitComplete(cap_ms)
    if name == "timeout":
        return Timeout(base_ms, per_ki_token_ms, cap_ms)
    if name == "adaptive":
        from kvstore.prefetch.adaptive import Adaptive  # it is made of what is above

        return Adaptive(cap_ms, Timeout(base_ms, per_ki_token_ms, cap_ms))
    near = difflib.get_close_matches(name, PREFETCH_POLICIES, n=1, cutoff=0.0)[0]
    raise ConfigError(f"unknown prefetch policy {name!r}; the nearest is {near!r}")
