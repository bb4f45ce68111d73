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
#include "coded.h"
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

// One head of q or k: normed, turned on its first R dims, rounded to T.
template <int T>
inline void turn(const Attend& a, float* x, float* spare, int at, const void* weight) {
    const int half = a.R / 2;
    if (weight) {
        widen(spare, weight, a.meta, 0, a.D);
        norm(x, spare, a.D, a.eps);
    }
    for (int i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        size_t c = (size_t)at * a.R + i;
        x[i] = first * read(a.cos, T, c) - second * read(a.sin, T, c);
        x[half + i] = second * read(a.cos, T, c + half) + first * read(a.sin, T, c + half);
    }
    round_to<T>(spare, 0, x, a.D);
    widen<T>(x, spare, 0, a.D);
}

constexpr int HEADS = 4;  // queries that share a key while it is in registers

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

// Where slot s of a sequence's key head is, in slots of the cache.
inline size_t slot_of(const Attend& a, int b, int kv, int s) {
    const size_t block = a.table ? a.table[(size_t)b * a.wide + s / a.BLOCK] : b;
    return block * a.block + kv * a.head + s % a.BLOCK;
}

// what(s, slot, count) of slots from + s .. from + s + count, which lie next to each other from `slot` of the cache on.
template <class What>
INLINE void runs(const Attend& a, int b, int kv, int from, int end, What what) {
    for (int s = from; s < end;) {
        const int rest = a.BLOCK - s % a.BLOCK, count = end - s < rest ? end - s : rest;
        what(s - from, slot_of(a, b, kv, s), count);
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

// Sums of values of N registers of each head, from q's value d on, into q's place.
template <int KV, int G, int N>
inline void values(const Attend& a, int b, int kv, int from, int end, int d, const float* scores, int stride, float* q) {
    using F = Isa::F;
    constexpr int L = Isa::LANES, P = PARTS<KV>;
    const int W = width<KV>(a.D), Q = padded<KV>(a.D);
    const bool half = N == P && d + N * L > a.D;
    F sum[G][N];
    for (int g = 0; g < G; g++)
        for (int i = 0; i < N; i++) sum[g][i] = Isa::zero();
    runs(a, b, kv, from, end, [&](int s, size_t slot, int count) {
        size_t at = slot * W + d / P;
        for (const int last = s + count; s < last; s++, at += W) {
            F by[G];
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) by[g] = Isa::all(scores[(size_t)g * stride + s]);
#pragma GCC unroll 4
            for (int i = 0; i < N; i += P) {
                F v[P];
                read_slot<KV>(v, a.v, at + i * L / P, half);
#pragma GCC unroll 2
                for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) sum[g][i + p] = Isa::plus_product(sum[g][i + p], v[p], by[g]);
            }
        }
    });
    for (int g = 0; g < G; g++)
        for (int i = 0; i < N; i++) Isa::store(q + g * Q + d + i * L, sum[g][i]);
}

// G queries of one key head: scores[g][s] of slots from .. end, then the sums of values, in q's place. Queries are `query_for`
// of the cache's kind; so are the sums, but for common[g], which all dims of a head have in common.
template <int KV, int G>
inline void attend_heads(const Attend& a, int b, int kv, int from, int end, float* q, float* scores, const float* sinks,
                         float* common) {
    using F = Isa::F;
    constexpr int L = Isa::LANES, P = PARTS<KV>, N = L == 8 ? 2 : 4;  // of values at once: AVX2 has half the registers
    const int n = end - from, W = width<KV>(a.D), Q = padded<KV>(a.D), stride = n + L, whole = a.D / (P * L) * P * L;
    float total[G] = {};
    if (KV == FOUR)
        for (int g = 0; g < G; g++)
            for (int d = 0; d < Q; d++) total[g] += q[g * Q + d];
    runs(a, b, kv, from, end, [&](int s, size_t slot, int count) {
        const int first = s;
        size_t at = slot * W;
        for (const int last = s + count; s < last; s += L) {
            F sum[G][L];
            const int here = last - s < L ? last - s : L;
            for (int i = 0; i < here; i++, at += W) {
                F one[G];
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) one[g] = Isa::zero();
                const auto add = [&](int d, bool half) __attribute__((always_inline)) {
                    F k[P];
                    read_slot<KV>(k, a.k, at + d / P, half);
#pragma GCC unroll 2
                    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                        for (int g = 0; g < G; g++)
                            one[g] = Isa::plus_product(one[g], k[p], Isa::meta(q, FP32, g * Q + d + p * L));
                };
                for (int d = 0; d < whole; d += P * L) add(d, false);
                if (P > 1 && whole < a.D) add(whole, true);
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) sum[g][i] = one[g];
            }
            for (int g = 0; g < G; g++) {
                for (int i = here; i < L; i++) sum[g][i] = Isa::zero();
                Isa::store(scores + (size_t)g * stride + s, Isa::times(totals<F, L>(sum[g]), Isa::all(a.scale)));
            }
        }
        for (int g = 0; g < G; g++)
            scaled<KV>(scores + (size_t)g * stride + first, a.k_scales, slot, count, a.k, W, a.scale * total[g], false);
    });
    for (int g = 0; g < G; g++) softmax(scores + (size_t)g * stride, n, sinks ? sinks + g : nullptr), common[g] = 0;
    if (CODED<KV>)
        runs(a, b, kv, from, end, [&](int s, size_t slot, int count) {
            for (int g = 0; g < G; g++)
                common[g] += scaled<KV>(scores + (size_t)g * stride + s, a.v_scales, slot, count, a.v, W, 0, true);
        });
    int d = 0;
    for (; d + N * L <= a.D; d += N * L) values<KV, G, N>(a, b, kv, from, end, d, scores, stride, q);
    for (; d < Q; d += P * L) values<KV, G, P>(a, b, kv, from, end, d, scores, stride, q);
}

