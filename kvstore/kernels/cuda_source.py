"""The CUDA kernels, as one string: cupy compiles it on a machine with a GPU, the tests everywhere.

The work is cut into spans: one page of one row (layer, K or V) of one block, `page_bytes` that lie
contiguous in the pool and in the slot. A row of threads (`threadIdx.y`) takes a span, its lanes
(`threadIdx.x`) walk it in 16-byte vectors, and the rows of the whole grid stride over all spans.
Where source and target lie differently within 16 bytes, the widest word that fits both is used,
and the unaligned ends of a span are copied bytewise, so any page size is right.

The slots may be host memory mapped into the device: neighbouring lanes touch neighbouring vectors,
which is what the bus wants.
"""

from __future__ import annotations

LANES = 32
"""Threads on one span: a warp, 512 bytes at a stride."""

SPANS_PER_BLOCK = 8
"""Spans a thread block works on at once."""

GRID_BLOCKS_MAX = 128
"""Thread blocks of one launch; more would only take room from the model's own kernels, as a host
link of 64 GB/s needs few warps in flight."""

CUDA_SOURCE = r"""
typedef unsigned char byte_t;
typedef unsigned long long word_t;

template <typename Vector>
__device__ __forceinline__ void copy_span_as(byte_t* target, const byte_t* source,
                                             word_t bytes, word_t lane, word_t lanes) {
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

__device__ __forceinline__ void copy_span(byte_t* target, const byte_t* source, word_t bytes,
                                          word_t lane, word_t lanes) {
    const word_t skew = ((word_t)target ^ (word_t)source) & 15;
    if (skew == 0) copy_span_as<uint4>(target, source, bytes, lane, lanes);
    else if ((skew & 7) == 0) copy_span_as<uint2>(target, source, bytes, lane, lanes);
    else if ((skew & 3) == 0) copy_span_as<unsigned int>(target, source, bytes, lane, lanes);
    else if ((skew & 1) == 0) copy_span_as<unsigned short>(target, source, bytes, lane, lanes);
    else copy_span_as<byte_t>(target, source, bytes, lane, lanes);
}

template <bool INTO_SLOTS>
__device__ __forceinline__ void copy_blocks(byte_t* pool, byte_t* const* slots, const int* pages,
                                            word_t blocks, word_t pages_per_block, word_t rows,
                                            word_t num_pages, word_t page_bytes) {
    const word_t spans = blocks * rows * pages_per_block;
    const word_t stride = (word_t)gridDim.x * blockDim.y;
    for (word_t span = (word_t)blockIdx.x * blockDim.y + threadIdx.y; span < spans;
         span += stride) {
        const word_t index = span % pages_per_block;
        const word_t row = span / pages_per_block % rows;
        const word_t block = span / (pages_per_block * rows);
        const int page = pages[block * pages_per_block + index];
        if (page < 0) continue;
        byte_t* in_pool = pool + (row * num_pages + (word_t)page) * page_bytes;
        byte_t* in_slot = slots[block] + (row * pages_per_block + index) * page_bytes;
        if (INTO_SLOTS) copy_span(in_slot, in_pool, page_bytes, threadIdx.x, blockDim.x);
        else copy_span(in_pool, in_slot, page_bytes, threadIdx.x, blockDim.x);
    }
}

extern "C" __global__ void kvstore_gather(byte_t* pool, byte_t* const* slots, const int* pages,
                                          word_t blocks, word_t pages_per_block, word_t rows,
                                          word_t num_pages, word_t page_bytes) {
    copy_blocks<true>(pool, slots, pages, blocks, pages_per_block, rows, num_pages, page_bytes);
}

extern "C" __global__ void kvstore_scatter(byte_t* pool, byte_t* const* slots, const int* pages,
                                           word_t blocks, word_t pages_per_block, word_t rows,
                                           word_t num_pages, word_t page_bytes) {
    copy_blocks<false>(pool, slots, pages, blocks, pages_per_block, rows, num_pages, page_bytes);
}
"""
"""Two kernels, `kvstore_gather` and `kvstore_scatter`, of the same arguments: the pool's address,
the slots' addresses (one for each block), page ids `[blocks, pages_per_block]` (negative: skip),
and the sizes of `kernels.base.PoolShape`. Any grid and block shape is right; `threadIdx.z` and
`blockIdx.y` are not used."""


def launch_shape(spans: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and block for this many spans (blocks * rows * pages_per_block)."""
    blocks = max(1, min(GRID_BLOCKS_MAX, -(-spans // SPANS_PER_BLOCK)))
    return (blocks, 1, 1), (LANES, SPANS_PER_BLOCK, 1)
