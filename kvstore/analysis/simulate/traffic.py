"""Generates requests from a description of traffic: conversations with shared first prompts.

Conversations start at random (Poisson). Each starts with one of several shared prompts, such as a
system prompt or a document. The k-th most popular prompt is 1/k as popular as the first. A turn
sends the whole conversation so far and some new tokens, and the answer is appended. After a gap the
next turn follows, or the conversation ends. The number of turns is geometric. New tokens, answers
and gaps are exponential, with the given means. As in the store, the last partial block of a prompt
has no id.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from kvstore.analysis.simulate.traces import TraceRequest
from kvstore.config.units import parse_duration_s
from kvstore.errors import ConfigError

CONTEXT_MAX: Final = 131_072
"""A conversation ends before its next turn if it has this many tokens."""
PREFIXES_MAX: Final = 1_000_000


@dataclass(frozen=True)
class Traffic:
    """Description of traffic. All values but `prefix` and `prefixes` are means.

    rate: requests per second. prefix: tokens of a shared first prompt. prefixes: number of shared
    prompts. turns: turns per conversation. turn, output: new tokens per turn and per answer. gap:
    seconds between an answer and the next turn.
    """

    rate: float = 1.0
    prefix: int = 1000
    prefixes: int = 10
    turns: float = 4.0
    turn: float = 200.0
    output: float = 250.0
    gap: float = 30.0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise ConfigError(f"traffic: {name} must be at least {least:g} (got {value})")
        if self.rate <= 0 or self.prefixes > PREFIXES_MAX:
            raise ConfigError(
                f"traffic: rate must be above 0 and prefixes at most {PREFIXES_MAX} "
                f"(got rate={self.rate}, prefixes={self.prefixes})"
            )

    @classmethod
    def parse(cls, text: str) -> Traffic:
        """Parse text like "rate=2,prefix=1500,turns=6,gap=1m". Missing names keep their default.

        Raises ConfigError: a name is unknown, or a value is invalid.
        """
        known = {each.name: each.default for each in fields(cls)}
        given: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in known:
                raise ConfigError(
                    f"traffic: unknown name {name!r}; use {', '.join(known)}, as in rate=2,turns=6"
                )
            try:
                number = parse_duration_s(value) if name == "gap" else float(value)
            except ValueError:
                raise ConfigError(f"traffic: {name} must be a number (got {value!r})") from None
            given[name] = int(number) if isinstance(known[name], int) else number
        return cls(**given)  # type: ignore[arg-type]


_LEAST: Final = {
    "rate": 0.0,
    "prefix": 0,
    "prefixes": 1,
    "turns": 1.0,
    "turn": 1.0,
    "output": 0.0,
    "gap": 0.0,
}


@dataclass
class _Talk:
    """A conversation: the ids of its full blocks, and its tokens so far."""

    run: tuple[int, ...]
    tokens: int


def generate(
    traffic: Traffic, requests: int, block_tokens: int = 16, seed: int = 0
) -> Iterator[TraceRequest]:
    """Yield requests in order of arrival. Equal arguments give equal requests."""
    draw = random.Random(seed)
    names = itertools.count()
    shared = traffic.prefix // block_tokens
    weights = list(itertools.accumulate(1 / rank for rank in range(1, traffic.prefixes + 1)))
    prompts: dict[int, tuple[int, ...]] = {}
    talks_per_s = traffic.rate / traffic.turns
    next_talk_s = 0.0
    order = itertools.count()
    waiting: list[tuple[float, int, _Talk]] = []
    for _ in range(requests):
        if waiting and waiting[0][0] <= next_talk_s:
            now_s, _, talk = heapq.heappop(waiting)
        else:
            now_s = next_talk_s
            next_talk_s += draw.expovariate(talks_per_s)
            (which,) = draw.choices(range(traffic.prefixes), cum_weights=weights)
            if which not in prompts:
                prompts[which] = tuple(itertools.islice(names, shared))
            talk = _Talk(prompts[which], traffic.prefix)
        talk.tokens += _some(draw, traffic.turn)
        fresh = talk.tokens // block_tokens - len(talk.run)
        talk.run += tuple(itertools.islice(names, fresh))
        output = _some(draw, traffic.output)
        yield TraceRequest(
            talk.run,
            tuple(range(0, len(talk.run) * block_tokens + 1, block_tokens)),
            talk.tokens,
            useful=(talk.tokens - 1) // block_tokens * block_tokens,
            time_s=now_s,
            output_tokens=output,
        )
        talk.tokens += output
        if draw.random() * traffic.turns >= 1.0 and talk.tokens < CONTEXT_MAX:
            later_s = now_s + (draw.expovariate(1 / traffic.gap) if traffic.gap else 0.0)
            heapq.heappush(waiting, (later_s, next(order), talk))


def _some(draw: random.Random, mean: float) -> int:
    """Return an exponential number of tokens, at least 1. 0 if the mean is 0."""
    return max(1, round(draw.expovariate(1 / mean))) if mean else 0
