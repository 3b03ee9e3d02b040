"""Is vLLM's output with kvstore correct during ten minutes of pressure?

    python bench/vllm_stress.py --vllm .venv-vllm/bin/python [--by connector|tier]
                                [--seconds 600] [--seed 0] [--json]

A real vLLM with a pool of 64 blocks, so that it preempts, over a sidecar with a small L2 and a disk
below it. Each round has 32 concurrent requests with shared prefixes; a fifth of them are aborted at
some step. Some rounds clear vLLM's own cache or the sidecar's L2, restart the sidecar, or kill and
restart it while requests run. A second vLLM without a store and with enough memory gives the
expected outputs. At the end no lease may be open and every block must be free. The exit code is 1
if anything was wrong, or if the run tested nothing: no preemption, no loaded block, or no kill.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "vllm"))

from tiny_models import write_model
from vllm_rig import Engine, Sidecar, connector, our_tier, tier, wait_until

REQUESTS: Final = 32
ABORTED_SHARE: Final = 0.2
PREFIXES: Final = 12
OUTPUT_TOKENS: Final = 24
ROUNDING: Final = 1e-4
"""Maximum difference of two log-probabilities; the largest one measured is 5e-6."""
ROUND_LIMIT_S: Final = 300.0
HOST_BYTES: Final = 8 << 20
"""Bytes of vLLM's host pool above the tier, less than the KV of a round."""
KILLED_WITHIN_S: Final = 2.0
"""Delay of a kill after the start of a round, which takes some seconds."""
DISTURBANCES: Final = ("nothing", "nothing", "reset", "reset", "clear", "restart", "kill")


