// One token of each of B sequences in mixers with a state of fixed size: gated delta, Mamba2, short convolutions. These are the
// functions `step` of decode/recurrent/*.py, in fp32, with inputs and outputs in `dtype`, rounded once. One thread adds up each
// sum, in one order: the bits of y and of the states do not depend on the number of threads or on the other sequences.
#pragma once
#include "args.h"
#include "dense.h"
#include "step.h"

namespace {

constexpr int PART = 64;  // channels of a convolution, and values between two operations, that one thread takes at once
constexpr int SUMS = 16;  // partial sums of a dot product: as many as the widest register has lanes

inline float sigmoid(float x) { return 1 / (1 + exponential(-x)); }
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

inline float dot(const float* a, const float* b, int n) {
    float sum[SUMS] = {}, total = 0;
    int i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (int j = 0; j < SUMS; j++) sum[j] += a[i + j] * b[i + j];
    for (; i < n; i++) total += a[i] * b[i];
    for (int j = 0; j < SUMS; j++) total += sum[j];
    return total;
}

// A convolution of n <= PART channels from c on with the newest inputs x, which go into the state rounded to its dtype; x is
// replaced by the sums. `by` multiplies the weights. W: taps, 0 where only `a` says how many.
template <int S, int W>
inline void convolve(const Conv& a, size_t slot, int c, int n, float* x, float by) {
    const int taps = W ? W : a.W, kept = taps - 1;
    const int each = W ? PART : PART / taps > 0 ? PART / taps : 1;  // channels at once, by which the arrays hold any width
    float fixed[2 * PART * (W ? W : 1)], *values = W || taps <= PART ? fixed : (float*)malloc(sizeof(float) * 2 * taps);
    float* weights = values + (W ? PART * W : each * taps);
    for (int first = 0; first < n; first += each) {
        const int here = n - first < each ? n - first : each;
        const size_t state = (slot * a.C + c + first) * kept;
        float* newest = x + first;
        widen<S>(values, a.state, state, here * kept);
        widen(weights, a.weight, a.meta, (size_t)(c + first) * taps, here * taps);
        alignas(float) char rounded[sizeof(float) * PART];
        round_to<S>(rounded, 0, newest, here), widen<S>(newest, rounded, 0, here);
        for (int i = 0; i < here; i++) {
            float *held = values + i * kept, sum = 0;
            for (int t = 0; t < kept; t++) sum += held[t] * (weights[i * taps + t] * by);
            sum += newest[i] * (weights[i * taps + kept] * by);
            for (int t = 1; t < kept; t++) held[t - 1] = held[t];
            if (kept) held[kept - 1] = newest[i];
            newest[i] = sum;
        }
        round_to<S>(a.state, state, values, here * kept);
        if (a.bias) {
            widen(weights, a.bias, a.meta, c + first, here);
            for (int i = 0; i < here; i++) newest[i] += weights[i];
        }
    }
    if (values != fixed) free(values);
}

inline void convolve(const Conv& a, size_t slot, int c, int n, float* x, float by = 1) {
    if (a.kind == BF16) a.W == 4 ? convolve<BF16, 4>(a, slot, c, n, x, by) : convolve<BF16, 0>(a, slot, c, n, x, by);
    else if (a.kind == FP16) a.W == 4 ? convolve<FP16, 4>(a, slot, c, n, x, by) : convolve<FP16, 0>(a, slot, c, n, x, by);
    else a.W == 4 ? convolve<FP32, 4>(a, slot, c, n, x, by) : convolve<FP32, 0>(a, slot, c, n, x, by);
}

// silu of the convolution of columns `at` .. of x, which are channels c .. c + n, into `to`.
template <int T>
inline void mixed(const Conv& a, const void* x, size_t at, size_t slot, int c, int n, float* to, float by = 1) {
    for (int first = 0; first < n; first += PART) {
        const int here = n - first < PART ? n - first : PART;
        widen<T>(to + first, x, at + first, here);
        convolve(a, slot, c + first, here, to + first, by);
        for (int i = first; i < first + here; i++) to[i] *= sigmoid(to[i]);
    }
}

// Columns of a head's state: S <- decay S + k (beta (v - decay S^T k))^T and y = S^T q; S (K, columns), rows V apart. COLUMNS:
// as many as keep their part of the state in the L1 cache from the first reading to the second (16 KB for K = 128).
constexpr int COLUMNS = 32;

template <int N>
inline void delta_columns(float* S, const float* q, const float* k, const float* v, int K, int V, float decay, float beta,
                          float* y, int count) {
    const int n = N ? N : count;
    float update[COLUMNS] = {}, sum[COLUMNS] = {};
    for (int i = 0; i < K; i++)
        for (int j = 0; j < n; j++) update[j] += k[i] * (S[(size_t)i * V + j] * decay);
    for (int j = 0; j < n; j++) update[j] = (v[j] - update[j]) * beta;
    for (int i = 0; i < K; i++) {
        float* row = S + (size_t)i * V;
        for (int j = 0; j < n; j++) {
            row[j] = row[j] * decay + k[i] * update[j];
            sum[j] += q[i] * row[j];
        }
    }
    for (int j = 0; j < n; j++) y[j] = sum[j];
}

inline void delta_head(float* S, const float* q, const float* k, const float* v, int K, int V, float decay, float beta,
                       float* y) {
    int j = 0;
    for (; j + COLUMNS <= V; j += COLUMNS) delta_columns<COLUMNS>(S + j, q, k, v + j, K, V, decay, beta, y + j, COLUMNS);
    if (j < V) delta_columns<0>(S + j, q, k, v + j, K, V, decay, beta, y + j, V - j);
}

// A key head of one sequence, and the value heads that belong to it, are one thread's.
template <int T>
void delta(const Delta& a) {
    const int K = a.k_dim, V = a.v_dim, each = a.v_heads / a.k_heads, keys = a.k_heads * K, values = a.v_heads * V;
    const int row = 2 * keys + 2 * values + 2 * a.v_heads;
#pragma omp parallel num_threads(a.threads)
    {
        float* memory = (float*)malloc(sizeof(float) * (2 * K + 4 * (size_t)V));
        float *q = memory, *k = q + K, *v = k + K, *y = v + V, *z = y + V, *weight = z + V;
        widen(weight, a.norm, a.norm_kind, 0, V);
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * a.k_heads; i++) {
            const int b = i / a.k_heads, h = i % a.k_heads;
            const size_t slot = a.slots[b], x = (size_t)b * row, wide = 2 * (size_t)K + 2 * (size_t)each * V;
            const size_t group = x + h * wide;  // where `grouped`: q, k, v and z of a key head, then the next one's
            mixed<T>(a.conv, a.x, a.grouped ? group : x + (size_t)h * K, slot, h * K, K, q);
            mixed<T>(a.conv, a.x, a.grouped ? group + K : x + keys + (size_t)h * K, slot, keys + h * K, K, k);
            const float by_q = 1 / std::sqrt(dot(q, q, K) + a.eps) / std::sqrt((float)K);
            const float by_k = 1 / std::sqrt(dot(k, k, K) + a.eps);
            for (int d = 0; d < K; d++) q[d] *= by_q, k[d] *= by_k;
            for (int j = 0; j < each; j++) {
                const int head = h * each + j;
                const size_t v_at = a.grouped ? group + 2 * K + (size_t)j * V : x + 2 * keys + (size_t)head * V;
                const size_t z_at = a.grouped ? v_at + (size_t)each * V : x + 2 * keys + values + (size_t)head * V;
                const size_t gates = x + 2 * keys + 2 * values;
                const size_t b_at = a.grouped ? gates + 2 * (size_t)h * each + j : gates + head;
                const size_t a_at = a.grouped ? b_at + each : gates + a.v_heads + head;
                mixed<T>(a.conv, a.x, v_at, slot, 2 * keys + head * V, V, v);
                const float dt = softplus(read(a.x, T, a_at) + read(a.dt_bias, a.bias_kind, head));
                const float decay = std::exp(-std::exp(read(a.a_log, a.log_kind, head)) * dt);
                float* S = a.S + (slot * a.v_heads + head) * K * V;
                delta_head(S, q, k, v, K, V, decay, 1 / (1 + std::exp(-read(a.x, T, b_at))), y);
                norm(y, weight, V, a.norm_eps);
                widen<T>(z, a.x, z_at, V);
                for (int d = 0; d < V; d++) y[d] *= z[d] * sigmoid(z[d]);
                round_to<T>(a.y, (size_t)b * values + (size_t)head * V, y, V);
            }
        }
        free(memory);
    }
}

