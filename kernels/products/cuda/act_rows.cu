// Rows of x[M,K] fp16 or bf16 rounded to e4m3 or int8, one scale per row.
//
// Maths   q = round(x * (LIMIT / max|x|)), scale = max / LIMIT, LIMIT = 448 or 127: lowq_kernels/activations.py to the last bit
// round_rows  q * scale in x's type: what 16-bit kernels multiply
// act_rows    q as bytes, in the order in which tile_wgmma8.cu's A operand holds codes, and sums of every SG of them. In the
//             i-th 32 bytes of each chunk of CHUNK k, byte 16*h + 4*quad + b is k = 16*f + 8*h + 2*quad + b / 2, with
//             f = i + (b % 2) * CHUNK / 32, at 8 bits (INTERLEAVED) f = 2*i + b % 2. GATE: rows of act(gate) * up, rounded to
//             x's type, where a row of x holds K values of gate, then K of up. NORM: stream += x (x 0: nothing is added), then
//             rows of stream * rsqrt(mean of squares + eps) * weight, both rounded to x's type
// WHICH       of act_rows: every row; or those with a token, where of_rows[row] is 0 for none, and the others stay unwritten;
//             or every row of x (a token of a mixture), written to the `copies` rows of_rows[copies * row ...] of its slots
// Shapes  y (M, K) · x8 (M, steps * 128) zeros past K · sums (M, sums_stride) of x's type · scales (M,)
// Launch  one block of 256 threads (act_rows: THREADS) a row. act_rows holds it in registers meanwhile where it has at most
//         16 * THREADS * ROUNDS values (0: it is read twice, as by round_rows, the second time out of L1)
// Source  own.
#include "tile.cuh"
#include "fold.cuh"

template <bool INT8>
__device__ __forceinline__ float quantized(float x, u32& byte) {  // the rounded value, and its bits
    if constexpr (INT8) {
        // 1.5 * 2^23: no room for a fraction, and the low byte is the number's. x comes by __fmul_rn: one fma would round once
        const float v = x + 12582912.f;
        byte = __float_as_uint(v) & 255u;
        return v - 12582912.f;
    } else {
        u16 two;
        u32 halves;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.f), "f"(x));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
        byte = two & 255u;
        return to_floats<FP16>(halves).x;
    }
}

// Two values' bytes, the first one's lower, and the sum of the rounded values: in e4m3 one conversion each way serves both.
template <bool INT8>
__device__ __forceinline__ float quantized(float a, float b, u32& bytes) {
    if constexpr (INT8) {
        u32 first, second;
        const float sum = quantized<INT8>(a, first) + quantized<INT8>(b, second);
        bytes = first | second << 8;
        return sum;
    } else {
        u16 two;
        u32 halves;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(b), "f"(a));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
        bytes = two;
        const float2 f = to_floats<FP16>(halves);
        return f.x + f.y;
    }
}

// The larger of two halves each, NaN if one is, without their signs.
template <int T>
__device__ __forceinline__ u32 larger2(u32 a, u32 b) {
    u32 d;
    if constexpr (T == FP16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b & 0x7fff7fffu));
    else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b & 0x7fff7fffu));
    return d;
}

__device__ __forceinline__ void load8(const u16* row, int k, int K, u32 (&v)[4]) {  // halves k .. k + 7 of a row, zeros past K
    if (k + 8 <= K && K % 8 == 0) {
        const uint4 all = *(const uint4*)(row + k);
        v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = (k + 2 * i < K ? row[k + 2 * i] : 0u) | (k + 2 * i + 1 < K ? (u32)row[k + 2 * i + 1] << 16 : 0u);
    }
}

template <int T>
__device__ __forceinline__ u32 largest(u32 most, const u32 (&v)[4]) {  // of so far, and of eight more
    most = larger2<T>(larger2<T>(most, v[0]), v[1]);
    return larger2<T>(larger2<T>(most, v[2]), v[3]);
}

template <int T, int WARPS>
__device__ __forceinline__ float of_block(u32 most, u32 (&maxima)[WARPS]) {  // the largest, at least a scale's least
#pragma unroll
    for (int d = 16; d; d /= 2) most = larger2<T>(most, __shfl_xor_sync(0xffffffffu, most, d));
    if ((threadIdx.x & 31) == 0) maxima[threadIdx.x >> 5] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) most = larger2<T>(most, maxima[i]);
    const float2 two = to_floats<T>(larger2<T>(most, most >> 16 | most << 16));
    return two.x < 1e-30f ? 1e-30f : two.x;
}

