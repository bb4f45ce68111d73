// What crosses the C ABI: native.py fills this struct, field by field.
#pragma once
#include <cstdint>

// The last three are not of activations. E4M3, E8M0: bytes of scales, `meta` reads E4M3 as 2^-8 of it. E4M3, FOUR: of a cache.
enum { BF16, FP16, FP32, E4M3, E8M0, FOUR };
#ifdef __aarch64__
typedef __fp16 Half;  // g++ knows _Float16 there from version 13 on
#elif defined(__clang__) ? __clang_major__ > 14 : __GNUC__ > 11
typedef _Float16 Half;
#elif defined(__F16C__)  // g++ 11 and clang 14, which are Ubuntu 22.04's, do not know it on x86
#include <immintrin.h>
struct Half {
    uint16_t bits;
    explicit Half(float f) : bits(_cvtss_sh(f, 0)) {}
    explicit operator float() const { return _cvtsh_ss(bits); }
};
#endif
#if defined(__clang__) || __GNUC__ > 11
#define SHUFFLED(INDICES, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(INDICES, a, b, ...) __builtin_shuffle(a, b, INDICES{__VA_ARGS__})  // INDICES: a vector of integers as wide
#endif
constexpr int AHEAD = 6144;  // bytes that weights are asked for ahead of their use

struct Args {
    const void* x;         // (M, K) `dtype`
    const int32_t* words;  // layout `cpu`
    const void *scales, *zeros, *bias;  // `meta`; zeros and bias may be null
    void* y;               // (M, N) `dtype`
    const float *table, *factor;  // (1 or tables, 2^bits) and (tables,), or null: what codes stand for, what multiplies scales
    int32_t M, N, K, bits, group, groups, chunks;
    int32_t block, blocks;  // k that share a scale of x: 32, 64 or 128, dividing the group
    int32_t dtype, meta, digits, threads;
    int32_t scale, tables, apart;  // of a table: dtype of scales; tables of N / tables rows; values between theirs, or 0
    float mid;             // the zero where none is stored
};

// What a layer does between its products (step.h); decode/cpu.py fills these. All strides in elements.
struct Norm {
    void* x;                        // (M, H) `dtype`: the residual stream, in place
    const void *delta, *post, *weight;  // delta (M, H) may be null; weights (H,) `meta`; post, delta's own norm, may be null
    void* y;                        // (M, H) `dtype`
    int32_t M, H, dtype, meta, threads;
    float eps;
};

enum { SILU, GELU_TANH, GELU, RELU, RELU2, CLAMPED };  // CLAMPED: gpt-oss's, of gate and up together

struct Gated {
    const void *x, *by;  // (M, 2 I) `dtype`: gate, up; or, `alone`, (M, I), times `by` if it is not null: rows `apart`
    void* y;             // (M, I)
    int64_t apart;
    int32_t M, I, dtype, act, alone, threads;
    float scale;         // of the gate
};

struct Attend {
    const void* qkv;          // (B, (HQ + 2 HKV) * D) `dtype`
    void *k, *v, *k_scales, *v_scales;  // caches of kind `kv`, a dtype, E4M3 or FOUR: blocks of BLOCK slots; scales of codes
    const void *cos, *sin;    // (slots, R) `dtype`
    const int32_t *pos, *table;  // pos (B,); table (B, wide), or null: sequence b is block b
    const void *q_norm, *k_norm;  // (D,) `meta`, or null
    const float* sinks;           // (HQ,), or null: a score of each head without a value
    void* y;                  // (B, HQ * D)
    int64_t block, head;      // slots from a block, and from a head of a block, to the next one
    int32_t B, HQ, HKV, D, R, BLOCK, wide, window, kv, dtype, meta, threads;
    float scale, eps;
};

// Steps of mixers with a state of fixed size (recurrent.h); decode/recurrent/steps_cpu.py fills these.
struct Conv {
    const void *weight, *bias;  // (C, W) and (C,) `meta`; bias may be null
    void* state;                // (slots, C, W - 1) `kind`: the last inputs, in order
    int32_t C, W, meta, kind;
};

struct Delta {
    Conv conv;
    const void* x;         // (B, 2 k_heads k_dim + 2 v_heads v_dim + 2 v_heads) `dtype`
    const int64_t* slots;  // (B,)
    float* S;              // (slots, v_heads, k_dim, v_dim)
    const void *a_log, *dt_bias, *norm;  // (v_heads,) `log_kind` and `bias_kind`, (v_dim,) `norm_kind`
    void* y;               // (B, v_heads v_dim) `dtype`
    int32_t B, k_heads, v_heads, k_dim, v_dim, grouped, log_kind, bias_kind, norm_kind, dtype, threads;
    float eps, norm_eps;
};

