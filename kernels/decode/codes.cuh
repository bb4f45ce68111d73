// A cache of keys and values as attend.cu reads it, in 16 bits or in codes (decode/kv.py): what a lane has of a slot, operands
// of mma made of it, and a token's codes.
//
// Dims    any order, the same for q and k, and for v and y: so what a lane has of a slot lies in pieces of up to 16 bytes. Lane
//         t of a key has pieces 16 t + 64 j of its row (4 bits: the t-th quarter); lane g of a value 16 g + 128 j, or the g-th
//         eighth.
// Halves  codes are fp16 numbers whatever the model's dtype, for no arithmetic: e4m3's bits, moved, are 2^-8 of the value; a
//         4-bit code in the lowest bits of a half is 2^-24 of it (a subnormal, which mma takes), in the next four 2^-20, so
//         that of a word two masks and one shift make eight. The sixteenth of that is taken of q's odd dims before, of y's
//         after.
#pragma once
#include "tile.cuh"

template <int KV, int D>
struct Held {
    static constexpr bool FOUR = KV == 4;
    static constexpr int ROW = KV == 0 ? 2 * D : FOUR ? D / 2 : D, SCALE = KV == 0 ? 0 : FOUR ? 4 : 1;  // bytes of a slot
    static constexpr int K_WORDS = ROW / 16, V_WORDS = ROW / 32;                                      // of a lane
    static constexpr int K_PIECES = ROW <= 64 ? 1 : ROW / 64, K_BYTES = ROW / 4 / K_PIECES;           // a piece is one copy
    static constexpr int V_PIECES = ROW <= 128 ? 1 : ROW / 128, V_BYTES = ROW / 8 / V_PIECES;
    static constexpr int K_AT = 2 * 32 * 4 * K_WORDS, V_AT = 4 * 32 * 4 * V_WORDS;  // bytes of a tile's keys, its values
    static constexpr int STAGE = K_AT + V_AT + 2 * 16 * SCALE;
    static constexpr float FACTOR = KV == 0 ? 1.f : FOUR ? 0x1p24f : 0x1p8f, ODD = FOUR ? 0.0625f : 1.f;
    static constexpr int FIRST = 103 << 3;  // of fp8's scales

    // Where piece j begins in the row, in bytes.
    static __device__ __forceinline__ int k_piece(int t, int j) { return K_BYTES * t + 64 * j; }
    static __device__ __forceinline__ int v_piece(int g, int j) { return V_BYTES * g + 128 * j; }
    // The first dim of step s (of 16, four a lane) of a key; the other two of its four are NEXT further on.
    static constexpr int NEXT = FOUR ? 4 : 2;
    static __device__ __forceinline__ int k_dim(int t, int s) {
        return KV == 0 ? 8 * t + 32 * (s >> 1) + 4 * (s & 1)
               : FOUR  ? D / 4 * t + 8 * (s >> 1) + 2 * (s & 1)
                       : 16 * t + 64 * (s >> 2) + 4 * (s & 3);
    }

    // e4m3 in the upper bytes of two halves; and a bit lower
    static __device__ __forceinline__ u32 of_bytes(u32 x, u32 moved) {
        return (moved & 0x3f803f80u) | (x & 0x80008000u);
    }
    // The two registers of step s of a key's words.
    static __device__ __forceinline__ void key(const u32* w, int s, u32& a0, u32& a2) {
        if constexpr (KV == 0) a0 = w[2 * s], a2 = w[2 * s + 1];
        else if constexpr (FOUR) a0 = w[s >> 1] >> 8 * (s & 1) & 0x000f000fu, a2 = w[s >> 1] >> 8 * (s & 1) & 0x00f000f0u;
        else a0 = of_bytes(w[s] << 8, w[s] << 7), a2 = of_bytes(w[s], w[s] >> 1);
    }
    // The same of a query, from its dims k_dim, + 1 and the two that follow.
    static __device__ __forceinline__ void query(u32 x, u32 next, u32& b0, u32& b1) {
        b0 = KV == 0 ? x : __byte_perm(x, next, 0x5410), b1 = KV == 0 ? next : __byte_perm(x, next, 0x7632);
    }
    // Two dims (step m of D / 16) of two slots each, from their words.
    static __device__ __forceinline__ void values(const u32* w0, const u32* w1, int m, u32& a0, u32& a1) {
        if constexpr (FOUR) {
            const u32 x = __byte_perm(w0[m >> 2], w1[m >> 2], m & 2 ? 0x7632 : 0x5410) >> 8 * (m & 1);
            a0 = x & 0x000f000fu, a1 = x & 0x00f000f0u;
        } else if constexpr (KV == 8) {
            const u32 x = __byte_perm(w0[m >> 1], w1[m >> 1], m & 1 ? 0x7632 : 0x5410);
            a0 = of_bytes(x << 8, x << 7), a1 = of_bytes(x, x >> 1);
        } else {
            a0 = __byte_perm(w0[m], w1[m], 0x5410), a1 = __byte_perm(w0[m], w1[m], 0x7632);
        }
    }
    // Scales of slot s: what codes are multiplied by, and what is added for each.
    static __device__ __forceinline__ void scales(u32 shared, int s, float& step, float& low) {
        const u32 w = read4(shared + (FOUR ? 4 * s : s & ~3));
        step = __uint_as_float(FOUR ? w << 16 : ((w >> 8 * (s & 3) & 255) + FIRST) << 20),
        low = FOUR ? __uint_as_float(w & 0xffff0000u) : 0.f;
    }
};

