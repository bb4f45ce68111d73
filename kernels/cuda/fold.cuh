// What a product of a decode step does for its neighbours: template argument FOLD of a kernel, a sum of these bits.
//
//   NORMED  x is a residual stream times a norm's weight times scale[m], not yet divided by its root mean square: y is
//           multiplied by rsqrt(mean of squares + eps) / scale[m]. The squares come as sums over 16 features each.
//   ADDED   residual[m, n] += y (rounded, in place); y becomes residual * norm[n] * scale[m], what NORMED takes, and the sums
//           of squares are written. scale is an earlier residual's rsqrt: it keeps y near 1 and so inside fp16's range.
//   SILU, GELU_TANH   y = act(gate) * up, (M, N / 2): rows of W are gate, then up; a block takes tiles of both.
//
// Sums have a fixed order: equal bits on every run. decode/fold.py launches; N is whole row tiles where anything is folded.
#pragma once
#include "tile.cuh"

enum { NORMED = 1, ADDED = 2, SILU = 4, GELU_TANH = 8, GATED = SILU | GELU_TANH };
constexpr int SQUARES = 16;  // features whose squares are summed together

struct Folded {
    const float* squares;   // NORMED: (M, K / 16)
    const float* scale;     // (M), of x where NORMED, of y where ADDED
    float* inverse;         // NORMED: (M) written, the norm's rsqrt
    u16* residual;          // ADDED: (M, N), read and written
    const u16* norm;        // ADDED: (N)
    float* squares_out;     // ADDED: (M, N / 16) written
    float eps;              // NORMED
};

__device__ __forceinline__ float activation(bool silu, float v) {
    float e;
    if (silu) {
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * v));
        return v / (1.f + e);
    }
    const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(2.f * 1.4426950408889634f * inner));
    return v - v / (e + 1.f);  // 0.5 v (1 + tanh(inner)), tanh(t) = 1 - 2 / (exp(2 t) + 1)
}

__device__ __forceinline__ float clamped_swiglu(float gate, float up) {  // gpt-oss; a comparison, not fminf: NaN stays
    float e;
    gate = gate > 7.f ? 7.f : gate, up = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * 1.702f * gate));
    return gate / (1.f + e) * (up + 1.f);
}

// The row tile of W that tile t of ROW_TILES of block `block` is. Gated, the second half of them are those of `up`.
template <int FOLD, int ROW_TILES>
__device__ __forceinline__ int tile_of(int block, int t, int N) {
    if (FOLD & GATED) return block * (ROW_TILES / 2) + t % (ROW_TILES / 2) + t / (ROW_TILES / 2) * (N / 32);
    return block * ROW_TILES + t;
}

// ------------------------------------------------------------------- after the wait for the kernel before, before the loop
// Nothing of what the end needs may be asked for only there: a trip to L2 there cost 0.4 us a launch.
// Values that a kernel has written which may have run at the same time as this one: not through L1.
__device__ __forceinline__ u16 load2(const u16* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load16_written(const u16* p) {  // so, too
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float load_float(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

struct Early {  // for this thread's first y: residual, norm, scale. NORMED: scale of its warp's first row
    u16 residual, norm;
    float scale;
};
// NORMED: a row's sums of squares go to shared memory, by the warp that will add them up; the caller commits.
template <int FOLD, int OUT, int WARPS>
__device__ __forceinline__ Early early(const Folded& f, u32 squares, int m0, int rows, int out0, int N, int K) {
    Early e = {};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = K / SQUARES;
    if (FOLD & NORMED) {
        if (warp < rows) e.scale = load_float(f.scale + m0 + warp);
        for (int row = warp; row < rows; row += WARPS)
            for (int i = 4 * lane; i < parts; i += 128)
                copy16_streaming(squares + 4 * (row * parts + i), f.squares + (size_t)(m0 + row) * parts + i);
    }
    if ((FOLD & ADDED) && (int)threadIdx.x < OUT * rows) {
        const int row = m0 + threadIdx.x / OUT, column = out0 + threadIdx.x % OUT;
        e.residual = load2(f.residual + (size_t)row * N + column), e.norm = load2(f.norm + column),
        e.scale = load_float(f.scale + row);
    }
    return e;
}

// factor[row] = rsqrt(mean + eps) / scale[row], a warp a row, once its copies are there; the first block of a row notes the
// rsqrt. A barrier must follow. At the end of a block it cost 0.25 us, while weights are on their way nothing.
template <int WARPS>
__device__ __forceinline__ void factors(float* factor, u32 squares, const Folded& f, const Early& first, int m0, int rows,
                                        int K) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, parts = K / SQUARES;
    for (int row = warp; row < rows; row += WARPS) {
        float sum = 0.f, root;
        for (int i = 4 * lane; i < parts; i += 128) {
            u32 v[4];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(squares + 4 * (row * parts + i)) : "memory");
            sum += __uint_as_float(v[0]) + __uint_as_float(v[1]) + (__uint_as_float(v[2]) + __uint_as_float(v[3]));
        }
#pragma unroll
        for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        const float mean = sum / K + f.eps;
        asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(mean));
        if (lane == 0) {
            factor[row] = root / (row == warp ? first.scale : load_float(f.scale + m0 + row));
            if (blockIdx.x == 0) f.inverse[m0 + row] = root;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- at the end
// Store a block's y. product(row, c): the sum of row `row` of x and row c of this block's rows of W, those of gate first.
template <int FOLD, int T, int OUT, class Product>
__device__ __forceinline__ void store(const Folded& f, const Early& first, u16* y, int m0, int rows, int out0, int N,
                                      int threads, Product product) {
    if constexpr ((FOLD & ADDED) != 0) {
        for (int o = threadIdx.x; o < (OUT * rows + 31) / 32 * 32; o += threads) {  // whole warps: they shuffle
            const int row = o / OUT, column = out0 + o % OUT;
            const size_t at = (size_t)(m0 + row) * N + column;
            float square = 0.f;
            if (row < rows) {
                const bool early = o == (int)threadIdx.x;
                const u16 before = early ? first.residual : load2(f.residual + at), norm = early ? first.norm : f.norm[column];
                const float scale = early ? first.scale : load_float(f.scale + m0 + row);
                const u32 after = from_floats<T>(to_floats<T>(before).x + product(row, o % OUT), 0.f);
                const float v = to_floats<T>(after).x;
                f.residual[at] = (u16)after, square = v * v;
                y[at] = (u16)from_floats<T>(v * to_floats<T>(norm).x * scale, 0.f);
            }
#pragma unroll
            for (int d = SQUARES / 2; d > 0; d /= 2) square += __shfl_xor_sync(0xffffffffu, square, d);
            if (row < rows && o % SQUARES == 0) f.squares_out[at / SQUARES] = square;
        }
    } else {
        const int width = FOLD & GATED ? N / 2 : N;
#pragma unroll 1
        for (u32 o = threadIdx.x; o < OUT * rows; o += threads) {  // unsigned: its divisions are shifts
            const u32 row = o / OUT;
            const int column = out0 + o % OUT;
            if (column >= width) continue;
            float v = product(row, o % OUT);
            if (FOLD & GATED) v = activation(FOLD & SILU, v) * product(row, o % OUT + OUT);
            y[(size_t)(m0 + row) * width + column] = (u16)from_floats<T>(v, 0.f);
        }
    }
}