struct Mamba2 {
    Conv conv;
    const void* x;         // (B, 2 heads dim + 2 groups N + heads) `dtype`
    const int64_t* slots;  // (B,)
    float* S;              // (slots, heads, dim, N)
    const void *a_log, *dt_bias, *d, *norm;  // (heads,) of `log_kind`, `bias_kind`, `d_kind`; (heads dim,) `norm_kind`, or null
    void* y;               // (B, heads dim) `dtype`
    int32_t B, heads, dim, groups, N, norm_groups, gate_last, log_kind, bias_kind, d_kind, norm_kind, dtype, threads;
    float norm_eps, least, most, scales[5];  // dt is from least to most; constants of z, x, B, C, dt
};

struct ShortConv {
    Conv conv;
    const void* x;         // (B, 3 C) `dtype`
    const int64_t* slots;  // (B,)
    void* y;               // (B, C) `dtype`
    int32_t B, dtype, threads;
};

// What layers of other families do between products (rows.h); decode/rows_cpu.py fills these.
struct AnyNorm {
    const void *weight, *bias;  // of `weight_kind` and `bias_kind`, or null
    int32_t layer, weight_kind, bias_kind, groups;
    float eps;
};

struct Update {
    AnyNorm norm, post;  // post: of what is added, if `posts`
    void* x;             // (M, H) `dtype`: the residual stream, in place
    const void *delta, *second, *after;  // (M, H) `dtype`, or null; one value `after_kind`, or null
    void* y;             // (M, H) `dtype`, or null
    int32_t M, H, posts, after_kind, dtype, threads;
    float scale;
};

struct Open {
    const void *x, *gate;  // (M, N) and (M, wide) `dtype`
    void* y;
    int32_t M, N, wide, dtype, threads;
};

struct Prepare {
    AnyNorm q_norm, k_norm, v_norm;  // each if `q_normed`, `k_normed`, `v_normed`
    const void* x;                   // rows of q, k, v as `Prepared` of decode/prepare.py says
    const void *cos, *sin;           // (slots, R) `angle_kind`, or null
    const int32_t* pos;              // (B,)
    void *y, *gate;                  // (B, (HQ + 2 HKV) D) and (B, HQ D) `dtype`
    int32_t B, HQ, HKV, D, R;
    int32_t values, by_head, gated, v_is_k, writes, all, norm_last, neighbours;  // values: of k and v in a row
    int32_t q_normed, k_normed, v_normed, angle_kind, offset, dtype, threads;
    float key_scale, beta, period;  // period 0: queries are not scaled by position
};

// Routers, experts and latent attention (mixture.h, latent.h); decode/mixture_cpu.py and latent_cpu.py fill these.
struct Route {
    AnyNorm norm;  // of x first, if `normed`
    const void *x, *weight, *scale, *logits_bias, *choice_bias, *each;  // (M, H) `dtype`, (E, H), (H,), (E,) ...; or null
    int64_t* ids;    // (M, top_k)
    float* weights;  // (M, top_k)
    int32_t M, E, H, top_k, groups, kept, top2, normed, sigmoid, usual, normalise, rounded;  // usual: logits are rounded
    int32_t weight_kind, scale_kind, logits_kind, choice_kind, each_kind, dtype, threads;
    float sum_eps, factor;
};

struct Experts {
    Args up, down;  // the products of expert 0; M, x and y are set for each expert
    const void* x;  // (M, H) `dtype`
    const int64_t* ids;    // (M, top_k)
    const float* weights;  // (M, top_k)
    void* y;               // (M, H)
    int64_t up_apart[5], down_apart[5];  // bytes from an expert's words, scales, zeros, bias, factor to the next one's
    int32_t M, top_k, E, act, alone, dtype, threads;
};

struct Latent {
    AnyNorm norm;
    const void *q, *latent;   // (B, heads (nope + rotated)) and (B, rank + rotated) `dtype`
    void *cache, *scales;     // (B or blocks, 1, BLOCK, rank + rotated) of kind `kv`, blocks `block` slots apart; as in Attend
    const void *cos, *sin;    // (slots, rotated) `angle_kind`
    const int32_t *pos, *table;  // (B,); (B, wide), or null: sequence b is block b
    const void *k_up, *v_up;  // (heads, nope, rank) and (heads, v_dim, rank) `up_kind`, heads `k_apart` and `v_apart` apart
    void* y;                  // (B, heads v_dim)
    int64_t block, k_apart, v_apart;
    int32_t B, heads, nope, rotated, v_dim, rank, BLOCK, wide, neighbours, angle_kind, up_kind, offset, kv, dtype, threads;
    float scale, beta, period;  // period 0: queries are not scaled by position
};

// Keys or values to codes and back (coded.h); decode/kv_cpu.py fills it.
struct Codes {
    void *x, *codes, *scales;  // (n, D) `dtype`; as a cache of kind `kv` holds n slots
    int64_t n;
    int32_t D, kv, decodes, dtype, threads;
};

enum { ADD_NORM, GATED, ATTEND, PRODUCT, DELTA, MAMBA2, SHORT_CONV, UPDATE, OPEN, PREPARE, ROUTE, EXPERTS, LATENT, CODES };

struct Call {
    int32_t what, dtype;
    const void* args;  // what: ADD_NORM with a Norm, PRODUCT with an Args, and so on
};
