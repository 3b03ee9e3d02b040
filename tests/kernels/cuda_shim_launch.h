// Runs one kernel over a whole grid. Returns the number of misaligned vector accesses.
extern "C" unsigned long long launch(int into_slots, unsigned grid_x, unsigned block_x,
                                     unsigned block_y, unsigned char* pool,
                                     unsigned char* const* slots, const int* pages,
                                     unsigned long long blocks, unsigned long long pages_per_block,
                                     unsigned long long rows, unsigned long long num_pages,
                                     unsigned long long page_bytes) {
    misaligned_accesses = 0;
    gridDim = {grid_x, 1, 1};
    blockDim = {block_x, block_y, 1};
    for (unsigned b = 0; b < grid_x; ++b)
        for (unsigned y = 0; y < block_y; ++y)
            for (unsigned x = 0; x < block_x; ++x) {
                blockIdx = {b, 0, 0};
                threadIdx = {x, y, 0};
                auto kernel = into_slots ? kvstore_gather : kvstore_scatter;
                kernel(pool, slots, pages, blocks, pages_per_block, rows, num_pages, page_bytes);
            }
    return misaligned_accesses;
}
