"""Layouts and formats: the bytes of a slot for each engine's pool, and their namespaces, valid and
invalid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pool_cases import Sizes, make_pool

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError
from kvstore.kernels import BlockFormat, PoolLayout, check_layout, format_of, gather
from kvstore.kernels.formats import STORAGES
from kvstore.kernels.plan import copy_plan

torch.set_num_threads(1)

L, B, N, H, D = 2, 5, 4, 3, 8
"""Layers, pages, tokens of a page, heads, head_dim."""
PAGES = [3, 1]
K = torch.randn(L, B, N, H, D)
V = torch.randn(L, B, N, H, D)


def slot_of(pool: PoolLayout, order: str, pages: list[int] = PAGES) -> torch.Tensor:
    form = BlockFormat(order)
    slot = bytearray(form.block_bytes(pool, len(pages)))
    gather(pool, [pages], [memoryview(slot)], form)
    return torch.frombuffer(slot, dtype=pool.dtype)


def block(order: str, pages: list[int] = PAGES) -> torch.Tensor:
    """Return the block of these pages by torch's permutations. C is K and V side by side."""
    both = torch.stack([K, V], dim=1)[:, :, pages].flatten(2, 3)  # L K T H D
    axes = order.replace("C", "KD")
    return both.permute(["LKTHD".index(axis) for axis in axes]).reshape(-1)


def pools() -> dict[str, PoolLayout]:
    packed = torch.cat([K, V], dim=-1).transpose(2, 3).contiguous()  # L B H N C
    nhd = torch.cat([K, V], dim=-1).contiguous().transpose(2, 3)
    blocks_first = packed.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack([K, V])
    tokens = both.flatten(2, 3)  # 2 L tokens H D
    return {
        "ours": PoolLayout.reference(torch.stack([K, V], dim=1)),
        "vllm LBHNC": PoolLayout.vllm(packed.unbind(0), D),
        "vllm LBNHC": PoolLayout.vllm(nhd.unbind(0), D),
        "vllm BLHNC": PoolLayout.vllm(blocks_first.unbind(0), D),
        "vllm before 0.26": PoolLayout.stacked(both.transpose(0, 1).contiguous().unbind(0)),
        "vllm before 0.26, blocks first": PoolLayout.stacked(
            torch.stack([K, V], dim=2).unbind(0), kv_axis=1
        ),
        "sglang device": PoolLayout.token_lists(
            [k.flatten(0, 1) for k in K], [v.flatten(0, 1) for v in V], page_tokens=N
        ),
        "sglang layer_first": PoolLayout.sglang_host(
            tokens.contiguous(), "layer_first", page_tokens=N
        ),
        "sglang page_first": PoolLayout.sglang_host(
            tokens.transpose(1, 2).contiguous(), "page_first", page_tokens=N
        ),
        "sglang page_first_direct": PoolLayout.sglang_host(
            both.transpose(1, 2).contiguous(), "page_first_direct", page_tokens=N
        ),
    }


@pytest.mark.parametrize("order", ["LKTHD", "KTLHD", "LHTKD", "LHTC", "LTHC"])
@pytest.mark.parametrize("name", list(pools()))
def test_every_engine_fills_the_same_slot(name: str, order: str) -> None:
    """The meaning of an order does not depend on the pool."""
    assert torch.equal(slot_of(pools()[name], order), block(order))


@pytest.mark.parametrize(
    ("name", "order", "run_bytes", "runs"),
    [
        ("ours", "LKTHD", N * H * D * 4, 2 * L),
        ("vllm LBHNC", "LHTC", H * N * 2 * D * 4, L),
        ("vllm LBNHC", "LTHC", H * N * 2 * D * 4, L),
        ("vllm BLHNC", "LHTC", L * H * N * 2 * D * 4, 1),
        ("vllm LBHNC", "LKTHD", D * 4, 2 * L * N * H),
        ("sglang page_first", "KTLHD", N * L * H * D * 4, 2),
        ("sglang page_first_direct", "KLTHD", L * N * H * D * 4, 2),
    ],
)
def test_a_pools_own_order_has_long_runs(name: str, order: str, run_bytes: int, runs: int) -> None:
    plan = copy_plan(pools()[name], BlockFormat(order), 1)
    assert (plan.run_bytes, plan.runs_per_page) == (run_bytes, runs)


