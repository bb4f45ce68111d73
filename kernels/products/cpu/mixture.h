// Routers and experts of mixtures: the functions of decode/router.py and of QuantExperts. Logits are one thread's each, an
// expert's product is that of product.h, a token's experts are added in their order: equal bits always.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "args.h"
#include "product.h"
#include "rows.h"

namespace {

// Of n values of a weight from `at` on, and as many of x.
template <int T>
inline float dot_with(const void* w, size_t at, const float* x, int n) {
    using F = Isa::F;
    constexpr int L = Isa::LANES;
    F first = Isa::zero(), second = Isa::zero();
    int i = 0;
    for (; i + 2 * L <= n; i += 2 * L) {
        first = Isa::plus_product(first, Isa::meta(w, T, at + i), Isa::meta(x, FP32, i));
        second = Isa::plus_product(second, Isa::meta(w, T, at + i + L), Isa::meta(x, FP32, i + L));
    }
    float total = Isa::total(first) + Isa::total(second);
    for (; i < n; i++) total += read(w, T, at + i) * x[i];
    return total;
}

inline float dot_with(const void* w, int kind, size_t at, const float* x, int n) {
    if (kind == BF16) return dot_with<BF16>(w, at, x, n);
    return kind == FP16 ? dot_with<FP16>(w, at, x, n) : dot_with<FP32>(w, at, x, n);
}

// The k largest of n scores, first those of lower indices where scores are equal; -inf in `score` afterwards marks nothing:
// `taken` does, so that there are k even of NaNs.
inline void largest(const float* score, int n, int k, char* taken, int64_t* ids) {
    memset(taken, 0, n);
    for (int j = 0; j < k; j++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || score[e] > score[best])) best = e;
        taken[best] = 1, ids[j] = best;
    }
}

// Scores of experts outside of the best groups <- -inf. best: room for a value a group, ids: for an index.
inline void keep_groups(const Route& a, float* score, float* best, char* taken, int64_t* ids) {
    const int wide = a.E / a.groups;
    for (int g = 0; g < a.groups; g++) {
        float top = -INFINITY, next = -INFINITY;
        for (int e = g * wide; e < (g + 1) * wide; e++)
            if (score[e] > top) next = top, top = score[e];
            else if (score[e] > next) next = score[e];
        best[g] = a.top2 ? top + next : top;
    }
    largest(best, a.groups, a.kept, taken, ids);
    for (int e = 0; e < a.E; e++)
        if (!taken[e / wide]) score[e] = -INFINITY;
}

// A token's experts and weights from its logits. spare: 2 E values, then E indices and E bytes.
inline void choose(const Route& a, int m, float* logits, float* choice, int64_t* some, char* taken) {
    const int E = a.E, k = a.top_k;
    if (a.sigmoid)
        for (int e = 0; e < E; e++) logits[e] = sigmoid(logits[e]);
    else
        softmax(logits, E, nullptr);
    for (int e = 0; e < E; e++) choice[e] = logits[e] + (a.choice_bias ? read(a.choice_bias, a.choice_kind, e) : 0);
    if (a.groups > a.kept) keep_groups(a, choice, choice + E, taken, some);
    int64_t* ids = a.ids + (size_t)m * k;
    float *weights = a.weights + (size_t)m * k, sum = 0;
    largest(choice, E, k, taken, ids);
    for (int j = 0; j < k; j++) sum += weights[j] = logits[ids[j]];
    for (int j = 0; j < k; j++) {
        if (a.normalise) weights[j] /= sum + a.sum_eps;
        weights[j] *= a.factor * (a.each ? read(a.each, a.each_kind, ids[j]) : 1);
    }
    if (!a.rounded || a.dtype == FP32) return;
    for (int j = 0; j < k; j++) weights[j] = rounded_to(a.dtype, weights[j]);
}