template <int BYTES>  // 4, 8 or 16, or as many zeros
__device__ __forceinline__ void copy_or_zero(u32 shared, const void* global, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES),
                 "r"(there ? BYTES : 0));
}
template <int BYTES>
__device__ __forceinline__ void read_words(u32* w, u32 shared) {
    if constexpr (BYTES == 4) w[0] = read4(shared);
    else if constexpr (BYTES == 8)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(shared) : "memory");
    else
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(shared)
                     : "memory");
}

// ------------------------------------------------------------------------------------------------- a token's own
// Four dims a lane of a head of D, in lanes side by side, turned (Hadamard's, with its factor).
template <int D>
__device__ __forceinline__ float4 turned(float4 v, int lane) {
    v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
    v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
#pragma unroll
    for (int d = 1; d < D / 4; d *= 2) {
        float* x[4] = {&v.x, &v.y, &v.z, &v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, *x[i], d);
            *x[i] = lane & d ? other - *x[i] : *x[i] + other;
        }
    }
    constexpr float BY = D == 128 ? 0.08838834764f : 0.125f;
    return make_float4(v.x * BY, v.y * BY, v.z * BY, v.w * BY);
}
template <int LANES, class F>  // over the lanes of a head
__device__ __forceinline__ float all(float v, F of) {
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) v = of(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}
// The bits of e4m3 nearest to x of at most 448, ties to even; and what they stand for.
__device__ __forceinline__ u32 to_e4m3(float x) {
    const u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    const u32 normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
    // multiples of 2^-9, as fp32 rounds them there
    const u32 small = __float_as_uint(__uint_as_float(size) + 16384.f) - 0x46800000u;
    return (size < 0x3c800000u ? small : normal) | (bits >> 24 & 0x80u);
}
__device__ __forceinline__ float of_e4m3(u32 code) {
    // 2^120: the exponents' difference
    return __uint_as_float((code & 0x7fu) << 20 | (code & 0x80u) << 24) * __uint_as_float(247u << 23);
}
__device__ __forceinline__ float as_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return __uint_as_float(bits + 0x7fffu + (bits >> 16 & 1) & 0xffff0000u);
}

// `kv.encode` of a turned head, four dims a lane: codes of this lane, a byte (or four bits) each, and the head's scales as they
// lie in memory. Eight scales are tried side by side, each by an eighth of the head's lanes, which read all of it at `head`
// (shared memory, written here): a loop of few instructions, for each is fetched once a layer. All of them one after another in
// registers, 700 instructions, took 3 us.
template <int KV>
struct Scale {
    static constexpr float LARGEST = 448.f, LEVELS = 15.f;  // of e4m3; of 4 bits, less one
    float step, by, base = 0.f;
    u32 its;

    __device__ __forceinline__ Scale(float top, float bottom, int i, float shorter) {  // the i-th for values from bottom to top
        if constexpr (KV == 8) {
            constexpr int FIRST = Held<KV, 128>::FIRST;
            const int first = (int)((__float_as_uint((top > -bottom ? top : -bottom) / LARGEST) + 0xfffffu) >> 20) - FIRST;
            its = smaller(first + i > 0 ? first + i : 0, 255);
            step = __uint_as_float((its + FIRST) << 20), by = 1.f / step;
        } else {
            const float reach = (top - bottom) * 0.5f * (1.f - shorter * i);
            step = as_bf16(reach * (2.f / LEVELS)), base = as_bf16((bottom + top) * 0.5f - reach),
            by = step > 0.f ? 1.f / step : 0.f;
            its = __float_as_uint(step) >> 16 | __float_as_uint(base);
        }
    }
    __device__ __forceinline__ u32 code(float v) const {
        const float x = (v - base) * by, low = KV == 8 ? -LARGEST : 0.f, high = KV == 8 ? LARGEST : LEVELS;
        const float some = x < low ? low : x > high ? high : x;
        // 2^23: rounds to a whole number, ties to even
        return KV == 8 ? to_e4m3(some) : __float_as_uint(some + 8388608.f) & 15;
    }
    __device__ __forceinline__ float off(float v) const {
        const u32 c = code(v);
        return (KV == 8 ? of_e4m3(c) : (float)c) * step + base - v;
    }
};
template <int KV, int D>
__device__ __forceinline__ void encode(float4 x, float4* head, int part, float shorter, u32& codes, u32& scales) {
    constexpr int LANES = D / 4, EACH = LANES / 8;  // lanes of a head, of a scale
    auto least = [](float a, float b) { return a < b ? a : b; };
    const float top = -all<LANES>(least(least(-x.x, -x.y), least(-x.z, -x.w)), least);
    const float bottom = all<LANES>(least(least(x.x, x.y), least(x.z, x.w)), least);
    head[part] = x;
    __syncwarp();
    const Scale<KV> mine(top, bottom, part / EACH, shorter);
    float error = 0.f;
#pragma unroll 1
    for (int i = part % EACH; i < LANES; i += EACH) {
        const float4 v = head[i];
        const float a = mine.off(v.x), b = mine.off(v.y), c = mine.off(v.z), d = mine.off(v.w);
        error += a * a + b * b + (c * c + d * d);
    }
    error = all<EACH>(error, [](float a, float b) { return a + b; });
    int best = part / EACH;
#pragma unroll
    for (int d = EACH; d < LANES; d *= 2) {  // the first of those with the least
        const float its = __shfl_xor_sync(0xffffffffu, error, d);
        const int other = __shfl_xor_sync(0xffffffffu, best, d);
        if (its < error || (its == error && other < best)) error = its, best = other;
    }
    const Scale<KV> taken(top, bottom, best, shorter);
    constexpr int BITS = KV;
    codes = taken.code(x.x) | taken.code(x.y) << BITS | taken.code(x.z) << 2 * BITS | taken.code(x.w) << 3 * BITS;
    scales = taken.its;
}
