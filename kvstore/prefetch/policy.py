"""Prefetch policies: how long a request waits for blocks that are being read from a tier into L2.

A policy decides from the state at one moment; it has no clock. Under every policy, a request waits
at most `max_wait_ms`. Then the engine uses the blocks that have arrived and computes the rest.
`factory` makes a policy by name; the fourth policy is in `adaptive`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol

DEFAULT_MAX_WAIT_MS: Final = 2000.0
DEFAULT_BASE_WAIT_MS: Final = 50.0
DEFAULT_PER_1K_TOKENS_MS: Final = 100.0
KI_TOKEN: Final = 1024


class WaitDecision(enum.Enum):
    """Wait for more blocks, or go on with those that have arrived."""

    WAIT = "wait"
    GO = "go"


class PrefetchPolicy(Protocol):
    """Decides whether one request goes on waiting for its prefetch."""

    @property
    def name(self) -> str: ...

    @property
    def max_wait_ms(self) -> float:
        """Maximum time that a request waits."""
        ...

    def decide(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> WaitDecision:
        """Wait, or go on.

        elapsed_ms: since the first lookup of the request.
        tokens_wanted, tokens_ready: tokens of the requested prefix, and of its part that arrived.
        done: no more blocks will arrive.
        can_start: the engine has room for the request now.
        """
        ...


@dataclass(frozen=True)
class BestEffort:
    """Go on with the arrived blocks as soon as the engine can start the request."""

    max_wait_ms: float = DEFAULT_MAX_WAIT_MS
    name: str = "best_effort"

    def decide(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> WaitDecision:
        go = done or can_start or elapsed_ms >= self.max_wait_ms
        return WaitDecision.GO if go else WaitDecision.WAIT


@dataclass(frozen=True)
class WaitComplete:
    """Wait for the whole prefix, at most max_wait_ms."""

    max_wait_ms: float = DEFAULT_MAX_WAIT_MS
    name: str = "wait_complete"

    def decide(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> WaitDecision:
        return WaitDecision.GO if done or elapsed_ms >= self.max_wait_ms else WaitDecision.WAIT


@dataclass(frozen=True)
class Timeout:
    """Wait base_wait_ms plus per_1k_tokens_ms per 1,024 tokens wanted, at most max_wait_ms."""

    base_wait_ms: float = DEFAULT_BASE_WAIT_MS
    per_1k_tokens_ms: float = DEFAULT_PER_1K_TOKENS_MS
    max_wait_ms: float = DEFAULT_MAX_WAIT_MS
    name: str = "timeout"

    def decide(
        self,
        *,
        elapsed_ms: float,
        tokens_wanted: int,
        tokens_ready: int,
        done: bool,
        can_start: bool,
    ) -> WaitDecision:
        allowed_ms = self.base_wait_ms + self.per_1k_tokens_ms * tokens_wanted / KI_TOKEN
        late = elapsed_ms >= min(allowed_ms, self.max_wait_ms)
        return WaitDecision.GO if done or late else WaitDecision.WAIT
