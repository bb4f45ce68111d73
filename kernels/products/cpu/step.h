// What a layer does between its products while decoding, in fp32 from `dtype`, rounded once to it: the functions of
// decode/reference.py. A row, or a head of a sequence, is one thread's, its sums are in one order: equal bits always.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "args.h"
#include "dense.h"

namespace {

// e^x within 2 ulp, in operations that the compiler makes vectors of; 0 below -87, infinite above 88.
inline float exponential(float x) {
    float clamped = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
    float n = __builtin_rintf(clamped * 1.44269504f), r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f, p = p * r * r + r + 1;
    uint32_t u = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &u, 4);
    return x < -87.f ? 0 : x > 88.f ? INFINITY : x != x ? x : p * scale;
}

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

template <int T>
void gated(const Gated& a) {
    constexpr int PART = 256;  // values at once
    const int parts = (a.I + PART - 1) / PART;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.M > 1)
    for (long i = 0; i < (long)a.M * parts; i++) {
        size_t m = i / parts, first = i % parts * PART, at = m * 2 * a.I + first;
        int n = a.I - (int)first < PART ? a.I - (int)first : PART;
        float gate[PART], up[PART];
        widen<T>(gate, a.x, at, n);
        widen<T>(up, a.x, at + a.I, n);
        if (a.gelu)  // by tanh(u) = 1 - 2 / (e^2u + 1)
            for (int j = 0; j < n; j++) {
                float g = gate[j], u = 1.5957691216f * (g + 0.044715f * g * g * g);
                up[j] *= g * (1 - 1 / (exponential(u) + 1));
            }
        else
            for (int j = 0; j < n; j++) up[j] *= gate[j] / (1 + exponential(-gate[j]));
        round_to<T>(a.y, m * a.I + first, up, n);
    }
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

// The queries first .. first + HEADS of one key head: scores[g][s] of slots from .. end, then the sums of values, in q's place.
template <int T>
inline void attend_heads(const Attend& a, int b, int kv, int from, int end, float* q, int heads, float* scores,
                         const float* sinks) {
    using F = Isa::F;
    constexpr int L = Isa::LANES;
    const int n = end - from, D = a.D;
    auto slot = [&](int s) {
        size_t block = a.table ? a.table[(size_t)b * a.wide + s / a.BLOCK] : b;
        return block * a.block + kv * a.head + (size_t)(s % a.BLOCK) * D;
    };
    for (int s = 0; s < n; s++) {
        size_t at = slot(from + s);
        F sum[HEADS];
        for (int g = 0; g < HEADS; g++) sum[g] = Isa::zero();
        for (int d = 0; d < D; d += L) {
            F k = Isa::meta(a.k, T, at + d);
            for (int g = 0; g < HEADS; g++) sum[g] = Isa::plus_product(sum[g], k, Isa::meta(q, FP32, g * D + d));
        }
        for (int g = 0; g < heads; g++) scores[(size_t)g * n + s] = Isa::total(sum[g]) * a.scale;
    }
    for (int g = 0; g < heads; g++) {
        float *p = scores + (size_t)g * n, most = sinks ? sinks[g] : p[0], total = 0;
        for (int s = 0; s < n; s++) most = p[s] > most ? p[s] : most;
        for (int s = 0; s < n; s++) p[s] = exponential(p[s] - most);
        for (int s = 0; s < n; s++) total += p[s];
        if (sinks) total += exponential(sinks[g] - most);
        const float by = 1 / total;
        for (int s = 0; s < n; s++) p[s] *= by;
    }
    for (int d = 0; d < D; d += L) {
        F sum[HEADS];
        for (int g = 0; g < HEADS; g++) sum[g] = Isa::zero();
        for (int s = 0; s < n; s++) {
            F v = Isa::meta(a.v, T, slot(from + s) + d);
            for (int g = 0; g < heads; g++) sum[g] = Isa::plus_product(sum[g], v, Isa::all(scores[(size_t)g * n + s]));
        }
        for (int g = 0; g < heads; g++) Isa::store(q + g * D + d, sum[g]);
    }
}

template <int T>
void attend(const Attend& a) {
    const int G = a.HQ / a.HKV, D = a.D, size = T == FP32 ? 4 : 2, rows = a.HQ + 2 * a.HKV;
    int longest = 0;
    for (int b = 0; b < a.B; b++) longest = a.pos[b] + 1 > longest ? a.pos[b] + 1 : longest;
#pragma omp parallel num_threads(a.threads) if (a.B * longest > 64)
    {
        float* scores = (float*)malloc(sizeof(float) * ((size_t)HEADS * longest + (HEADS + 1) * D));
        float *q = scores + (size_t)HEADS * longest, *spare = q + HEADS * D;
#pragma omp for schedule(static)  // all of them before the first is read: rows of a table may be of one text
        for (int i = 0; i < a.B * a.HKV; i++) {
            const int b = i / a.HKV, kv = i % a.HKV, at = a.pos[b];
            size_t block = a.table ? a.table[(size_t)b * a.wide + at / a.BLOCK] : b, row = (size_t)b * rows * D;
            size_t here = block * a.block + kv * a.head + (size_t)(at % a.BLOCK) * D;
            widen<T>(q, a.qkv, row + (size_t)(a.HQ + kv) * D, D);
            turn<T>(a, q, spare, (char*)a.k + here * size, at, a.k_norm);
            memcpy((char*)a.v + here * size, (const char*)a.qkv + (row + (size_t)(a.HQ + a.HKV + kv) * D) * size, (size_t)D * size);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * a.HKV; i++) {
            const int b = i / a.HKV, kv = i % a.HKV, at = a.pos[b], end = at + 1;
            const int from = a.window && end > a.window ? end - a.window : 0;
            const size_t row = (size_t)b * rows * D;
            for (int g0 = 0; g0 < G; g0 += HEADS) {
                const int heads = G - g0 < HEADS ? G - g0 : HEADS;
                const size_t to = ((size_t)b * a.HQ + kv * G + g0) * D;
                memset(q, 0, sizeof(float) * HEADS * D);
                for (int g = 0; g < heads; g++) {
                    widen<T>(q + g * D, a.qkv, row + (size_t)(kv * G + g0 + g) * D, D);
                    turn<T>(a, q + g * D, spare, (char*)a.y + (to + (size_t)g * D) * size, at, a.q_norm);
                }
                attend_heads<T>(a, b, kv, from, end, q, heads, scores, a.sinks ? a.sinks + kv * G + g0 : nullptr);
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

inline void step(int what, int dtype, const void* a) {
    if (dtype == BF16) step_of<BF16>(what, a);
    else if (dtype == FP16) step_of<FP16>(what, a);
    else step_of<FP32>(what, a);
}

}  // namespace
