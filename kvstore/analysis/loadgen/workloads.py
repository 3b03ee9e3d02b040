"""Six workloads that share prefixes in different ways: synthetic conversations, from a seed.

A session sends its turns one after another, each with the session's whole history. Sessions run
concurrently. Sizes are in tokens. They are converted to words with the ratio that the server's
tokenizer gives for a sample.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics
from typing import Final

from kvstore.errors import ConfigError

Message = Mapping[str, str]

SENTENCE_WORDS: Final = (7, 16)
"""Minimum and maximum number of words in a sentence."""
POPULARITY: Final = 1.0
"""Documents are used in proportion to 1 / rank ** POPULARITY."""


@dataclass(frozen=True)
class Turn:
    """Messages that one request adds to its session's history.

    reply: the synthetic answer in the history, if the server's own is not used.
    """

    messages: tuple[Message, ...]
    reply: str


@dataclass(frozen=True)
class Session:
    """A sequence of requests, each with the history of the earlier ones."""

    turns: tuple[Turn, ...]
    temperature: float = 0.0

    def tokens(self, tokens_per_word: float, max_tokens: int) -> int:
        """Return the approximate number of tokens of the last request and its answer."""
        words = sum(
            len(text.split())
            for turn in self.turns
            for text in (turn.reply, *(message["content"] for message in turn.messages))
        )
        return int(words * tokens_per_word) + max_tokens * len(self.turns)


@lru_cache(maxsize=1)
def _words() -> tuple[str, ...]:
    """Return ordinary words, from the reference manual that is part of every Python."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{3,9}\b", " ".join(topics.values())))))


class Writer:
    """Makes texts and choices, always the same for one seed.

    scale: multiplies every length. tokens_per_word: of the server's tokenizer.
    """

    def __init__(self, seed: int, scale: float = 1.0, tokens_per_word: float = 1.3) -> None:
        self.random = random.Random(seed)
        self._words_per_token = scale / tokens_per_word

    def text(self, least: int, most: int | None = None) -> str:
        """Return sentences of about `least` tokens, or of `least` to `most` tokens."""
        tokens = least if most is None else self.random.randint(least, most)
        left = max(1, round(tokens * self._words_per_token))
        sentences = []
        while left > 0:
            words = self.random.choices(_words(), k=min(left, self.random.randint(*SENTENCE_WORDS)))
            sentences.append(" ".join(words).capitalize() + ".")
            left -= len(words)
        return " ".join(sentences)


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def chat(writer: Writer, requests: int) -> list[Session]:
    """Conversations of six turns under one system prompt of 200 tokens."""
    system = _system(writer.text(200))
    sessions = []
    for start in range(0, requests, 6):
        turns = []
        for turn in range(min(6, requests - start)):
            question = _user(writer.text(20, 120))
            messages = (system, question) if turn == 0 else (question,)
            turns.append(Turn(messages, writer.text(50, 200)))
        sessions.append(Session(tuple(turns)))
    return sessions


def system_prompt(writer: Writer, requests: int) -> list[Session]:
    """Questions of 20 to 200 tokens after one system prompt of 1,000."""
    system = _system(writer.text(1000))
    return [_single(writer, system, _user(writer.text(20, 200))) for _ in range(requests)]


def rag(writer: Writer, requests: int) -> list[Session]:
    """Questions about two of eight documents of 400 tokens, of different popularity."""
    system = _system(writer.text(100))
    documents = [writer.text(400) for _ in range(8)]
    weights = [1 / rank**POPULARITY for rank in range(1, len(documents) + 1)]
    sessions = []
    for _ in range(requests):
        first, second = writer.random.choices(range(len(documents)), weights, k=2)
        shown = [documents[first]] + ([documents[second]] if second != first else [])
        question = writer.text(20, 60)
        sessions.append(_single(writer, system, _user("\n\n".join([*shown, question]))))
    return sessions


def agent(writer: Writer, requests: int) -> list[Session]:
    """Loops of eight steps after 600 tokens of tools. Each step adds a result of 50 to 300."""
    system = _system(writer.text(600))
    sessions = []
    for start in range(0, requests, 8):
        turns = []
        for step in range(min(8, requests - start)):
            result = _user("Result: " + writer.text(50, 300))
            messages = (system, _user(writer.text(40, 80))) if step == 0 else (result,)
            turns.append(Turn(messages, writer.text(20, 60)))
        sessions.append(Session(tuple(turns)))
    return sessions


def few_shot(writer: Writer, requests: int) -> list[Session]:
    """Questions after the first two to five of five examples of 150 tokens."""
    examples = [(writer.text(110), writer.text(40)) for _ in range(5)]
    sessions = []
    for _ in range(requests):
        shown = examples[: writer.random.randint(2, 5)]
        parts = [f"Example: {ask}\nAnswer: {answer}" for ask, answer in shown]
        parts.append(f"Question: {writer.text(20, 80)}\nAnswer:")
        sessions.append(_single(writer, _user("\n\n".join(parts))))
    return sessions


def sampling(writer: Writer, requests: int) -> list[Session]:
    """Problems of 200 to 500 tokens, each sent eight times at temperature 1."""
    sessions: list[Session] = []
    while len(sessions) < requests:
        turn = Turn((_user(writer.text(200, 500)),), writer.text(20))
        sessions += [Session((turn,), temperature=1.0)] * min(8, requests - len(sessions))
    return sessions


def _single(writer: Writer, *messages: Message) -> Session:
    return Session((Turn(messages, writer.text(20)),))


WORKLOADS: dict[str, Callable[[Writer, int], list[Session]]] = {
    "chat": chat,
    "system-prompt": system_prompt,
    "rag": rag,
    "agent": agent,
    "few-shot": few_shot,
    "sampling": sampling,
}
"""Functions by name. Each returns sessions with `requests` requests in total."""


def parse_workloads(names: Sequence[str]) -> list[str]:
    """Check the names of workloads. No name: all. Raises ConfigError for an unknown name."""
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}; use one of {', '.join(WORKLOADS)}")
    return list(dict.fromkeys(names)) or list(WORKLOADS)
