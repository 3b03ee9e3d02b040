"""Compares the speed of the radix tree at 100,000 nodes with SGLang's.

Two trees. *deep*: prompts of 8k tokens published in 15 pieces, so 15 nodes deep, about 7,000
leaves. *wide*: 100,000 leaves, prompts of 1.5k tokens of which a thousand prompts share the first
1,024. Each operation uses random paths, so that only the nodes near the root are in the
processor's cache.

    python bench/radix.py [--trees deep wide] [--page-tokens 1 16] [--scale 1.0] [--json]

SGLang's figures are those of version 0.5.23 on trees of the same size, on one thread of a shared
machine with two cores (medians; two runs differed by up to a factor of two). They are printed for
comparison and not measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.engine.pages import PagePool
from kvstore.engine.radix import NO_ROOT, RadixCache

VOCABULARY = 128_256
SAMPLES = 300
FAMILIES = 100
"""Number of shared beginnings of the prompts."""

IDS = np.random.default_rng(0).integers(0, VOCABULARY, 8192, dtype=np.int32)

SGLANG_US: dict[tuple[str, str], tuple[str, str]] = {
    ("deep", "match, full hit"): ("139-260", "37.5-46"),
    ("deep", "match, miss"): ("6-9", "8-9"),
    ("deep", "match, split"): ("161-170", "50-69"),
    ("deep", "lock and unlock"): ("34-35", "8-9"),
    ("deep", "insert 512 tokens more"): ("90-141", "52-57"),
    ("deep", "insert, half is new"): ("186-188", "88-108"),
    ("deep", "evict one page"): ("3500-8500", "140"),
    ("deep", "evict one prompt"): ("4800-8000", "320-330"),
    ("deep", "evict a quarter, per 1k tokens"): ("15-31", "26-45"),
    ("wide", "match, full hit"): ("24-25", "9.6-13.8"),
    ("wide", "evict one page"): ("63000-70000", "3100-9600"),
    ("wide", "evict one prompt"): ("67000-131000", "2900-3200"),
}
"""(tree, operation): microseconds of SGLang's RadixCache in Python and of its Rust core."""


@dataclass(frozen=True)
class Shape:
    """A tree: `prompts` prompts in pieces of these lengths, the first one shared."""

    name: str
    prompts: int
    pieces: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(self.pieces)

    def tokens(self, number: int) -> np.ndarray:
        """Return prompt `number`: its family's beginning, then unique tokens."""
        shared = (IDS[: self.pieces[0]] + number % FAMILIES) % VOCABULARY
        own = (IDS[self.pieces[0] : self.prompt_tokens] + number) % VOCABULARY
        return np.concatenate([shared, own])


SHAPES = {
    "deep": Shape("deep", 7_140, (576, *[544] * 14)),
    "wide": Shape("wide", 100_000, (1_024, 512)),
}


Times = list[tuple[float, float]]
"""(CPU time of this thread, wall time) of each call, in microseconds."""


def timed(calls: Iterator[Callable[[], object]]) -> Times:
    """Return the times of each call, without the time to prepare the call."""
    times = []
    for call in calls:
        clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
        call()
        cpu = time.thread_time_ns() - cpu
        times.append((cpu / 1000, (time.perf_counter_ns() - clock) / 1000))
    return times


