"""Source of the CUDA kernels. cupy compiles it on a machine with a GPU, the tests on any machine.

The work is the runs of a `plan.CopyPlan`. A row of threads (`threadIdx.y`, a warp) takes one run
and its lanes (`threadIdx.x`) walk it. The rows of the grid stride over all runs of all blocks.

- plain: in 16-byte vectors. If source and target have different alignments, the kernel uses the
  widest word that fits both. Unaligned ends of a run are copied bytewise, so any run is possible.
- planes: a vector of elements is loaded, and each of its byte planes is stored as one word.
- int8: a run is a vector. The lanes of the warp find its largest value together. `quantise` has the
  formulas; the intrinsics below keep their rounding (nothing is fused).

The slots can be host memory mapped into the device. Neighbouring lanes access neighbouring words,
which makes efficient bus transfers.
"""

from __future__ import annotations

from kvstore.kernels.plan import CopyPlan

LANES = 32
"""Threads per run: a warp, which copies 512 bytes per stride."""

RUNS_PER_BLOCK = 8
"""Runs that a thread block processes at once."""

GRID_BLOCKS_MAX = 128
"""Maximum thread blocks of a launch. More would only take resources from the model's own kernels:
a host link of 64 GB/s needs few warps."""

RUNS_MAX = 2**31
"""Maximum runs of a launch. The kernels count them in 32 bits."""

_COPIES = r"""
typedef unsigned char byte_t;
typedef unsigned int uint_t;
typedef unsigned long long word_t;

template <typename Vector>
__device__ __forceinline__ void copy_run_as(byte_t* target, const byte_t* source, word_t bytes,
                                            word_t lane, word_t lanes) {
    word_t head = (0 - (word_t)source) & (sizeof(Vector) - 1);
    if (head > bytes) head = bytes;
    const word_t vectors = (bytes - head) / sizeof(Vector);
    const word_t tail = head + vectors * sizeof(Vector);
    const Vector* from = (const Vector*)(source + head);
    Vector* into = (Vector*)(target + head);
    for (word_t i = lane; i < head; i += lanes) target[i] = source[i];
    word_t i = lane;
    for (; i + 3 * lanes < vectors; i += 4 * lanes) {
        const Vector a = from[i];
        const Vector b = from[i + lanes];
        const Vector c = from[i + 2 * lanes];
        const Vector d = from[i + 3 * lanes];
        into[i] = a;
        into[i + lanes] = b;
        into[i + 2 * lanes] = c;
        into[i + 3 * lanes] = d;
    }
    for (; i < vectors; i += lanes) into[i] = from[i];
    for (word_t j = tail + lane; j < bytes; j += lanes) target[j] = source[j];
}

__device__ __forceinline__ void copy_run(byte_t* target, const byte_t* source, word_t bytes,
                                         word_t lane, word_t lanes) {
    const word_t skew = ((word_t)target ^ (word_t)source) & 15;
    if (skew == 0) copy_run_as<uint4>(target, source, bytes, lane, lanes);
    else if ((skew & 7) == 0) copy_run_as<uint2>(target, source, bytes, lane, lanes);
    else if ((skew & 3) == 0) copy_run_as<unsigned int>(target, source, bytes, lane, lanes);
    else if ((skew & 1) == 0) copy_run_as<unsigned short>(target, source, bytes, lane, lanes);
    else copy_run_as<byte_t>(target, source, bytes, lane, lanes);
}

struct Plain {
    static const int SHRINK = 1;
    template <bool INTO_SLOTS>
    __device__ __forceinline__ static void run(byte_t* in_pool, byte_t* in_slot, word_t bytes,
                                               word_t, uint_t lane, uint_t lanes) {
        if (INTO_SLOTS) copy_run(in_slot, in_pool, bytes, lane, lanes);
        else copy_run(in_pool, in_slot, bytes, lane, lanes);
    }
};
"""

