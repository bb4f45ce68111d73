// y[m,n] = sum_k x[m,k] * (q[n,k] - zeros[n,g]) * scales[n,g] + bias[n] over the layout warp32, one warp a row of W.
//
// Grid    x: ceil(N / WARPS), y: M (a row of x each: weights are read again, from L2, for every row)
// x       in shared memory, padded with zeros to whole words of codes
// Lane    word t*32 + lane holds E codes 32 apart, most significant first: code i is k = (t*E + i)*32 + lane
// Sums    SUM: 0 four fp32 accumulators, 1 one, 2 half2 (two codes an instruction; fp16 only; to fp32 every E codes),
//         3 int8 activations with int32 sums, 4 the same four at a time by dp4a (x stored so that four codes' x are a word)
// Source  GemLite, branch stable_cuda_only (A16fWnO16f, A8iWnO32i): there M = 1, one scale and zero, K % 1024 == 0.
#include "gemv.cuh"

enum { FP32X4 = 0, FP32 = 1, HALF2 = 2, INT32 = 3, DP4A = 4 };

template <int BITS, int T, int GROUP, bool ZEROS, int SUM, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 32 / WARPS)
gemv_warp32(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
            const u16* __restrict__ bias, const void* __restrict__ x, void* __restrict__ y, int N, int K, int row_words,
            int groups) {
    constexpr int E = 32 / BITS;
    constexpr u32 MASK = BITS == 8 ? 255u : (1u << BITS) - 1;
    constexpr bool INTEGER = SUM >= INT32;
    constexpr int INNER = E < 8 ? E : 8, OUTER = BITS == 8 ? 4 : BITS == 4 ? 2 : 1;  // unrolled further, registers spill
    extern __shared__ float4 shared[];
    const int lane = threadIdx.x & 31, n = blockIdx.x * WARPS + (threadIdx.x >> 5), m = blockIdx.y;
    const int padded = row_words * E;  // k of a row of words

    if constexpr (INTEGER) {
        signed char* to = (signed char*)shared;
        const signed char* from = (const signed char*)x + (size_t)m * K;
        for (int k = threadIdx.x; k < padded; k += WARPS * 32) {
            const int strip = k >> 5, place = SUM == DP4A ? ((strip >> 2) * 32 + (k & 31)) * 4 + (strip & 3) : k;
            to[place] = k < K ? from[k] : (signed char)0;
        }
    } else {
        u16* to = (u16*)shared;
        const u16* from = (const u16*)x + (size_t)m * K;
        for (int k = threadIdx.x; k < padded; k += WARPS * 32) to[k] = k < K ? from[k] : (u16)0;
    }
    __syncthreads();
    if (n >= N) return;

    float total = 0.f, scale = 0.f, zero = 0.f;
    float part[4] = {};  // of the current group: sum(code * x) and
    float sum_x = 0.f;   // sum(x)
    int part_i = 0, sum_i = 0, group = -1;
    auto enter = [&](int k) {  // the group of k: settle the one before
        const int g = GROUP == 0 ? 0 : smaller((u32)k / (GROUP ? GROUP : 1), groups - 1);
        if (g == group) return;
        if constexpr (INTEGER) total += scale * ((float)part_i - zero * (float)sum_i), part_i = sum_i = 0;
        else {
            total += scale * ((part[0] + part[1]) + (part[2] + part[3]) - zero * sum_x);
            part[0] = part[1] = part[2] = part[3] = sum_x = 0.f;
        }
        group = g;
        scale = half_to_float<T>(scales[(size_t)n * groups + g]);
        zero = ZEROS ? half_to_float<T>(zeros[(size_t)n * groups + g]) : mid<BITS>();
    };
    const u32* row = words + (size_t)n * row_words + lane;
#pragma unroll OUTER
    for (int t = 0; t < row_words / 32; t++) {
        const u32 word = row[t * 32];
        const int k0 = t * E * 32 + lane;
        auto code = [&](int i) { return word >> (32 - BITS * (i + 1)) & MASK; };
        if constexpr (SUM == HALF2) {
            const u16* xs = (const u16*)shared;
#pragma unroll INNER / 2
            for (int i = 0; i < E; i += 2) {
                // 128 k apart at most; with ten codes a word a group may begin at any pair
                if (i % 4 == 0 || E % 4 || (GROUP && GROUP % 128)) enter(k0 + i * 32);
                const u32 codes = add2<FP16>(code(i) | code(i + 1) << 16 | 0x64006400u, 0xe400e400u);
                const u32 two = (u32)xs[k0 + i * 32] | (u32)xs[k0 + i * 32 + 32] << 16;
                const bool same = GROUP == 0 || GROUP % 64 == 0;  // both codes of one group
                if (same) {
                    const float2 p = to_floats<FP16>(fma2<FP16>(codes, two, 0u)), sx = to_floats<FP16>(two);
                    part[0] += p.x, part[1] += p.y, sum_x += sx.x + sx.y;
                } else {
                    const float2 q = to_floats<FP16>(codes), sx = to_floats<FP16>(two);
                    part[0] += q.x * sx.x, sum_x += sx.x;
                    enter(k0 + i * 32 + 32);
                    part[0] += q.y * sx.y, sum_x += sx.y;
                }
            }
        } else if constexpr (SUM == DP4A) {
            const u32* xs = (const u32*)shared;
#pragma unroll INNER / 4
            for (int i = 0; i < E; i += 4) {
                const u32 four = code(i) | code(i + 1) << 8 | code(i + 2) << 16 | code(i + 3) << 24;
                const u32 xx = xs[((t * E + i) >> 2) * 32 + lane];
                if (GROUP == 0 || GROUP % 128 == 0) {
                    enter(k0 + i * 32);
                    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(part_i) : "r"(four), "r"(xx));
                    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum_i) : "r"(0x01010101u), "r"(xx));
                } else {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        enter(k0 + (i + j) * 32);
                        const int one = (int)(signed char)(xx >> (8 * j));
                        part_i += (int)(four >> (8 * j) & 255u) * one, sum_i += one;
                    }
                }
            }
        } else {
#pragma unroll INNER
            for (int i = 0; i < E; i++) {
                const int k = k0 + i * 32;
                enter(k);
                if constexpr (INTEGER) {
                    const int one = ((const signed char*)shared)[k];
                    part_i += (int)code(i) * one, sum_i += one;
                } else {
                    const float one = half_to_float<T>(((const u16*)shared)[k]);
                    part[SUM == FP32X4 ? i & 3 : 0] += code_to_float(code(i)) * one, sum_x += one;
                }
            }
        }
    }
    group = -2;
    enter(0);
    total = warp_sum(total);
    if (lane) return;
    if constexpr (INTEGER) {
        ((float*)y)[(size_t)m * N + n] = total;
    } else {
        if (bias) total += half_to_float<T>(bias[n]);
        ((u16*)y)[(size_t)m * N + n] = (u16)from_floats<T>(total, 0.f);
    }
}
