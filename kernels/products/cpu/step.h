// What a layer does between its products while decoding, in fp32 from `dtype`, rounded once to it: the functions of
// decode/reference.py. A row, or a head of a sequence, is one thread's, its sums are in one order: equal bits always.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "activate.h"
#include "args.h"
#include "dense.h"

namespace {

// x / sqrt(mean(x^2) + eps) * weight
inline void norm(float* x, const float* weight, int n, float eps) {
    constexpr int SUMS = 32;
    float sum[SUMS] = {}, total = 0;
    int i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (int j = 0; j < SUMS; j++) sum[j] += x[i + j] * x[i + j];
    for (; i < n; i++) total += x[i] * x[i];
    for (int j = 0; j < SUMS; j++) total += sum[j];
    const float by = 1 / std::sqrt(total / n + eps);
    for (i = 0; i < n; i++) x[i] = x[i] * by * weight[i];
}

template <int T>
void add_norm(const Norm& a) {
    const int H = a.H;
    float* memory = (float*)malloc(sizeof(float) * H * (2 + 2 * (size_t)a.threads));
    float *weight = memory, *post = memory + H;
    widen(weight, a.weight, a.meta, 0, H);
    if (a.post) widen(post, a.post, a.meta, 0, H);
#pragma omp parallel num_threads(a.threads) if (a.M > 1)
    {
#ifdef _OPENMP
        float* x = memory + 2 * H + 2 * (size_t)H * omp_get_thread_num();
#else
        float* x = memory + 2 * H;
#endif
        float* delta = x + H;
#pragma omp for schedule(static)
        for (int m = 0; m < a.M; m++) {
            size_t at = (size_t)m * H;
            widen<T>(x, a.x, at, H);
            if (a.delta) {
                widen<T>(delta, a.delta, at, H);
                if (a.post) {  // rounded, as a product's output is
                    norm(delta, post, H, a.eps);
                    round_to<T>(a.y, at, delta, H);
                    widen<T>(delta, a.y, at, H);
                }
                for (int i = 0; i < H; i++) x[i] += delta[i];
                round_to<T>(a.x, at, x, H);
                widen<T>(x, a.x, at, H);
            }
            norm(x, weight, H, a.eps);
            round_to<T>(a.y, at, x, H);
        }
    }
    free(memory);
}

// One head of q or k: normed, turned on its first R dims, rounded to T as the cache is.
template <int T>
inline void turn(const Attend& a, float* x, float* by, void* rounded, int at, const void* weight) {
    const int half = a.R / 2;
    if (weight) {
        widen(by, weight, a.meta, 0, a.D);
        norm(x, by, a.D, a.eps);
    }
    for (int i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        size_t c = (size_t)at * a.R + i;
        x[i] = first * read(a.cos, T, c) - second * read(a.sin, T, c);
        x[half + i] = second * read(a.cos, T, c + half) + first * read(a.sin, T, c + half);
    }
    round_to<T>(rounded, 0, x, a.D);
    widen<T>(x, rounded, 0, a.D);
}

constexpr int HEADS = 4;  // queries that share a key while it is in registers

#define INLINE inline __attribute__((always_inline))  // else g++ leaves some of these calls in the innermost loops

// Of each 2 H lanes, a's sums of lanes H apart, then b's.
template <class F, int L, int H, size_t... J>
INLINE F halves_added(F a, F b, std::index_sequence<J...>) {
    typedef int32_t Lanes __attribute__((vector_size(sizeof(F))));
    return SHUFFLED(Lanes, a, b, (J / (2 * H) * 2 * H + J % H + J / H % 2 * L)...) +
           SHUFFLED(Lanes, a, b, (J / (2 * H) * 2 * H + H + J % H + J / H % 2 * L)...);
}

// Lane i of the result is the sum of the lanes of v[i]: first of those L / 2 apart, then L / 4, and so on. 16 registers take 45
// operations together, and 14 each one by one.
template <class F, int L, int H = L / 2>
INLINE F totals(F* v) {
#pragma GCC unroll 8
    for (int i = 0; i < H; i++) v[i] = halves_added<F, L, H>(v[i], v[i + H], std::make_index_sequence<L>());
    if constexpr (H > 1) return totals<F, L, H / 2>(v);
    return v[0];
}

// what(s, at, count) of slots from + s .. from + s + count, which lie next to each other from element `at` of the cache on.
template <class What>
INLINE void runs(const Attend& a, int b, int kv, int from, int end, What what) {
    for (int s = from; s < end;) {
        const int within = s % a.BLOCK, rest = a.BLOCK - within, count = end - s < rest ? end - s : rest;
        const size_t block = a.table ? a.table[(size_t)b * a.wide + s / a.BLOCK] : b;
        what(s - from, block * a.block + kv * a.head + (size_t)within * a.D, count);
        s += count;
    }
}

// p of n scores, which sum to 1 together with the sink's; in 16 sums each, whatever the registers.
inline void softmax(float* p, int n, const float* sink) {
    constexpr int SUMS = 16;
    float top[SUMS], sum[SUMS] = {}, most = sink ? *sink : p[0], total = 0;
    const int whole = n / SUMS * SUMS;
    for (int j = 0; j < SUMS; j++) top[j] = most;
    for (int s = 0; s < whole; s += SUMS)
        for (int j = 0; j < SUMS; j++) top[j] = p[s + j] > top[j] ? p[s + j] : top[j];
    for (int j = 0; j < SUMS; j++) most = top[j] > most ? top[j] : most;
    for (int s = whole; s < n; s++) most = p[s] > most ? p[s] : most;
    for (int s = 0; s < n; s++) p[s] = exponential(p[s] - most);
    for (int s = 0; s < whole; s += SUMS)
        for (int j = 0; j < SUMS; j++) sum[j] += p[s + j];
    for (int s = whole; s < n; s++) total += p[s];
    for (int j = 0; j < SUMS; j++) total += sum[j];
    if (sink) total += exponential(*sink - most);
    const float by = 1 / total;
    for (int s = 0; s < n; s++) p[s] *= by;
}

// Sums of values of N registers of each head from dim d on, into q's place.
template <int T, int G, int N>
inline void values(const Attend& a, int b, int kv, int from, int end, int d, const float* scores, int stride, float* q) {
    using F = Isa::F;
    constexpr int L = Isa::LANES;
    F sum[G][N];
    for (int g = 0; g < G; g++)
        for (int i = 0; i < N; i++) sum[g][i] = Isa::zero();
    runs(a, b, kv, from, end, [&](int s, size_t at, int count) {
        for (const int last = s + count; s < last; s++, at += a.D) {
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const F v = Isa::meta(a.v, T, at + d + i * L);
#pragma GCC unroll 4
                for (int g = 0; g < G; g++)
                    sum[g][i] = Isa::plus_product(sum[g][i], v, Isa::all(scores[(size_t)g * stride + s]));
            }
        }
    });
    for (int g = 0; g < G; g++)
        for (int i = 0; i < N; i++) Isa::store(q + g * a.D + d + i * L, sum[g][i]);
}