_PLANES = r"""
// Plane 0 has the most significant byte of each element, which is the last one in memory.
__device__ __forceinline__ uint_t high_bytes(uint_t a, uint_t b) {
    return ((a >> 8) & 0xffu) | ((a >> 16) & 0xff00u) | ((b << 8) & 0xff0000u) | (b & 0xff000000u);
}
__device__ __forceinline__ uint_t low_bytes(uint_t a, uint_t b) {
    return (a & 0xffu) | ((a >> 8) & 0xff00u) | ((b & 0xffu) << 16) | ((b & 0xff0000u) << 8);
}
__device__ __forceinline__ uint_t woven(uint_t high, uint_t low) {
    return (low & 0xffu) | ((high & 0xffu) << 8) | ((low & 0xff00u) << 8)
        | ((high & 0xff00u) << 16);
}

template <int SIZE>
__device__ __forceinline__ void bytes_of_elements(byte_t* in_pool, byte_t* in_slot, word_t plane,
                                                  word_t first, word_t end, bool into_slots,
                                                  uint_t lane, uint_t lanes) {
    for (word_t i = first + lane; i < end; i += lanes)
        for (int p = 0; p < SIZE; ++p) {
            byte_t* a = in_pool + i * SIZE + (SIZE - 1 - p);
            byte_t* b = in_slot + p * plane + i;
            if (into_slots) *b = *a;
            else *a = *b;
        }
}

struct Planes2 {
    static const int SHRINK = 2;
    template <bool INTO_SLOTS>
    __device__ __forceinline__ static void run(byte_t* in_pool, byte_t* in_slot, word_t bytes,
                                               word_t plane, uint_t lane, uint_t lanes) {
        const word_t elements = bytes / 2;
        word_t vectors = 0;
        if ((((word_t)in_pool & 15) | (((word_t)in_slot | plane) & 7)) == 0) vectors = elements / 8;
        for (word_t i = lane; i < vectors; i += lanes) {
            uint4* whole = (uint4*)in_pool + i;
            uint2* high = (uint2*)in_slot + i;
            uint2* low = (uint2*)(in_slot + plane) + i;
            if (INTO_SLOTS) {
                const uint4 v = *whole;
                *high = make_uint2(high_bytes(v.x, v.y), high_bytes(v.z, v.w));
                *low = make_uint2(low_bytes(v.x, v.y), low_bytes(v.z, v.w));
            } else {
                const uint2 h = *high;
                const uint2 l = *low;
                *whole = make_uint4(woven(h.x, l.x), woven(h.x >> 16, l.x >> 16),
                                    woven(h.y, l.y), woven(h.y >> 16, l.y >> 16));
            }
        }
        bytes_of_elements<2>(in_pool, in_slot, plane, vectors * 8, elements, INTO_SLOTS, lane,
                             lanes);
    }
};

struct Planes4 {
    static const int SHRINK = 4;
    template <bool INTO_SLOTS>
    __device__ __forceinline__ static void run(byte_t* in_pool, byte_t* in_slot, word_t bytes,
                                               word_t plane, uint_t lane, uint_t lanes) {
        const word_t elements = bytes / 4;
        word_t vectors = 0;
        if ((((word_t)in_pool & 15) | (((word_t)in_slot | plane) & 3)) == 0) vectors = elements / 4;
        for (word_t i = lane; i < vectors; i += lanes) {
            uint4* whole = (uint4*)in_pool + i;
            uint_t* planes[4];
            for (int p = 0; p < 4; ++p) planes[p] = (uint_t*)(in_slot + p * plane) + i;
            if (INTO_SLOTS) {
                const uint4 v = *whole;
                const uint_t top = high_bytes(v.x, v.y), rest = low_bytes(v.x, v.y);
                const uint_t top2 = high_bytes(v.z, v.w), rest2 = low_bytes(v.z, v.w);
                *planes[0] = high_bytes(top, top2);
                *planes[1] = high_bytes(rest, rest2);
                *planes[2] = low_bytes(top, top2);
                *planes[3] = low_bytes(rest, rest2);
            } else {
                const uint_t a = *planes[0], b = *planes[1], c = *planes[2], d = *planes[3];
                const uint_t top = woven(a, c), rest = woven(b, d);
                const uint_t top2 = woven(a >> 16, c >> 16), rest2 = woven(b >> 16, d >> 16);
                *whole = make_uint4(woven(top, rest), woven(top >> 16, rest >> 16),
                                    woven(top2, rest2), woven(top2 >> 16, rest2 >> 16));
            }
        }
        bytes_of_elements<4>(in_pool, in_slot, plane, vectors * 4, elements, INTO_SLOTS, lane,
                             lanes);
    }
};
"""

