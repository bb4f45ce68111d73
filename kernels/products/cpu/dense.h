// Few rows of x against a matrix (N, K) in 16 bits or fp32: a layer that was not quantized. And values to and from fp32.
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

// f rounded to 16 bits of a dtype.
inline float rounded_to(int dtype, float f) {
    uint16_t u;
    write(&u, dtype, 0, f);
    return read(&u, dtype, 0);
}

// n values from `at` on, to and from fp32: loops that the compiler makes vectors of, the dtype known outside of them.
template <int T>
inline void widen(float* to, const void* from, size_t at, int n) {
    for (int i = 0; i < n; i++) to[i] = read(from, T, at + i);
}

template <int T>
inline void round_to(void* to, size_t at, const float* from, int n) {
    for (int i = 0; i < n; i++) write(to, T, at + i, from[i]);
}

inline void widen(float* to, const void* from, int dtype, size_t at, int n) {
    dtype == BF16 ? widen<BF16>(to, from, at, n) : dtype == FP16 ? widen<FP16>(to, from, at, n) : widen<FP32>(to, from, at, n);
}

inline void narrow(void* to, int dtype, size_t at, const float* from, int n) {
    dtype == BF16   ? round_to<BF16>(to, at, from, n)
    : dtype == FP16 ? round_to<FP16>(to, at, from, n)
                    : round_to<FP32>(to, at, from, n);
}

// y's columns n0 .. n0 + n of the rows m0 on that `out` holds: what it holds, times `unit`, and the bias.
template <int WIDE>
inline void write_rows(const Args& a, int n0, int m0, int MB, float (*out)[WIDE], float unit = 1) {
    const int n = a.N - n0 < WIDE ? a.N - n0 : WIDE;
    float bias[WIDE] = {};
    if (a.bias) widen(bias, a.bias, a.meta, n0, n);
    for (int m = 0; m < MB; m++) {
        for (int r = 0; r < WIDE; r++) out[m][r] = out[m][r] * unit + bias[r];
        narrow(a.y, a.dtype, (size_t)(m0 + m) * a.N + n0, out[m], n);
    }
}

// Of a mapped file. One line of a page is asked for ahead: its address is then known in time (3.4 -> 2.9 ms of 64 MB).
constexpr int PAGE = 4096;

// NB rows of the weight with MB rows of x, both along k: two sums each, always added in one order, so that a row of y
// has the same bits in any company. `Way` says what a step of STEP k is, for operands as it wants them.
template <class Way, int NB, int MB>
inline void dot_rows(const Args& a, const typename Way::X* x, int n, int m) {
    constexpr int U = 2;
    typename Way::F sum[NB][MB][U];
#pragma GCC unroll 2
    for (int i = 0; i < NB; i++)
#pragma GCC unroll 4
        for (int j = 0; j < MB; j++)
#pragma GCC unroll 2
            for (int u = 0; u < U; u++) sum[i][j][u] = Way::zero();
    const auto* row = (const typename Way::Word*)a.words + (size_t)n * a.K;
    const typename Way::X* at = x + (size_t)m * a.K;
    for (int k = 0; m == 0 && k < a.K; k += PAGE / (int)sizeof *row) __builtin_prefetch(row + k + 4 * PAGE / sizeof *row);
    int k = 0;
    for (; k + U * Way::STEP <= a.K; k += U * Way::STEP)
#pragma GCC unroll 2
        for (int u = 0; u < U; u++) {
            const int here = k + u * Way::STEP;
            typename Way::W w[NB];
#pragma GCC unroll 2
            for (int i = 0; i < NB; i++) {
                w[i] = Way::weights(row + (size_t)i * a.K + here);
                if (NB > 1 && m == 0) __builtin_prefetch(row + (size_t)(i + NB) * a.K + here);
            }
#pragma GCC unroll 4
            for (int j = 0; j < MB; j++)
#pragma GCC unroll 2
                for (int i = 0; i < NB; i++) sum[i][j][u] = Way::dot(sum[i][j][u], w[i], at + (size_t)j * a.K + here);
        }
    for (int i = 0; i < NB; i++)
        for (int j = 0; j < MB; j++) {
            float total = Way::total(sum[i][j][0]) + Way::total(sum[i][j][1]);
            for (int rest = k; rest < a.K; rest++)
                total += read(row, a.meta, (size_t)i * a.K + rest) * Way::value(at[(size_t)j * a.K + rest]);
            write(a.y, a.dtype, (size_t)(m + j) * a.N + n + i, total + (a.bias ? read(a.bias, a.meta, n + i) : 0.f));
        }
}

template <class Way, int NB>
inline void rows_of_x(const Args& a, const typename Way::X* x, int n) {
    int m = 0;
    if (Way::ROWS >= 4)
        for (; m + 4 <= a.M; m += 4) dot_rows<Way, NB, 4>(a, x, n, m);
    if (Way::ROWS >= 4 && a.M - m == 3) return dot_rows<Way, NB, 3>(a, x, n, m);
    for (; m + 2 <= a.M; m += 2) dot_rows<Way, NB, 2>(a, x, n, m);
    if (m < a.M) dot_rows<Way, NB, 1>(a, x, n, m);
}

// One row of the weight after the other for one row of x (the memory likes one stream: four side by side took 32 ms for 20),
// two that share what is read of more.
template <class Way>
inline void dense_rows(const Args& a, const typename Way::X* x) {
#pragma omp parallel for schedule(dynamic, 32) num_threads(a.threads)
    for (int n = 0; n < a.N; n += 2) {
        if (a.M > 1 && n + 1 < a.N) {
            rows_of_x<Way, 2>(a, x, n);
        } else {
            rows_of_x<Way, 1>(a, x, n);
            if (n + 1 < a.N) rows_of_x<Way, 1>(a, x, n + 1);
        }
    }
}

}  // namespace
