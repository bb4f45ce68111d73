// One row of x against a 16-bit matrix (N, K), row by row, in fp32: an output head that was not quantized.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "args.h"

namespace {

inline float widen_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline float read(const void* p, int dtype, size_t i) {
    if (dtype == BF16) return widen_bf16(((const uint16_t*)p)[i]);
    if (dtype == FP16) return (float)((const Half*)p)[i];
    return ((const float*)p)[i];
}

inline void write(void* p, int dtype, size_t i, float f) {
    if (dtype == FP16) {
        ((Half*)p)[i] = (Half)f;
    } else if (dtype == BF16) {
        uint32_t u;
        memcpy(&u, &f, 4);
        // half to even; a NaN stays one
        ((uint16_t*)p)[i] = (u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 64 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    } else {
        ((float*)p)[i] = f;
    }
}

// One row of the weight with x: four sums a lane, always added in the same order.
inline float dot_row(const Args& a, const float* x, size_t at) {
    constexpr int L = Isa::LANES, SUMS = 4;
    Isa::F sum[SUMS];
    for (int u = 0; u < SUMS; u++) sum[u] = Isa::zero();
    int k = 0;
    for (; k + SUMS * L <= a.K; k += SUMS * L)
        for (int u = 0; u < SUMS; u++)
            sum[u] = Isa::plus_product(sum[u], Isa::meta(a.words, a.meta, at + k + u * L), Isa::meta(x, FP32, k + u * L));
    alignas(64) float lanes[SUMS][L];
    for (int u = 0; u < SUMS; u++) Isa::store(lanes[u], sum[u]);
    float total = 0;
    for (int u = 0; u < SUMS; u++)
        for (int i = 0; i < L; i++) total += lanes[u][i];
    for (; k < a.K; k++) total += read(a.words, a.meta, at + k) * x[k];
    return total;
}

inline void dense(const Args& a) {
    float* x = (float*)malloc(sizeof(float) * a.K);
    for (size_t i = 0; i < (size_t)a.K; i++) x[i] = read(a.x, a.dtype, i);
#pragma omp parallel for schedule(dynamic, 64) num_threads(a.threads)
    for (int n = 0; n < a.N; n++)
        write(a.y, a.dtype, n, dot_row(a, x, (size_t)n * a.K) + (a.bias ? read(a.bias, a.meta, n) : 0.f));
    free(x);
}

}  // namespace
