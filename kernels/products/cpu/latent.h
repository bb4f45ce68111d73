// A step of latent attention, absorbed: the function `step` of decode/latent.py. Keys and values of all heads are the cache's
// entries, so it is `attend` of one key head with queries of rank + rotated values, between two products of each head.
#pragma once
#include <cmath>
#include <cstdlib>

#include "args.h"
#include "mixture.h"
#include "rows.h"
#include "step.h"

namespace {

// A head's query in the dims of cache entries: its rotated part last.
template <int U>
inline void absorb(const Latent& a, const Prepare& turns, int h, int at, float* q, float* to, float* spare) {
    rotate(turns, q + a.nope, at);
    const float by = a.period ? position_factor(a, at) : 1;
    for (int r = 0; r < a.rank; r++) to[r] = 0;
    for (int n = 0; n < a.nope; n++) {
        widen<U>(spare, a.k_up, h * a.k_apart + (size_t)n * a.rank, a.rank);
        const float x = q[n] * by;
        for (int r = 0; r < a.rank; r++) to[r] += x * spare[r];
    }
    for (int r = 0; r < a.rotated; r++) to[a.rank + r] = q[a.nope + r] * by;
}

template <int T, int U, int KV>
void latent(const Latent& a) {
    const int D = a.rank + a.rotated, Q = padded<KV>(D), wide = a.nope + a.rotated;
    const int groups = (a.heads + HEADS - 1) / HEADS;
    Prepare turns{};
    turns.cos = a.cos, turns.sin = a.sin, turns.R = a.rotated, turns.neighbours = a.neighbours, turns.angle_kind = a.angle_kind;
    Attend over{};
    over.k = over.v = a.cache, over.k_scales = over.v_scales = a.scales,
    over.table = a.table, over.block = a.block, over.wide = a.wide, over.BLOCK = a.BLOCK;
    over.D = D, over.scale = a.scale;
    int longest = 0;
    for (int b = 0; b < a.B; b++) longest = a.pos[b] + 1 > longest ? a.pos[b] + 1 : longest;
#pragma omp parallel num_threads(a.threads)
    {
        const size_t scored = HEADS * (size_t)(longest + Isa::LANES);
        float* scores = (float*)malloc(sizeof(float) * (scored + HEADS * (size_t)Q + D + wide + a.v_dim));
        float *q = scores + scored, *spare = q + HEADS * Q, *one = spare + D, *out = one + wide;
#pragma omp for schedule(static)  // all of them before the first is read: rows of a table may be of one text
        for (int b = 0; b < a.B; b++) {
            const int at = a.pos[b];
            widen<T>(q, a.latent, (size_t)b * D, D);
            any_norm(q, a.norm, a.rank, 0, spare);
            rotate(turns, q + a.rank, at);
            round_to<T>(spare, 0, q, D);
            widen<T>(q, spare, 0, D);
            keep<T, KV>(a.cache, a.scales, slot_of(over, b, 0, at), q, D);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * groups; i++) {
            const int b = i / groups, h0 = i % groups * HEADS, heads = a.heads - h0 < HEADS ? a.heads - h0 : HEADS;
            for (int g = 0; g < heads; g++) {
                widen<T>(one, a.q, ((size_t)b * a.heads + h0 + g) * wide, wide);
                absorb<U>(a, turns, h0 + g, a.pos[b], one, q + g * Q, spare);
            }
            const int end = a.pos[b] + 1;
            attend_some<KV>(heads, over, b, 0, 0, end, q, scores, nullptr, spare);
            for (int g = 0; g < heads; g++) {
                const size_t h = h0 + g;
                for (int v = 0; v < a.v_dim; v++)
                    out[v] = dot_with<U>(a.v_up, h * a.v_apart + (size_t)v * a.rank, q + g * D, a.rank);
                round_to<T>(a.y, ((size_t)b * a.heads + h) * a.v_dim, out, a.v_dim);
            }
        }
        free(scores);
    }
}

template <int T, int U>
void latent(const Latent& a) {
    a.kv == E4M3 ? latent<T, U, E4M3>(a) : a.kv == FOUR ? latent<T, U, FOUR>(a) : latent<T, U, T>(a);
}

template <int T>
void mixture_of(int what, const void* a) {
    const Latent& of = *(const Latent*)a;
    if (what == ROUTE) route(*(const Route*)a);
    else if (what == EXPERTS) experts<T>(*(const Experts*)a);
    else if (of.up_kind == FP32) latent<T, FP32>(of);
    else latent<T, T>(of);  // refused otherwise
}

template <int T>
void codes_of(const Codes& a) { a.kv == E4M3 ? code<T, E4M3>(a) : code<T, FOUR>(a); }

template <int T>
void between_of(int what, const void* a) {
    if (what < PRODUCT) step_of<T>(what, a);
    else if (what < UPDATE) recurrent_of<T>(what, a);
    else if (what < ROUTE) rows_of<T>(what, a);
    else if (what < CODES) mixture_of<T>(what, a);
    else codes_of<T>(*(const Codes*)a);
}

// What lies between products: one call of args.h.
inline void between(int what, int dtype, const void* a) {
    if (dtype == BF16) between_of<BF16>(what, a);
    else if (dtype == FP16) between_of<FP16>(what, a);
    else between_of<FP32>(what, a);
}

}  // namespace
