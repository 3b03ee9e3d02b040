typedef void (*Kernel)(const word_t*, byte_t* const*, const int*, uint_t, uint_t, uint_t, uint_t,
                       uint_t, word_t, word_t, word_t, word_t, word_t, word_t, word_t, word_t);

// Runs one kernel over a whole grid; `together`: the 32 lanes of a warp at once. Returns the number
// of misaligned vector accesses.
extern "C" unsigned long long launch(Kernel kernel, int together, unsigned grid_x, unsigned block_x,
                                     unsigned block_y, const word_t* rows, byte_t* const* slots,
                                     const int* pages, const uint_t* counts,
                                     const word_t* strides) {
    misaligned_accesses = 0;
    auto lanes_from = [&](unsigned first, unsigned end) {
        gridDim = {grid_x, 1, 1};
        blockDim = {block_x, block_y, 1};
        for (unsigned b = 0; b < grid_x; ++b)
            for (unsigned y = 0; y < block_y; ++y)
                for (unsigned x = first; x < end; ++x) {
                    blockIdx = {b, 0, 0};
                    threadIdx = {x, y, 0};
                    kernel(rows, slots, pages, counts[0], counts[1], counts[2], counts[3],
                           counts[4], strides[0], strides[1], strides[2], strides[3], strides[4],
                           strides[5], strides[6], strides[7]);
                }
    };
    if (!together) {
        lanes_from(0, block_x);
        return misaligned_accesses;
    }
    pthread_barrier_init(&warp_barrier, nullptr, 32);
    std::vector<std::thread> lanes;
    for (unsigned x = 0; x < 32; ++x) lanes.emplace_back(lanes_from, x, x + 1);
    for (auto& lane : lanes) lane.join();
    pthread_barrier_destroy(&warp_barrier);
    return misaligned_accesses;
}