_INT8 = r"""
struct Float32 {
    static const int BYTES = 4;
    __device__ __forceinline__ static uint_t load(const byte_t* at) { return *(const uint_t*)at; }
    __device__ __forceinline__ static void store(byte_t* at, float x) {
        const uint_t bits = __float_as_uint(x);
        *(uint_t*)at = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
    }
};

struct BFloat16 {
    static const int BYTES = 2;
    __device__ __forceinline__ static uint_t load(const byte_t* at) {
        return (uint_t) * (const unsigned short*)at << 16;
    }
    __device__ __forceinline__ static void store(byte_t* at, float x) {
        const uint_t bits = __float_as_uint(x);
        const uint_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        *(unsigned short*)at = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
    }
};

struct Float16 {
    static const int BYTES = 2;
    __device__ __forceinline__ static uint_t load(const byte_t* at) {
        const uint_t h = *(const unsigned short*)at;
        const uint_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
        if (rest >= 0x7c00u) return sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
        if (rest >= 0x400u) return sign | ((rest << 13) + 0x38000000u);
        return sign | __float_as_uint((float)rest * 5.9604644775390625e-8f);  // 2**-24
    }
    __device__ __forceinline__ static void store(byte_t* at, float x) {
        const uint_t bits = __float_as_uint(x);
        const uint_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
        uint_t half;
        if (rest > 0x7f800000u) half = 0x7e00u;
        else if (rest >= 0x477ff000u) half = sign | 0x7c00u;  // >= 65,520
        else if (rest >= 0x38800000u)  // >= 2**-14
            half = sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13);
        else  // Near 0.5 a float's last place is 2**-24, that of the subnormal halves.
            half = sign | (__float_as_uint(__fadd_rn(__uint_as_float(rest), 0.5f)) - 0x3f000000u);
        *(unsigned short*)at = half;
    }
};

// One vector, and its values and scale in the slot. The 32 lanes of a warp work together.
template <typename Float>
struct Int8 {
    static const int SHRINK = 1;
    template <bool INTO_SLOTS>
    __device__ __forceinline__ static void run(byte_t* in_pool, byte_t* in_slot, word_t bytes,
                                               word_t, uint_t lane, uint_t lanes) {
        const uint_t width = bytes / Float::BYTES;
        if (INTO_SLOTS) quantise(in_pool, in_slot, width, lane, lanes);
        else dequantise(in_pool, in_slot, width, lane, lanes);
    }

    __device__ __forceinline__ static void quantise(const byte_t* in_pool, byte_t* in_slot,
                                                    uint_t width, uint_t lane, uint_t lanes) {
        uint_t top_bits = 0;
        for (uint_t i = lane; i < width; i += lanes) {
            const uint_t bits = Float::load(in_pool + i * Float::BYTES) & 0x7fffffffu;
            if (bits > top_bits) top_bits = bits;
        }
        top_bits = __reduce_max_sync(0xffffffffu, top_bits);
        const bool kept = top_bits < 0x7f800000u && top_bits >= 0x0d800000u;  // 2**-100
        const float top = kept ? __uint_as_float(top_bits) : 1.0f;
        const float factor = kept ? __fdiv_rn(127.0f, top) : 0.0f;
        uint_t scale_bits = kept ? __float_as_uint(__fdiv_rn(top, 127.0f)) : 0u;
        if (top_bits >= 0x7f800000u) scale_bits = 0x7fc00000u;
        for (uint_t i = lane * 4; i < width; i += lanes * 4) {
            uint_t four = 0;
            const uint_t count = width - i < 4 ? width - i : 4;
            for (uint_t j = 0; j < count; ++j) {
                const float x = __uint_as_float(Float::load(in_pool + (i + j) * Float::BYTES));
                const float q = kept ? rintf(__fmul_rn(x, factor)) : 0.0f;
                const int clamped = (int)fminf(fmaxf(q, -127.0f), 127.0f);
                four |= ((uint_t)clamped & 0xffu) << (8 * j);
            }
            store_bytes(in_slot + i, four, count);
        }
        if (lane == 0) store_bytes(in_slot + width, scale_bits, 4);
    }

    __device__ __forceinline__ static void dequantise(byte_t* in_pool, const byte_t* in_slot,
                                                      uint_t width, uint_t lane, uint_t lanes) {
        const float scale = __uint_as_float(load_bytes(in_slot + width, 4));
        for (uint_t i = lane * 4; i < width; i += lanes * 4) {
            const uint_t count = width - i < 4 ? width - i : 4;
            const uint_t four = load_bytes(in_slot + i, count);
            for (uint_t j = 0; j < count; ++j) {
                const float q = (float)(signed char)((four >> (8 * j)) & 0xffu);
                Float::store(in_pool + (i + j) * Float::BYTES, __fmul_rn(q, scale));
            }
        }
    }

    __device__ __forceinline__ static void store_bytes(byte_t* at, uint_t four, uint_t count) {
        if (count == 4 && ((word_t)at & 3) == 0) *(uint_t*)at = four;
        else for (uint_t j = 0; j < count; ++j) at[j] = (byte_t)(four >> (8 * j));
    }

    __device__ __forceinline__ static uint_t load_bytes(const byte_t* at, uint_t count) {
        if (count == 4 && ((word_t)at & 3) == 0) return *(const uint_t*)at;
        uint_t four = 0;
        for (uint_t j = 0; j < count; ++j) four |= (uint_t)at[j] << (8 * j);
        return four;
    }
};
"""