// S <- decay S + (dt u) B^T and y = S C + D u; S (dim, N), u and y (dim,).
inline void mamba2_head(float* S, const float* u, const float* B, const float* C, int dim, int N, float decay, float dt,
                        float D, float* y) {
    for (int d = 0; d < dim; d++) {
        float* row = S + (size_t)d * N;
        const float input = dt * u[d];
        for (int n = 0; n < N; n++) row[n] = row[n] * decay + input * B[n];
        y[d] = dot(row, C, N) + D * u[d];
    }
}

// The convolution of all channels, then the heads, then gate and norm of each part that is normed by itself.
template <int T>
void mamba2(const Mamba2& a) {
    const int inner = a.heads * a.dim, BC = a.groups * a.N, C = inner + 2 * BC, row = inner + C + a.heads;
    const int parts = (C + PART - 1) / PART, norms = a.norm ? a.norm_groups : a.heads, wide = inner / norms;
    float* all = (float*)malloc(sizeof(float) * ((size_t)a.B * (C + inner) + 2 * (size_t)wide * a.threads));
    float *channels = all, *ys = channels + (size_t)a.B * C, *spare = ys + (size_t)a.B * inner;
#pragma omp parallel num_threads(a.threads)
    {
#ifdef _OPENMP
        float *gate = spare + 2 * (size_t)wide * omp_get_thread_num(), *weight = gate + wide;
#else
        float *gate = spare, *weight = gate + wide;
#endif
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * parts; i++) {
            const int b = i / parts, end = (i % parts + 1) * PART < C ? (i % parts + 1) * PART : C;
            for (int c = i % parts * PART; c < end;) {  // a part may hold channels of x, B and C, whose constants differ
                const int kind = c < inner ? 0 : c < inner + BC ? 1 : 2, last = kind == 0 ? inner : inner + kind * BC;
                const int n = (end < last ? end : last) - c;
                float* to = channels + (size_t)b * C + c;
                mixed<T>(a.conv, a.x, (size_t)b * row + inner + c, a.slots[b], c, n, to, a.scales[1 + kind]);
                c += n;
            }
        }
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * a.heads; i++) {
            const int b = i / a.heads, h = i % a.heads, group = h / (a.heads / a.groups);
            const float *u = channels + (size_t)b * C + (size_t)h * a.dim, *B = channels + (size_t)b * C + inner + group * a.N;
            float dt = read(a.x, T, (size_t)b * row + inner + C + h) * a.scales[4] + read(a.dt_bias, a.bias_kind, h);
            dt = softplus(dt);
            dt = dt < a.least ? a.least : dt > a.most ? a.most : dt;
            const float decay = std::exp(dt * -std::exp(read(a.a_log, a.log_kind, h)));
            float* S = a.S + ((size_t)a.slots[b] * a.heads + h) * a.dim * a.N;
            mamba2_head(S, u, B, B + BC, a.dim, a.N, decay, dt, read(a.d, a.d_kind, h), ys + (size_t)b * inner + h * a.dim);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < a.B * norms; i++) {
            const int b = i / norms, first = i % norms * wide;
            float* y = ys + (size_t)b * inner + first;
            widen<T>(gate, a.x, (size_t)b * row + first, wide);
            for (int d = 0; d < wide; d++) gate[d] *= a.scales[0], gate[d] *= sigmoid(gate[d]);
            if (!a.gate_last || !a.norm)
                for (int d = 0; d < wide; d++) y[d] *= gate[d];
            if (a.norm) {
                widen(weight, a.norm, a.norm_kind, first, wide);
                norm(y, weight, wide, a.norm_eps);
                if (a.gate_last)
                    for (int d = 0; d < wide; d++) y[d] *= gate[d];
            }
            round_to<T>(a.y, (size_t)b * inner + first, y, wide);
        }
    }
    free(all);
}

template <int T>
void short_conv(const ShortConv& a) {
    const int C = a.conv.C, parts = (C + PART - 1) / PART;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.B > 1)
    for (int i = 0; i < a.B * parts; i++) {
        const int b = i / parts, c = i % parts * PART, n = C - c < PART ? C - c : PART;
        const size_t x = (size_t)b * 3 * C + c;
        float B[PART], gate[PART], u[PART];
        widen<T>(B, a.x, x, n), widen<T>(gate, a.x, x + C, n), widen<T>(u, a.x, x + 2 * C, n);
        for (int j = 0; j < n; j++) u[j] *= B[j];
        convolve(a.conv, a.slots[b], c, n, u);
        for (int j = 0; j < n; j++) u[j] *= gate[j];
        round_to<T>(a.y, (size_t)b * C + c, u, n);
    }
}

template <int T>
void recurrent_of(int what, const void* a) {
    if (what == DELTA) delta<T>(*(const Delta*)a);
    else if (what == MAMBA2) mamba2<T>(*(const Mamba2*)a);
    else short_conv<T>(*(const ShortConv*)a);
}

}  // namespace
