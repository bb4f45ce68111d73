// AVX-512 with dot products of bf16 (Zen 4, Sapphire Rapids): a 16-bit layer at the memory's speed also at eight rows of x,
// where fp32 multiply-adds take twice the instructions and a conversion.
#include <immintrin.h>

#include "dense.h"

namespace {
struct Bf16 {
    using Word = uint16_t;
    using X = uint16_t;
    using W = __m512bh;
    using F = __m512;
    static constexpr int STEP = 32, ROWS = 4;
    static F zero() { return _mm512_setzero_ps(); }
    static W weights(const void* p) { return (W)_mm512_loadu_si512(p); }
    static F dot(F sum, W w, const X* x) { return _mm512_dpbf16_ps(sum, w, (W)_mm512_loadu_si512(x)); }
    static float total(F v) { return _mm512_reduce_add_ps(v); }
    static float value(X x) { return widen_bf16(x); }
};
}  // namespace

// Whether this CPU has them and x and the weight are bf16; then it is done.
bool dense_bf16(const Args& a) {
    if (a.meta != BF16 || a.dtype != BF16 || !__builtin_cpu_supports("avx512bf16")) return false;
    dense_rows<Bf16>(a, (const uint16_t*)a.x);
    return true;
}
