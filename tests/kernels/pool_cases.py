"""Random pools in all engines' layouts, with tables and slots, for the tests of all copiers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kvstore.kernels import SKIP, BlockFormat, PoolLayout
from kvstore.kernels.formats import QUANTISABLE, dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
SLOT_ROUND_BYTES = 64
"""Slots here are longer than a block, as real ones are."""

VLLM_PHYSICAL = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
KINDS = (
    "reference",
    *(f"vllm {order}" for order in VLLM_PHYSICAL),
    *(f"vllm split {order}" for order in VLLM_PHYSICAL),
    "vllm apart",
    "stacked 0",
    "stacked 1",
    "stacked heads first",
    "token lists",
    "mla token lists",
    "mla vllm",
    *(f"sglang {order}" for order in ("layer_first", "page_first", "page_first_direct")),
    *(f"mla sglang {order}" for order in ("layer_first", "page_first", "page_first_direct")),
)

ORDERS_APART = tuple("".join(axes) + "D" for axes in itertools.permutations("LKTH"))
ORDERS_TOGETHER = tuple("".join(axes) + "C" for axes in itertools.permutations("LTH"))


@dataclass(frozen=True)
class Sizes:
    layers: int
    pages: int
    tokens: int
    heads: int
    width: int


@dataclass
class Case:
    """A pool of random bits (or floats, for int8), a page table, and slots of random bits."""

    pool: PoolLayout
    form: BlockFormat
    pages: list[list[int]]
    slots: list[bytearray]

    def views(self) -> list[memoryview]:
        return [memoryview(slot) for slot in self.slots]

    @property
    def pages_per_block(self) -> int:
        return len(self.pages[0]) if self.pages else 1


def make_pool(kind: str, sizes: Sizes, dtype: torch.dtype, fill: np.ndarray) -> PoolLayout:
    """Return a pool of this kind. `fill` is repeated for its bytes."""
    layers, pages, tokens, heads, width = vars(sizes).values()

    def tensor(*shape: int) -> torch.Tensor:
        count = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(np.resize(fill, count)).view(dtype).view(shape)

    if kind == "reference":
        return PoolLayout.reference(tensor(layers, 2, pages, tokens, heads, width))
    if kind.startswith("vllm") and kind != "vllm apart":
        axes = {"L": layers, "B": pages, "H": heads, "N": tokens, "C": 2 * width}
        physical = kind.rpartition(" ")[2]
        whole = tensor(*(axes[axis] for axis in physical))
        logical = whole.permute([physical.index(axis) for axis in "LBHNC"])
        return PoolLayout.vllm(logical.unbind(0), width if "split" in kind else None)
    if kind == "vllm apart":
        apart = [tensor(pages, tokens, heads, 2 * width).transpose(1, 2) for _ in range(layers)]
        return PoolLayout.vllm(apart, width)
    if kind == "mla vllm":
        return PoolLayout.vllm([tensor(pages, 1, tokens, width) for _ in range(layers)])
    if kind.startswith("stacked"):
        if kind == "stacked heads first":
            whole = [tensor(2, pages, heads, tokens, width).transpose(2, 3) for _ in range(layers)]
            return PoolLayout.stacked(whole)
        axis = int(kind[-1])
        shape = (2, pages) if axis == 0 else (pages, 2)
        whole = [tensor(*shape, tokens, heads, width) for _ in range(layers)]
        return PoolLayout.stacked(whole, kv_axis=axis)
    if kind.endswith("token lists"):
        count = pages * tokens + 1
        keys = [tensor(count, heads, width) for _ in range(layers)]
        values = [tensor(count, heads, width) for _ in range(layers)]
        mla = kind.startswith("mla")
        return PoolLayout.token_lists(keys, None if mla else values, page_tokens=tokens)
    order = kind.rpartition(" ")[2]
    parts = () if kind.startswith("mla") else (2,)
    middle = {
        "layer_first": (layers, pages * tokens),
        "page_first": (pages * tokens, layers),
        "page_first_direct": (pages, layers, tokens),
    }[order]
    return PoolLayout.sglang_host(tensor(*parts, *middle, heads, width), order, page_tokens=tokens)


@st.composite
def cases(draw: st.DrawFn, *, unique: bool, storages: tuple[str, ...] = ("plain",)) -> Case:
    """unique: use each page at most once, as a scatter requires."""
    storage = draw(st.sampled_from(storages))
    pages_per_block, blocks = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    least = max(1, pages_per_block * blocks)
    kind = draw(st.sampled_from(KINDS))
    sizes = Sizes(
        layers=draw(st.integers(1, 3)),
        pages=draw(st.integers(least, least + 2)),
        tokens=draw(st.integers(1, 4)),
        heads=1 if kind == "mla vllm" else draw(st.integers(1, 3)),
        width=draw(st.integers(1, 9)),
    )
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fill = rng.integers(0, 256, 4096, dtype=np.uint8)
    if storage == "int8":
        dtype = draw(st.sampled_from([one for one in DTYPES if dtype_name(one) in QUANTISABLE]))
        fill = some_floats(rng, dtype)
    pool = make_pool(kind, sizes, dtype, fill)
    orders = ORDERS_TOGETHER + (ORDERS_APART if pool.parts == 2 else ())
    form = BlockFormat(draw(st.sampled_from(orders)), storage)
    table = rng.permutation(pool.num_pages)[: blocks * pages_per_block]
    if not unique:
        table = rng.integers(0, pool.num_pages, blocks * pages_per_block)
    table[rng.random(len(table)) < draw(st.sampled_from((0.0, 0.3, 1.0)))] = SKIP
    block_bytes = form.block_bytes(pool, pages_per_block)
    slot_bytes = -(-block_bytes // SLOT_ROUND_BYTES) * SLOT_ROUND_BYTES
    slots = [bytearray(rng.bytes(slot_bytes)) for _ in range(blocks)]
    return Case(pool, form, table.reshape(blocks, pages_per_block).tolist(), slots)


def some_floats(rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    """Return bytes of floats of all sizes, with zeros, extremes, infinities and NaN."""
    normal = torch.from_numpy(rng.standard_normal(1024).astype(np.float32)) * 2.0 ** float(
        rng.integers(-20, 12)
    )
    info = torch.finfo(dtype)
    odd = torch.tensor([0.0, -0.0, info.max, -info.max, info.tiny, info.tiny / 2])
    # Among the first values: a small pool has no more.
    normal[torch.from_numpy(rng.permutation(64)[: len(odd)])] = odd
    if rng.random() < 0.5:
        normal[int(rng.integers(0, 16))] = float("inf")
        normal[int(rng.integers(16, 64))] = float("nan")
    return normal.to(dtype).view(torch.uint8).numpy()


def clone(pool: PoolLayout) -> PoolLayout:
    """Return a copy of the pool in new memory. Each allocation is copied once."""
    copies: dict[int, torch.Tensor] = {}
    sheets = []
    for number, sheet in enumerate(pool.sheets):
        start, _ = pool.storage_of(number)
        if start not in copies:
            copies[start] = pool.bytes_of(number).clone()
        offset = sheet.storage_offset()
        sheets.append(
            copies[start].view(pool.dtype).as_strided(sheet.shape, sheet.stride(), offset)
        )
    return PoolLayout(tuple(sheets), pool.parts)


def bits(pool: PoolLayout) -> bytes:
    """Return all bytes of all allocations of the pool, in order of first use."""
    seen: dict[int, bytes] = {}
    for number in range(len(pool.sheets)):
        start, _ = pool.storage_of(number)
        if start not in seen:
            seen[start] = pool.bytes_of(number).cpu().numpy().tobytes()
    return b"".join(seen.values())


def crafted(dtype: torch.dtype) -> tuple[torch.Tensor, bytearray]:
    """Return a pool of one page, and a block with critical products q * scale: rounding ties of the
    dtype, overflows, and its smallest numbers."""
    scales = [5.0, 9.0, 33.0, 129.0, 2.0**-24 * 1.5, 2.0**-20 * 1.125, 65519.0 / 127, 65520.0 / 127]
    scales += [65536.0, 3e38, float("inf"), float("nan"), -3.0, 0.0, 2.0**-149, 2.0**-133 * 1.5]
    width = 256
    values = np.arange(-128, 128, dtype=np.int8).view(np.uint8)
    vectors = [values.tobytes() + np.float32(scale).tobytes() for scale in scales]
    pool = torch.zeros(1, 2, 1, len(scales) // 2, 1, width, dtype=dtype)
    return pool, bytearray(b"".join(vectors))
