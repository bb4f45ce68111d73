// Products of codes of 1 and 2 bits by counting bits: tile_mma's FORM PLANES, for a row or two of x.
//
// x       In a span of k (a group or what a chunk has of it) x = x' * unit: x' an integer, unit a power of two, so that the span's
//         largest x' fills 15 bits (2-bit codes: 14). Rounded there: by at most 2^-15 (2^-14) of that largest |x|, and no fp16
//         number within 1/16 (1/8) of it is rounded at all. The way with codes as halves (EXACT) is 2^-14 of a code off.
// mma     16 x 256 bits by 256 x 8 bits, counts of ones of the AND. A: a chunk's words as they lie, four a lane. B: column p has
//         bit p of x' where A has the low bit of that k's code, and bit p of 2 x' where A has its high bit; two mma for p < 16.
//         The 16th bit weighs -2^15. Nothing is done to a code: 33 instructions for 16 x 128 weights instead of 115.
// zeros   A of all ones (of low bits) yields the same sums of x', so sum(code * x') - zero * sum(x') is taken before the powers of
//         four that part the lanes of a row are put in, and cancels as it should.
// Spans   that hold inf or nan, and sums past fp32, end as no finite number; such a y is computed once more, one by one.
#pragma once
#include "tile.cuh"

__device__ __forceinline__ u32 load4_written(const u16* p) {  // as load2 of fold.cuh: not by way of L1
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }
template <int T>
__device__ __forceinline__ u32 larger2(u32 a, u32 b) {  // of two halves each; NaN if one is
    u32 d;
    if constexpr (T == FP16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 pick(u32 a, u32 b, u32 mask) {  // a where mask is set, else b: one LOP3, which C++ makes two of
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}

__device__ __forceinline__ void mma_bits(u32 (&d)[4], const u32* a, u32 b0, u32 b1) {  // d = a b
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0), "r"(0), "r"(0), "r"(0));
}

template <int BITS, int T, int GROUP, int ROWS, int THREADS>
struct Planes {
    using L = Tile<BITS>;
    static constexpr int SPAN = GROUP == 0 || GROUP % L::CHUNK == 0 ? L::CHUNK : gcd(GROUP, L::CHUNK);
    static constexpr int SPANS = L::CHUNK / SPAN, PER_SPAN = 16 / SPANS;  // of a chunk; bits of half a word that are of a span
    static constexpr int BYTES = 544;  // of a span's planes: [lane][p / 8][register], and 32 that halve the bank conflicts of stores
    static constexpr int HEAD = 15 - BITS;                               // unit is 2^-HEAD of the largest |x|'s power of two
    static constexpr float ROUND = 12582912.f;                           // 1.5 * 2^23: its last bits become the nearest integer
    static constexpr u32 LOW = BITS == 1 ? ~0u : 0x55555555u;            // where A has low bits of codes

    const int chunks;
    const u32 planes;    // in shared memory: [row][chunk][span]
    float* const units;  // behind them, in the same order

    __device__ __forceinline__ Planes(char* shared, int chunks)
        : chunks(chunks), planes(shared_address(shared)), units((float*)(shared + ROWS * chunks * SPANS * BYTES)) {}
    __device__ __forceinline__ int bytes() const { return (ROWS * chunks * SPANS * (BYTES + 4) + 15) / 16 * 16; }

