// What layers of other families than Llama's do between products: the functions of decode/norms.py, prepare.py and `opened` of
// activation.py, in fp32 from `dtype`, rounded once to it. A row, or a head of a row, is one thread's.
#pragma once
#include "args.h"
#include "dense.h"
#include "recurrent.h"
#include "step.h"

namespace {

// The norm of n values in place; `spare` has room for n more. Weights of the values from `at` on.
inline void any_norm(float* x, const AnyNorm& a, int n, int at, float* spare) {
    const int wide = n / a.groups;
    for (int g = 0; g < a.groups; g++) {
        float* part = x + g * wide;
        if (a.layer) {
            float total = 0;
            for (int i = 0; i < wide; i++) total += part[i];
            for (int i = 0; i < wide; i++) part[i] -= total / wide;
        }
        const float by = 1 / std::sqrt(dot(part, part, wide) / wide + a.eps);
        for (int i = 0; i < wide; i++) part[i] *= by;
    }
    if (a.weight) {
        widen(spare, a.weight, a.weight_kind, at, n);
        for (int i = 0; i < n; i++) x[i] *= spare[i];
    }
    if (a.bias) {
        widen(spare, a.bias, a.bias_kind, at, n);
        for (int i = 0; i < n; i++) x[i] += spare[i];
    }
}

// x <- (x + scale post(delta + second)) after, then y = norm(x); without delta x stays, without y nothing is normed.
template <int T>
void update(const Update& a) {
    const int H = a.H;
    const float after = a.after ? read(a.after, a.after_kind, 0) : 1;
    float* memory = (float*)malloc(sizeof(float) * 3 * (size_t)H * a.threads);
#pragma omp parallel num_threads(a.threads) if (a.M > 1)
    {
#ifdef _OPENMP
        float* x = memory + 3 * (size_t)H * omp_get_thread_num();
#else
        float* x = memory;
#endif
        float *added = x + H, *spare = added + H;
#pragma omp for schedule(static)
        for (int m = 0; m < a.M; m++) {
            const size_t at = (size_t)m * H;
            widen<T>(x, a.x, at, H);
            if (a.delta) {
                widen<T>(added, a.delta, at, H);
                if (a.second) {
                    widen<T>(spare, a.second, at, H);
                    for (int i = 0; i < H; i++) added[i] += spare[i];
                }
                if (a.posts) any_norm(added, a.post, H, 0, spare);
                for (int i = 0; i < H; i++) x[i] = (x[i] + a.scale * added[i]) * after;
                round_to<T>(a.x, at, x, H);
                widen<T>(x, a.x, at, H);
            }
            if (a.y) {
                any_norm(x, a.norm, H, 0, spare);
                round_to<T>(a.y, at, x, H);
            }
        }
    }
    free(memory);
}

// y sigmoid(gate), gate (M, N) or (M, 1).
template <int T>
void open(const Open& a) {
    const int parts = (a.N + AT_ONCE - 1) / AT_ONCE;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.M > 1)
    for (int i = 0; i < a.M * parts; i++) {
        const int m = i / parts, first = i % parts * AT_ONCE, n = a.N - first < AT_ONCE ? a.N - first : AT_ONCE;
        const size_t at = (size_t)m * a.N + first;
        float y[AT_ONCE], gate[AT_ONCE];
        widen<T>(y, a.x, at, n);
        if (a.wide == 1)
            for (int j = 0; j < n; j++) gate[j] = read(a.gate, T, m);
        else
            widen<T>(gate, a.gate, at, n);
        for (int j = 0; j < n; j++) y[j] *= sigmoid(gate[j]);
        round_to<T>(a.y, at, y, n);
    }
}

// What a query at position `at` is multiplied by, where queries are scaled by position.
template <class Of>
inline float position_factor(const Of& a, int at) {
    return 1 + a.beta * std::log1p(std::floor((at + a.offset) / a.period));
}

