// Reads what tile_mma reads of the weights (words, scales, zeros), in the same order, and computes nothing: the floor that
// benchmarks/cuda_tile.py puts beside each time. y is written only if the words' sum is one number of 2^32.
#include "tile.cuh"

__device__ __forceinline__ uint4 read16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

template <int WARPS, int UNROLL>  // a block: `bytes` of words and `meta_bytes` of scales and of zeros
__global__ void __launch_bounds__(WARPS * 32)
tile_read(const char* __restrict__ words, const char* __restrict__ scales, const char* __restrict__ zeros, u16* __restrict__ y,
          int bytes, int meta_bytes) {
    constexpr int ROUND = WARPS * 512;
    next_grid_launch();
    u32 sum = 0;
    auto stream = [&](const char* from, int size) {
        for (int at = threadIdx.x * 16; at < size; at += ROUND * UNROLL) {
            uint4 v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (at + u * ROUND < size) v[u] = read16(from + at + u * ROUND);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (at + u * ROUND < size) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
        }
    };
    stream(words + (size_t)blockIdx.x * bytes, bytes);
    stream(scales + (size_t)blockIdx.x * meta_bytes, meta_bytes);
    if (zeros) stream(zeros + (size_t)blockIdx.x * meta_bytes, meta_bytes);
    previous_grid_wait();
    if (sum == 0x12345678u) y[0] = 1;
}
