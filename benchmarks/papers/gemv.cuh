// Shared by the two GEMV kernels: codes and activations as fp32, sums across a warp.
#pragma once
#include "tile.cuh"

__device__ __forceinline__ float code_to_float(u32 code) {  // code < 2^23, without the slow integer conversion
    return __uint_as_float(0x4b000000u | code) - 8388608.f;
}
template <int T>
__device__ __forceinline__ float half_to_float(u16 v) {
    return to_floats<T>((u32)v).x;
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}
__device__ __forceinline__ uint4 load16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
