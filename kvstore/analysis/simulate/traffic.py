"""Requests made up from a description of traffic: conversations that begin with shared prompts.

Conversations begin at random (Poisson), each with one of some shared first prompts (a system
prompt, a document; the k-th most popular is 1/k as popular as the first). A turn asks with all that
was said before and some new tokens; the answer is added, and after a while the next turn comes, or
none. Turns are geometric in number, new tokens, answers and gaps exponential, with the means given.
A prompt's last, partial block has no name, as in the store.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from kvstore.analysis.simulate.traces import Asked
from kvstore.config.units import parse_duration_s
from kvstore.errors import ConfigError

CONTEXT_MAX: Final = 131_072
"""A conversation that would grow longer, in tokens, ends."""
PREFIXES_MAX: Final = 1_000_000


@dataclass(frozen=True)
class Traffic:
    """rate: requests a second. prefix: tokens of a shared first prompt; prefixes: how many there
    are. turns: of a conversation. turn, output: new tokens of a turn, and of an answer. gap:
    seconds between an answer and the next turn. All but `prefix` and `prefixes` are means."""

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
                raise ConfigError(f"traffic: {name} is {value}; {least:g} or more is right")
        if self.rate <= 0 or self.prefixes > PREFIXES_MAX:
            raise ConfigError(
                f"traffic: rate above 0 and {PREFIXES_MAX} prefixes at most are right"
            )

    @classmethod
    def parse(cls, text: str) -> Traffic:
        """Of "rate=2,prefix=1500,turns=6,gap=1m"; what is not named is as by default.

        Raises ConfigError: an unknown name, or a value that is none.
        """
        known = {each.name: each.default for each in fields(cls)}
        given: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in known:
                raise ConfigError(
                    f"traffic: unknown {name!r}; {', '.join(known)} are known, as in rate=2,turns=6"
                )
            try:
                number = parse_duration_s(value) if name == "gap" else float(value)
            except ValueError:
                raise ConfigError(f"traffic: {name} is {value!r}; a number is right") from None
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
    """A conversation: the blocks that are full, and tokens so far."""

    run: tuple[int, ...]
    tokens: int


def generate(
    traffic: Traffic, requests: int, block_tokens: int = 16, seed: int = 0
) -> Iterator[Asked]:
    """So many requests, in order of their arrival; the same for the same arguments."""
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
        yield Asked(
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
    """Tokens, at least one where the mean is; exponential."""
    return max(1, round(draw.expovariate(1 / mean))) if mean else 0