def test_a_single_latent_is_one_vector() -> None:
    latent = torch.randn(L, B, N, 1, 6)
    pool = PoolLayout.vllm([layer.transpose(1, 2) for layer in latent])
    wanted = latent[:, PAGES].reshape(-1)
    assert torch.equal(slot_of(pool, "LTHC"), wanted)
    with pytest.raises(AssertionError, match="separate vectors"):
        BlockFormat("LKTHD").check(pool)


def test_invalid_layouts_are_rejected() -> None:
    with pytest.raises(AssertionError, match="same shape"):
        PoolLayout((torch.zeros(2, 2, 1, 4), torch.zeros(3, 2, 1, 4)), 2)
    with pytest.raises(AssertionError, match="strides"):
        PoolLayout((torch.zeros(2, 2, 3, 4), torch.zeros(2, 3, 2, 4).transpose(1, 2)), 2)
    with pytest.raises(AssertionError, match="missing part"):
        PoolLayout((torch.zeros(2, 2, 1, 4),), 2)
    with pytest.raises(AssertionError, match="contiguous"):
        PoolLayout((torch.zeros(2, 2, 4, 3).transpose(2, 3),), 1)
    with pytest.raises(AssertionError, match="K‖V of 16"):
        PoolLayout.vllm([torch.zeros(2, 2, 3, 16)], 4)


# Namespaces.

ENGINE = Namespace(model="m", dtype="float32", layers=L, kv_heads=H, head_dim=D, block_tokens=2 * N)


@pytest.mark.parametrize("order", ["LKTHD", "KTLHD", "LHTC"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_format_is_in_the_namespace_and_comes_back(order: str, storage: str) -> None:
    form = BlockFormat(order, storage)
    made = form.namespace(ENGINE)
    found, engine = format_of(made)
    assert found == form
    assert (engine.dtype, engine.head_dim, engine.quantisation) == ("float32", D, "none")
    pool = pools()["vllm LBHNC"]
    assert check_layout(made, pool) == (form, 2)
    assert made.block_bytes == form.block_bytes(pool, 2)


def test_no_two_formats_share_a_namespace() -> None:
    """Even with equal sizes: planes of one dtype, and plain bytes."""
    formats = [BlockFormat(o, s) for o in ("LKTHD", "KTLHD", "LHTC") for s in STORAGES]
    digests = {form.namespace(ENGINE).digest for form in formats}
    digests |= {form.namespace(replace(ENGINE, dtype="bfloat16")).digest for form in formats}
    assert len(digests) == 2 * len(formats)


def test_int8_is_never_a_default_and_always_named() -> None:
    assert BlockFormat().storage == "plain"
    made = BlockFormat("LKTHD", "int8").namespace(replace(ENGINE, quantisation="gptq-4"))
    assert made.quantisation == "gptq-4+kv-int8-float32"
    assert made.block_bytes == ENGINE.block_bytes * (D + 4) // (4 * D)
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        BlockFormat("LKTHD", "int8").namespace(replace(ENGINE, dtype="fp8_e4m3"))


@pytest.mark.parametrize("order", ["", "LKTH", "LKTHDD", "LKTTD", "LKTHC", "lkthd", "LTHD"])
def test_invalid_orders_are_rejected(order: str) -> None:
    with pytest.raises(ConfigError, match="layout"):
        BlockFormat(order)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": 3}, "layers is 3"),
        ({"kv_heads": 2}, "kv_heads is 2"),
        ({"head_dim": 4}, "head_dim is 4"),
        ({"head_dim_v": 4}, "head_dim_v is 4"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
        ({"block_tokens": 6}, r"\(got 6\)"),
        ({"attention": "mla"}, "separate K and V"),
        ({"layout": "LKTHD-planes-int4"}, "unknown dtype"),
    ],
    ids=str,
)
def test_a_namespace_of_another_pool_is_rejected(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_layout(replace(ENGINE, **change), pools()["ours"])  # type: ignore[arg-type]


def test_a_pool_of_one_vector_needs_an_order_of_one_vector() -> None:
    pool = make_pool("vllm LBHNC", Sizes(L, B, N, H, D), torch.float32, np.zeros(8, np.uint8))
    with pytest.raises(ConfigError, match="a single vector"):
        check_layout(ENGINE, pool)
    assert check_layout(replace(ENGINE, layout="LHTC"), pool)[1] == 2
    eight_bits = PoolLayout(tuple(sheet.view(torch.uint8) for sheet in pool.sheets), 1)
    fp8 = replace(ENGINE, layout="LHTC", dtype="fp8_e4m3", head_dim=4 * D, head_dim_v=4 * D)
    assert check_layout(fp8, eight_bits)[1] == 2
