"""A process with an SGLang engine on a CPU: one JSON command a line on stdin, one JSON answer on
fd 3.

{"do": "start", "args": {...}}     an engine with kvstore as its storage backend
{"do": "generate", "prompts": [[...]], "tokens": 8}
{"do": "flush"}, {"do": "metrics"}, {"do": "stop"}
{"do": "update_from_disk", "path": "...", "version": null}
{"do": "update_from_tensor", "name": "...", "factor": 2.0}
{"do": "attach", "extra": {...}}     detach the storage backend, and attach it again
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FLUSH_LIMIT_S = 60.0


def run_scheduler(*arguments: Any, **more: Any) -> Any:
    """SGLang's scheduler process. Copies between host and device run on the CPU."""
    from hicache_rig import driver

    driver()
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(*arguments, **more)


class Program:
    """The commands."""

    def __init__(self) -> None:
        self.engine: Any = None

    def do_start(self, args: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.entrypoints.engine import Engine

        class CpuEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

        defaults = {
            "served_model_name": "m",
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "skip_server_warmup": True,
            "skip_tokenizer_init": True,
            "max_total_tokens": 4096,
            "max_running_requests": 4,
            "mem_fraction_static": 0.3,
            "page_size": 16,
            "random_seed": 0,
            "enable_hierarchical_cache": True,
            "enable_cache_report": True,
            "enable_metrics": True,
            "hicache_size": 1,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        self.engine = CpuEngine(**{**defaults, **args})
        return {}

    def do_generate(self, prompts: list[list[int]], tokens: int = 8) -> dict[str, Any]:
        """Run prompts one after another: output tokens, their log-probabilities, and how many
        tokens of the prompt came from the storage backend."""
        results = []
        for prompt in prompts:
            answer = self.engine.generate(
                input_ids=prompt,
                sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
                return_logprob=True,
            )
            about = answer["meta_info"]
            cached = about.get("cached_tokens_details") or {}
            results.append(
                {
                    "tokens": answer["output_ids"],
                    "logprobs": [each[0] for each in about["output_token_logprobs"]],
                    "cached": about["cached_tokens"],
                    "storage": cached.get("storage", 0),
                }
            )
        return {"results": results}

    def do_flush(self) -> dict[str, Any]:
        """Flush when all backups have ended."""
        return {"success": self._manager("flush_cache", FLUSH_LIMIT_S).success}

    def do_update_from_disk(self, path: str, version: str | None = None) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=path, weight_version=version)
        return self._updated(self._manager("update_weights_from_disk", request, None))

    def do_update_from_tensor(self, name: str, factor: float) -> dict[str, Any]:
        """Multiply one parameter of the model."""
        import torch

        weight = torch.tensor(self.engine.get_weights_by_name(name, truncate_size=1 << 20))
        self.engine.begin_weight_update()
        done = self.engine.update_weights_from_tensor([(name, weight * factor)])
        self.engine.end_weight_update()
        return self._updated(done)

    def do_attach(self, extra: dict[str, Any]) -> dict[str, Any]:
        self._manager("detach_hicache_storage")
        done = self._manager("attach_hicache_storage", "dynamic", json.dumps(extra))
        return {"success": done.success, "message": done.message}

    def do_metrics(self) -> dict[str, Any]:
        """The text of SGLang's /metrics."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return {"text": generate_latest(registry).decode()}

    def do_stop(self) -> dict[str, Any]:
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None
        return {}

    def _manager(self, call: str, *arguments: Any) -> Any:
        """Call SGLang's tokenizer manager, as its HTTP server does."""
        manager = self.engine.tokenizer_manager
        return self.engine.loop.run_until_complete(getattr(manager, call)(*arguments))

    def _updated(self, answer: Any) -> dict[str, Any]:
        """The result of an update. SGLang flushes its cache with it only if no backup is under way;
        otherwise it says that a flush must follow."""
        success, message = bool(answer[0]), str(answer[1])
        if not success and "call /flush_cache" in message:
            success = bool(self.do_flush()["success"])
        return {"success": success, "message": message}


def main() -> None:
    program = Program()
    with os.fdopen(3, "w") as answers:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = getattr(program, f"do_{command.pop('do')}")(**command)
            except Exception:  # reported to the test
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    for package in ("xgrammar", "sgl_kernel"):
        if importlib.util.find_spec(package) is None:
            sys.path.append(str(HERE / "engine_standins"))
            break
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(HERE / "standins"))
    main()