class Stress:
    """Both engines, the sidecar, and the findings."""

    def __init__(self, folder: Path, python: str, seed: int, by: str) -> None:
        self.by = by
        self.random = random.Random(seed)
        self.folder = folder
        model = folder / "model"
        write_model(model, "llama", 1)
        self.sidecar = Sidecar(
            folder, "--l2", "16MiB", "--slot-bytes", "128KiB",
            "--disk", str(folder / "disk"), "--disk-capacity", "64MiB",
        )  # fmt: skip
        self.right = Engine(folder / "right.log", python)
        self.right.start(model, num_gpu_blocks_override=2048, max_num_seqs=REQUESTS)
        self.tested = Engine(folder / "tested.log", python)
        prefetch = {"policy": "timeout", "max_wait": 2000, "min_load_tokens": 64}
        self.tested.start(
            model,
            kv_transfer_config=connector(self.sidecar.socket, prefetch=prefetch)
            if by == "connector"
            else tier(HOST_BYTES, our_tier(self.sidecar.socket)),
            prefix_caching_hash_algo="sha256_cbor",
            num_gpu_blocks_override=64,
            max_num_seqs=16,
        )
        self.prefixes = [self.tokens(self.random.randrange(32, 400)) for _ in range(PREFIXES)]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(4, 512) for _ in range(count)]

    def round(self, number: int) -> None:
        """32 concurrent requests, and one disturbance before or during them."""
        what = self.random.choice(DISTURBANCES)
        self.counts[f"disturbed by {what}"] += 1
        self.disturb(what)
        requests = [
            {
                "id": f"{number}-{index}",
                "prompt": self.random.choice(self.prefixes) + self.tokens(8 + index * 3),
                "tokens": OUTPUT_TOKENS,
            }
            for index in range(REQUESTS)
        ]
        names = [each["id"] for each in requests]
        aborted = self.random.sample(names, int(REQUESTS * ABORTED_SHARE))
        aborts = {name: self.random.randrange(1, 120) for name in aborted}
        self.tested.send("run", requests=requests, aborts=aborts, within_s=ROUND_LIMIT_S / 2)
        if what == "kill":
            time.sleep(self.random.uniform(0.0, KILLED_WITHIN_S))
            self.sidecar.kill()
            self.sidecar.start()
        found = self.tested.answer(ROUND_LIMIT_S)
        if "error" in found:
            raise SystemExit(f"round {number}: {found['error']}\n{self.tested.tail()}")
        prompts = [each["prompt"] for each in requests]
        right = self.right.generate(prompts, tokens=OUTPUT_TOKENS, together=True)
        for name, expected in zip(names, right, strict=True):
            told = found["done"].get(name)
            if told is None:
                if name not in aborts:
                    self.wrong.append(f"{name} never ended")
                continue
            self.counts["requests"] += 1
            self.counts["tokens_cached"] += told["cached"] or 0
            self.compare(name, told, expected)
            if name not in aborts and told["finish"] != "length":
                self.wrong.append(f"{name} ended by {told['finish']}")
        self.counts["rounds"] += 1
        self.counts["aborted"] += len(aborts)

    def compare(self, name: str, told: dict[str, Any], expected: dict[str, Any]) -> None:
        """Check for the same tokens with the same log-probabilities. If two tokens are equally
        probable within rounding, which depends on the rest of the batch, either is valid; the
        texts may then differ."""
        pairs = zip(told["tokens"], expected["tokens"], strict=False)
        for at, (token, right) in enumerate(pairs):
            found, wanted = told["logprobs"][at], expected["logprobs"][at]
            if abs(found - wanted) > ROUNDING:
                self.wrong.append(f"{name}, token {at}: {token} ({found}), not {right} ({wanted})")
            if token != right:
                self.counts["ties"] += 1
            if token != right or abs(found - wanted) > ROUNDING:
                return

    def disturb(self, what: str) -> None:
        if what != "nothing":
            self.tested.ask("reset")
        if what == "clear":
            request = urllib.request.Request(f"{self.sidecar.url}/v1/clear?tier=l2", method="POST")
            urllib.request.urlopen(request, timeout=60).close()
        if what == "restart":
            if self.sidecar.stop() != 0:
                self.wrong.append("a sidecar ended with unreleased leases")
            self.sidecar.start()

    def finish(self) -> dict[str, Any]:
        """Check for leaks, and end all processes."""
        if self.tested.ask("settle")["requests"]:
            self.wrong.append("vLLM still knows requests")
        wait_until(lambda: self.sidecar.stats()["l2"]["slots_leased"] == 0, "leases are released")
        metrics = self.tested.ask("metrics")["metrics"]
        self.counts["preemptions"] = int(metrics.get("vllm:num_preemptions", 0))
        free = self.tested.ask("free")
        if free["free_blocks"] != free["blocks"] - 1:
            self.wrong.append(f"{free['blocks'] - 1 - free['free_blocks']} blocks are not free")
        if self.by == "connector":
            self.look_at_connector(metrics)
        else:
            self.look_at_tier()
        for name in ("preemptions", "loaded", "disturbed by kill"):
            if not self.counts[name]:
                self.wrong.append(f"the run tested nothing: {name} is 0")
        if self.tested.end() or self.right.end():
            self.wrong.append("an engine's process failed")
        if self.sidecar.stop():
            self.wrong.append("the sidecar ended with unreleased leases")
        return {"wrong": self.wrong, **self.counts}

    def look_at_connector(self, metrics: dict[str, float]) -> None:
        state = self.tested.state()
        for side, name in (
            ("scheduler", "loads_under_way"), ("scheduler", "requests_waiting"),
            ("worker", "loads_under_way"), ("worker", "saves_under_way"),
        ):  # fmt: skip
            if state[side][name]:
                self.wrong.append(f"{side}: {state[side][name]} {name}")
        for name in ("loaded", "failed", "saved"):
            self.counts[name] = int(metrics.get(f"vllm:kvstore_blocks_{name}", 0))
        name = "saves_preempted"
        self.counts[name] = int(metrics.get(f"vllm:kvstore_{name}", 0))

    def look_at_tier(self) -> None:
        stats = self.tested.ask("tier")["stats"]
        if stats["busy"]:
            self.wrong.append("the tier has jobs that have not ended")
        for name in ("loaded", "saved", "dropped"):
            self.counts[name] = int(stats.get(f"blocks_{name}", 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default=sys.executable, help="Python with vLLM installed")
    parser.add_argument("--by", choices=("connector", "tier"), default="connector")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stress = Stress(Path(folder), options.vllm, options.seed, options.by)
        end_s = time.monotonic() + options.seconds
        number = 0
        while time.monotonic() < end_s and not stress.wrong:
            stress.round(number)
            number += 1
        found = stress.finish()
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
