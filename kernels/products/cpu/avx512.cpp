// AVX-512 with VNNI: a tile's 16 rows are one register, one instruction multiplies 64 codes.
#include <immintrin.h>
#include <stdint.h>

#include "args.h"

bool dense_bf16(const Args&);

namespace {
typedef int32_t __attribute__((may_alias, aligned(4))) Quad;

struct Isa {
    using I = __m512i;
    using F = __m512;
    static constexpr int LANES = 16, OFFSET = 0, TOGETHER = 8;
    static constexpr bool JOINED = false;  // digits' sums of a block
    static constexpr bool AT_ONCE = false;
    static constexpr bool ANY_BYTE = true;  // of codes in `dot`
    static constexpr bool pairs(int, int, int) { return false; }  // of 16-bit integers: bytes are multiplied
    static I load(const void* p) { return _mm512_loadu_si512(p); }
    static I none() { return _mm512_setzero_si512(); }
    static I eight(I v) { return v; }
    static I half(I quad, int) { return quad; }
    static I right(I v, int n) { return n ? _mm512_srli_epi32(v, n) : v; }
    static I left(I v, int n) { return _mm512_slli_epi32(v, n); }
    static I down(I v, int n) { return n ? _mm512_srai_epi32(v, n) : v; }
    static I masked(I v, int m) { return _mm512_and_si512(v, _mm512_set1_epi32(m)); }
    static I merged(I low, I high) {  // bits 0 and 1 of each byte from low, 2 from high
        I v = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi32(0x03030303), 0xe4);
        return masked(v, 0x07070707);
    }
    static I add(I a, I b) { return _mm512_add_epi32(a, b); }
    static I quad(const void* x) {
        int32_t quad;
        __builtin_memcpy(&quad, x, 4);
        return _mm512_set1_epi32(quad);
    }
    template <int BITS>
    static I begin(I sum) { return sum; }
    template <int BITS>
    static I end(I, I part, int = 0) { return part; }
    template <int BITS>
    static I dot(I sum, I codes, I digits) {
        return _mm512_dpbusd_epi32(sum, codes, digits);
    }
    // The same of four bytes in memory, repeated by the instruction itself: g++ 12 loads them first, one more in three.
    template <int BITS>
    static I dot_at(I sum, I codes, const void* x) {
#ifdef __AVX512VNNI__
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const Quad*)x));
        return sum;
#else  // tests/kernels/avx512_emulated.h
        return dot<BITS>(sum, codes, quad(x));
#endif
    }
    // Entries of a table are 16-bit integers: those of one register of codes fill two. Each has two of every four rows.
    struct Entries { I first, second; };
    using Sums = Entries;  // of the same rows, two a row
    static I bytes(const void* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
    static Entries look_up(I codes, I low, I high) {
        low = _mm512_shuffle_epi8(low, codes), high = _mm512_shuffle_epi8(high, codes);
        return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    }
    static Sums no_sums() { return {none(), none()}; }
    static Sums plus(Sums sum, Entries v, const int16_t* x) {
        int64_t four;
        __builtin_memcpy(&four, x, 8);
        const I quad = _mm512_set1_epi64(four);
        return {_mm512_dpwssd_epi32(sum.first, v.first, quad), _mm512_dpwssd_epi32(sum.second, v.second, quad)};
    }
    static I total(Sums s) {
        const F first = _mm512_castsi512_ps(s.first), second = _mm512_castsi512_ps(s.second);
        return add(_mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88)),
                   _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd)));
    }
    static bool bf16_dense(const Args& a) { return dense_bf16(a); }
    static F zero() { return _mm512_setzero_ps(); }
    static F all(float f) { return _mm512_set1_ps(f); }
    static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
    static F minus(F a, F b) { return _mm512_sub_ps(a, b); }
    static F times(F a, F b) { return _mm512_mul_ps(a, b); }
    static F plus_product(F sum, F a, F b) { return _mm512_fmadd_ps(a, b, sum); }
    static F minus_product(F sum, F a, F b) { return _mm512_fnmadd_ps(a, b, sum); }
    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static float total(F v) { return _mm512_reduce_add_ps(v); }
    // Bytes as integers: a register of them, or `half` of one and zeros.
    static I widened(const void* p, bool half) {
        return _mm512_cvtepu8_epi32(half ? _mm_loadl_epi64((const __m128i*)p) : _mm_loadu_si128((const __m128i*)p));
    }
    static I widened_signed(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
    static F meta(const void* p, int dtype, size_t at) {
        if (dtype == 2) return _mm512_loadu_ps((const float*)p + at);
        if (dtype > 2) {
            __m128i v = _mm_loadu_si128((const __m128i*)((const uint8_t*)p + at));
            const __m256i signs = _mm256_set1_epi16(~(1 << 14));
            if (dtype == 3) return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(v), 7), signs));
            return _mm512_castsi512_ps(_mm512_max_epi32(left(_mm512_cvtepu8_epi32(v), 23), _mm512_set1_epi32(1 << 22)));
        }
        __m256i v = _mm256_loadu_si256((const __m256i*)((const uint16_t*)p + at));
        return dtype == 1 ? _mm512_cvtph_ps(v) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
    }
};
}  // namespace

#include "latent.h"
#include "product.h"

void product_avx512(const Args& a) { product(a); }
void step_avx512(int what, int dtype, const void* a) { between(what, dtype, a); }
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
