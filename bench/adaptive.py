"""Is the adaptive prefetch policy ever slower than the better of always and never loading?

    python bench/adaptive.py [--lengths 256,512,1024,2048] [--speeds 0.25,0.5,1,2,4,16]
                             [--repeats 15] [--png docs/img/adaptive.png] [--json]

One engine for each of the three over one embedded store, whose only tier is memory held to a rate:
`--speeds` are multiples of the rate at which loading all takes as long as computing all, as this
machine computes each length now. L2 and the engine's pages are emptied before each request, so that
everything comes from the tier or is computed. The three take turns, the adaptive one after a
warm-up in which it learns. The ratio is to the better of the other two in the same turn, and its
median is given; beside it how far the better one's own times lie apart (their quarters over their
median), and how the warm-up compares. All compute on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from kvstore.connectors.reference.hooks import ReferenceHooks
from kvstore.engine.hooks import KVHooks, NoHooks
from kvstore.engine.loader import LoadedModel, random_model
from kvstore.engine.loop import Engine
from kvstore.engine.runner import Runner
from kvstore.prefetch.adaptive import Adaptive
from kvstore.prefetch.policy import PrefetchPolicy, WaitComplete
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.rate_limit import RateLimit

BLOCK_TOKENS: Final = 16
WAIT_MS: Final = 600_000.0
NAMES: Final = ("always", "never", "adaptive")
WARM_UP: Final = 10
VOCAB: Final = 512


class Rig:
    """A store over one tier of a given rate, and an engine for each way of using it."""

    def __init__(self, loaded: LoadedModel, longest: int, bytes_per_s: float) -> None:
        namespace = loaded.namespace(BLOCK_TOKENS)
        pages = 3 * (longest // BLOCK_TOKENS + 4)  # saves hold at most half of them
        tier = RateLimit(
            MemoryTier(1 << 32, name="slow"),
            read_bytes_per_s=bytes_per_s,
            burst_bytes=2 * namespace.block_bytes,
        )
        self.store = Store(Slab.create(2 * pages, namespace.block_bytes), [tier])
        self.sessions = []
        self.engines: dict[str, Engine] = {}
        for name in NAMES:
            runner = Runner(loaded, pages, BLOCK_TOKENS, threads=1)
            hooks: KVHooks = NoHooks(BLOCK_TOKENS)
            if name != "never":
                policy: PrefetchPolicy = Adaptive(WAIT_MS)
                session = self.store.session(namespace)
                self.sessions.append(session)
                hooks = ReferenceHooks(
                    session,
                    runner.pool,
                    BLOCK_TOKENS,
                    policy=policy if name == "adaptive" else WaitComplete(max_wait_ms=WAIT_MS),
                    max_wait_ms=WAIT_MS,
                    min_load_tokens=1,
                )
            self.engines[name] = Engine(
                loaded, num_pages=pages, page_tokens=BLOCK_TOKENS, hooks=hooks, runner=runner
            )

    def ask(self, name: str, prompt: list[int]) -> tuple[float, int, list[int]]:
        """Seconds to the first token, prompt tokens not computed, and the tokens."""
        assert self.store.flush(60.0)
        self.store.clear("l2")
        engine = self.engines[name]
        engine.reset_prefix_cache()
        [output] = engine.generate([prompt], max_tokens=1, ignore_eos=True)
        return output.times.ttft_ms / 1e3, sum(output.cached.values()), output.tokens

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        for session in self.sessions:
            session.close()
        self.store.close()


def measure(loaded: LoadedModel, length: int, speed: float, repeats: int) -> dict[str, Any]:
    """One length at one multiple of the break-even rate."""
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    held_bytes = length // BLOCK_TOKENS * loaded.namespace(BLOCK_TOKENS).block_bytes
    probe = Rig(loaded, length, 1e12)
    cold_s = statistics.median(probe.ask("never", prompt)[0] for _ in range(5))
    probe.close()
    rig = Rig(loaded, length, speed * held_bytes / cold_s)
    _, _, right = rig.ask("always", prompt)
    learning = [rig.ask("adaptive", prompt)[0] for _ in range(WARM_UP)]
    seen: dict[str, list[float]] = {name: [] for name in NAMES}
    spared: list[int] = []
    for turn in range(repeats):
        for place in range(len(NAMES)):  # nobody always comes behind the same one
            name = NAMES[(turn + place) % len(NAMES)]
            seconds, cached, tokens = rig.ask(name, prompt)
            assert tokens == right, "another token"
            assert name != "always" or cached >= length - BLOCK_TOKENS, "not all was loaded"
            seen[name].append(seconds)
            if name == "adaptive":
                spared.append(cached)
    rig.close()
    better = min(("always", "never"), key=lambda name: statistics.median(seen[name]))
    better_s = statistics.median(seen[better])
    ratios = [mine / its for mine, its in zip(seen["adaptive"], seen[better], strict=True)]
    low, _, high = statistics.quantiles(seen[better], n=4)
    return {
        "prompt_tokens": length,
        "speed": speed,
        **{f"{name}_ms": round(1e3 * statistics.median(seen[name]), 1) for name in NAMES},
        "adaptive_over_better": round(statistics.median(ratios), 3),
        "better_quarters": [round(low / better_s, 2), round(high / better_s, 2)],
        "learning_over_better": round(statistics.mean(learning) / better_s, 2),
        "loaded_tokens": round(statistics.median(spared)),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time to first token over the tier's speed, a picture for each length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({row["prompt_tokens"] for row in rows})
    figure, all_axes = pyplot.subplots(
        1, len(lengths), figsize=(4.6 * len(lengths), 3.8), dpi=150, squeeze=False
    )
    for length, axes in zip(lengths, all_axes[0], strict=True):
        here = [row for row in rows if row["prompt_tokens"] == length]
        for name, style in zip(NAMES, ("--", ":", "-"), strict=True):
            speeds = [row["speed"] for row in here]
            axes.plot(speeds, [row[f"{name}_ms"] for row in here], style, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tier's speed, 1 = loading as fast as computing")
        axes.set_title(f"{length:,} tokens")
        axes.grid(True, which="both", alpha=0.3)
    all_axes[0][0].set_ylabel("time to first token, ms")
    all_axes[0][0].legend(title="loading")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="256,512,1024,2048", help="prompt tokens")
    parser.add_argument("--speeds", default="0.25,0.5,1,2,4,16", help="of the break-even rate")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--png", type=Path, help="draw a picture into this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = random_model(
        0, layers=4, hidden=256, heads=4, kv_heads=4, vocab=VOCAB, max_positions=8192, device="cpu"
    )
    rows, began_s = [], time.monotonic()
    for length in map(int, options.lengths.split(",")):
        for speed in map(float, options.speeds.split(",")):
            row = measure(loaded, length, speed, options.repeats)
            print(row, file=sys.stderr)
            rows.append(row)
    if options.png is not None:
        draw(rows, options.png)
    if options.json:
        print(json.dumps({"rows": rows, "seconds": round(time.monotonic() - began_s)}))
        return
    print(
        "| prompt tokens | tier's speed | always, ms | never, ms | adaptive, ms | / better "
        "| better's own spread | while learning | tokens loaded |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        cells = " | ".join(f"{row[f'{name}_ms']:,.0f}" for name in NAMES)
        low, high = row["better_quarters"]
        print(
            f"| {row['prompt_tokens']:,} | {row['speed']:g} | {cells} "
            f"| {row['adaptive_over_better']:.2f} | {low:.2f}-{high:.2f} "
            f"| {row['learning_over_better']:.2f} | {row['loaded_tokens']:,} |"
        )


if __name__ == "__main__":
    main()
