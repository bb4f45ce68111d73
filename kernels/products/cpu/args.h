// What crosses the C ABI: native.py fills this struct, field by field.
#pragma once
#include <cstdint>

enum { BF16, FP16, FP32, E4M3, E8M0 };  // the last two of scales alone: bytes; `meta` reads E4M3 as 2^-8 of it
#ifdef __aarch64__
typedef __fp16 Half;  // g++ knows _Float16 there from version 13 on
#else
typedef _Float16 Half;
#endif
constexpr int AHEAD = 6144;  // bytes that weights are asked for ahead of their use

struct Args {
    const void* x;         // (M, K) `dtype`
    const int32_t* words;  // layout `cpu`
    const void *scales, *zeros, *bias;  // `meta`; zeros and bias may be null
    const float* most;     // (M,) the largest |x| of each row, for one digit
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

struct Gated {
    const void* x;  // (M, 2 I) `dtype`
    void* y;        // (M, I)
    int32_t M, I, dtype, gelu, threads;
};

struct Attend {
    const void* qkv;          // (B, (HQ + 2 HKV) * D) `dtype`
    void *k, *v;              // caches: blocks of BLOCK slots, `block` apart, each head of one `head` apart, slots D apart
    const void *cos, *sin;    // (slots, R) `dtype`
    const int32_t *pos, *table;  // pos (B,); table (B, wide), or null: sequence b is block b
    const void *q_norm, *k_norm;  // (D,) `meta`, or null
    const float* sinks;           // (HQ,), or null: a score of each head without a value
    void* y;                  // (B, HQ * D)
    int64_t block, head;
    int32_t B, HQ, HKV, D, R, BLOCK, wide, window, dtype, meta, threads;
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
    int32_t B, HQ, HKV, D, R, values, by_head, gated, v_is_k, writes, all, norm_last, neighbours;  // values: of k and v in a row
    int32_t q_normed, k_normed, v_normed, angle_kind, offset, dtype, threads;
    float key_scale, beta, period;  // period 0: queries are not scaled by position
};

enum { ADD_NORM, GATED, ATTEND, PRODUCT, DELTA, MAMBA2, SHORT_CONV, UPDATE, OPEN, PREPARE };

struct Call {
    int32_t what, dtype;
    const void* args;  // what: ADD_NORM with a Norm, PRODUCT with an Args, and so on
};