template <int T>
__device__ __forceinline__ float largest(const u16* row, int K, u32 (&maxima)[8]) {  // of a row
    u32 most = 0;
    for (int k = threadIdx.x * 8; k < K; k += 2048) {
        u32 v[4];
        load8(row, k, K, v);
        most = largest<T>(most, v);
    }
    return of_block<T>(most, maxima);
}

template <int T, bool INT8>
__global__ void __launch_bounds__(256)
round_rows(const u16* __restrict__ x, u16* __restrict__ y, int K) {
    __shared__ u32 maxima[8];
    const u16* const from = x + (size_t)blockIdx.x * K;
    u16* const to = y + (size_t)blockIdx.x * K;
    next_grid_launch();
    previous_grid_wait();
    constexpr float LIMIT = INT8 ? 127.f : 448.f;
    const float most = largest<T>(from, K, maxima), inverse = LIMIT / most, scale = most / LIMIT;
    for (int k = threadIdx.x * 8; k < K; k += 2048) {
        u32 v[4], byte;
        load8(from, k, K, v);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 f = to_floats<T>(v[i]);
            const float a = quantized<INT8>(__fmul_rn(f.x, inverse), byte) * scale,
                        b = quantized<INT8>(__fmul_rn(f.y, inverse), byte) * scale;
            v[i] = from_floats<T>(a, b);
        }
        if (K % 8 == 0) *(uint4*)(to + k) = make_uint4(v[0], v[1], v[2], v[3]);
        else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (k + i < K) to[k + i] = (u16)(v[i / 2] >> (i % 2 * 16));
        }
    }
}

template <int THREADS>  // 1 / root of a row's mean of squares, of each thread's sum
__device__ __forceinline__ float inverse_root(float square, int K, float eps, float (&squares)[THREADS / 32]) {
#pragma unroll
    for (int d = 16; d; d /= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
    if ((threadIdx.x & 31) == 0) squares[threadIdx.x >> 5] = square;
    __syncthreads();
    float sum = 0.f, root;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) sum += squares[i];
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(sum / K + eps));
    return root;
}

