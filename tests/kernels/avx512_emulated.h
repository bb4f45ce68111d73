// AVX-512 on a CPU that has none: of <immintrin.h>'s functions those that avx512.cpp and bf16.cpp call, lane by lane as Intel's
// guide defines them. A name that is missing here is an error of the compiler ("target specific option mismatch").
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace wide {
using I = __m512i;
using F = __m512;

template <class T>
struct Lanes {
    T at[64 / sizeof(T)];
};
template <class To, class From>
inline To same_bits(const From& v) {
    To out;
    std::memcpy(&out, &v, sizeof out);
    return out;
}
template <class T, class V>
inline Lanes<T> lanes(const V& v) { return same_bits<Lanes<T>>(v); }

// A vector V of lanes T: what(i) of each.
template <class V, class T, class What>
inline V made(What what) {
    Lanes<T> out;
    for (size_t i = 0; i < 64 / sizeof(T); i++) out.at[i] = what(i);
    return same_bits<V>(out);
}

inline I loadu_si512(const void* p) { return same_bits<I>(*(const Lanes<uint8_t>*)p); }
inline F loadu_ps(const void* p) { return same_bits<F>(*(const Lanes<uint8_t>*)p); }
inline void storeu_ps(void* p, F v) { std::memcpy(p, &v, 64); }
inline I setzero_si512() { return made<I, int32_t>([](int) { return 0; }); }
inline F setzero_ps() { return made<F, float>([](int) { return 0.0f; }); }
inline I set1_epi32(int v) { return made<I, int32_t>([=](int) { return v; }); }
inline I set1_epi64(int64_t v) { return made<I, int64_t>([=](int) { return v; }); }
inline F set1_ps(float v) { return made<F, float>([=](int) { return v; }); }
inline I castps_si512(F v) { return same_bits<I>(v); }
inline F castsi512_ps(I v) { return same_bits<F>(v); }
inline I broadcast_i32x4(__m128i v) {
    int32_t four[4];
    std::memcpy(four, &v, 16);
    return made<I, int32_t>([&](int i) { return four[i % 4]; });
}

inline I and_si512(I a, I b) {
    const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
    return made<I, uint32_t>([&](int i) { return x.at[i] & y.at[i]; });
}
inline I add_epi32(I a, I b) {
    const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
    return made<I, uint32_t>([&](int i) { return x.at[i] + y.at[i]; });
}
inline I max_epi32(I a, I b) {
    const auto x = lanes<int32_t>(a), y = lanes<int32_t>(b);
    return made<I, int32_t>([&](int i) { return std::max(x.at[i], y.at[i]); });
}
inline I slli_epi32(I a, int n) {
    const auto x = lanes<uint32_t>(a);
    return made<I, uint32_t>([&](int i) { return n > 31 ? 0 : x.at[i] << n; });
}
inline I srli_epi32(I a, int n) {
    const auto x = lanes<uint32_t>(a);
    return made<I, uint32_t>([&](int i) { return n > 31 ? 0 : x.at[i] >> n; });
}
inline I srai_epi32(I a, int n) {
    const auto x = lanes<int32_t>(a);
    return made<I, int32_t>([&](int i) { return x.at[i] >> std::min(n, 31); });
}
inline I ternarylogic_epi32(I a, I b, I c, int imm) {  // a bit of each picks one of imm's eight
    const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b), z = lanes<uint32_t>(c);
    return made<I, uint32_t>([&](int i) {
        uint32_t out = 0;
        for (int bit = 0; bit < 32; bit++)
            out |= (uint32_t)(imm >> ((x.at[i] >> bit & 1) << 2 | (y.at[i] >> bit & 1) << 1 | (z.at[i] >> bit & 1)) & 1) << bit;
        return out;
    });
}
inline I dpbusd_epi32(I sum, I codes, I digits) {
    const auto s = lanes<int32_t>(sum);
    const auto x = lanes<uint8_t>(codes);
    const auto y = lanes<int8_t>(digits);
    return made<I, int32_t>([&](int i) {
        int32_t out = s.at[i];
        for (int j = 4 * i; j < 4 * i + 4; j++) out += x.at[j] * y.at[j];
        return out;
    });
}
inline I dpwssd_epi32(I sum, I a, I b) {
    const auto s = lanes<int32_t>(sum);
    const auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
    return made<I, int32_t>([&](int i) { return s.at[i] + x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1]; });
}
// Within each 16 bytes, as all of the following:
inline I shuffle_epi8(I table, I at) {
    const auto x = lanes<uint8_t>(table), n = lanes<uint8_t>(at);
    return made<I, uint8_t>([&](int i) { return n.at[i] & 0x80 ? 0 : x.at[i / 16 * 16 + n.at[i] % 16]; });
}
inline I unpacked(I a, I b, int half) {
    const auto x = lanes<uint8_t>(a), y = lanes<uint8_t>(b);
    return made<I, uint8_t>([&](int i) { return (i % 2 ? y : x).at[i / 16 * 16 + half + i % 16 / 2]; });
}
inline I unpacklo_epi8(I a, I b) { return unpacked(a, b, 0); }
inline I unpackhi_epi8(I a, I b) { return unpacked(a, b, 8); }
inline F shuffle_ps(F a, F b, int imm) {
    const auto x = lanes<float>(a), y = lanes<float>(b);
    return made<F, float>([&](int i) { return (i % 4 < 2 ? x : y).at[i / 4 * 4 + (imm >> i % 4 * 2 & 3)]; });
}

