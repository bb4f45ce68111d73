// Values from a table (packers/tables.py) in registers: codes of 4, 3 or 2 bits become halves, and scales of 8 bits floats.
//
// E2M1   FP4: the four bits of a code, moved, are a half. Its sign goes to bit 15, its exponent and mantissa to the bottom of
//        the exponent and the top of the mantissa: 2^(ee - 1) (1 + m / 2) becomes 2^(ee - 15) (1 + m / 2) in fp16. That is
//        2^-14 times the value, subnormal codes (ee = 0) included. In bf16 it is 2^-126 times the value, less than a sum in
//        fp32 keeps, so one multiplication by 2^126 follows there. fp16's 2^14 is part of `unit`.
// BOOK   Any table. Its halves are split into a plane of low bytes and a plane of high bytes. One `prmt` looks up four codes
//        among eight bytes of a plane; among sixteen it takes two, and a third that chooses between them by the top bits.
// Scales are applied to sums in fp32 (byte_scales), or to the values as halves (HalfScales).
// `unit` (fp32, of a row tile) is what a row's sum is multiplied by at the end: the factor of e4m3 scales, powers of two that
//        keep halves in their range, and what a book was divided by so that its largest value is between 1 and 2.
#pragma once
#include "tile.cuh"

// FORM: one of the first three (the third: as bytes, split_int8.cuh), and perhaps one of the others.
enum { E2M1 = 4, BOOK = 5, BOOK_PLANES = 6, SCALES_E4M3 = 16, SCALES_E8M0 = 32 };
constexpr bool of_table(int form) { return (form & 15) >= E2M1; }
constexpr bool of_bytes(int form) { return form >= SCALES_E4M3; }

// Two scales in the low half of v, a byte each. Those of e4m3 may be negative.
__device__ __forceinline__ u32 e4m3_halves(u32 v) {  // two numbers of e4m3 in the low half of v, in fp16, which holds them
#if __CUDA_ARCH__ >= 890 || !defined(__CUDA_ARCH__)
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)v));
    return halves;
#else
    const u32 top = __byte_perm(v, 0, 0x1404);  // each byte at the top of a half; moved down by a bit: 2^-8 times the number
    return fma2<FP16>((top >> 1 & 0x3f803f80u) | (top & 0x80008000u), Half<FP16>::power(8), 0x80008000u);
#endif
}
template <int FORM>
__device__ __forceinline__ float2 byte_scales(u32 v) {
    if constexpr ((FORM & SCALES_E8M0) != 0)
        return make_float2(__uint_as_float((v & 0xff) << 23), __uint_as_float((v >> 8 & 0xff) << 23));
    return to_floats<FP16>(e4m3_halves(v));
}

__device__ __forceinline__ u32 either_of(u32 a, u32 b, u32 mask) {  // one LOP3, which C++ makes two of
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xa8;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}
template <int T> constexpr float E2M1_UNIT = T == FP16 ? 16384.f : 1.f;  // what e2m1 leaves to `unit`
template <int T>  // register j of fragment f, e2m1 times 2^-14 (fp16) or 2^-126 (bf16)
__device__ __forceinline__ u32 small_e2m1(u32 word, int f) {
    // its top byte holds all: three instructions make those of two fragments, 10 a word of eight codes
    if constexpr (T == FP16) {
        // 18 c - 16 has the sign at bit 7 and c at 3..1 (0: -0, lending from the byte above, which + 1 pays)
        const u32 codes = word & 0x0f0f0f0fu << f % 2 * 4;
        const u32 tops = f % 2 ? either_of(codes, codes >> 3, 0x8e8e8e8eu) : codes * 18 + 0xf0f0f0f1u & 0x8e8e8e8eu;
        return __byte_perm(tops, 0, f / 2 ? 0x3414 : 0x2404);
    }
    const int to = 6 - 4 * f;
    if (to >= 0) return (word & 0xf000fu << 4 * f) * (65u << (to & 31)) & 0x81c081c0u;  // one multiplication moves both
    return (word << (12 - 4 * f) & 0x80008000u) | (word >> (-to & 31) & 0x01c001c0u);
}
template <int T>  // the same times 2^-14 (fp16) or as it is (bf16)
__device__ __forceinline__ u32 e2m1(u32 word, int f) {
    if constexpr (T == FP16) return small_e2m1<T>(word, f);
    else return fma2<T>(small_e2m1<T>(word, f), Half<T>::power(126), 0x80008000u);
}

// The scales of two rows as halves; a value times its scale is rounded once. With E2M1 the scales are multiplied by 2^14 (bf16:
// 2^126) / 2^SHIFT, whose 2^SHIFT is part of `unit`. SHIFT 7 leaves room for all of e4m3 (e2m1 * e4m3 is exact in fp16), 4 for
// e8m0 from 2^-19 to 2^5, beyond which weights are 0 or infinite. fp16 scales have no room: there the value is multiplied.
template <int FORM, int T>
struct HalfScales {
    static constexpr bool SMALL = (FORM & 15) == E2M1, E4M3 = (FORM & SCALES_E4M3) != 0,
                          RAISED = SMALL && T == FP16 && !of_bytes(FORM);
    static constexpr int SHIFT = !SMALL || RAISED ? 0 : T == BF16 ? 64 : E4M3 ? 7 : 4;
    static constexpr int UP = !SMALL || RAISED ? 0 : (T == FP16 ? 14 : 126) - SHIFT;

