// AVX2: half a tile a register. Its multiply-add of bytes saturates at 16 bits, so codes of 8 bits are multiplied as 16-bit
// integers, of which the other takes pairs: two of them for four codes, as many as two digits take.
#include <immintrin.h>
#include <stdint.h>

#include "args.h"

namespace {
struct Isa {
    using I = __m256i;
    using F = __m256;
    static constexpr int LANES = 8, OFFSET = 0, TOGETHER = 2;
    static constexpr bool JOINED = true;  // digits' sums of a block
    static constexpr bool AT_ONCE = true;  // a dot product's sum is there in the next cycle
    static constexpr bool ANY_BYTE = false;  // of codes in `dot`: else those below 128, two of which do not overflow
    // Whether x goes as 16-bit integers: for codes of 8 bits, and where many rows share what is decoded.
    static constexpr bool pairs(int bits, int digits, int rows) { return bits == 8 || (digits == 2 && rows > 2); }
    static I load(const void* p) { return _mm256_loadu_si256((const I*)p); }
    static I none() { return _mm256_setzero_si256(); }
    static I eight(I v) { return v; }
    static I half(I quad, int odd) { return odd ? _mm256_srli_epi16(quad, 8) : masked(quad, 0x00ff00ff); }
    static I right(I v, int n) { return n ? _mm256_srli_epi32(v, n) : v; }
    static I left(I v, int n) { return _mm256_slli_epi32(v, n); }
    static I down(I v, int) { return v; }
    static I masked(I v, int m) { return _mm256_and_si256(v, _mm256_set1_epi32(m)); }
    static I merged(I low, I high) { return _mm256_or_si256(masked(low, 0x03030303), masked(high, 0x04040404)); }
    static I add(I a, I b) { return _mm256_add_epi32(a, b); }
    static I quad(const void* x) {
        int32_t quad;
        __builtin_memcpy(&quad, x, 4);
        return _mm256_set1_epi32(quad);
    }
    // Sums of a chunk: up to 4 bits in 16 bits, 8 quads of 2 * 15 * 127 at most.
    template <int BITS>
    static I begin(I sum) { return BITS == 8 ? sum : none(); }
    template <int BITS>
    static I dot(I part, I codes, I digits) {
        if (BITS == 8) part = add(part, _mm256_madd_epi16(codes, digits));
        else part = _mm256_add_epi16(part, _mm256_maddubs_epi16(codes, digits));
        __asm__ volatile("" : "+x"(part));  // now: g++ holds back the sums of a chunk, in memory (54 of 173 instructions)
        return part;
    }
    template <int BITS>
    static I end(I sum, I part, int left = 0) {
        return BITS == 8 ? part : add(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1 << left)));
    }
    template <int BITS>
    static I dot_at(I sum, I codes, const void* x) { return dot<BITS>(sum, codes, quad(x)); }
    // Entries of a table are 16-bit integers: those of one register of codes fill two, rows 0, 1, 4, 5 and rows 2, 3, 6, 7.
    struct Entries { I first, second; };
    using Sums = Entries;  // of the same rows, two a row
    static I bytes(const void* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
    static Entries look_up(I codes, I low, I high) {
        low = _mm256_shuffle_epi8(low, codes), high = _mm256_shuffle_epi8(high, codes);
        return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    }
    static Sums no_sums() { return {none(), none()}; }
    static Sums plus(Sums sum, Entries v, const int16_t* x) {
        int64_t four;
        __builtin_memcpy(&four, x, 8);
        const I quad = _mm256_set1_epi64x(four);
        sum = {add(sum.first, _mm256_madd_epi16(v.first, quad)), add(sum.second, _mm256_madd_epi16(v.second, quad))};
        __asm__ volatile("" : "+x"(sum.first), "+x"(sum.second));  // as in `dot`
        return sum;
    }
    static I total(Sums s) { return _mm256_hadd_epi32(s.first, s.second); }
    static bool bf16_dense(const Args&) { return false; }
    static F zero() { return _mm256_setzero_ps(); }
    static F all(float f) { return _mm256_set1_ps(f); }
    static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
    static F minus(F a, F b) { return _mm256_sub_ps(a, b); }
    static F times(F a, F b) { return _mm256_mul_ps(a, b); }
    static F plus_product(F sum, F a, F b) { return _mm256_fmadd_ps(a, b, sum); }
    static F minus_product(F sum, F a, F b) { return _mm256_fnmadd_ps(a, b, sum); }
    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static float total(F v) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    // Bytes as integers.
    static I widened(const void* p, bool) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
    static I widened_signed(const void* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
    static F meta(const void* p, int dtype, size_t at) {
        if (dtype == 2) return _mm256_loadu_ps((const float*)p + at);
        if (dtype > 2) {
            __m128i v = _mm_loadl_epi64((const __m128i*)((const uint8_t*)p + at));
            const __m128i e4m3 = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(v), 7), _mm_set1_epi16(~(1 << 14)));
            if (dtype == 3) return _mm256_cvtph_ps(e4m3);
            return _mm256_castsi256_ps(_mm256_max_epi32(left(_mm256_cvtepu8_epi32(v), 23), _mm256_set1_epi32(1 << 22)));
        }
        __m128i v = _mm_loadu_si128((const __m128i*)((const uint16_t*)p + at));
        return dtype == 1 ? _mm256_cvtph_ps(v) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
    }
};
}  // namespace

#include "latent.h"
#include "product.h"

void product_avx2(const Args& a) { product(a); }
void step_avx2(int what, int dtype, const void* a) { between(what, dtype, a); }
// Every CPU with AVX2 has F16C, for which clang 14 has no name here.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
