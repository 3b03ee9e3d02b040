"""The radix tree hits every prefix that hashed blocks hit, for any prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.hashing import hash_tokens
from kvstore.engine.pages import PagePool, useful_tokens
from kvstore.engine.radix import RadixCache

CUTS = [[0] * 40, [0] * 13 + [1] * 27, [0] * 24 + [1] * 16, [1] * 40]
prompts = st.lists(
    st.one_of(
        st.builds(lambda tokens, end: tokens[:end], st.sampled_from(CUTS), st.integers(1, 40)),
        st.lists(st.integers(0, 1), min_size=1, max_size=40),
    ),
    max_size=12,
)


def block_run(cached: set[bytes], hashes: list[bytes]) -> int:
    run = 0
    while run < len(hashes) and hashes[run] in cached:
        run += 1
    return run


@pytest.mark.parametrize("page_tokens", [1, 2, 8])
@given(sent=prompts)
@settings(max_examples=60, deadline=None)
def test_the_tree_hits_at_least_as_much_as_blocks(page_tokens: int, sent: list[list[int]]) -> None:
    block_tokens = 8
    pool = PagePool(2000)
    cache = RadixCache(pool, page_tokens)
    cached: set[bytes] = set()
    for prompt in sent:
        tokens = np.array(prompt, np.int32)
        hashes = hash_tokens(tokens, block_tokens=block_tokens)
        run = block_run(cached, hashes)
        hit = cache.match(tokens).tokens
        assert hit // block_tokens == run, "both find the same whole blocks"
        spared = cache.match(tokens[: useful_tokens(len(prompt), page_tokens)]).tokens
        assert spared == min(hit, useful_tokens(len(prompt), page_tokens))
        assert spared >= min(run * block_tokens, useful_tokens(len(prompt), block_tokens))
        cached.update(hashes)
        whole = len(prompt) // page_tokens
        pages = pool.alloc(whole)
        cache.insert(tokens[: whole * page_tokens], pages)
        pool.drop_ref(pages)


@pytest.mark.parametrize(
    ("prompt_tokens", "page_tokens", "useful"),
    [(0, 1, 0), (1, 1, 0), (2, 1, 1), (32, 16, 16), (33, 16, 32), (16, 16, 0)],
)
def test_the_last_token_is_always_computed(
    prompt_tokens: int, page_tokens: int, useful: int
) -> None:
    assert useful_tokens(prompt_tokens, page_tokens) == useful