inline I cvtepu8_epi32(__m128i v) {
    uint8_t x[16];
    std::memcpy(x, &v, 16);
    return made<I, int32_t>([&](int i) { return x[i]; });
}
inline I cvtepi8_epi32(__m128i v) {
    int8_t x[16];
    std::memcpy(x, &v, 16);
    return made<I, int32_t>([&](int i) { return x[i]; });
}
inline I cvtepu16_epi32(__m256i v) {
    uint16_t x[16];
    std::memcpy(x, &v, 32);
    return made<I, int32_t>([&](int i) { return x[i]; });
}
inline F cvtepi32_ps(I v) {
    const auto x = lanes<int32_t>(v);
    return made<F, float>([&](int i) { return (float)x.at[i]; });
}
inline F cvtph_ps(__m256i v) {
    uint16_t x[16];
    std::memcpy(x, &v, 32);
    return made<F, float>([&](int i) { return _cvtsh_ss(x[i]); });
}
inline F sub_ps(F a, F b) {
    const auto x = lanes<float>(a), y = lanes<float>(b);
    return made<F, float>([&](int i) { return x.at[i] - y.at[i]; });
}
inline F mul_ps(F a, F b) {
    const auto x = lanes<float>(a), y = lanes<float>(b);
    return made<F, float>([&](int i) { return x.at[i] * y.at[i]; });
}
inline F fmadd_ps(F a, F b, F c) {
    const auto x = lanes<float>(a), y = lanes<float>(b), z = lanes<float>(c);
    return made<F, float>([&](int i) { return std::fma(x.at[i], y.at[i], z.at[i]); });
}
inline F fnmadd_ps(F a, F b, F c) {
    const auto x = lanes<float>(a), y = lanes<float>(b), z = lanes<float>(c);
    return made<F, float>([&](int i) { return std::fma(-x.at[i], y.at[i], z.at[i]); });
}
inline float reduce_add_ps(F v) {
    const auto x = lanes<float>(v);
    float sum = 0;
    for (float f : x.at) sum += f;
    return sum;
}
template <class Bf16>
inline F dpbf16_ps(F sum, Bf16 a, Bf16 b) {
    const auto s = lanes<float>(sum);
    const auto x = lanes<uint16_t>(a), y = lanes<uint16_t>(b);
    const auto value = [](uint16_t v) { return same_bits<float>((uint32_t)v << 16); };
    return made<F, float>([&](int i) {
        const float high = value(x.at[2 * i + 1]) * value(y.at[2 * i + 1]);
        return s.at[i] + high + value(x.at[2 * i]) * value(y.at[2 * i]);
    });
}
}  // namespace wide

// Macros where g++ does not optimize:
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#undef _mm512_ternarylogic_epi32
#undef _mm512_shuffle_ps
#define __builtin_cpu_supports(name) 1
#define _mm512_loadu_si512 wide::loadu_si512
#define _mm512_loadu_ps wide::loadu_ps
#define _mm512_storeu_ps wide::storeu_ps
#define _mm512_setzero_si512 wide::setzero_si512
#define _mm512_setzero_ps wide::setzero_ps
#define _mm512_set1_epi32 wide::set1_epi32
#define _mm512_set1_epi64 wide::set1_epi64
#define _mm512_set1_ps wide::set1_ps
#define _mm512_castps_si512 wide::castps_si512
#define _mm512_castsi512_ps wide::castsi512_ps
#define _mm512_broadcast_i32x4 wide::broadcast_i32x4
#define _mm512_and_si512 wide::and_si512
#define _mm512_add_epi32 wide::add_epi32
#define _mm512_max_epi32 wide::max_epi32
#define _mm512_slli_epi32 wide::slli_epi32
#define _mm512_srli_epi32 wide::srli_epi32
#define _mm512_srai_epi32 wide::srai_epi32
#define _mm512_ternarylogic_epi32 wide::ternarylogic_epi32
#define _mm512_dpbusd_epi32 wide::dpbusd_epi32
#define _mm512_dpwssd_epi32 wide::dpwssd_epi32
#define _mm512_shuffle_epi8 wide::shuffle_epi8
#define _mm512_unpacklo_epi8 wide::unpacklo_epi8
#define _mm512_unpackhi_epi8 wide::unpackhi_epi8
#define _mm512_shuffle_ps wide::shuffle_ps
#define _mm512_cvtepu8_epi32 wide::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 wide::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 wide::cvtepu16_epi32
#define _mm512_cvtepi32_ps wide::cvtepi32_ps
#define _mm512_cvtph_ps wide::cvtph_ps
#define _mm512_sub_ps wide::sub_ps
#define _mm512_mul_ps wide::mul_ps
#define _mm512_fmadd_ps wide::fmadd_ps
#define _mm512_fnmadd_ps wide::fnmadd_ps
#define _mm512_reduce_add_ps wide::reduce_add_ps
#define _mm512_dpbf16_ps wide::dpbf16_ps
