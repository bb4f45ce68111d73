// A cache in few bits (decode/kv.py) as attend.cu reads it: what a lane has of a slot, and its codes as operands of mma.
//
// Dims    any order, the same for q and k, and for v and y: so a lane's codes of a slot lie side by side in memory. Lane t of a
//         key has words 4 t + 16 j (fp8, of four dims) or the t-th quarter of the row (4 bits, words of eight); lane g of a
//         value the g-th eighth.
// Halves  e4m3's bits, moved, are a half: 2^-8 of the value in fp16, 2^-120 in bf16. A 4-bit code is one as it stands in fp16, 2^-24
//         of it (a subnormal, which mma takes); in bf16 sums of such would be lost, so there it is 128 more, and the sums of
//         what it is multiplied by take that off.
// UNIT    of p * step, so that the product is a half, and what comes of codes in bf16's 2^-120 no subnormal.
#pragma once
#include "tile.cuh"

template <int KV, int T, int D>
struct Held {
    static constexpr bool FOUR = KV == 4;
    static constexpr int ROW = FOUR ? D / 2 : D, SCALE = FOUR ? 4 : 1;                 // bytes of a slot
    static constexpr int K_WORDS = ROW / 16, V_WORDS = ROW / 32;                       // of a lane
    static constexpr int K_PIECES = FOUR ? 1 : D / 64, K_BYTES = 4 * K_WORDS / K_PIECES;  // a piece is one copy
    static constexpr int V_BYTES = 4 * V_WORDS;
    static constexpr int SLOTS = 16, K_AT = 2 * 4 * K_WORDS * 32, V_AT = 4 * V_BYTES * 32;  // bytes of a tile's keys, its values
    static constexpr int STAGE = K_AT + V_AT + 2 * SLOTS * SCALE;
    static constexpr float FACTOR = FOUR ? (T == FP16 ? 0x1p24f : 1.f) : (T == FP16 ? 0x1p8f : 0x1p120f);
    static constexpr float MORE = FOUR && T == BF16 ? 128.f : 0.f;  // than the code
    static constexpr float UNIT = !FOUR && T == BF16 ? 0x1p100f : 256.f;
    static constexpr int FIRST = 103 << 3;  // of fp8's scales

    // Where piece j of a lane's part of a key begins in the row, in bytes.
    static __device__ __forceinline__ int k_piece(int t, int j) { return FOUR ? K_BYTES * t : 16 * t + 64 * j; }
    // The first dim of word m of a lane's part of a key.
    static __device__ __forceinline__ int k_dim(int t, int m) { return FOUR ? D / 4 * t + 8 * m : 16 * t + 64 * (m >> 2) + 4 * (m & 3); }

    static __device__ __forceinline__ u32 of_bytes(u32 x) {  // e4m3 in the upper bytes of two halves
        constexpr u32 SIZE = T == FP16 ? 0x3f803f80u : 0x07f007f0u;
        return (x >> (T == FP16 ? 1 : 4) & SIZE) | (x & 0x80008000u);
    }
    static __device__ __forceinline__ u32 of_nibbles(u32 x) {  // codes in the lowest bits of two halves
        return (x & 0x000f000fu) | (MORE != 0.f ? 0x43004300u : 0u);
    }
    // The two registers of step s (of 16 dims, four a lane) of a key's word: dims +0 +2, +1 +3, or +2s +2s+4, +2s+1 +2s+5.
    static __device__ __forceinline__ void key(u32 w, int s, u32& b0, u32& b1) {
        if constexpr (FOUR) b0 = of_nibbles(w >> 8 * s), b1 = of_nibbles(w >> (8 * s + 4));
        else b0 = of_bytes(w << 8), b1 = of_bytes(w);
    }
    // The same of a query: eight (or four) dims as they lie.
    static __device__ __forceinline__ void query(const u32* x, int s, u32& a0, u32& a2) {
        const u32 a = x[FOUR ? s : 0], b = x[FOUR ? s + 2 : 1];
        a0 = (a & 0xffffu) | b << 16, a2 = (a >> 16) | (b & 0xffff0000u);
    }
    // Two dims of two slots each, from their words: fp8 bytes k and k + 1, 4 bits both halves of byte k.
    static __device__ __forceinline__ void values(u32 w0, u32 w1, int k, u32& a0, u32& a1) {
        const u32 x = both(w0, w1, k);
        if constexpr (FOUR) a0 = of_nibbles(x), a1 = of_nibbles(x >> 4);
        else a0 = of_bytes(x), a1 = of_bytes(both(w0, w1, k + 1));
    }
    static __device__ __forceinline__ u32 both(u32 w0, u32 w1, int k) {  // byte k of each, in both bytes of a half
        u32 d;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(w0), "r"(w1), "r"(0x4400 + 0x1111 * k));
        return d;
    }
    // Scales of slots s, s + 1 (s even): what codes are multiplied by, and what is added for each.
    static __device__ __forceinline__ void scales(u32 shared, int s, float (&step)[2], float (&low)[2]) {
        const u32 w = read4(shared + (FOUR ? 4 * s : s & ~3)), next = FOUR ? read4(shared + 4 * s + 4) : 0;
        if constexpr (FOUR) {
            step[0] = __uint_as_float(w << 16), low[0] = __uint_as_float(w & 0xffff0000u);
            step[1] = __uint_as_float(next << 16), low[1] = __uint_as_float(next & 0xffff0000u);
        } else {
            const u32 two = w >> 8 * (s & 2);
            step[0] = __uint_as_float(((two & 255) + FIRST) << 20), step[1] = __uint_as_float((((two >> 8) & 255) + FIRST) << 20);
            low[0] = low[1] = 0.f;
        }
    }
};

template <int BYTES>  // 4, 8 or 16, or as many zeros
__device__ __forceinline__ void copy_or_zero(u32 shared, const void* global, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES), "r"(there ? BYTES : 0));
}
template <int BYTES>
__device__ __forceinline__ void read_words(u32* w, u32 shared) {
    if constexpr (BYTES == 4) w[0] = read4(shared);
    else if constexpr (BYTES == 8) asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(shared) : "memory");
    else asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(shared) : "memory");
}

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