inline void route(const Route& a) {
    const int H = a.H, E = a.E;
    float* memory = (float*)malloc(sizeof(float) * ((size_t)a.M * (H + E) + H));
    float *x = memory, *logits = memory + (size_t)a.M * H, *spare = logits + (size_t)a.M * E;
    for (int m = 0; m < a.M; m++) {
        float* row = x + (size_t)m * H;
        widen(row, a.x, a.dtype, (size_t)m * H, H);
        if (a.normed) any_norm(row, a.norm, H, 0, spare);
        if (a.scale) {
            widen(spare, a.scale, a.scale_kind, 0, H);
            const float by = 1 / std::sqrt((float)H);
            for (int i = 0; i < H; i++) row[i] = row[i] * spare[i] * by;
        }
    }
    if (a.weight_kind == FP32) {
#pragma omp parallel for schedule(static) num_threads(a.threads)
        for (int e = 0; e < E; e++)
            for (int m = 0; m < a.M; m++)
                logits[(size_t)m * E + e] = dot_with<FP32>(a.weight, (size_t)e * H, x + (size_t)m * H, H);
    } else {
        Args p{};
        p.words = (const int32_t*)a.weight, p.meta = a.weight_kind, p.y = logits, p.dtype = FP32;
        p.M = a.M, p.N = E, p.K = H, p.threads = a.threads;
        a.weight_kind == BF16 ? dense_rows<Widened<BF16>>(p, x) : dense_rows<Widened<FP16>>(p, x);
    }
    for (size_t i = 0; i < (size_t)a.M * E; i++) {
        if (a.logits_bias) logits[i] += read(a.logits_bias, a.logits_kind, i % E);
        if (a.usual && a.weight_kind != FP32) logits[i] = rounded_to(a.weight_kind, logits[i]);
    }
#pragma omp parallel num_threads(a.threads) if (a.M > 1)
    {
        float* choice = (float*)malloc((size_t)E * (2 * sizeof(float) + sizeof(int64_t) + 1));
        int64_t* some = (int64_t*)(choice + 2 * (size_t)E);
#pragma omp for schedule(static)
        for (int m = 0; m < a.M; m++) choose(a, m, logits + (size_t)m * E, choice, some, (char*)(some + E));
        free(choice);
    }
    free(memory);
}

// The product of expert e: that of expert 0, moved.
inline void product_of(Args p, const int64_t* apart, int64_t e, int rows, int threads, const void* x, void* y) {
    const auto moved = [&](auto& q, int i) {
        if (q) q = (std::remove_reference_t<decltype(q)>)((const char*)q + apart[i] * e);
    };
    moved(p.words, 0), moved(p.scales, 1), moved(p.zeros, 2), moved(p.bias, 3), moved(p.factor, 4);
    p.M = rows, p.threads = threads, p.x = x, p.y = y;
    product(p);
}

template <int T>
void experts(const Experts& a) {
    const size_t size = T == FP32 ? 4 : 2, H = a.up.K, N = a.up.N, I = a.down.K, out = a.down.N, slots = (size_t)a.M * a.top_k;
    int* first = (int*)calloc(a.E + 1 + slots, sizeof(int));  // of each expert's slots in `order`
    int *order = first + a.E + 1, most = 0;
    for (size_t s = 0; s < slots; s++) first[a.ids[s] + 1]++;
    for (int e = 0; e < a.E; e++) most = first[e + 1] > most ? first[e + 1] : most, first[e + 1] += first[e];
    for (size_t s = 0; s < slots; s++) order[first[a.ids[s]]++] = s;  // first[e] is then the end of e's
    const int rows = a.M == 1 ? 1 : most;
    char* memory = (char*)malloc(size * (rows * (H + N + I + out) + slots * out));
    char *x = memory, *h = x + size * rows * H, *gates = h + size * rows * N, *y = gates + size * rows * I;
    char* each = y + size * rows * out;  // (slots, out): added up in the order of a token's experts
    for (int e = 0, at = 0; e < a.E; at = first[e++]) {
        const int n = first[e] - at;
        if (n == 0) continue;
        const int* slot = order + at;
        const char* own = (const char*)a.x;
        if (a.M > 1) {
            for (int i = 0; i < n; i++) memcpy(x + size * H * i, own + size * H * (slot[i] / a.top_k), size * H);
            own = x;
        }
        // one token's slots of an expert that it chose twice are alike
        const int computed = a.M > 1 ? n : 1;
        product_of(a.up, a.up_apart, e, computed, a.threads, own, h);
        gated<T>({h, nullptr, gates, 0, computed, (int)I, T, a.act, a.alone, a.threads, 1});
        product_of(a.down, a.down_apart, e, computed, a.threads, gates, y);
        for (int i = 0; i < n; i++) memcpy(each + size * out * slot[i], y + size * out * (a.M > 1 ? i : 0), size * out);
    }
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.M > 1)
    for (int m = 0; m < a.M; m++) {
        for (size_t c = 0; c < out; c += AT_ONCE) {
            const int n = out - c < AT_ONCE ? out - c : AT_ONCE;
            float sum[AT_ONCE] = {}, one[AT_ONCE];
            for (int j = 0; j < a.top_k; j++) {
                const size_t s = (size_t)m * a.top_k + j;
                widen<T>(one, each, s * out + c, n);
                for (int i = 0; i < n; i++) sum[i] += a.weights[s] * one[i];
            }
            round_to<T>(a.y, (size_t)m * out + c, sum, n);
        }
    }
    free(memory);
    free(first);
}

}  // namespace