    static __device__ __forceinline__ u32 times(u32 v, int power) {
        return power ? fma2<T>(v, Half<T>::power(power), 0x80008000u) : v;
    }
    static __device__ __forceinline__ u32 of(u32 v) {
        if constexpr (!of_bytes(FORM)) return times(v, UP);
        else if constexpr (E4M3 && !SMALL) {
            if constexpr (T == FP16) return e4m3_halves(v);
            const float2 wide = byte_scales<FORM>(v);
            return from_floats<T>(wide.x, wide.y);
        } else if constexpr (T == FP16 && !E4M3) {
            const float2 wide = byte_scales<FORM>(v);
            return from_floats<T>(wide.x * (1 << UP), wide.y * (1 << UP));
        } else {
            // each byte at the top of a half: 2^-8 (fp16) or 2^-120 times e4m3, or e8m0
            const u32 top = __byte_perm(v, 0, 0x1404);
            if constexpr (T == FP16) return times(top >> 1, UP + 8);
            else if constexpr (E4M3) return times(times(top >> 4, 120), UP);
            else return times(top >> 1, UP);
        }
    }
    static __device__ __forceinline__ u32 scaled(u32 value, u32 scale) {
        return fma2<T>(times(value, RAISED ? 14 : 0), scale, 0x80008000u);
    }
    // A value by the scale of one of two rows; `scales` stays in one register.
    static __device__ __forceinline__ u32 of_row(u32 value, u32 scales, int high) {
        u32 d;
        if (high) asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, hi};}" : "=r"(d) : "r"(scales));
        else asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {lo, lo};}" : "=r"(d) : "r"(scales));
        return scaled(value, d);
    }
};

// Whether values times scales are exact as halves, over the range of the scales or, in bf16, of weights that bf16 holds. Then
// no sum ends at each group.
template <int FORM, int T>
constexpr bool scaled_halves() { return (FORM & 15) == E2M1 && ((FORM & SCALES_E4M3) || (T == BF16 && of_bytes(FORM))); }

// A table of 2^BITS floats as byte planes: low bytes, and 16 bytes on high bytes. By a whole warp; what it was divided by.
template <int BITS, int T>
__device__ __forceinline__ float make_book(const float* values, unsigned char* book, int lane) {
    const float value = lane < 1 << BITS ? values[lane] : 0.f;
    float most = fabsf(value);
#pragma unroll
    for (int d = 1 << BITS >> 1; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    u32 power = __float_as_uint(__shfl_sync(0xffffffffu, most, 0)) >> 23;
    power = power < 1 ? 1 : power > 252 ? 252 : power;
    const u32 half = from_floats<T>(value * __uint_as_float((254 - power) << 23), 0.f);
    if (lane < 1 << BITS) book[lane] = (unsigned char)half, book[16 + lane] = (unsigned char)(half >> 8);
    return __uint_as_float(power << 23);
}

template <int BITS>
struct Book {
    static __device__ __forceinline__ u32 plane(const u32* bytes, u32 select, u32 upper) {
        if constexpr (BITS == 2) return __byte_perm(bytes[0], bytes[0], select);
        if constexpr (BITS == 3) return __byte_perm(bytes[0], bytes[1], select);
        return __byte_perm(__byte_perm(bytes[0], bytes[1], select), __byte_perm(bytes[2], bytes[3], select), upper);
    }

    // Register j of fragments 4 * quad to 4 * quad + 3: two halves each. book: planes of make_book.
    static __device__ __forceinline__ void look_up(const u32 (&w)[Tile<BITS>::REGS], int quad, int j, const uint4 (&book)[2],
                                                   u32 (&a)[4]) {
        const u32 planes[8] = {book[0].x, book[0].y, book[0].z, book[0].w, book[1].x, book[1].y, book[1].z, book[1].w};
        const u32 upper = (w[j] >> 1 & 0x44444444u) | 0x32321010u;  // 4 bits: which of the two look-ups
#pragma unroll
        for (int i = 0; i < 2; i++) {  // two fragments: i * 2 and the next; of fewer bits i and i + 2, one nibble a code
            u32 select = w[j] & 0x77777777u;
            if constexpr (BITS < 4) select = w[j] >> 2 * i & 0x33333333u;
            if constexpr (BITS == 3) {
                const u32 third = w[4 + (j >> 1)];
                const int right = 2 * i + (j & 1) - 2;
                select |= (right >= 0 ? third >> (right & 31) : third << (-right & 31)) & 0x44444444u;
            }
            // the byte of these codes in both halves of the word
            const int both = BITS < 4 ? 0x20 + 0x11 * quad : 0x20 + 0x11 * i;
            const u32 by = __byte_perm(select, 0, 0x4400 | both), which = BITS < 4 ? 0 : __byte_perm(upper, 0, 0x4400 | both);
            const u32 low = plane(planes, by, which), high = plane(planes + 4, by, which);
            a[BITS < 4 ? i : 2 * i] = __byte_perm(low, high, 0x6240);
            a[BITS < 4 ? i + 2 : 2 * i + 1] = __byte_perm(low, high, 0x7351);
        }
    }
};
