// CUDA's index variables, vector types and intrinsics for g++, to run the kernels' logic on a CPU:
// thread_local variables that `launch` loops over. The lanes of a warp run one after another. If
// the kernel works on a warp together, each lane runs on a separate thread.
// The vector types count unaligned accesses, which a device would reject. For words of up to 8
// bytes the compiler adds traps.
#include <pthread.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(THREADS)

struct Index3 {
    unsigned x, y, z;
};
static thread_local Index3 threadIdx, blockIdx, blockDim, gridDim;
static unsigned long long misaligned_accesses = 0;

static void check_vector(const void* a, const void* b, uintptr_t size) {
    if ((uintptr_t)a % size != 0 || (uintptr_t)b % size != 0)
        __atomic_fetch_add(&misaligned_accesses, 1, __ATOMIC_RELAXED);
}

struct uint2 {
    unsigned x, y;
    uint2() = default;
    uint2(unsigned a, unsigned b) : x(a), y(b) {}
    uint2(const uint2& other) { *this = other; }
    uint2& operator=(const uint2& other) {
        check_vector(this, &other, sizeof(uint2));
        std::memmove((void*)this, (const void*)&other, sizeof(uint2));
        return *this;
    }
} __attribute__((aligned(8)));

struct uint4 {
    unsigned x, y, z, w;
    uint4() = default;
    uint4(unsigned a, unsigned b, unsigned c, unsigned d) : x(a), y(b), z(c), w(d) {}
    uint4(const uint4& other) { *this = other; }
    uint4& operator=(const uint4& other) {
        check_vector(this, &other, sizeof(uint4));
        std::memmove((void*)this, (const void*)&other, sizeof(uint4));
        return *this;
    }
} __attribute__((aligned(16)));

static inline uint2 make_uint2(unsigned a, unsigned b) { return uint2(a, b); }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) {
    return uint4(a, b, c, d);
}
static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }

static pthread_barrier_t warp_barrier;
static unsigned warp_values[32];
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    (void)mask;
    warp_values[threadIdx.x] = value;
    pthread_barrier_wait(&warp_barrier);
    unsigned most = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (warp_values[lane] > most) most = warp_values[lane];
    pthread_barrier_wait(&warp_barrier);
    return most;
}
