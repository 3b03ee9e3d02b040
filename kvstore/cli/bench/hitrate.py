"""`kvstore bench hitrate`: compares the hit rates of a radix tree and of hashed blocks.

Four workloads of random tokens, an unlimited cache, no model. The tree is the engine's own, with
pages of one token. The blocks follow the store's rules: full blocks only, named by their chained
hash, and a lookup ends at the first absent block.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

Prompt = list[int]
Row = dict[str, str | float]

BLOCK_TOKENS = (16, 64)
SEED = 0
TOKEN_IDS = (1000, 50_000)
"""Range of the random token ids, end excluded."""


class Draw:
    """Random lengths and texts, always in the same order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def length(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def text(self, tokens: int) -> Prompt:
        return [self._random.randrange(*TOKEN_IDS) for _ in range(tokens)]

    def text_of(self, least: int, most: int) -> Prompt:
        """Return a text of random length."""
        return self.text(self.length(least, most))


def shared_system_prompt(draw: Draw) -> list[Prompt]:
    """100 questions after one system prompt of 1,000 tokens."""
    system = draw.text(1000)
    return [system + draw.text_of(20, 200) for _ in range(100)]


def multi_turn_chat(draw: Draw) -> list[Prompt]:
    """20 conversations of 8 turns. Each turn sends the whole history."""
    prompts = []
    for _ in range(20):
        history = draw.text(300)
        for _ in range(8):
            history = history + draw.text_of(10, 60)
            prompts.append(history)
            history = history + draw.text_of(50, 300)
    return prompts


def few_shot(draw: Draw) -> list[Prompt]:
    """100 questions after a header and the first two to five of five examples."""
    examples = [draw.text_of(100, 200) for _ in range(5)]
    header = draw.text(37)
    prompts = []
    for _ in range(100):
        shown = examples[: draw.length(2, 5)]
        prompts.append([*header, *itertools.chain(*shown), *draw.text_of(20, 80)])
    return prompts


def parallel_sampling(draw: Draw) -> list[Prompt]:
    """30 problems, each sent 8 times with a different last token."""
    prompts = []
    for _ in range(30):
        problem = draw.text_of(80, 400)
        prompts += [problem + draw.text(1) for _ in range(8)]
    return prompts


WORKLOADS: dict[str, Callable[[Draw], list[Prompt]]] = {
    "shared system prompt": shared_system_prompt,
    "multi-turn chat": multi_turn_chat,
    "few-shot, number of examples varies": few_shot,
    "same question sampled in parallel": parallel_sampling,
}


def radix_hit_tokens(prompts: Sequence[Prompt]) -> int:
    """Return the prompt tokens that hit in the engine's radix tree without eviction."""
    import numpy as np

    from kvstore.engine.pages import PagePool, useful_tokens
    from kvstore.engine.radix import RadixCache

    pool = PagePool(sum(map(len, prompts)))
    cache = RadixCache(pool, page_tokens=1)
    hit = 0
    for prompt in prompts:
        tokens = np.array(prompt, np.int32)
        hit += cache.match(tokens[: useful_tokens(len(prompt))]).tokens
        pages = pool.alloc(len(prompt))
        cache.insert(tokens, pages)
        pool.drop_ref(pages)
    return hit


def block_hit_tokens(prompts: Sequence[Prompt], block_tokens: int) -> int:
    """Return the prompt tokens that hit in blocks of this size without eviction."""
    from kvstore.blocks.hashing import hash_tokens
    from kvstore.engine.pages import useful_tokens

    cached: set[bytes] = set()
    hit = 0
    for prompt in prompts:
        hashes = hash_tokens(prompt, block_tokens=block_tokens)
        run = sum(1 for _ in itertools.takewhile(cached.__contains__, hashes))
        hit += min(run * block_tokens, useful_tokens(len(prompt), block_tokens))
        cached.update(hashes)
    return hit


def rows() -> list[Row]:
    """Return one row per workload: its token hit rates, as fractions."""
    draw = Draw(SEED)
    found: list[Row] = []
    for workload, prompts_of in WORKLOADS.items():
        prompts = prompts_of(draw)
        tokens = sum(map(len, prompts))
        row: Row = {"workload": workload, "radix": radix_hit_tokens(prompts) / tokens}
        for block_tokens in BLOCK_TOKENS:
            row[f"block{block_tokens}"] = block_hit_tokens(prompts, block_tokens) / tokens
        found.append(row)
    return found


def register(app: typer.Typer) -> None:
    app.command("hitrate")(hitrate)


def hitrate(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare hit rates of the radix tree and of blocks of 16 and 64 tokens, for four workloads."""
    if as_json:
        print(json.dumps({"rows": rows()}))
        return
    from rich.console import Console

    Console().print(_table(rows()))


def _table(found: list[Row]) -> Table:
    from rich.table import Table

    table = Table(title="Reused prompt tokens, unlimited cache")
    table.add_column("workload")
    names = ["radix", *(f"block{block_tokens}" for block_tokens in BLOCK_TOKENS)]
    for name in names:
        table.add_column(name.replace("block", "blocks of "), justify="right")
    for row in found:
        table.add_row(str(row["workload"]), *(f"{row[name]:.1%}" for name in names))
    return table