// G queries of one key head: scores[g][s] of slots from .. end, then the sums of values, in q's place.
template <int T, int G>
inline void attend_heads(const Attend& a, int b, int kv, int from, int end, float* q, float* scores, const float* sinks) {
    using F = Isa::F;
    constexpr int L = Isa::LANES, N = L == 8 ? 2 : 4;  // of values at once: AVX2 has half the registers
    const int n = end - from, D = a.D, stride = n + L;
    runs(a, b, kv, from, end, [&](int s, size_t at, int count) {
        for (const int last = s + count; s < last; s += L) {
            F sum[G][L];
            const int here = last - s < L ? last - s : L;
            for (int i = 0; i < here; i++, at += D) {
                F one[G];
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) one[g] = Isa::zero();
                for (int d = 0; d < D; d += L) {
                    const F k = Isa::meta(a.k, T, at + d);
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) one[g] = Isa::plus_product(one[g], k, Isa::meta(q, FP32, g * D + d));
                }
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) sum[g][i] = one[g];
            }
            for (int g = 0; g < G; g++) {
                for (int i = here; i < L; i++) sum[g][i] = Isa::zero();
                Isa::store(scores + (size_t)g * stride + s, Isa::times(totals<F, L>(sum[g]), Isa::all(a.scale)));
            }
        }
    });
    for (int g = 0; g < G; g++) softmax(scores + (size_t)g * stride, n, sinks ? sinks + g : nullptr);
    int d = 0;
    for (; d + N * L <= D; d += N * L) values<T, G, N>(a, b, kv, from, end, d, scores, stride, q);
    for (; d < D; d += L) values<T, G, 1>(a, b, kv, from, end, d, scores, stride, q);
}

