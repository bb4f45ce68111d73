// What crosses the C ABI: packed.py fills this struct, field by field.
#pragma once
#include <cstdint>

enum { BF16, FP16, FP32 };
#ifdef __aarch64__
typedef __fp16 Half;  // g++ knows _Float16 there from version 13 on
#else
typedef _Float16 Half;
#endif
constexpr int AHEAD = 2048;  // bytes that weights are asked for ahead of their use

struct Args {
    const void* x;         // (M, K) `dtype`
    const int32_t* words;  // layout `cpu`
    const void *scales, *zeros, *bias;  // `meta`; zeros and bias may be null
    const float* most;     // (M,) the largest |x| of each row, for one digit
    void* y;               // (M, N) `dtype`
    int32_t M, N, K, bits, group, groups, chunks;
    int32_t block, blocks;  // k that share a scale of x: 32, 64 or 128, dividing the group
    int32_t dtype, meta, digits, threads;
    float mid;             // the zero where none is stored
};
