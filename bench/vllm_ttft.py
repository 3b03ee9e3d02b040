"""Time to vLLM's first token by prompt length: computed, and from each cache.

    python bench/vllm_ttft.py --vllm .venv-vllm/bin/python [--lengths 128,...,900,1900]
                              [--repeats N] [--json] [--plot docs/img/vllm_ttft.png]
    python bench/vllm_ttft.py --vllm .venv-vllm/bin/python --saves 100

The second form measures only the cost of saving in a cold request. The two engines take turns with
the same prompts and alternate in who is first.

Real vLLM on this CPU with a tiny model (4 layers, 4 KiB of float32 KV a token), so that computing
does not hide the cost of a cache. Columns: `plain` is computed by a vLLM without a store; `cold` is
computed with kvstore, which saves it; `own` is vLLM's own prefix cache; `L2` and `disk` are
KVStoreConnector over a sidecar; `tier` is KVStoreTier from the sidecar's L2, `tier disk` from its
disk, and `fs` vLLM's own tier on files, all three in vLLM's native offloading with an empty host
pool. The engines run in turns, and the median of the repeats is reported. The blocks of one engine
are on disk before the next one starts. `tier` and `fs` use the same replacement of vLLM's CUDA
worker; their files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "vllm"))

from tiny_models import write_model
from vllm_rig import Engine, Sidecar, connector, our_tier, tier

COLUMNS: Final = ("plain", "cold", "own", "L2", "disk", "tier", "tier disk", "fs")
LIMIT_TOKENS: Final = 2048
PATIENT: Final = {"policy": "wait_complete", "max_wait": 60_000, "min_load_tokens": 0}
HOST_BYTES: Final = 64 << 20


class Bench:
    """Four engines, each in a separate process, that run one at a time.

    names: engines to start. None: all.
    """

    def __init__(self, folder: Path, python: str, names: Sequence[str] | None = None) -> None:
        self._random = random.Random(1)
        model = folder / "model"
        write_model(model, "llama", 1)
        self.sidecar = Sidecar(
            folder, "--l2", "256MiB", "--slot-bytes", "128KiB",
            "--disk", str(folder / "disk"), "--disk-capacity", "4GiB",
        )  # fmt: skip
        files = {"type": "fs", "root_dir": str(folder / "fs")}
        transfers: dict[str, Any] = {
            "plain": None,
            "connector": connector(self.sidecar.socket, prefetch=PATIENT, response_timeout=60_000),
            "tier": tier(HOST_BYTES, our_tier(self.sidecar.socket, max_wait=60_000)),
            "fs": tier(HOST_BYTES, files),
        }
        self.engines: dict[str, Engine] = {}
        for name, transfer in transfers.items():
            if names is not None and name not in names:
                continue
            engine = self.engines[name] = Engine(folder / f"{name}.log", python)
            engine.start(
                model,
                kv_transfer_config=transfer,
                prefix_caching_hash_algo="sha256_cbor",
                max_model_len=LIMIT_TOKENS,
                max_num_batched_tokens=LIMIT_TOKENS,
                num_gpu_blocks_override=256,
            )

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(4, 512) for _ in range(length)]

    def first_token_ms(self, name: str, prompt: list[int], cached: bool) -> float:
        (result,) = self.engines[name].generate([prompt], tokens=1)
        assert (result["cached"] > 0) == cached, f"{name}: {result['cached']} tokens were cached"
        return 1e3 * float(result["seconds"])

    def once(self, length: int) -> dict[str, float]:
        """Measure one prompt in every column."""
        prompt = self.prompt(length)
        found = {
            "plain": self.first_token_ms("plain", prompt, False),
            "cold": self.first_token_ms("connector", prompt, False),
        }
        self.engines["connector"].ask("settle")
        self._post("/v1/flush")
        found["own"] = self.first_token_ms("connector", prompt, True)
        self.engines["connector"].ask("reset")
        found["L2"] = self.first_token_ms("connector", prompt, True)
        self.engines["connector"].ask("reset")
        self._post("/v1/clear?tier=l2")
        found["disk"] = self.first_token_ms("connector", prompt, True)
        self.engines["connector"].ask("settle")
        for name in ("tier", "fs"):
            self.first_token_ms(name, prompt, False)
            self._without_host_pool(name)
            found[name] = self.first_token_ms(name, prompt, True)
        self._without_host_pool("tier")
        self._post("/v1/clear?tier=l2")
        found["tier disk"] = self.first_token_ms("tier", prompt, True)
        self.engines["tier"].ask("settle")
        return found

    def _without_host_pool(self, name: str) -> None:
        """Write the engine's blocks to its tier, and clear its caches."""
        self.engines[name].ask("settle")
        self._post("/v1/flush")
        self.engines[name].ask("reset", connector=True)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.end()
        self.sidecar.stop()

    def _post(self, path: str) -> None:
        request = urllib.request.Request(f"{self.sidecar.url}{path}", method="POST")
        urllib.request.urlopen(request, timeout=60).close()