inline void rotate(const Prepare& a, float* x, int at) {
    const int half = a.R / 2, step = a.neighbours ? 2 : 1, apart = a.neighbours ? 1 : half;
    for (int i = 0; i < half; i++) {
        const float c = read(a.cos, a.angle_kind, (size_t)at * a.R + i), s = read(a.sin, a.angle_kind, (size_t)at * a.R + i);
        const float first = x[i * step], second = x[i * step + apart];
        x[i * step] = first * c - second * s, x[i * step + apart] = second * c + first * s;
    }
}

// Heads of q or k: n values, normed before or after the rotation.
inline void rotate_and_norm(const Prepare& a, float* x, int n, int at, const AnyNorm& norm, int normed, float* spare) {
    for (int pass = 0; pass < 2; pass++)
        if (pass == a.norm_last) {
            if (normed) any_norm(x, norm, n, 0, spare);
        } else if (a.cos) {
            for (int d = 0; d < n; d += a.D) rotate(a, x + d, at);
        }
}

template <int T>
void prepare(const Prepare& a) {
    const int D = a.D, wide = a.gated ? 2 * D : D, row = a.by_head ? 3 * a.HQ * D : a.HQ * wide + (a.writes ? a.values : 0);
    const int out = (a.HQ + (a.writes ? 2 * a.HKV : 0)) * D;
    const int qs = a.all ? 1 : a.HQ, ks = !a.writes ? 0 : a.all ? 1 : a.HKV, vs = a.writes ? a.HKV : 0, units = qs + ks + vs;
    const int q_wide = a.all ? a.HQ * D : D, k_wide = a.all ? a.HKV * D : D, most = q_wide > k_wide ? q_wide : k_wide;
#pragma omp parallel num_threads(a.threads) if (a.B > 1)
    {
        float *x = (float*)malloc(sizeof(float) * 2 * (size_t)most), *spare = x + most;
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * units; i++) {
            const int b = i / units, u = i % units, at = a.pos[b];
            const size_t from = (size_t)b * row, k0 = from + (size_t)a.HQ * wide, to = (size_t)b * out;
            const auto q_at = [&](int h) { return a.by_head ? from + 3 * (size_t)h * D : from + (size_t)h * wide; };
            const auto k_at = [&](int h) { return a.by_head ? q_at(h) + D : k0 + (size_t)h * D; };
            if (u < qs) {
                for (int h = 0; h < q_wide / D; h++) widen<T>(x + h * D, a.x, q_at(u + h), D);
                rotate_and_norm(a, x, q_wide, at, a.q_norm, a.q_normed, spare);
                if (a.period) {
                    const float factor = position_factor(a, at);
                    for (int d = 0; d < q_wide; d++) x[d] *= factor;
                }
                round_to<T>(a.y, to + (size_t)u * D, x, q_wide);
                for (int h = 0; a.gated && h < q_wide / D; h++) {
                    widen<T>(x, a.x, q_at(u + h) + D, D);
                    round_to<T>(a.gate, ((size_t)b * a.HQ + u + h) * D, x, D);
                }
            } else if (u < qs + ks) {
                const int k = u - qs;
                for (int h = 0; h < k_wide / D; h++) widen<T>(x + h * D, a.x, k_at(k + h), D);
                for (int d = 0; d < k_wide; d++) x[d] *= a.key_scale;
                rotate_and_norm(a, x, k_wide, at, a.k_norm, a.k_normed, spare);
                round_to<T>(a.y, to + (size_t)(a.HQ + k) * D, x, k_wide);
            } else {
                const int v = u - qs - ks;
                const size_t v_at = a.by_head ? q_at(v) + 2 * D : a.v_is_k ? k_at(v) : k0 + (size_t)(a.HKV + v) * D;
                widen<T>(x, a.x, v_at, D);
                if (a.v_normed) any_norm(x, a.v_norm, D, 0, spare);
                round_to<T>(a.y, to + (size_t)(a.HQ + a.HKV + v) * D, x, D);
            }
        }
        free(x);
    }
}

template <int T>
void rows_of(int what, const void* a) {
    if (what == UPDATE) update<T>(*(const Update*)a);
    else if (what == OPEN) open<T>(*(const Open*)a);
    else prepare<T>(*(const Prepare*)a);
}

}  // namespace
