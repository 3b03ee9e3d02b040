"""A process with vLLM in it: one JSON command a line on stdin, one JSON answer on fd 3.

{"do": "start", "args": {...}}     an engine (a former one is ended first)
{"do": "generate", "prompts": [[...]], "salt": null, "tokens": 16, ...}
{"do": "run", "requests": [...], "aborts": [...]}     by steps, with aborts
{"do": "reset"}, {"do": "metrics"}, {"do": "state"}, {"do": "stop"}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any


class Program:
    """The commands."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.added = 0

    def do_start(self, args: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        self.do_stop()
        # A start that failed, or was rejected, leaves its connector for the next engine to find.
        ensure_kv_transfer_shutdown()
        # vLLM collects garbage four times at each start and end, through all it has imported.
        gc.freeze()
        defaults = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 1024,
            "enforce_eager": True,
            "block_size": 32,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 1024,
            "seed": 0,
            "disable_log_stats": False,
            "num_gpu_blocks_override": 128,
        }
        began_s = time.monotonic()
        self.llm = LLM(**{**defaults, **args})
        return {"seconds": time.monotonic() - began_s}

    def do_stop(self) -> dict[str, Any]:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()
        return {}

    def do_generate(
        self,
        prompts: list[list[int]],
        salt: str | None = None,
        tokens: int = 16,
        together: bool = False,
        prompt_logprobs: int | None = None,
        adapter: list[Any] | None = None,
        sound: int | None = None,
    ) -> dict[str, Any]:
        """Run prompts one after another, or together. adapter: name, number and folder of a LoRA.
        sound: seed of a random sound, for prompts with a placeholder."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            prompt_logprobs=prompt_logprobs,
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        if salt is not None:
            inputs = [{**prompt, "cache_salt": salt} for prompt in inputs]
        if sound is not None:
            inputs = [{**prompt, "multi_modal_data": {"audio": noise(sound)}} for prompt in inputs]
        lora = None
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            lora = LoRARequest(*adapter)
        groups = [inputs] if together else [[prompt] for prompt in inputs]
        results = []
        for group in groups:
            began_s = time.monotonic()
            outputs = self.llm.generate(group, params, use_tqdm=False, lora_request=lora)
            seconds = time.monotonic() - began_s
            results += [{**told(output), "seconds": seconds} for output in outputs]
        return {"results": results}

    def do_embeds(
        self, seed: int, length: int, token_positions: list[int] | None = None
    ) -> dict[str, Any]:
        """A prompt of random embeddings instead of tokens.

        token_positions: a mixed prompt, whose positions from the first to before the second of
        these have token 0 in place of an embedding. The embeddings there are not used.
        """
        import torch
        from vllm import SamplingParams

        width = self.llm.llm_engine.model_config.hf_config.hidden_size
        made = torch.randn(length, width, generator=torch.Generator().manual_seed(seed))
        prompt: dict[str, Any] = {"prompt_embeds": made}
        if token_positions is not None:
            mask = [at in range(*token_positions) for at in range(length)]
            prompt |= {"prompt_token_ids": [0] * length, "prompt_is_token_ids": mask}
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1
        )
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        return {"result": told(output)}

    def do_run(
        self, requests: list[dict[str, Any]], aborts: dict[str, int], within_s: float
    ) -> dict[str, Any]:
        """Add requests at once and step by hand. aborts: request to the step of its abort."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        names = {}
        for each in requests:
            params = SamplingParams(
                temperature=0,
                max_tokens=each["tokens"],
                ignore_eos=True,
                detokenize=False,
                logprobs=1,
            )
            prompt = {"prompt_token_ids": each["prompt"]}
            names[each["id"]] = engine.add_request(each["id"], prompt, params) or each["id"]
        done: dict[str, Any] = {}
        end_s, steps = time.monotonic() + within_s, 0
        while engine.has_unfinished_requests():
            assert time.monotonic() < end_s, "requests have not ended"
            for name, step in aborts.items():
                if step == steps:
                    engine.abort_request([name])
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = told(output)
            steps += 1
        return {"done": done, "steps": steps}

    def do_add(self, prompt: list[int], tokens: int = 8) -> dict[str, Any]:
        """Add a request that `step` advances; returns its name."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1
        )
        self.added += 1
        name = f"added-{self.added}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return {"name": name}

    def do_step(self, pause_s: float = 0.0) -> dict[str, Any]:
        """One step and a pause for answers; returns the requests that have ended."""
        ended = [told(each) for each in self.llm.llm_engine.step() if each.finished]
        time.sleep(pause_s)
        return {"ended": ended}

    def do_abort(self, name: str) -> dict[str, Any]:
        self.llm.llm_engine.abort_request([name])
        return {}

    def do_settle(self, limit_s: float = 10.0) -> dict[str, Any]:
        """Step until the scheduler has no blocks of ended requests."""
        scheduler = self.scheduler
        end_s = time.monotonic() + limit_s
        while scheduler.has_requests() and time.monotonic() < end_s:
            self.llm.llm_engine.engine_core.engine_core.step_fn()
        return {"requests": len(scheduler.requests)}

    def do_reset(self, connector: bool = False, settle: bool = True) -> dict[str, Any]:
        """Reset vLLM's own cache. connector: also the host pool of its offloading. settle: first
        wait until nothing of ended requests is under way."""
        if settle:
            self.do_settle()
        return {"reset": bool(self.llm.reset_prefix_cache(reset_connector=connector))}

    def do_metrics(self) -> dict[str, Any]:
        """Metrics summed over labels; those with a source also by source: `name{disk}`."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                source = metric.labels.get("source")
                for name in [metric.name, *([f"{metric.name}{{{source}}}"] if source else [])]:
                    found[name] = found.get(name, 0) + value
        return {"metrics": found}

    def do_state(self) -> dict[str, Any]:
        """Stats of the connector's two sides (summed over ranks), and vLLM's free blocks."""
        core = self.llm.llm_engine.engine_core.engine_core
        workers = core.model_executor.collective_rpc(worker_stats)
        connector = self.scheduler.connector
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "scheduler": connector._scheduler.stats(),
            "worker": {
                name: sum(each.get(name, 0) for each in workers)
                for name in dict.fromkeys(name for each in workers for name in each)
            },
            "free_blocks": pool.get_num_free_blocks(),
            "blocks": pool.num_gpu_blocks,
        }

    def do_free(self) -> dict[str, Any]:
        """vLLM's free blocks and their total."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {"free_blocks": pool.get_num_free_blocks(), "blocks": pool.num_gpu_blocks}

    def do_tier(self) -> dict[str, Any]:
        """Counts of KVStoreTier, the fields of its namespace, and the number of KV groups."""
        (tier,) = self.scheduler.connector.connector_scheduler.manager.secondary_tiers
        return {
            "stats": tier.stats(),
            "fields": asdict(tier._opened.store.namespace),
            "groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
        }

    def do_namespace(self) -> dict[str, Any]:
        """The fields of the connector's namespace."""
        return {"fields": asdict(self.scheduler.connector._namespaces[0])}

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler


def worker_stats(worker: Any) -> dict[str, Any]:
    """Run in the process of each rank: stats of the connector's side there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    stats: dict[str, Any] = get_kv_transfer_group()._worker.stats()
    return stats


def noise(seed: int) -> Any:
    """A second of it, and its sampling rate."""
    import numpy as np

    return np.random.default_rng(seed).normal(0, 0.3, 16_000).astype(np.float32), 16_000


def told(output: Any) -> dict[str, Any]:
    """Tokens, their log-probabilities, cached tokens, and the finish reason."""
    first = output.outputs[0]
    logprobs = [_first(step) for step in first.logprobs or []]
    prompt = [_first(step) for step in output.prompt_logprobs or []]
    return {
        "tokens": list(first.token_ids),
        "logprobs": logprobs,
        "prompt_logprobs": prompt,
        "cached": output.num_cached_tokens,
        "finish": first.finish_reason,
    }


def _first(step: Any) -> float | None:
    """Log-probability of the token itself, which vLLM lists first."""
    return next(iter(step.values())).logprob if step else None


def main() -> None:
    answers = os.fdopen(3, "w", buffering=1)
    program = Program()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(program, f"do_{command.pop('do')}")(**command)
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    program.do_stop()


if __name__ == "__main__":
    main()