enum { PLAIN = 0, SILU_GATE = 1, GELU_TANH_GATE = 2, NORM = 3, CLAMPED_GATE = 4 };
enum { EVERY_ROW = 0, ROWS_WITH_TOKENS = 1, ROWS_OF_TOKENS = 2 };
template <int T, bool INT8, int CHUNK, bool INTERLEAVED, int SG, int ROUNDS, int GATE, int WHICH, int THREADS>
__global__ void __launch_bounds__(THREADS)
act_rows(const u16* __restrict__ x, u32* __restrict__ x8, u16* __restrict__ sums, float* __restrict__ scales, int K, int steps,
         int sums_stride, const int* __restrict__ of_rows, int copies, u16* stream, const u16* __restrict__ weight, float eps) {
    static_assert(GATE == PLAIN || ROUNDS > 0, "gates are computed once");
    static_assert(THREADS == 256 || ROUNDS > 0, "a row that is read twice is read by 256 threads");
    __shared__ u32 maxima[THREADS / 32];
    __shared__ float squares[GATE == NORM ? THREADS / 32 : 1];
    const int row = blockIdx.x, units = steps * 8;  // of 16 bytes
    next_grid_launch();
    previous_grid_wait();
    if (WHICH == ROWS_WITH_TOKENS && of_rows[row] == 0) return;
    if (WHICH != ROWS_OF_TOKENS) copies = 1;
    const u16* const from = x + (size_t)row * (GATE == PLAIN || GATE == NORM ? K : 2 * K);
    u16* const into = stream + (size_t)row * K;
    float square = 0.f;
    auto to = [&](int copy) { return WHICH == ROWS_OF_TOKENS ? of_rows[row * copies + copy] : row; };
    constexpr float LIMIT = INT8 ? 127.f : 448.f;
    auto gated = [](float gate, float up) {
        if constexpr (GATE == SILU_GATE) {  // its quotient in one instruction, within 2 ulp: an exact one takes ten
            float e, inverse;
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * gate));
            asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + e));
            return gate * inverse * up;
        } else if constexpr (GATE == CLAMPED_GATE) return clamped_swiglu(gate, up);
        else return activation(false, gate) * up;
    };
    auto load = [&](int k, u32 (&v)[4]) {
        if constexpr (GATE == NORM) {
            load8(into, k, K, v);
            if (x != nullptr) {
                u32 delta[4];
                load8(from, k, K, delta);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 a = to_floats<T>(v[i]), b = to_floats<T>(delta[i]);
                    v[i] = from_floats<T>(a.x + b.x, a.y + b.y);
                }
                if (k < K) *(uint4*)(into + k) = make_uint4(v[0], v[1], v[2], v[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 a = to_floats<T>(v[i]);
                square = fmaf(a.x, a.x, fmaf(a.y, a.y, square));
            }
            return;
        }
        load8(from, k, K, v);
        if constexpr (GATE != PLAIN && GATE != NORM) {
            u32 up[4];
            load8(from + K, k, K, up);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 a = to_floats<T>(v[i]), b = to_floats<T>(up[i]);
                v[i] = from_floats<T>(gated(a.x, b.x), gated(a.y, b.y));
            }
        }
    };
    auto place = [&](int unit, int half) {  // the first k of half of a unit's 16 values
        constexpr int PER = CHUNK / 16;  // units of a chunk
        const int chunk = unit / PER, j = unit % PER / 2, h = unit % 2;
        return chunk * CHUNK + 16 * (INTERLEAVED ? 2 * j + half : j + half * CHUNK / 32) + 8 * h;
    };
    auto read = [&](int unit, u32 (&v)[2][4]) { load(place(unit, 0), v[0]), load(place(unit, 1), v[1]); };
    u32 held[ROUNDS ? ROUNDS : 1][2][4];
    float most = 0.f;
    if constexpr (ROUNDS > 0) {
        u32 largest_two = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) read(i * THREADS + threadIdx.x, held[i]);
        if constexpr (GATE == NORM) {
            const float unit = inverse_root<THREADS>(square, K, eps, squares);
#pragma unroll
            for (int i = 0; i < 2 * ROUNDS; i++) {
                u32(&v)[4] = held[i / 2][i % 2], w[4];
                load8(weight, place(i / 2 * THREADS + threadIdx.x, i % 2), K, w);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 a = to_floats<T>(v[j]), b = to_floats<T>(w[j]);
                    v[j] = from_floats<T>(a.x * unit * b.x, a.y * unit * b.y);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) largest_two = largest<T>(largest<T>(largest_two, held[i][0]), held[i][1]);
        most = of_block<T>(largest_two, maxima);
    } else if constexpr (THREADS == 256) most = largest<T>(from, K, maxima);
    const float inverse = LIMIT / most;
    if (threadIdx.x == 0)
        for (int i = 0; i < copies; i++) scales[to(i)] = most / LIMIT;

    auto write = [&](int unit, const u32 (&v)[2][4]) {
        u32 out[4];
        float sum = 0.f;
#pragma unroll
        for (int quad = 0; quad < 4; quad++) {
            const float2 a = to_floats<T>(v[0][quad]), b = to_floats<T>(v[1][quad]);
            u32 low, high;
            sum += quantized<INT8>(__fmul_rn(a.x, inverse), __fmul_rn(b.x, inverse), low);
            sum += quantized<INT8>(__fmul_rn(a.y, inverse), __fmul_rn(b.y, inverse), high);
            out[quad] = low | high << 16;
        }
#pragma unroll
        for (int d = 1; d < SG / 16; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (unit < units) {
            for (int i = 0; i < copies; i++) {
                const size_t at = to(i);
                *(uint4*)(x8 + (at * units + unit) * 4) = make_uint4(out[0], out[1], out[2], out[3]);
                if (unit % (SG / 16) == 0) sums[at * sums_stride + unit / (SG / 16)] = (u16)from_floats<T>(sum, 0.f);
            }
        }
    };
    if constexpr (ROUNDS > 0) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) write(i * THREADS + threadIdx.x, held[i]);
    } else {
        const int rounds = (units + 255) / 256;
        for (int i = 0; i < rounds; i++) {
            read(i * 256 + threadIdx.x, held[0]);
            write(i * 256 + threadIdx.x, held[0]);
        }
    }
}