class Tree:
    """The measured tree, with its pool and its number of prompts."""

    def __init__(self, shape: Shape, page_tokens: int, prompts: int) -> None:
        self.shape = shape
        self.page_tokens = page_tokens
        self.prompts = prompts
        # Pages for all private pieces, the shared ones, and the prompts that are inserted later.
        tokens = prompts * (shape.prompt_tokens - shape.pieces[0])
        tokens += (FAMILIES + 2 * SAMPLES) * shape.prompt_tokens
        self.pool = PagePool(tokens // page_tokens)
        self.cache = RadixCache(self.pool, page_tokens)
        self.choice = np.random.default_rng(1)

    def build(self) -> Times:
        """Insert every prompt piece by piece, as chunked prefill does; return times per piece."""
        ends = np.cumsum(self.shape.pieces)
        times: Times = []
        for number in range(self.prompts):
            tokens = self.shape.tokens(number)
            pages = self.pool.alloc(len(tokens) // self.page_tokens)
            times += timed(
                (lambda t=tokens[:end], p=pages[: end // self.page_tokens]: self.cache.insert(t, p))
                for end in ends
            )
            self.pool.drop_ref(pages)
        return times

    def some(self, count: int = SAMPLES) -> Iterator[np.ndarray]:
        """Yield distinct random prompts of the tree."""
        for number in self.choice.permutation(self.prompts)[:count]:
            yield self.shape.tokens(int(number))

    def put(self, tokens: np.ndarray) -> None:
        """Insert and keep no reference to the pages."""
        pages = self.pool.alloc(len(tokens) // self.page_tokens)
        self.cache.insert(tokens, pages)
        self.pool.drop_ref(pages)

    def branch(self, tokens: np.ndarray) -> None:
        """Insert a branch after each piece, so that no two nodes of the path merge."""
        other = np.full(self.page_tokens, VOCABULARY, np.int32)
        for end in np.cumsum(self.shape.pieces[:-1]):
            self.put(np.concatenate([tokens[:end], other]))


def matches(tree: Tree) -> dict[str, Times]:
    cache, size = tree.cache, tree.shape.prompt_tokens
    fresh = np.random.default_rng(2)
    missing = (fresh.integers(0, VOCABULARY, size, dtype=np.int32) for _ in range(SAMPLES))

    def cut() -> Iterator[np.ndarray]:
        """Yield prompts that leave their path in the middle of the last piece."""
        for tokens in tree.some():
            tokens[-(tree.shape.pieces[-1] // 2) :] = VOCABULARY + 1
            yield tokens

    found = {
        "match, full hit": timed((lambda t=t: cache.match(t)) for t in tree.some()),
        "match, miss": timed((lambda t=t: cache.match(t)) for t in missing),
        "match, split": timed((lambda t=t: cache.match(t)) for t in cut()),
    }
    hits = (cache.match(tokens) for tokens in tree.some())
    found["gather the pages of a match"] = timed((lambda m=m: m.pages) for m in hits)
    return found


def locks(tree: Tree) -> dict[str, Times]:
    """Measure a path where every node is shared, and one that the first unlock merges."""

    def both(tokens: np.ndarray, branched: bool) -> Callable[[], object]:
        if branched:
            tree.branch(tokens)
        node = tree.cache.match(tokens).node

        def call() -> None:
            tree.cache.lock(node)
            tree.cache.unlock(node)

        return call

    return {
        "lock and unlock": timed(both(t, True) for t in tree.some()),
        "lock and unlock, merging": timed(both(t, False) for t in tree.some()),
    }


def inserts(tree: Tree) -> dict[str, Times]:
    fresh = np.random.default_rng(3)

    def ready(tokens: np.ndarray, known: int, new: int) -> Callable[[], object]:
        ids = fresh.integers(0, VOCABULARY, new, dtype=np.int32)
        whole = np.concatenate([tokens[:known], ids])
        tree.cache.match(whole)
        pages = tree.pool.alloc(len(whole) // tree.page_tokens)

        def call() -> None:
            tree.cache.insert(whole, pages, NO_ROOT)

        release.append(pages)
        return call

    release: list[np.ndarray] = []
    size = tree.shape.prompt_tokens
    found: dict[str, Times] = {}
    for name, known, new in (
        ("insert 512 tokens more", size, 512),
        ("insert, half is new", size // 2, size // 2),
    ):
        found[name] = []
        for tokens in tree.some(SAMPLES // 2):
            found[name] += timed(iter([ready(tokens, known, new)]))
            tree.pool.drop_ref(release.pop())
    return found


def evictions(tree: Tree) -> dict[str, Times]:
    cache = tree.cache
    prompt_pages = tree.shape.prompt_tokens // tree.page_tokens
    found = {
        "evict one page": timed((lambda: cache.evict(1)) for _ in range(SAMPLES)),
        "evict one prompt": timed((lambda: cache.evict(prompt_pages)) for _ in range(SAMPLES // 3)),
    }
    quarter = cache.device_pages // 4
    ((cpu, clock),) = timed(iter([lambda: cache.evict(quarter)]))
    kilotokens = quarter * tree.page_tokens / 1000
    found["evict a quarter, per 1k tokens"] = [(cpu / kilotokens, clock / kilotokens)]
    for tokens in tree.some(tree.prompts // 4):
        cache.mark_stored(tokens, NO_ROOT, len(tokens))
    found["evict one page, a quarter is stored"] = timed(
        (lambda: cache.evict(1)) for _ in range(SAMPLES)
    )
    return found


def measure(shape: Shape, page_tokens: int, scale: float) -> list[dict[str, object]]:
    tree = Tree(shape, page_tokens, int(shape.prompts * scale))
    built = tree.build()
    # The nodes are long-lived; an engine would also exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    times = matches(tree) | locks(tree) | inserts(tree) | evictions(tree)
    tree.cache.evict(tree.cache.device_pages)
    gc.unfreeze()
    times["insert a piece, building"] = built
    return [row_of(shape.name, page_tokens, operation, found) for operation, found in times.items()]


def row_of(tree: str, page_tokens: int, operation: str, found: Times) -> dict[str, object]:
    python_us, rust_us = SGLANG_US.get((tree, operation), ("", ""))
    return {
        "tree": tree,
        "page_tokens": page_tokens,
        "operation": operation,
        "cpu_median_us": round(statistics.median(cpu for cpu, _ in found), 1),
        "clock_median_us": round(statistics.median(clock for _, clock in found), 1),
        "clock_best_us": round(min(clock for _, clock in found), 1),
        "sglang_python_us": python_us,
        "sglang_rust_us": rust_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trees", nargs="+", choices=SHAPES, default=list(SHAPES), help="trees to measure"
    )
    parser.add_argument(
        "--page-tokens", nargs="+", type=int, default=[1, 16], help="tokens per page"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="1.0: 100,000 nodes or leaves")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = [
        row
        for name in arguments.trees
        for page_tokens in arguments.page_tokens
        for row in measure(SHAPES[name], page_tokens, arguments.scale)
    ]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print_table(rows)


def print_table(rows: list[dict[str, object]]) -> None:
    print(f"{'':47} {'µs: CPU':>9} {'wall':>9} {'wall':>9} {'SGLang':>13} {'SGLang':>11}")
    print(f"{'tree':5} {'page':>4} {'operation':36} {'median':>9} {'median':>9} ", end="")
    print(f"{'best':>9} {'Python':>13} {'Rust':>11}")
    for row in rows:
        print(f"{row['tree']:5} {row['page_tokens']:>4} {row['operation']:36} ", end="")
        print(f"{row['cpu_median_us']:>9,} {row['clock_median_us']:>9,} ", end="")
        print(f"{row['clock_best_us']:>9,} {row['sglang_python_us']:>13} ", end="")
        print(f"{row['sglang_rust_us']:>11}")


if __name__ == "__main__":
    main()
