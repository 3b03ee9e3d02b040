"""A request: what the user asks, how it lives in the engine, and what comes out of it.

`Request` is what the user said and never changes. `Job` is its life in the engine: which tokens
it has, in which pages their KV lies, what of it is published, offered and loaded. `Output` is what
one step made for one request.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.blocks.hashing import BlockHasher
from kvstore.engine.sampling import Sampler, SamplingParams
from kvstore.engine.text import TextStream
from kvstore.errors import ConfigError, KVStoreError

MAX_STOP_STRINGS = 16
"""Stop strings one request may carry."""
MAX_STOP_CHARS = 1024
"""Length of one stop string."""


class QueueFull(KVStoreError):
    """The engine has as many requests as it takes; try again later."""


class State(enum.Enum):
    """Where a job stands. An aborted job that still has a copy running is FINISHED."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation to make.

    max_tokens: None means as many as the context and the page pool allow.
    stop: strings that end the text (needs a tokenizer); the stop string itself is not given out.
    ignore_eos: go on past the model's end-of-sequence tokens.
    """

    request_id: str
    prompt_tokens: Sequence[int]
    max_tokens: int | None = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    lora_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one engine can serve; a request outside it is refused when it arrives."""

    max_context: int
    vocab: int
    num_pages: int
    page_tokens: int
    loras: frozenset[str] = frozenset()

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of one request: the last output token's KV is never computed."""
        return min(self.max_context, self.num_pages * self.page_tokens + 1)


def sampling_params(request: Request) -> SamplingParams:
    """How this request's tokens are chosen; ConfigError for a value outside its range."""
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
    )


def checked(request: Request, limits: Limits) -> tuple[np.ndarray, int]:
    """The prompt as int32 [prompt_tokens] and the number of tokens to make at most.

    Raises:
        ConfigError: one line naming the value that is wrong and the limit it breaks.
    """
    prompt = _checked_prompt(request.prompt_tokens, limits)
    sampling_params(request)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise ConfigError(f"max_tokens is {request.max_tokens}; it must be at least 1")
    if request.lora_name and request.lora_name not in limits.loras:
        known = ", ".join(sorted(limits.loras)) or "none is loaded"
        raise ConfigError(f"unknown lora {request.lora_name!r}; known: {known}")
    if len(request.stop) > MAX_STOP_STRINGS:
        raise ConfigError(f"{len(request.stop)} stop strings; at most {MAX_STOP_STRINGS} are right")
    for text in request.stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise ConfigError(
                f"a stop string has {len(text)} characters; it must have 1..{MAX_STOP_CHARS}"
            )
    room = limits.max_context - len(prompt)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens; with one token of output it must fit into the "
            f"context of {limits.max_context} tokens"
        )
    wanted = request.max_tokens
    if wanted is None:
        wanted = max(1, min(room, limits.max_total_tokens - len(prompt)))
    if wanted > room:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {wanted}; together they must "
            f"fit into the context of {limits.max_context} tokens"
        )
    if len(prompt) + wanted > limits.max_total_tokens:
        raise ConfigError(
            f"{len(prompt)} prompt tokens and {wanted} to make can never fit into the KV pool of "
            f"{limits.num_pages} pages of {limits.page_tokens} tokens"
        )
    return prompt, wanted


def _checked_prompt(tokens: Sequence[int], limits: Limits) -> np.ndarray:
    if len(tokens) == 0:
        raise ConfigError("the prompt is empty; it must have at least 1 token")
    if len(tokens) >= limits.max_context:
        raise ConfigError(
            f"the prompt has {len(tokens)} tokens; with one token of output it must fit into the "
            f"context of {limits.max_context} tokens"
        )
    wide = np.asarray(tokens)
    if wide.dtype.kind not in "iu":
        raise ConfigError(f"prompt tokens must be integers in 0..{limits.vocab - 1}")
    outside = wide[(wide < 0) | (wide >= limits.vocab)]
    if len(outside):
        raise ConfigError(f"token id {outside[0]} is outside the vocabulary 0..{limits.vocab - 1}")
    return wide.astype(np.int32)


@dataclass(slots=True)
class Times:
    """Seconds on the engine's clock; 0.0 for what has not happened."""

    arrival_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def queue_ms(self) -> float:
        """From arrival to the first time pages were given (a load counts as started)."""
        return max(0.0, self.started_s - self.arrival_s) * 1e3

    @property
    def ttft_ms(self) -> float:
        """Time to first token, from arrival."""
        return max(0.0, self.first_token_s - self.arrival_s) * 1e3


@dataclass(slots=True)
class Output:
    """What one step made for one request.

    tokens: new token ids (a stop token is among them). text: new text; empty without a tokenizer.
    finish_reason: None while it goes on; then "stop", "length", "abort" or "error".
    cached: prompt tokens not computed, by tier: {"l1": n, "l2": n, ...}; sums to at most
        prompt_tokens - 1 and does not change after the first output.
    """

    request_id: str
    tokens: list[int]
    text: str
    finish_reason: str | None
    prompt_tokens: int
    cached: dict[str, int]
    times: Times
    error: str = ""


@dataclass(eq=False, slots=True)
class Job:
    """A request's life in the engine. Only the loop thread touches it.

    tokens: int32 buffer for prompt and output; the first `length` are known.
    page_table: int32 buffer; the first page_count entries are the job's pages, on each of which
        it holds one reference.
    computed: tokens (from the start) whose KV lies in the pages.
    published: tokens (whole pages) of this job that are in the radix tree, in these very pages.
    node: the radix node locked for this job.
    offered_blocks: blocks (from the start) that were offered to the hooks or came from them.
    passed_over: how often a later arrival was started instead of this job.
    start: this job's place in the order of starts; -1 while it waits.
    match_open: the hooks may hold something for this job's last match.
    pending: the last consideration ended in waiting for KV that is on its way.
    ahead: later blocks may be on their way while this job runs: the hooks are asked before each of
        its steps. compute_to: how far it may compute until then, in tokens.
    counting: what is loaded counts as cached; not in a life after a preemption.
    """

    request: Request
    tokens: np.ndarray
    length: int
    prompt_length: int
    max_length: int
    hasher: BlockHasher
    hashes: list[bytes]
    page_table: np.ndarray
    sampler: Sampler
    text: TextStream
    arrival: int
    times: Times
    state: State = State.WAITING
    page_count: int = 0
    computed: int = 0
    published: int = 0
    node: Any = None
    offered_blocks: int = 0
    passed_over: int = 0
    start: int = -1
    preempted: bool = False
    match_open: bool = False
    pending: bool = False
    ahead: bool = False
    compute_to: int = 0
    counting: bool = False
    cached: dict[str, int] | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def root(self) -> tuple[str, str]:
        """The radix root this job's prefix lies under."""
        return (self.request.lora_name, self.request.cache_salt)

    @property
    def known(self) -> np.ndarray:
        """Tokens known so far, int32 [length]; a view."""
        return self.tokens[: self.length]

    @property
    def pages(self) -> np.ndarray:
        """Ids of the job's pages in token order, int32 [page_count]; a view."""
        return self.page_table[: self.page_count]

    def append(self, token: int) -> None:
        """Add one made token, and its hash when it fills a block."""
        self.tokens[self.length] = token
        self.length += 1
        self.hashes += self.hasher.feed([token])