// `attend_heads` of 1 to HEADS heads.
template <int T>
inline void attend_some(int heads, const Attend& a, int b, int kv, int from, int end, float* q, float* scores,
                        const float* sinks) {
    if (heads == 1) attend_heads<T, 1>(a, b, kv, from, end, q, scores, sinks);
    else if (heads == 2) attend_heads<T, 2>(a, b, kv, from, end, q, scores, sinks);
    else if (heads == 3) attend_heads<T, 3>(a, b, kv, from, end, q, scores, sinks);
    else attend_heads<T, 4>(a, b, kv, from, end, q, scores, sinks);
}

template <int T>
void attend(const Attend& a) {
    const int G = a.HQ / a.HKV, D = a.D, size = T == FP32 ? 4 : 2, rows = a.HQ + 2 * a.HKV;
    int longest = 0;
    for (int b = 0; b < a.B; b++) longest = a.pos[b] + 1 > longest ? a.pos[b] + 1 : longest;
#pragma omp parallel num_threads(a.threads) if (a.B * longest > 64)
    {
        float* scores = (float*)malloc(sizeof(float) * (HEADS * (size_t)(longest + Isa::LANES) + (HEADS + 1) * D));
        float *q = scores + HEADS * (size_t)(longest + Isa::LANES), *spare = q + HEADS * D;
#pragma omp for schedule(static)  // all of them before the first is read: rows of a table may be of one text
        for (int i = 0; i < a.B * a.HKV; i++) {
            const int b = i / a.HKV, kv = i % a.HKV, at = a.pos[b];
            size_t block = a.table ? a.table[(size_t)b * a.wide + at / a.BLOCK] : b, row = (size_t)b * rows * D;
            size_t here = block * a.block + kv * a.head + (size_t)(at % a.BLOCK) * D;
            widen<T>(q, a.qkv, row + (size_t)(a.HQ + kv) * D, D);
            turn<T>(a, q, spare, (char*)a.k + here * size, at, a.k_norm);
            memcpy((char*)a.v + here * size, (const char*)a.qkv + (row + (size_t)(a.HQ + a.HKV + kv) * D) * size,
                   (size_t)D * size);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * a.HKV; i++) {
            const int b = i / a.HKV, kv = i % a.HKV, at = a.pos[b], end = at + 1;
            const int from = a.window && end > a.window ? end - a.window : 0;
            const size_t row = (size_t)b * rows * D;
            for (int g0 = 0; g0 < G; g0 += HEADS) {
                const int heads = G - g0 < HEADS ? G - g0 : HEADS;
                const size_t to = ((size_t)b * a.HQ + kv * G + g0) * D;
                for (int g = 0; g < heads; g++) {
                    widen<T>(q + g * D, a.qkv, row + (size_t)(kv * G + g0 + g) * D, D);
                    turn<T>(a, q + g * D, spare, (char*)a.y + (to + (size_t)g * D) * size, at, a.q_norm);
                }
                const float* sinks = a.sinks ? a.sinks + kv * G + g0 : nullptr;
                attend_some<T>(heads, a, b, kv, from, end, q, scores, sinks);
                round_to<T>(a.y, to, q, heads * D);
            }
        }
        free(scores);
    }
}

template <int T>
void step_of(int what, const void* a) {
    if (what == ADD_NORM) add_norm<T>(*(const Norm*)a);
    else if (what == GATED) gated<T>(*(const Gated*)a);
    else attend<T>(*(const Attend*)a);
}

}  // namespace
