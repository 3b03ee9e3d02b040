"""Steps over the paged pool: any split, any batch, any page order gives the same output."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine.loader import LoadedModel, random_model
from kvstore.engine.lora import random_adapter
from kvstore.engine.runner import Runner, StepRow
from kvstore.errors import ConfigError

torch.set_num_threads(1)
PAGE = 4
PAGES = 256


@cache
def model(family: str = "llama") -> LoadedModel:
    return random_model(11, family=family, layers=2, hidden=64, device="cpu")


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, length).astype(np.int32)


def scattered(seed: int, tokens: int) -> np.ndarray:
    """Return distinct page ids in random order."""
    order = np.random.default_rng(seed).permutation(PAGES)
    return order[: -(-tokens // PAGE)].astype(np.int32)


def pool_kv(runner: Runner, pages: np.ndarray, tokens: int) -> torch.Tensor:
    """Return the KV of a page table: [layers, 2, tokens, kv_heads, head_dim]."""
    return runner.pool[:, :, pages.astype(np.int64)].flatten(2, 3)[:, :, :tokens].clone()


def generate(
    runner: Runner, tokens: np.ndarray, pages: np.ndarray, count: int, start: int = 0
) -> list[int]:
    """Return greedy tokens after `tokens`, of which the first `start` are already in the pages."""
    new = tokens[start:]
    out: list[int] = []
    for _ in range(count):
        logits = runner.step([StepRow(new, start, pages)])
        start += len(new)
        out.append(int(logits[0].argmax()))
        new = np.array(out[-1:], dtype=np.int32)
    return out


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    seed=st.integers(0, 10_000),
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_any_split_of_a_prompt_gives_the_same(family: str, seed: int, parts: list[int]) -> None:
    length = sum(parts)
    tokens = prompt(seed, length)
    whole, split = Runner(model(family), PAGES, PAGE), Runner(model(family), PAGES, PAGE)
    whole_pages, split_pages = scattered(seed, length + 4), scattered(seed + 1, length + 4)
    expected = whole.step([StepRow(tokens, 0, whole_pages)])
    start = 0
    for part in parts:
        got = split.step([StepRow(tokens[start : start + part], start, split_pages)])
        start += part
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        pool_kv(split, split_pages, length),
        pool_kv(whole, whole_pages, length),
        atol=1e-5,
        rtol=1e-5,
    )
    assert generate(split, tokens, split_pages, 4, length - 1) == generate(
        whole, tokens, whole_pages, 4, length - 1
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.lists(
        st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 20))),
        min_size=2,
        max_size=7,
    ),
)
def test_the_batch_around_a_row_does_not_change_it(seed: int, rows: list[tuple[int, int]]) -> None:
    together, alone = Runner(model(), PAGES, PAGE), Runner(model(), PAGES, PAGE)
    free = np.random.default_rng(seed).permutation(PAGES).astype(np.int32)
    batch: list[StepRow] = []
    expected: list[torch.Tensor] = []
    for index, (start, count) in enumerate(rows):
        needed = -(-(start + count) // PAGE)
        pages, free = free[:needed], free[needed:]
        tokens = prompt(seed + index, start + count)
        if start:
            together.step([StepRow(tokens[:start], 0, pages)])
            alone.step([StepRow(tokens[:start], 0, pages)])
        batch.append(StepRow(tokens[start:], start, pages))
        expected.append(alone.step([batch[-1]])[0])
    got = together.step(batch)
    assert got.shape == (len(rows), 512)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.stack(expected), atol=1e-4, rtol=0)
    assert got.argmax(-1).tolist() == torch.stack(expected).argmax(-1).tolist()
    torch.testing.assert_close(together.pool, alone.pool, atol=1e-5, rtol=1e-5)


def test_decoding_rows_of_every_length_together() -> None:
    """Lengths 1..48 fall into several groups, most of them padded."""
    runner = Runner(model(), 1024, PAGE)
    free = np.random.default_rng(0).permutation(1024).astype(np.int32)
    batch, expected = [], []
    for length in range(1, 49):
        pages, free = free[: -(-length // PAGE)], free[-(-length // PAGE) :]
        tokens = prompt(length, length)
        expected.append(runner.step([StepRow(tokens, 0, pages)])[0])
        batch.append(StepRow(tokens[-1:], length - 1, pages))
    torch.testing.assert_close(runner.step(batch), torch.stack(expected), atol=1e-4, rtol=0)


def test_a_step_writes_its_own_slots_and_nothing_else() -> None:
    runner = Runner(model(), PAGES, PAGE)
    runner.pool.fill_(7.0)
    pages = scattered(1, 32)
    runner.step([StepRow(prompt(1, 13), 0, pages)])
    changed = (runner.pool != 7.0).flatten(4).any(-1)
    for page in range(PAGES):
        at = np.flatnonzero(pages == page)
        count = min(max(13 - int(at[0]) * PAGE, 0), PAGE) if len(at) else 0
        assert bool(changed[:, :, page, :count].all())
        assert not bool(changed[:, :, page, count:].any())


def test_pages_past_the_row_are_never_read() -> None:
    tokens = prompt(2, 30)
    answers = []
    for rubbish in (0.0, float("nan")):
        runner = Runner(model(), PAGES, PAGE)
        pages = np.arange(40, 80, dtype=np.int32)
        runner.pool[:, :, :40] = rubbish
        runner.pool[:, :, 48:] = rubbish
        answers.append(runner.step([StepRow(tokens[:25], 0, pages)]))
        answers.append(runner.step([StepRow(tokens[25:], 25, pages)]))
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])


def test_padding_of_decoding_rows_reads_only_their_own_pages() -> None:
    """A load may be writing another page while a step runs."""
    tokens = prompt(8, 40)
    answers = []
    for rubbish in (0.0, float("nan")):
        runner = Runner(model(), PAGES, PAGE)
        runner.pool.fill_(rubbish)
        tables = [np.arange(first, first + 10, dtype=np.int32) for first in (50, 70)]
        lengths = (32, 40)
        rows = []
        for pages, length in zip(tables, lengths, strict=True):
            runner.step([StepRow(tokens[: length - 1], 0, pages)])
            rows.append(StepRow(tokens[length - 1 : length], length - 1, pages[: length // PAGE]))
        answers.append(runner.step(rows))
    assert torch.equal(answers[0], answers[1])


def test_a_copied_prefix_gives_the_same_output_as_a_computed_one() -> None:
    tokens, prefix = prompt(3, 50), 32
    first, second = Runner(model(), PAGES, PAGE), Runner(model(), PAGES, PAGE)
    pages = scattered(3, 70)
    expected = generate(first, tokens, pages, 10)
    other = scattered(4, 70)
    copied = prefix // PAGE
    source, target = pages[:copied].astype(np.int64), other[:copied].astype(np.int64)
    second.pool[:, :, target] = first.pool[:, :, source]
    assert generate(second, tokens, other, 10, start=prefix) == expected


def test_wrong_kv_in_a_prefix_changes_the_answer() -> None:
    """Otherwise no cache test could detect a wrong hit."""
    tokens = prompt(5, 40)
    runner = Runner(model(), PAGES, PAGE)
    pages = scattered(5, 60)
    expected = generate(runner, tokens, pages, 8)
    other = prompt(6, 40)
    runner.step([StepRow(other[:8], 0, pages)])
    assert generate(runner, tokens, pages, 8, start=32) != expected


def test_an_invalid_row_fails_an_assertion() -> None:
    runner = Runner(model(), PAGES, PAGE)
    pages = np.arange(4, dtype=np.int32)
    tokens = prompt(0, 10)
    wrong = {
        "without new tokens": StepRow(tokens[:0], 0, pages),
        "token id outside": StepRow(np.array([512], np.int32), 0, pages),
        "token id below": StepRow(np.array([-1], np.int32), 0, pages),
        r"\(2, 3\)": StepRow(tokens, 0, pages[:2]),
        "page id outside": StepRow(tokens, 0, np.array([0, 1, PAGES], np.int32)),
        "page id below": StepRow(tokens, 0, np.array([0, -1, 2], np.int32)),
        "4097": StepRow(tokens[:1], 4096, np.zeros(2000, np.int32)),
        "fable": StepRow(tokens, 0, pages, "fable"),
    }
    for message, row in wrong.items():
        with pytest.raises(AssertionError, match=message):
            runner.step([row])
    with pytest.raises(AssertionError, match="without rows"):
        runner.step([])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_pages": 0}, r"num_pages must be at least 1 \(got 0\)"),
        ({"page_tokens": -1}, r"page_tokens must be .*\(got -1\)"),
        ({"threads": 0}, r"threads must be .*\(got 0\)"),
        ({"num_pages": 1 << 50}, "a KV pool of 1125899906842624 pages of 4 tokens needs"),
    ],
)
def test_an_invalid_pool_is_rejected(sizes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner(model(), **{"num_pages": 8, "page_tokens": PAGE, **sizes})


def test_threads_are_set_on_request() -> None:
    Runner(model(), 8, PAGE, threads=1)
    assert torch.get_num_threads() == 1


def test_an_adapter_needs_a_unique_name() -> None:
    runner = Runner(model(), 8, PAGE)
    adapter = random_adapter(1, model().config)
    runner.add_lora("a", adapter)
    with pytest.raises(ConfigError, match="'a' is already loaded"):
        runner.add_lora("a", adapter)
    with pytest.raises(ConfigError, match="must not be empty"):
        runner.add_lora("", adapter)
    assert set(runner.loras) == {"a"}