// 1 to HEADS queries of D values, padded<KV>(D) apart, over slots from .. end; their sums of values D apart in their place.
template <int KV>
inline void attend_some(int heads, const Attend& a, int b, int kv, int from, int end, float* q, float* scores,
                        const float* sinks, float* spare) {
    const int D = a.D, Q = padded<KV>(D);
    float common[HEADS];
    for (int g = 0; g < heads; g++) query_for<KV>(q + g * Q, D, spare);
    if (heads == 1) attend_heads<KV, 1>(a, b, kv, from, end, q, scores, sinks, common);
    else if (heads == 2) attend_heads<KV, 2>(a, b, kv, from, end, q, scores, sinks, common);
    else if (heads == 3) attend_heads<KV, 3>(a, b, kv, from, end, q, scores, sinks, common);
    else attend_heads<KV, 4>(a, b, kv, from, end, q, scores, sinks, common);
    for (int g = 0; g < heads; g++) {
        values_from<KV>(q + g * Q, D, common[g], spare);
        if (Q > D) memmove(q + g * D, q + g * Q, sizeof(float) * D);
    }
}

template <int T, int KV>
void attend(const Attend& a) {
    const int G = a.HQ / a.HKV, D = a.D, Q = padded<KV>(D), rows = a.HQ + 2 * a.HKV;
    int longest = 0;
    for (int b = 0; b < a.B; b++) longest = a.pos[b] + 1 > longest ? a.pos[b] + 1 : longest;
#pragma omp parallel num_threads(a.threads) if (a.B * longest > 64)
    {
        const size_t scored = HEADS * (size_t)(longest + Isa::LANES);
        float* scores = (float*)malloc(sizeof(float) * (scored + HEADS * Q + D));
        float *q = scores + scored, *spare = q + HEADS * Q;
#pragma omp for schedule(static)  // all of them before the first is read: rows of a table may be of one text
        for (int i = 0; i < a.B * a.HKV; i++) {
            const int b = i / a.HKV, kv = i % a.HKV;
            const size_t slot = slot_of(a, b, kv, a.pos[b]), key = ((size_t)b * rows + a.HQ + kv) * D;
            widen<T>(q, a.qkv, key, D);
            turn<T>(a, q, spare, a.pos[b], a.k_norm);
            keep<T, KV>(a.k, a.k_scales, slot, q, D);
            widen<T>(q, a.qkv, key + (size_t)a.HKV * D, D);
            keep<T, KV>(a.v, a.v_scales, slot, q, D);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * a.HKV; i++) {
            const int b = i / a.HKV, kv = i % a.HKV, end = a.pos[b] + 1;
            const int from = a.window && end > a.window ? end - a.window : 0;
            for (int g0 = 0; g0 < G; g0 += HEADS) {
                const int heads = G - g0 < HEADS ? G - g0 : HEADS, head = kv * G + g0;
                for (int g = 0; g < heads; g++) {
                    widen<T>(q + g * Q, a.qkv, ((size_t)b * rows + head + g) * D, D);
                    turn<T>(a, q + g * Q, spare, a.pos[b], a.q_norm);
                }
                attend_some<KV>(heads, a, b, kv, from, end, q, scores, a.sinks ? a.sinks + head : nullptr, spare);
                round_to<T>(a.y, ((size_t)b * a.HQ + head) * D, q, heads * D);
            }
        }
        free(scores);
    }
}

template <int T>
void step_of(int what, const void* a) {
    if (what == ADD_NORM) add_norm<T>(*(const Norm*)a);
    else if (what == GATED) gated<T>(*(const Gated*)a);
    else if (((const Attend*)a)->kv == E4M3) attend<T, E4M3>(*(const Attend*)a);
    else if (((const Attend*)a)->kv == FOUR) attend<T, FOUR>(*(const Attend*)a);
    else attend<T, T>(*(const Attend*)a);
}

}  // namespace