def measure(lengths: list[int], repeats: int, python: str) -> list[dict[str, Any]]:
    """A row for each length: the median of each column, in milliseconds."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), python)
        try:
            bench.once(max(lengths))  # warm-up: only the first request has this cost
            runs: dict[int, list[dict[str, float]]] = {length: [] for length in lengths}
            for _ in range(repeats):
                for length in lengths:
                    runs[length].append(bench.once(length))
        finally:
            bench.close()
    for length, found in runs.items():
        middles = {name: statistics.median(run[name] for run in found) for name in COLUMNS}
        overhead = statistics.median(run["cold"] / run["plain"] for run in found) - 1
        rows.append({"tokens": length, **middles, "save_overhead": overhead})
    return rows


def measure_saves(lengths: list[int], pairs: int, python: str) -> list[dict[str, Any]]:
    """A row for each length: cold time with kvstore over cold time without it.

    undisturbed: ratio of the fastest tenths, which other work on the machine affected least;
    low, median, high: quartiles of the pairs.
    """
    rows = []
    names = ("plain", "connector")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), python, names)
        try:
            for length in lengths:
                found: list[dict[str, float]] = []
                for turn in range(pairs + 1):
                    prompt, times = bench.prompt(length), {}
                    for name in names if turn % 2 else reversed(names):
                        times[name] = bench.first_token_ms(name, prompt, False)
                    bench.engines["connector"].ask("settle")
                    found.append(times)
                del found[0]  # warm-up: only the first request has this cost
                fast = {
                    name: statistics.quantiles([t[name] for t in found], n=10)[0] for name in names
                }
                low, middle, high = statistics.quantiles(
                    [times["connector"] / times["plain"] for times in found], n=4
                )
                row = {"undisturbed": fast["connector"] / fast["plain"], "median": middle}
                rows.append({"tokens": length, **row, "low": low, "high": high})
        finally:
            bench.close()
    return rows


def show_saves(rows: list[dict[str, Any]]) -> None:
    columns = ("undisturbed", "median", "low", "high")
    print("| prompt tokens | " + " | ".join(columns) + " |")
    print("| ---: |" + " ---: |" * len(columns))
    for row in rows:
        print(f"| {row['tokens']:,} | " + " | ".join(f"{row[name]:.3f}" for name in columns) + " |")


def show(rows: list[dict[str, Any]]) -> None:
    print("| prompt tokens | " + ", ms | ".join(COLUMNS) + ", ms | L2 / own | saving costs |")
    print("| ---: |" + " ---: |" * (len(COLUMNS) + 2))
    for row in rows:
        times = " | ".join(f"{row[name]:,.1f}" for name in COLUMNS)
        ratio = row["L2"] / row["own"]
        print(f"| {row['tokens']:,} | {times} | {ratio:.2f} | {row['save_overhead']:+.1%} |")


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg" if path.endswith(".svg") else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in COLUMNS:
        axes.plot([row["tokens"] for row in rows], [row[name] for row in rows], "o-", label=name)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default=sys.executable, help="Python with vLLM installed")
    parser.add_argument("--lengths", default="128,256,512,900,1900")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--saves",
        type=int,
        default=0,
        help="measure only the cost of saving, with this number of pairs",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", help="write a plot to this file")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if options.saves:
        rows = measure_saves(lengths, options.saves, options.vllm)
        print(json.dumps(rows)) if options.json else show_saves(rows)
        return
    rows = measure(lengths, options.repeats, options.vllm)
    print(json.dumps(rows)) if options.json else show(rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
