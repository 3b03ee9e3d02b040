"""The engine: continuous batching over one model, one page pool and one radix tree.

Each step polls the hooks, lets the scheduler choose, and computes. Then it publishes full pages in
the tree, saves full blocks with the hooks, samples tokens and returns outputs. The engine does not
wait for a tier, with one exception: if no request can run until a copy ends, it waits for the copy
a few milliseconds at a time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from kvstore.blocks.hashing import BlockHasher
from kvstore.engine.attention import StepRow
from kvstore.engine.cache import PrefixCache
from kvstore.engine.hooks import KVHooks, LayerArrival, NoHooks
from kvstore.engine.request import (
    Job,
    Output,
    QueueFull,
    Request,
    RequestLimits,
    Times,
    sampling_params,
    validate_request,
)
from kvstore.engine.sampling import Sampler, sample
from kvstore.engine.scheduler import Scheduler, Slice
from kvstore.engine.text import TextStream
from kvstore.engine.transfers import EngineTransfers
from kvstore.errors import ConfigError

IDLE_POLL_S = 0.005
"""Maximum wait for the hooks in a step in which nothing can run."""
MAX_IDLE_STEPS = 200_000
"""Steps without work after which `run_until_idle` fails: the hooks owe an event."""


class StepRunner(Protocol):
    """The part of a runner that the engine uses. `runner.Runner` is one."""

    @property
    def loras(self) -> dict[str, Any]: ...

    def step(self, rows: Sequence[StepRow]) -> Any: ...

    def expect(self, layers: Sequence[LayerArrival]) -> None:
        """Make the next step compute layer i after layers[i]."""
        ...


class Engine:
    """Serves requests from one thread. `EngineThread` runs it for a server.

    loaded: a `loader.LoadedModel`. The engine uses its config, tokenizer and model.
    runner: None: make a `Runner` with num_pages pages. Pass one if the hooks need its pool.
    hooks: None: an engine without kvstore.
    hash_algo, hash_seed: see `hashing.BlockHasher`. Hashes with a LoRA adapter include its name and
        the digest of its weights.
    max_batch_tokens: maximum tokens per step, over all rows (chunked prefill).
    max_running: maximum requests that run or load. max_waiting: maximum requests in the queue.
    max_context: maximum prompt and output tokens. None: the model's limit.

    Raises:
        ConfigError: sizes do not fit together.
    """

    def __init__(
        self,
        loaded: Any,
        *,
        num_pages: int,
        page_tokens: int = 16,
        hooks: KVHooks | None = None,
        runner: StepRunner | None = None,
        hash_algo: str = "sha256_cbor",
        hash_seed: str | None = None,
        max_batch_tokens: int = 2048,
        max_running: int = 64,
        max_waiting: int = 4096,
        max_context: int | None = None,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_sizes(num_pages, page_tokens, max_batch_tokens, max_running, max_waiting)
        if hooks is None:
            hooks = NoHooks(page_tokens)
        if hooks.block_tokens < page_tokens or hooks.block_tokens % page_tokens:
            raise ConfigError(
                f"block_tokens must be a multiple of page_tokens ({page_tokens}) "
                f"(got {hooks.block_tokens})"
            )
        if runner is None:
            from kvstore.engine.runner import Runner

            runner = Runner(loaded, num_pages, page_tokens)
        positions = loaded.config.max_positions
        if max_context is not None and not 2 <= max_context <= positions:
            raise ConfigError(f"max_context must be 2 to {positions} (got {max_context})")
        self.loaded = loaded
        self.runner = runner
        self.hooks = hooks
        self.clock = clock
        self.max_waiting = max_waiting
        self.limits = RequestLimits(
            max_context=max_context or positions,
            vocab=loaded.config.vocab,
            num_pages=num_pages,
            page_tokens=page_tokens,
        )
        self.cache = PrefixCache(num_pages, page_tokens, enabled=prefix_cache)
        self.transfers = EngineTransfers(hooks, self.cache)
        self.scheduler = Scheduler(
            self.cache,
            self.transfers,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            clock=clock,
        )
        self._hash: dict[str, Any] = {
            "algo": hash_algo,
            "block_tokens": hooks.block_tokens,
            "seed": hash_seed,
        }
        self._new_hasher(Request(request_id="", prompt_tokens=()))
        self._jobs: dict[str, Job] = {}
        self._arrivals = itertools.count()
        self._names = itertools.count()
        self._outputs: list[Output] = []
        self._unreported: tuple[int, int, float] | None = None
        self.counts = {"steps": 0, "computed_tokens": 0, "prompt_tokens": 0, "requests": 0}
        self.cached_tokens: dict[str, int] = {"l1": 0}

    # ---- in ----

    def check_request(self, request: Request) -> None:
        """Reject a request that can never be served. Safe from any thread.

        Raises:
            ConfigError: names the value and the limit.
        """
        validate_request(request, self._limits_now())

    def add(self, request: Request) -> None:
        """Add a request. The next step considers it.

        Raises:
            ConfigError: it can never be served, or its id is in use.
            QueueFull: `max_waiting` requests are waiting.
        """
        prompt, max_tokens = validate_request(request, self._limits_now())
        name = request.request_id
        if name in self._jobs or self.transfers.is_loading(name):
            raise ConfigError(f"request id {name!r} is in use; use a unique id")
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} requests are waiting; try again later")
        tokenizer = self.loaded.tokenizer
        if request.stop and tokenizer is None:
            raise ConfigError("stop strings require a tokenizer, and this model has none")
        tokens = np.empty(len(prompt) + max_tokens, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        hasher = self._new_hasher(request)
        job = Job(
            request=request,
            tokens=tokens,
            length=len(prompt),
            prompt_length=len(prompt),
            max_length=len(tokens),
            hasher=hasher,
            hashes=hasher.feed(prompt),
            page_table=np.empty(-(-len(tokens) // self.cache.page_tokens), dtype=np.int32),
            sampler=Sampler(sampling_params(request)),
            text=TextStream(tokenizer.stream() if tokenizer is not None else None, request.stop),
            arrival=next(self._arrivals),
            times=Times(arrival_s=self.clock()),
        )
        self._jobs[name] = job
        self.counts["requests"] += 1
        self.scheduler.add(job)

    def abort(self, request_id: str) -> None:
        """End a request early. The next step returns its last output. Ignores unknown ids."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._outputs.append(self._retire(job, [], job.text.finish(), "abort"))

    # ---- the step ----

    @property
    def busy(self) -> bool:
        """Whether a request, a copy or an output is left."""
        return bool(self._jobs or self._outputs or self.transfers.busy)

    def step(self) -> list[Output]:
        """Run one step and return the new outputs."""
        self._poll_hooks(0.0)
        plan = self.scheduler.schedule()
        if plan:
            self._compute(plan)
        elif self.busy and not self._outputs:
            self._poll_hooks(IDLE_POLL_S)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _poll_hooks(self, timeout_s: float) -> None:
        for load, blocks in self.transfers.poll(timeout_s):
            self.scheduler.complete_load(load, blocks)

    def _compute(self, plan: list[Slice]) -> None:
        for layers in self.transfers.take_arriving():
            self.runner.expect(layers)
        began_s = self.clock()
        logits = torch.as_tensor(self.runner.step([self._row(part) for part in plan]))
        if self.hooks.wants_times:
            self._report_time(plan, began_s, logits)
        self.counts["steps"] += 1
        ready: list[int] = []
        for index, part in enumerate(plan):
            job = part.job
            job.computed += part.tokens
            self.counts["computed_tokens"] += part.tokens
            self.cache.publish(job)
            self.transfers.save_full_blocks(job)
            if job.computed == job.length:
                ready.append(index)
        if ready:
            jobs = [plan[index].job for index in ready]
            tokens = sample(logits[ready], [job.sampler for job in jobs])
            now_s = self.clock()
            for job, token in zip(jobs, tokens, strict=True):
                self._outputs.append(self._extend(job, token, now_s))

    def _report_time(self, plan: list[Slice], began_s: float, logits: torch.Tensor) -> None:
        """Report the duration of a step with prefill to the hooks.

        A device can still be computing the step. The engine waits for it if it needs the result at
        once: a job has later blocks in progress, or tokens are sampled. The duration of other steps
        is reported together with the next one.
        """
        longest = max(plan, key=lambda part: part.tokens)
        start, tokens, since_s = self._unreported or (longest.job.computed, 0, began_s)
        tokens += longest.tokens
        job_ends = any(part.job.computed + part.tokens == part.job.length for part in plan)
        if logits.is_cuda and not job_ends and not any(part.job.ahead for part in plan):
            self._unreported = (start, tokens, since_s)
            return
        if logits.is_cuda:
            logits[0, 0].item()
        self._unreported = None
        if tokens > 1:
            self.hooks.record_prefill(start, tokens, self.clock() - since_s)

    def _row(self, part: Slice) -> StepRow:
        job, end = part.job, part.job.computed + part.tokens
        return StepRow(
            job.tokens[job.computed : end],
            job.computed,
            job.pages,
            job.request.lora_name,
        )

    def _extend(self, job: Job, token: int, now_s: float) -> Output:
        """Append one token. Ends the request if the token was its last."""
        if not job.times.first_token_s:
            job.times.first_token_s = now_s
            self._count_prompt(job)
        job.append(token)
        request = job.request
        if self._is_end(request, token):
            return self._retire(job, [token], job.text.finish(), "stop")
        text = job.text.push(token)
        if job.text.stopped:
            return self._retire(job, [token], text, "stop")
        if job.length == job.max_length:
            text += job.text.finish()
            return self._retire(job, [token], text, "stop" if job.text.stopped else "length")
        return self._output(job, [token], text, None)

    def _is_end(self, request: Request, token: int) -> bool:
        if token in request.stop_token_ids:
            return True
        return not request.ignore_eos and token in self.loaded.config.eos_ids

    def _count_prompt(self, job: Job) -> None:
        self.counts["prompt_tokens"] += job.prompt_length
        for tier, tokens in (job.cached or {}).items():
            self.cached_tokens[tier] = self.cached_tokens.get(tier, 0) + tokens

    def _retire(self, job: Job, tokens: list[int], text: str, reason: str) -> Output:
        """Remove a finished request and abort it with the hooks, once."""
        job.times.finished_s = self.clock()
        self.scheduler.remove(job)
        del self._jobs[job.id]
        self.hooks.abort(job.id)
        return self._output(job, tokens, text, reason)

    def _output(self, job: Job, tokens: list[int], text: str, reason: str | None) -> Output:
        return Output(
            request_id=job.id,
            tokens=tokens,
            text=text,
            finish_reason=reason,
            prompt_tokens=job.prompt_length,
            cached=dict(job.cached or {"l1": 0}),
            times=replace(job.times),
        )

    # ---- complete runs ----

    def run_until_idle(self) -> list[Output]:
        """Step until no request and no copy is left. Returns all outputs in order."""
        outputs: list[Output] = []
        idle_steps = 0
        while self.busy:
            steps = self.counts["steps"]
            outputs += self.step()
            idle_steps = 0 if self.counts["steps"] > steps else idle_steps + 1
            assert idle_steps < MAX_IDLE_STEPS, "the hooks never reported a copy"
        return outputs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = 16,
        **fields: Any,
    ) -> list[Output]:
        """Generate for all prompts (token ids) in one batch. Returns one complete Output each.

        fields: further fields of `Request`, the same for all.
        """
        names = [f"generate-{next(self._names)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.add(
                Request(request_id=name, prompt_tokens=prompt, max_tokens=max_tokens, **fields)
            )
        return collect(self.run_until_idle(), names)

    # ---- cache and statistics ----

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache on the device. Returns False, without effect, if requests run."""
        if self.scheduler.running or self.scheduler.loading:
            return False
        self.cache.tree.clear()
        return True

    def check(self) -> None:
        """Assert that nothing leaked. The engine must be idle: no request, no copy."""
        assert not self.busy, "check() needs an idle engine"
        scheduler = self.scheduler
        assert not (scheduler.waiting + scheduler.running + scheduler.loading)
        assert self.transfers.save_pages == 0
        self.cache.check_idle()

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges as numbers, exact if read from the loop thread."""
        scheduler = self.scheduler
        return {
            **self.counts,
            "cached_tokens": dict(self.cached_tokens),
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "loading": len(scheduler.loading),
            "preemptions": scheduler.preemptions,
            "pages_total": self.limits.num_pages,
            "pages_free": self.cache.pool.free,
            "pages_evictable": self.cache.tree.evictable_pages,
            "save_blocks": self.transfers.save_blocks,
            "save_blocks_dropped": self.transfers.save_blocks_dropped,
            "hooks": self.hooks.stats(),
        }

    def close(self) -> None:
        """Abort all requests, wait for running copies, release all leases."""
        for name in list(self._jobs):
            self.abort(name)
        self.hooks.close()

    def __repr__(self) -> str:
        scheduler = self.scheduler
        return (
            f"Engine({len(scheduler.running)} running, {len(scheduler.loading)} loading, "
            f"{len(scheduler.waiting)} waiting | {self.cache.tree!r}, "
            f"{self.cache.pool.free}/{self.limits.num_pages} pages free)"
        )

    def _limits_now(self) -> RequestLimits:
        return replace(self.limits, loras=frozenset(self.runner.loras))

    def _new_hasher(self, request: Request) -> BlockHasher:
        name = request.lora_name
        lora = (name, self.runner.loras[name].digest) if name else None
        return BlockHasher(**self._hash, cache_salt=request.cache_salt or None, lora=lora)


def collect(outputs: Sequence[Output], names: Sequence[str]) -> list[Output]:
    """Join the outputs of complete requests: one per name, with all its tokens and text."""
    whole: dict[str, Output] = {}
    for output in outputs:
        before = whole.get(output.request_id)
        if before is not None:
            output = replace(
                output, tokens=before.tokens + output.tokens, text=before.text + output.text
            )
        whole[output.request_id] = output
    return [whole[name] for name in names]


def _check_sizes(
    num_pages: int, page_tokens: int, max_batch_tokens: int, max_running: int, max_waiting: int
) -> None:
    sizes = {
        "num_pages": num_pages,
        "page_tokens": page_tokens,
        "max_running": max_running,
        "max_waiting": max_waiting,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1 (got {value})")
    if max_batch_tokens < max_running:
        raise ConfigError(
            f"max_batch_tokens must be at least max_running ({max_running}), so that every running "
            f"request gets a token per step (got {max_batch_tokens})"
        )
