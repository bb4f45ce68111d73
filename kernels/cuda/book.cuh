// Values from a table in registers (packers/tables.py): codes of 4, 3 or 2 bits to halves, and scales of 8 bits to floats.
//
// E2M1 (FP4): the four bits of a code, moved, are a half. Its sign goes to bit 15, its exponent and mantissa to the top of the
// mantissa and the bottom of the exponent: 2^(ee - 1) (1 + m / 2) becomes 2^(ee - 15) (1 + m / 2) in fp16, which is 2^-14 times
// the value, subnormal codes included (ee = 0: m / 2 of 2^0 and of 2^-14). In bf16 it is 2^-126 times it: below what a sum in
// fp32 keeps, so there one multiplication by 2^126 follows. fp16's 2^14 is part of `unit`.
// BOOK: any table. Its halves are cut into a plane of low bytes and one of high bytes; a `prmt` looks four codes up among eight
// bytes of a plane at once, two of them and a third by the codes' top bits among sixteen.
// `unit` (fp32, of a row tile): what a row's sum is multiplied by at the end: the factor of e4m3 scales, 2^14, and the power of
// two that a book was divided by, so that its halves are between 1 and 2 at most.
#pragma once
#include "tile.cuh"

enum { E2M1 = 4, BOOK = 5, SCALES_E4M3 = 16, SCALES_E8M0 = 32 };  // FORM: one of the first, and perhaps one of the others
constexpr bool of_table(int form) { return (form & 15) >= E2M1; }
constexpr bool of_bytes(int form) { return form >= SCALES_E4M3; }

// Two scales in the low half of v, a byte each. e4m3: the bits, moved to fp32's place, are 2^-120 times the number.
template <int FORM>
__device__ __forceinline__ float2 byte_scales(u32 v) {
    if constexpr ((FORM & SCALES_E8M0) != 0) return make_float2(__uint_as_float((v & 0xff) << 23), __uint_as_float((v >> 8 & 0xff) << 23));
    const float power = __uint_as_float(247u << 23);  // 2^120
    return make_float2(__uint_as_float((v & 0xff) << 20) * power, __uint_as_float((v >> 8 & 0xff) << 20) * power);
}

template <int T>  // register j of fragment f, e2m1 times 2^-14 (fp16) or e2m1 itself (bf16)
__device__ __forceinline__ u32 e2m1(u32 word, int f) {
    const int to = (T == FP16 ? 9 : 6) - 4 * f;
    const u32 magnitude = (to >= 0 ? word << (to & 31) : word >> (-to & 31)) & (T == FP16 ? 0x0e000e00u : 0x01c001c0u);
    const u32 value = (word << (12 - 4 * f) & 0x80008000u) | magnitude;
    if constexpr (T == FP16) return value;
    else return fma2<T>(value, Half<T>::power(126), 0x80008000u);
}

// A table of 2^BITS floats as byte planes, low bytes of four values a word, then high bytes; what it was divided by.
template <int BITS, int T>
__device__ __forceinline__ float make_book(const float* values, u32 (&book)[8]) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 1 << BITS; i++) most = fmaxf(most, fabsf(values[i]));
    u32 power = __float_as_uint(most) >> 23;
    power = power < 1 ? 1 : power > 252 ? 252 : power;
    const float inverse = __uint_as_float((254 - power) << 23);
#pragma unroll
    for (int i = 0; i < (1 << BITS) / 4; i++) {
        const u32 a = from_floats<T>(values[4 * i] * inverse, values[4 * i + 1] * inverse);
        const u32 b = from_floats<T>(values[4 * i + 2] * inverse, values[4 * i + 3] * inverse);
        book[i] = __byte_perm(a, b, 0x6420), book[4 + i] = __byte_perm(a, b, 0x7531);
    }
    return __uint_as_float(power << 23);
}

template <int BITS>
struct Book {
    static constexpr int SETS = Tile<BITS>::FRAGS / 4;  // of four fragments, whose codes one look-up takes: f = SETS * i + set

    static __device__ __forceinline__ u32 plane(const u32* bytes, u32 select, u32 upper) {
        if constexpr (BITS == 2) return __byte_perm(bytes[0], bytes[0], select);
        if constexpr (BITS == 3) return __byte_perm(bytes[0], bytes[1], select);
        return __byte_perm(__byte_perm(bytes[0], bytes[1], select), __byte_perm(bytes[2], bytes[3], select), upper);
    }

    // Register j of the four fragments of a set: two halves each.
    static __device__ __forceinline__ void look_up(const u32 (&w)[Tile<BITS>::REGS], int set, int j, const u32 (&book)[8], u32 (&a)[4]) {
        u32 select = w[j], upper = 0;  // a nibble a code
        if constexpr (BITS == 4) upper = (select >> 1 & 0x44444444u) | 0x32103210u, select &= 0x77777777u;
        else select = select >> 2 * set & 0x33333333u;
        if constexpr (BITS == 3) {
            const u32 third = w[4 + (j >> 1)];
            const int right = 2 * set + (j & 1) - 2;
            select |= (right >= 0 ? third >> (right & 31) : third << (-right & 31)) & 0x44444444u;
        }
        u32 pairs[2][2];  // of half e: fragments 0 and 1, 2 and 3
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 low = plane(book, select >> 16 * e, upper >> 16 * e), high = plane(book + 4, select >> 16 * e, upper >> 16 * e);
            pairs[e][0] = __byte_perm(low, high, 0x5140), pairs[e][1] = __byte_perm(low, high, 0x7362);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = __byte_perm(pairs[0][i / 2], pairs[1][i / 2], i % 2 ? 0x7632 : 0x5410);
    }
};
