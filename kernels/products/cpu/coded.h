// Keys and values in few bits: `encode` and `decode` of decode/kv.py, and what attention (step.h) reads of a cache, whose kind
// KV is the dtype of its values, E4M3 (fp8) or FOUR (4 bits).
//
// Attention stays among transformed values: queries are transformed, the sum of values is transformed back. An e4m3 code
// shifted by 20 bits is its value's 2^-120 as fp32, subnormal ones too, so three operations make 16 codes numbers, and factors
// of 2^60 bring queries, weights and sums back into range. Codes of 4 bits become two registers, of even and of odd dims;
// queries are put in the same order, and the lowest value and the step of a slot multiply its whole score.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "args.h"
#include "dense.h"
#include "round.h"

namespace {

#define INLINE inline __attribute__((always_inline))  // else g++ leaves some of these calls in the innermost loops

constexpr int TRIES = 8, LEVELS = 15, FIRST = 103 << 3, NO_NUMBER = 0x7f, LARGEST_SCALE = 255;  // as decode/kv.py has them
constexpr double SHORTER = 0.04;
constexpr float LARGEST = 448, LEAST_NORMAL = 0x1p-6f;
constexpr float LIFT = 0x1p60f;  // twice on the way from a shifted code to its value

template <int KV>
constexpr bool CODED = KV == E4M3 || KV == FOUR;
template <int KV>
constexpr int PARTS = KV == FOUR ? 2 : 1;  // registers that one load fills

// Elements of a slot in its tensor; values of a query in the order of codes, padded to whole loads.
template <int KV>
constexpr int width(int D) { return KV == FOUR ? D / 2 : D; }
template <int KV>
constexpr int padded(int D) { return (D + PARTS<KV> * Isa::LANES - 1) / (PARTS<KV> * Isa::LANES) * PARTS<KV> * Isa::LANES; }

// PARTS<KV> registers from element `at` on; `half`: 4-bit codes of L dims instead of 2 L.
template <int KV>
INLINE void read_slot(Isa::F* out, const void* p, size_t at, bool half = false) {
    if constexpr (KV == E4M3) {
        out[0] = (Isa::F)Isa::masked(Isa::left(Isa::widened_signed((const uint8_t*)p + at), 20), 0x87f00000);
    } else if constexpr (KV == FOUR) {
        const Isa::I both = Isa::widened((const uint8_t*)p + at, half);
        out[0] = Isa::to_float(Isa::masked(both, LEVELS)), out[1] = Isa::to_float(Isa::right(both, 4));
    } else {
        out[0] = Isa::meta(p, KV, at);
    }
}

inline float scale_of(int byte) {
    const uint32_t u = (uint32_t)(FIRST + byte) << 20;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// x[s] of n slots from `slot` on multiplied by their scales; of 4 bits returns sums of x times the lowest values, or adds those
// times `add` to x instead.
template <int KV>
inline float scaled(float* x, const void* scales, size_t slot, int n, const void* codes, int D, float add, bool sums) {
    constexpr int SUMS = 16;
    float sum[SUMS] = {}, total = 0;
    if (KV == E4M3) {
        const uint8_t* bytes = (const uint8_t*)scales + slot;
        for (int s = 0; s < n; s++) x[s] = x[s] * scale_of(bytes[s]) * LIFT;
        for (const uint8_t* p = bytes; (p = (const uint8_t*)memchr(p, LARGEST_SCALE, bytes + n - p)); p++)
            if ((((const uint8_t*)codes)[(slot + (p - bytes)) * D] & NO_NUMBER) == NO_NUMBER) x[p - bytes] = NAN;
    } else if (KV == FOUR) {
        const uint16_t* pairs = (const uint16_t*)scales + 2 * slot;
        if (!sums) {
            for (int s = 0; s < n; s++) x[s] = x[s] * widen_bf16(pairs[2 * s]) + add * widen_bf16(pairs[2 * s + 1]);
            return 0;
        }
        int s = 0;
        for (; s + SUMS <= n; s += SUMS)
            for (int j = 0; j < SUMS; j++) sum[j] += x[s + j] * widen_bf16(pairs[2 * (s + j) + 1]);
        for (; s < n; s++) total += x[s] * widen_bf16(pairs[2 * s + 1]);
        for (int j = 0; j < SUMS; j++) total += sum[j];
        for (s = 0; s < n; s++) x[s] *= widen_bf16(pairs[2 * s]);
    }
    return total;
}

// In each lane the sum with the lane H further, or the difference from the lane H before.
template <int H, size_t... J>
INLINE Isa::F added_in_lanes(Isa::F v, std::index_sequence<J...>) {
    typedef int32_t Lanes __attribute__((vector_size(sizeof(Isa::F))));
    const Isa::F sign = {(J & H ? -1.f : 1.f)...};
    return SHUFFLED(Lanes, v, v, (J ^ H)...) + v * sign;
}

template <int H>
INLINE Isa::F within_lanes(Isa::F v) {
    v = added_in_lanes<H>(v, std::make_index_sequence<Isa::LANES>());
    if constexpr (2 * H < Isa::LANES) return within_lanes<2 * H>(v);
    return v;
}

// The Hadamard transform of D values in parts of the largest power of two that divides D, at least 16; its own inverse.
inline void hadamard(float* x, int D) {
    using F = Isa::F;
    constexpr int L = Isa::LANES;
    const int n = D & -D;
    const F by = Isa::all(1 / std::sqrt((float)n));
    for (int i = 0; i < D; i += L) Isa::store(x + i, within_lanes<1>(Isa::times(Isa::meta(x, FP32, i), by)));
    for (int apart = L; apart < n; apart *= 2)
        for (int i = 0; i < D; i += 2 * apart)
            for (int j = i; j < i + apart; j += L) {
                const F a = Isa::meta(x, FP32, j), b = Isa::meta(x, FP32, j + apart);
                Isa::store(x + j, a + b), Isa::store(x + j + apart, Isa::minus(a, b));
            }
}

// A query among codes: transformed, in their order, with zeros up to the padded size.
template <int KV>
inline void query_for(float* x, int D, float* spare) {
    constexpr int L = Isa::LANES;
    if (!CODED<KV>) return;
    hadamard(x, D);
    if (KV == E4M3) {
        for (int d = 0; d < D; d++) x[d] *= LIFT;
        return;
    }
    memcpy(spare, x, sizeof(float) * D);
    memset(x, 0, sizeof(float) * padded<KV>(D));
    for (int d = 0; d < D; d++) x[d / (2 * L) * 2 * L + d % 2 * L + d % (2 * L) / 2] = spare[d];
}

// The sum of values back from the order of codes, without what every dim has in common.
template <int KV>
inline void values_from(float* x, int D, float common, float* spare) {
    constexpr int L = Isa::LANES;
    if (!CODED<KV>) return;
    if (KV == E4M3) {
        for (int d = 0; d < D; d++) x[d] *= LIFT;
    } else {
        for (int d = 0; d < D; d++) spare[d] = x[d / (2 * L) * 2 * L + d % 2 * L + d % (2 * L) / 2] + common;
        memcpy(x, spare, sizeof(float) * D);
    }
    hadamard(x, D);
}

// |x| <= 448 rounded to e4m3, half to even.
inline float to_e4m3(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u = (u + 0x7ffff + (u >> 20 & 1)) & 0xfff00000;
    float normal, small = (x + 24576) - 24576;  // between 2^14 and 2^15, multiples of 2^-9
    memcpy(&normal, &u, 4);
    return std::fabs(x) < LEAST_NORMAL ? small : normal;
}

inline uint8_t e4m3_code(float x, float rounded) {
    uint32_t sign, u;
    memcpy(&sign, &x, 4);
    rounded = std::fabs(rounded);
    memcpy(&u, &rounded, 4);
    return (sign >> 24 & 0x80) | (rounded < LEAST_NORMAL ? (int)(rounded * 512) : (int)(u >> 20) - (120 << 3));
}

inline float within(float x, float least, float most) { return x < least ? least : x > most ? most : x; }

// The sum over dims of square(x - what(x)), in 16 sums.
template <class What>
INLINE float squares(const float* x, int D, What what) {
    constexpr int SUMS = 16;
    float sum[SUMS] = {}, total = 0;
    for (int d = 0; d < D; d += SUMS)
        for (int j = 0; j < SUMS; j++) {
            const float off = what(x[d + j]) - x[d + j];
            sum[j] += off * off;
        }
    for (int j = 0; j < SUMS; j++) total += sum[j];
    return total;
}

inline void encode_e4m3(const float* x, int D, uint32_t top, uint8_t* codes, uint8_t* scale) {
    float amax, least = 0;
    memcpy(&amax, &top, 4);
    amax /= LARGEST;
    memcpy(&top, &amax, 4);
    const int first = (int)((top + 0xfffff) >> 20) - FIRST;
    for (int i = 0; i < TRIES; i++) {
        const int byte = first + i < 0 ? 0 : first + i > LARGEST_SCALE ? LARGEST_SCALE : first + i;
        const float unit = scale_of(byte), by = 1 / unit;
        const float error = squares(x, D, [=](float v) { return to_e4m3(within(v * by, -LARGEST, LARGEST)) * unit; });
        if (i == 0 || error < least) least = error, *scale = byte;
    }
    const float by = 1 / scale_of(*scale);
    for (int d = 0; d < D; d++) {
        const float v = within(x[d] * by, -LARGEST, LARGEST);
        codes[d] = e4m3_code(v, to_e4m3(v));
    }
}

inline void encode_four(const float* x, int D, uint8_t* codes, uint16_t* scales) {
    float low = x[0], high = x[0], least = 0, step = 0, begin = 0;
    for (int d = 1; d < D; d++) low = x[d] < low ? x[d] : low, high = x[d] > high ? x[d] : high;
    const float middle = (low + high) / 2, half = (high - low) / 2;
    const auto level = [](float v, float begin, float by) { return within(__builtin_rintf((v - begin) * by), 0, LEVELS); };
    for (int i = 0; i < TRIES; i++) {
        const float reach = half * (float)(1 - SHORTER * i), s = rounded_to(BF16, reach * (2.f / LEVELS));
        const float from = rounded_to(BF16, middle - reach), by = s > 0 ? 1 / s : 0;
        const float error = squares(x, D, [=](float v) { return level(v, from, by) * s + from; });
        if (i == 0 || error < least) least = error, step = s, begin = from;
    }
    write(scales, BF16, 0, step), write(scales, BF16, 1, begin);
    const float by = step > 0 ? 1 / step : 0;
    for (int d = 0; d < D; d += 2)
        codes[d / 2] = (int)level(x[d], begin, by) | (int)level(x[d + 1], begin, by) << 4;
}

// D values of one slot into a cache, and they may change; not finite: no number in any dim.
template <int T, int KV>
inline void keep(void* cache, void* scales, size_t slot, float* x, int D) {
    if (!CODED<KV>) return round_to<T>(cache, slot * D, x, D);
    hadamard(x, D);
    const uint32_t top = largest_bits(x, D);
    uint8_t *codes = (uint8_t*)cache + slot * width<KV>(D), *bytes = (uint8_t*)scales;
    uint16_t* pair = (uint16_t*)scales + 2 * slot;
    if (top >= 0x7f800000) {
        memset(codes, NO_NUMBER, width<KV>(D));
        if (KV == E4M3) bytes[slot] = LARGEST_SCALE;
        else write(pair, BF16, 0, NAN), write(pair, BF16, 1, NAN);
    } else if (KV == E4M3) {
        encode_e4m3(x, D, top, codes, bytes + slot);
    } else {
        encode_four(x, D, codes, pair);
    }
}

// A slot's D values. spare: D floats.
template <int T, int KV>
inline void restore(void* to, size_t at, const void* cache, const void* scales, size_t slot, int D, float* x, float* spare) {
    constexpr int L = Isa::LANES;
    const size_t from = slot * width<KV>(D);
    float unit = 1, common = 0;
    scaled<KV>(&unit, scales, slot, 1, cache, D, 0, false);
    if (KV == FOUR) common = 1, unit = 1, common = scaled<KV>(&unit, scales, slot, 1, cache, D, 0, true);
    for (int d = 0; d < D; d += PARTS<KV> * L) {
        Isa::F v[PARTS<KV>];
        read_slot<KV>(v, cache, from + d / PARTS<KV>, d + PARTS<KV> * L > D);
        for (int p = 0; p < PARTS<KV>; p++) Isa::store(x + d + p * L, Isa::times(v[p], Isa::all(unit)));
    }
    values_from<KV>(x, D, common, spare);
    round_to<T>(to, at, x, D);
}

// `encode` of rows x (n, D), or `decode` into them.
template <int T, int KV>
void code(const Codes& a) {
    const int rows = 64, D = a.D;
#pragma omp parallel num_threads(a.threads) if (a.n > rows)
    {
        float *x = (float*)malloc(sizeof(float) * (padded<KV>(D) + D)), *spare = x + padded<KV>(D);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < a.n; first += rows)
            for (int64_t i = first; i < a.n && i < first + rows; i++) {
                if (a.decodes) {
                    restore<T, KV>(a.x, (size_t)i * D, a.codes, a.scales, i, D, x, spare);
                } else {
                    widen<T>(x, a.x, (size_t)i * D, D);
                    keep<T, KV>(a.codes, a.scales, i, x, D);
                }
            }
        free(x);
    }
}

}  // namespace
