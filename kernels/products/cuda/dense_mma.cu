// y[M,N] = x[M,K] @ W^T + bias, W (N, K) in 16 bits as files hold it, for the few rows of a decode step: W is the A operand.
//
// Grid    x: ROW_TILES row tiles of 16 rows of W a block. y: blocks of 8 rows of x.
// Block   WARPS warps take the steps (STEP k) in turn and add up through shared memory at the end.
// Warp    W and x go from global memory into registers, two steps of them: W's first two before anything else and in front of
//         the wait for the kernel before, a later one as soon as the step two before it is used. The order of k inside a
//         product is free: a lane reads 16 bytes of a row of W, and of x, and they are its pairs of two mma; 64 bytes of a row
//         by its four lanes, 128 by two loads.
// FOLD    what the product does for its neighbours in a decode step, fold.cuh; 0: nothing.
// Limits  K a multiple of 8.
// Launch  weights do not depend on the kernel before, x does. Every sum has a fixed order: equal bits on every run.
// Source  own
#include "fold.cuh"

__device__ __forceinline__ uint4 weights16(const u16* p) {  // read once
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

template <int T, int WARPS, int ROW_TILES, int STEP, int BLOCKS_PER_SM, int FOLD = 0>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
dense_mma(const u16* __restrict__ W, const u16* __restrict__ bias, const u16* x, u16* y, int M, int N, int K,
          const Folded folded) {
    // of 16 bytes, of a lane and row; fp32 sums of a warp: [t][register][lane]
    constexpr int LOADS = STEP / 32, E = ROW_TILES * 4 * 32;
    constexpr int OUT = FOLD & GATED ? ROW_TILES * 8 : ROW_TILES * 16;
    extern __shared__ float4 shared[];
    __shared__ float factor[8];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, quad = lane & 3;
    const int m0 = blockIdx.y * 8, rows = smaller(M - m0, 8), steps = (K + STEP - 1) / STEP;
    auto tile = [&](int t) { return tile_of<FOLD, ROW_TILES>(blockIdx.x, t, N); };

    const u16* from[ROW_TILES][2];  // of the lane; rows past the last repeat it: those sums are never stored
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) from[t][i] = W + (size_t)smaller(tile(t) * 16 + r + 8 * i, N - 1) * K + 8 * quad;
    uint4 w[2][ROW_TILES][2][LOADS], v[2][LOADS];
    auto load_w = [&](int u, int s) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                const int k = s * STEP + 32 * j;
#pragma unroll
                for (int i = 0; i < 2; i++)
                    w[u][t][i][j] = k + 8 * quad < K ? weights16(from[t][i] + k) : make_uint4(0, 0, 0, 0);
            }
    };
    const u16* x_from = x + (size_t)(m0 + smaller(r, rows - 1)) * K + 8 * quad;
    auto load_x = [&](int u, int s) {
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const int k = s * STEP + 32 * j;
            v[u][j] = r < rows && k + 8 * quad < K ? load16_written(x_from + k) : make_uint4(0, 0, 0, 0);
        }
    };
    const int second = warp + WARPS;
    if (warp < steps) load_w(0, warp);
    if (second < steps) load_w(1, second);
    previous_grid_wait();
    next_grid_launch();
    if (warp < steps) load_x(0, warp);
    if (second < steps) load_x(1, second);
    const u32 squares = shared_address(shared) + WARPS * E * 4;
    const Early first = early<FOLD, OUT, WARPS>(folded, squares, m0, rows, blockIdx.x * OUT, N, K);
    copy_commit();

    float acc[ROW_TILES][4] = {};
    for (int s = warp; s < steps; s += 2 * WARPS)
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int now = s + u * WARPS, next = now + WARPS;
            if (now >= steps) continue;
            if (now != warp && next < steps) load_w(1 - u, next), load_x(1 - u, next);
#pragma unroll
            for (int j = 0; j < LOADS; j++)
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++) {
                    const uint4 &low = w[u][t][0][j], &high = w[u][t][1][j], &b = v[u][j];
                    const u32 one[4] = {low.x, high.x, low.y, high.y}, two[4] = {low.z, high.z, low.w, high.w};
                    float(&d)[4] = acc[t];
                    mma<T>(d, one, b.x, b.y, d[0], d[1], d[2], d[3]);
                    mma<T>(d, two, b.z, b.w, d[0], d[1], d[2], d[3]);
                }
            if ((FOLD & NORMED) && now == warp) {
                copy_wait<0>();
                __syncwarp();
                factors<WARPS>(factor, squares, folded, first, m0, rows, K);
            }
        }
    if ((FOLD & NORMED) && warp >= steps) {
        copy_wait<0>();
        __syncwarp();
        factors<WARPS>(factor, squares, folded, first, m0, rows, K);
    }
    float* sums = (float*)shared;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[warp * E + (t * 4 + i) * 32 + lane] = acc[t][i];
    __syncthreads();
    store<FOLD, T, OUT>(folded, first, y, m0, rows, blockIdx.x * OUT, N, WARPS * 32, [&](u32 row, u32 c) {
        const float* at = sums + (c / 16 * 4 + c % 16 / 8 * 2 + row % 2) * 32 + c % 8 * 4 + row / 2;
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < WARPS; k++) sum += at[k * E];
        if (FOLD & NORMED) sum *= factor[row];
        if (bias) sum += to_floats<T>(bias[smaller(tile(c / 16) * 16 + c % 16, N - 1)]).x;
        return sum;
    });
}