    // x (ROWS, K) into planes and units, zeros past K, by all threads; a barrier must follow. A thread takes 32 k of a chunk, all
    // of a lane's register of B: k = 16 f + 8 i + 2 c and the next. At 1 bit of one register i (f < 16), at 2 bits of both.
    __device__ __forceinline__ void prepare(const u16* __restrict__ x, int K) const {
        constexpr int EACH = BITS == 1 ? 8 : 4;  // threads of a chunk
        const int tasks = chunks * EACH, whole = (tasks + 31) / 32 * 32;  // whole warps: they shuffle
        for (int task = threadIdx.x; task < ROWS * whole; task += THREADS) {
            const int row = ROWS == 1 ? 0 : task / whole, mine = task - row * whole;
            const int chunk = mine / EACH, at = row * chunks + chunk, c = mine % 4, i = BITS == 1 ? mine % 8 / 4 : 0;
            const int k = chunk * L::CHUNK + 8 * i + 2 * c, left = K - k;
            const u16* from = x + (size_t)row * K + k;
            asm volatile("" : "+l"(from));  // else ptxas makes each address anew, 50 of 440 instructions
            u32 v[16], top[SPANS] = {};  // top: largest |x| of even and odd k, then of both and of all threads of a chunk
            auto offset = [](int n) { return BITS == 1 ? 16 * n : 8 * n; };
#pragma unroll
            for (int n = 0; n < 16; n++) v[n] = offset(n) < left ? load4_written(from + offset(n)) : 0u;
#pragma unroll
            for (int n = 0; n < 16; n++) top[offset(n) / SPAN] = larger2<T>(top[offset(n) / SPAN], v[n] & 0x7fff7fffu);
            float up[SPANS];
#pragma unroll
            for (int j = 0; j < SPANS; j++) {
                top[j] = larger(top[j] & 0xffffu, top[j] >> 16);
#pragma unroll
                for (int d = 1; d < EACH; d *= 2) top[j] = larger(top[j], __shfl_xor_sync(0xffffffffu, top[j], d));
                const u32 e = larger(__float_as_uint(to_floats<T>(top[j]).x) >> 23, HEAD + 2);
                up[j] = __uint_as_float((254 + HEAD - e) << 23);
                const u32 unit = e == 255 ? 0x7fffffffu : (e - HEAD) << 23;  // nan where an x is no finite number
                if (mine % EACH == 0 && mine < tasks) units[at * SPANS + j] = __uint_as_float(unit);
            }
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const float2 two = to_floats<T>(v[n]);
                const u32 lo = __float_as_uint(__fmaf_rn(two.x, up[offset(n) / SPAN], ROUND));
                v[n] = __byte_perm(lo, __float_as_uint(__fmaf_rn(two.y, up[offset(n) / SPAN], ROUND)), 0x5410);
            }
#pragma unroll
            for (int s = 8; s > 0; s /= 2) {  // transposes both halves' 16 x 16 bits
                const u32 low = s == 4 ? 0x0f0f0f0fu : s == 2 ? 0x33333333u : 0x55555555u;
#pragma unroll
                for (int p = 0; p < 16; p++)
                    if (!(p & s)) {
                        const u32 a = v[p], b = v[p + s];
                        if (s == 8) v[p] = __byte_perm(a, b, 0x6240), v[p + s] = __byte_perm(a, b, 0x7351);
                        else v[p] = pick(a, b << s, low), v[p + s] = pick(a >> s, b, low);
                    }
            }
            if (mine < tasks)
#pragma unroll
                for (int j = 0; j < SPANS; j++)
#pragma unroll
                    for (int p = 0; p < 16; p++) {
                        const u32 to = planes + (at * SPANS + j) * BYTES + (p % 8 * 4 + c) * 16 + p / 8 * 8;
                        const u32 here = ((1u << PER_SPAN) - 1) * 0x10001u << j * PER_SPAN;
                        if constexpr (BITS == 1) {
                            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 4 * i), "r"(v[p] & here) : "memory");
                        } else {  // bits of i = 0 and 1 take turns
                            const u32 before = p ? v[p - (p > 0)] : 0u;
                            const u32 b0 = pick(v[p], before << 1, LOW), b1 = pick(v[p] >> 1, before, LOW);
                            asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(b0 & here), "r"(b1 & here) : "memory");
                        }
                    }
        }
    }

    // What a lane has of a span, the fourth of B's columns that are its: B, and unit, and its part of sum(x).
    struct Span {
        u32 b[4];
        float unit, sum;
        int last;  // how often the upper of two bits weighs as much as the lower, in the upper half of x'
    };
    __device__ __forceinline__ Span span(int row, int chunk, int j) const {
        Span s;
        const int at = (row * chunks + chunk) * SPANS + j;
        const u32 from = planes + at * BYTES + (threadIdx.x & 31) * 16;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(s.b[0]), "=r"(s.b[1]), "=r"(s.b[2]), "=r"(s.b[3]) : "r"(from) : "memory");
        s.unit = units[at], s.last = (threadIdx.x & 3) == 3 ? -2 : 2;
        const u32 ones[4] = {LOW, LOW, LOW, LOW};
        s.sum = product(s, ones).x;
        return s;
    }
    // This lane's part of sum(code * x) of rows r and r + 8.
    static __device__ __forceinline__ float2 product(const Span& s, const u32* a) {
        u32 low[4], high[4];
        mma_bits(low, a, s.b[0], s.b[1]);
        mma_bits(high, a, s.b[2], s.b[3]);
        float sum[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            sum[h] = (float)(int)(low[2 * h] + 2 * low[2 * h + 1] + 256 * (high[2 * h] + s.last * high[2 * h + 1]));
        return make_float2(sum[0], sum[1]);
    }
};
