// y[m,n] = sum_k x[m,k] * (q[n,k] - zeros[n,g]) * scales[n,g] + bias[n] over rowstream rows (BITS 8, 4, 2, 1) or a dense
// half row (BITS 16): P threads a dot product, 16 bytes of the row each at a time.
//
// Grid    x: ceil(N / ROWS), y: M.  Block P x ROWS threads. Sums: fp32, across the warp by shuffles, then across the P / 32
//         warps of a row through shared memory, in order.
// Limits  a row of words is a multiple of 16 bytes; K and GROUP multiples of 16 (GROUP 0: one group)
// Source  FastGEMV (fp16, int8, int4; p threads, two-level reduction, 16-byte loads): there one scale and zero a tensor.
#include "gemv.cuh"

template <int BITS, int T, int GROUP, bool ZEROS, int P, int ROWS>
__global__ void __launch_bounds__(P * ROWS)
gemv_rows(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
          const u16* __restrict__ bias, const u16* __restrict__ x, u16* __restrict__ y, int N, int K, int row_words,
          int groups) {
    constexpr int CODES = 128 / BITS;             // of 16 bytes
    constexpr int BATCH = CODES < 16 ? CODES : 16;  // codes of one group for certain
    __shared__ float sums[ROWS][P / 32];
    const int p = threadIdx.x % P, row = threadIdx.x / P, n = blockIdx.x * ROWS + row, m = blockIdx.y;
    const u16* xs = x + (size_t)m * K;
    float total = 0.f;
    if (n < N) {
        const u32* w = words + (size_t)n * row_words;
#pragma unroll 2
        for (int c = p; c * 4 < row_words; c += P) {
            const uint4 v = load16(w + c * 4);
            const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int b = 0; b < CODES / BATCH; b++) {
                const int k0 = c * CODES + b * BATCH;
                if (k0 >= K) break;
                float part = 0.f, sum_x = 0.f;
#pragma unroll
                for (int h = 0; h < BATCH / 8; h++) {
                    const uint4 xv = load16(xs + k0 + h * 8);
                    const u32 xw[4] = {xv.x, xv.y, xv.z, xv.w};
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const int j = b * BATCH + h * 8 + i, bit = j * BITS;
                        const float2 pair = to_floats<T>(xw[i / 2]);
                        const float one = i % 2 ? pair.y : pair.x;
                        if constexpr (BITS == 16) {
                            const float2 two = to_floats<T>(word[j / 2]);
                            part += (i % 2 ? two.y : two.x) * one;
                        } else {
                            part += code_to_float(word[bit / 32] >> (bit % 32) & ((1u << (BITS & 15)) - 1)) * one;
                            sum_x += one;
                        }
                    }
                }
                if constexpr (BITS == 16) {
                    total += part;
                } else {
                    const size_t g = (size_t)n * groups + (GROUP == 0 ? 0 : (u32)k0 / (GROUP ? GROUP : 1));
                    const float zero = ZEROS ? half_to_float<T>(zeros[g]) : mid<BITS == 16 ? 8 : BITS>();
                    total += half_to_float<T>(scales[g]) * (part - zero * sum_x);
                }
            }
        }
    }
    total = warp_sum(total);
    if constexpr (P > 32) {
        if (p % 32 == 0) sums[row][p / 32] = total;
        __syncthreads();
        total = 0.f;
        if (p == 0)
#pragma unroll
            for (int i = 0; i < P / 32; i++) total += sums[row][i];
    }
    if (p == 0 && n < N) {
        if (bias) total += half_to_float<T>(bias[n]);
        y[(size_t)m * N + n] = (u16)from_floats<T>(total, 0.f);
    }
}
