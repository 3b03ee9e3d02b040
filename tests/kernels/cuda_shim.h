// CUDA's index variables and vector types for g++, so that the kernels' logic runs on a CPU:
// thread_local variables that `launch` loops over, one thread of the grid after another.
// The vector types count accesses that a device would refuse because they are not aligned.
#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline

struct Index3 {
    unsigned x, y, z;
};
static thread_local Index3 threadIdx, blockIdx, blockDim, gridDim;
static thread_local unsigned long long misaligned_accesses = 0;

template <typename Word, int COUNT>
struct Checked {
    Word words[COUNT];
    Checked() = default;
    Checked(const Checked& other) { take(other); }
    Checked& operator=(const Checked& other) {
        take(other);
        return *this;
    }
    void take(const Checked& other) {
        const uintptr_t size = sizeof(Checked);
        if ((uintptr_t)this % size != 0 || (uintptr_t)&other % size != 0) misaligned_accesses += 1;
        __builtin_memcpy(words, other.words, sizeof(words));
    }
};
typedef Checked<unsigned, 4> uint4_words;
typedef Checked<unsigned, 2> uint2_words;
struct alignas(16) uint4 : uint4_words {};
struct alignas(8) uint2 : uint2_words {};