_WALK = r"""
struct Walk {
    const word_t* rows;           // [rows][2]: address in the pool, offset in the slot
    byte_t* const* slots;         // [blocks]
    const int* pages;             // [blocks][pages_per_block], negative: skip
    uint_t blocks, pages_per_block, rows_count, count0, count1;
    word_t page_stride, slot_page_stride, pool0, slot0, pool1, slot1, run_bytes, plane_bytes;
};

template <typename Kind, bool INTO_SLOTS>
__device__ __forceinline__ void walk(const Walk& w) {
    const uint_t per_page = w.rows_count * w.count0 * w.count1;
    const uint_t runs = w.blocks * w.pages_per_block * per_page;
    const uint_t stride = gridDim.x * blockDim.y;
    for (uint_t run = blockIdx.x * blockDim.y + threadIdx.y; run < runs; run += stride) {
        const uint_t place = run / per_page;
        const int page = w.pages[place];
        if (page < 0) continue;
        uint_t rest = run - place * per_page;
        const uint_t j = rest % w.count1;
        rest /= w.count1;
        const uint_t i = rest % w.count0;
        const uint_t row = rest / w.count0;
        const uint_t block = place / w.pages_per_block;
        const word_t index = place - block * w.pages_per_block;
        byte_t* in_pool = (byte_t*)w.rows[2 * row] + (word_t)page * w.page_stride
            + i * w.pool0 + j * w.pool1;
        const word_t offset = w.rows[2 * row + 1] + index * w.slot_page_stride
            + i * w.slot0 + j * w.slot1;
        byte_t* in_slot = w.slots[block] + offset / Kind::SHRINK;
        Kind::template run<INTO_SLOTS>(in_pool, in_slot, w.run_bytes, w.plane_bytes, threadIdx.x,
                                       blockDim.x);
    }
}

#define KVSTORE_KERNEL(NAME, KIND, INTO_SLOTS)                                                    \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                       \
        const word_t* rows, byte_t* const* slots, const int* pages, uint_t blocks,                \
        uint_t pages_per_block, uint_t rows_count, uint_t count0, uint_t count1,                  \
        word_t page_stride, word_t slot_page_stride, word_t pool0, word_t slot0, word_t pool1,    \
        word_t slot1, word_t run_bytes, word_t plane_bytes) {                                     \
        const Walk w = {rows, slots, pages, blocks, pages_per_block, rows_count, count0, count1,  \
                        page_stride, slot_page_stride, pool0, slot0, pool1, slot1, run_bytes,     \
                        plane_bytes};                                                             \
        walk<KIND, INTO_SLOTS>(w);                                                                \
    }
"""

_KINDS = {
    "plain": "Plain",
    "planes2": "Planes2",
    "planes4": "Planes4",
    "int8_float32": "Int8<Float32>",
    "int8_bfloat16": "Int8<BFloat16>",
    "int8_float16": "Int8<Float16>",
}

KERNELS = tuple(f"kvstore_{name}_{kind}" for kind in _KINDS for name in ("gather", "scatter"))
"""Names of all kernels. They take the same arguments: addresses of the table of rows, of the slot
addresses and of the page ids, then `launch_sizes`. Any grid is possible, and any block of up to 256
threads. int8 needs rows of exactly LANES threads."""


def _definitions() -> str:
    lines = [
        f"KVSTORE_KERNEL(kvstore_{name}_{kind}, {struct}, {into})"
        for kind, struct in _KINDS.items()
        for name, into in (("gather", "true"), ("scatter", "false"))
    ]
    return "\n".join(lines) + "\n"


CUDA_SOURCE = _COPIES + _PLANES + _INT8 + _WALK + _definitions()


def kernel_name(plan: CopyPlan, dtype: str, *, into_slots: bool) -> str:
    """Return the kernel for a plan over a pool of this dtype (by the namespace's name)."""
    operation = "gather" if into_slots else "scatter"
    kind = "plain"
    if plan.storage == "planes" and plan.element_bytes > 1:
        kind = f"planes{plan.element_bytes}"
    elif plan.storage == "int8":
        kind = f"int8_{dtype}"
    name = f"kvstore_{operation}_{kind}"
    assert name in KERNELS, name
    return name


def launch_sizes(plan: CopyPlan, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the arguments after the three addresses: five of 32 bits, then eight of 64."""
    outer, inner = plan.axes
    counts = (blocks, plan.pages_per_block, len(plan.rows), outer.steps, inner.steps)
    strides = (plan.page_stride, plan.slot_page_stride)
    steps = (outer.pool, outer.slot, inner.pool, inner.slot)
    return counts, (*strides, *steps, plan.run_bytes, plan.plane_bytes)


def launch_shape(runs: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return grid and block for this many runs."""
    assert 0 < runs < RUNS_MAX, f"{runs} runs in one launch"
    blocks = max(1, min(GRID_BLOCKS_MAX, -(-runs // RUNS_PER_BLOCK)))
    return (blocks, 1, 1), (LANES, RUNS_PER_BLOCK, 1)
