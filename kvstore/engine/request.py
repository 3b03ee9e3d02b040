"""A request, its state in the engine, and its output.

`Request` is the user's input and never changes. `Job` is its state in the engine: its tokens, the
pages with their KV, and what is published, saved and loaded. `Output` is the result of one step for
one request.
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
"""Maximum number of stop strings per request."""
MAX_STOP_CHARS = 1024
"""Maximum length of a stop string."""


class QueueFull(KVStoreError):
    """The engine has its maximum number of requests; try again later."""


class State(enum.Enum):
    """State of a job. An aborted job is FINISHED, even while a copy is running."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Parameters of one generation.

    max_tokens: None: as many as the context and the page pool allow.
    stop: strings that end the text (requires a tokenizer). The output does not include them.
    ignore_eos: continue after the model's end-of-sequence tokens.
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
class RequestLimits:
    """Limits of one engine. A request outside them is rejected on arrival."""

    max_context: int
    vocab: int
    num_pages: int
    page_tokens: int
    loras: frozenset[str] = frozenset()

    @property
    def max_total_tokens(self) -> int:
        """Maximum prompt and output tokens: the last output token's KV is never computed."""
        return min(self.max_context, self.num_pages * self.page_tokens + 1)


def sampling_params(request: Request) -> SamplingParams:
    """Return the request's sampling parameters. Raises ConfigError for a value out of range."""
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
    )


def validate_request(request: Request, limits: RequestLimits) -> tuple[np.ndarray, int]:
    """Return the prompt as int32 [prompt_tokens] and the maximum tokens to generate.

    Raises:
        ConfigError: names the invalid value and its limit.
    """
    prompt = _validate_prompt(request.prompt_tokens, limits)
    sampling_params(request)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1 (got {request.max_tokens})")
    if request.lora_name and request.lora_name not in limits.loras:
        known = ", ".join(sorted(limits.loras)) or "(none is loaded)"
        raise ConfigError(f"unknown lora {request.lora_name!r}; loaded adapters: {known}")
    if len(request.stop) > MAX_STOP_STRINGS:
        raise ConfigError(
            f"stop must have at most {MAX_STOP_STRINGS} strings (got {len(request.stop)})"
        )
    for text in request.stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise ConfigError(
                f"a stop string must have 1 to {MAX_STOP_CHARS} characters (got {len(text)})"
            )
    room = limits.max_context - len(prompt)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, too many for the context of "
            f"{limits.max_context} tokens with one token of output"
        )
    wanted = request.max_tokens
    if wanted is None:
        wanted = max(1, min(room, limits.max_total_tokens - len(prompt)))
    if wanted > room:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {wanted}, together too many "
            f"for the context of {limits.max_context} tokens"
        )
    if len(prompt) + wanted > limits.max_total_tokens:
        raise ConfigError(
            f"{len(prompt)} prompt tokens and max_tokens {wanted} do not fit into the KV pool of "
            f"{limits.num_pages} pages of {limits.page_tokens} tokens"
        )
    return prompt, wanted


def _validate_prompt(tokens: Sequence[int], limits: RequestLimits) -> np.ndarray:
    if len(tokens) == 0:
        raise ConfigError("the prompt must have at least 1 token (got an empty prompt)")
    if len(tokens) >= limits.max_context:
        raise ConfigError(
            f"the prompt has {len(tokens)} tokens, too many for the context of "
            f"{limits.max_context} tokens with one token of output"
        )
    wide = np.asarray(tokens)
    if wide.dtype.kind not in "iu":
        raise ConfigError(f"prompt tokens must be integers from 0 to {limits.vocab - 1}")
    outside = wide[(wide < 0) | (wide >= limits.vocab)]
    if len(outside):
        raise ConfigError(f"token ids must be 0 to {limits.vocab - 1} (got {outside[0]})")
    return wide.astype(np.int32)


@dataclass(slots=True)
class Times:
    """Seconds on the engine's clock. 0.0: has not happened yet."""

    arrival_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def queue_ms(self) -> float:
        """Time from arrival until pages were first allocated. A load counts as started."""
        return max(0.0, self.started_s - self.arrival_s) * 1e3

    @property
    def ttft_ms(self) -> float:
        """Time from arrival to the first token."""
        return max(0.0, self.first_token_s - self.arrival_s) * 1e3


@dataclass(slots=True)
class Output:
    """Result of one step for one request.

    tokens: new token ids, including a stop token. text: new text; empty without a tokenizer.
    finish_reason: None while the request runs, then "stop", "length", "abort" or "error".
    cached: prompt tokens that hit, by tier: {"l1": n, "l2": n, ...}. Their sum is at most
        prompt_tokens - 1. Does not change after the first output.
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
    """State of a request in the engine. Only the loop thread uses it.

    tokens: int32 buffer for prompt and output. The first `length` are known.
    page_table: int32 buffer. The first page_count entries are the job's pages. It has one reference
        on each.
    computed: leading tokens with their KV in the pages.
    published: leading tokens (whole pages) that are in the radix tree, in these same pages.
    node: the radix node locked for this job.
    saved_blocks: leading blocks that were passed to `save`, or were loaded.
    passed_over: number of times a later arrival was started before this job.
    start: number of this job in the order of starts. -1: waiting.
    match_open: the hooks may have leases for this job's last match.
    pending: the last consideration ended with a wait for KV in progress.
    ahead: later blocks may be in progress while this job runs. The scheduler then calls the hooks
        before each of its steps. compute_to: number of tokens it may compute until then.
    counting: loaded tokens count as cached. False after a preemption.
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
    saved_blocks: int = 0
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
        """The radix root of this job's prefix."""
        return (self.request.lora_name, self.request.cache_salt)

    @property
    def known(self) -> np.ndarray:
        """Known tokens, int32 [length]; a view."""
        return self.tokens[: self.length]

    @property
    def pages(self) -> np.ndarray:
        """Ids of the job's pages in token order, int32 [page_count]; a view."""
        return self.page_table[: self.page_count]

    def append(self, token: int) -> None:
        """Append one generated token, and its hash if it fills a block."""
        self.tokens[self.length] = token
        self.length += 1
        self.hashes += self.hasher.feed([token])
