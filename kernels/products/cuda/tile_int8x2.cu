// y[M,N] =x[M,K] @ dequantize(W)^T + bias for up to 16 rows on Hopper: codes as bytes by x as two signed bytes
//         (int8_planes.cu),
// integer wgmma, W's codes its A operand in registers.
//
// Maths   sum_k x w = sum over spans of 128 k of scale * unit * (sum_k code * x' - zero * sum_k x'),  x = x' * unit
// Columns of a product are planes: 2 m high and 2 m + 1 low ones of row m of x. So a lane has both of each sum, two rows of W
//         and COLUMNS / 8 of x, and flushes a span at a time: 5 instructions a value, where halves cost 32 and more to be made
//         of codes.
// Codes   (word >> place) & mask are 32 k of a row; int8_planes writes x in that order. Of 2 and 1 bits every other place needs
//         no shift: its codes come times 4 or 2, its planes are of an x' that much smaller (PLACE). Words of 1 bit hold two
//         spans, pulled apart by a byte permutation. 16 x 128 weights and 16 rows of x: 86 to 97 instructions and 64 cycles of
//         tensor cores, and a kernel takes the sum of both: while wgmma reads and writes registers little else is issued.
// Tile    64 * WARPGROUPS_N rows of W, WARPGROUPS_N x WARPGROUPS_K consumer warpgroups: WARPGROUPS_N side by side along N; of a
//         step each of WARPGROUPS_K takes SPANS spans of its own, and their sums meet in shared memory. A block takes tiles in
//         turn; a producer thread feeds a ring of STAGES by TMA: planes (128-byte swizzled panels), words, scales, zeros, units
//         of one step.
// Cache   words are read once and leave the second-level cache first.
// Spans   that hold inf or nan end as no finite number; such a y is computed once more, one by one (split_int8.cuh).
// Edges   TMA reads zeros outside; stores are masked. Sums of columns past 2 M are of nothing, and stay here.
// Limits  groups of a multiple of 128, or one a row. K of x a multiple of 8.
// Source  own.
#include "split_int8.cuh"
#include "hopper.cuh"
#include "wgmma8.cuh"

template <int BITS>
__device__ __forceinline__ void span_codes(const u32 (&w)[128 / Tile<BITS>::CHUNK + (BITS == 1)][Tile<BITS>::REGS], int span,
                                           u32 (&a)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if constexpr (BITS == 1) {  // its low four bits are places of the span
            const u32 mine = __byte_perm(w[0][j], w[0][j] >> 4, span % 2 ? 0x7351 : 0x6240);
#pragma unroll
            for (int i = 0; i < 4; i++) a[i][j] = mine >> i / 2 * 2 & 0x01010101u << i % 2;
        } else if constexpr (BITS == 3) {
            const u32 even = fields_of_four(w[0], j, 0), odd = fields_of_four(w[0], j, 1);
#pragma unroll
            for (int i = 0; i < 4; i++) a[i][j] = (i % 2 ? odd : even) >> i / 2 * 4 & 0x07070707u;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i][j] = BITS == 2 ? w[0][j] >> i / 2 * 4 & 0x03030303u << i % 2 * 2 : w[i / 2][j] >> i % 2 * 4 & 0x0f0f0f0fu;
        }
    }
}

// The phases of the kernel, as functions of their arguments.
template <int BITS, int T, int GROUP, bool ZEROS, int WARPGROUPS_N, int WARPGROUPS_K, int COLUMNS, int SPANS, int STAGES>
struct Int8x2 {
    using L = Tile<BITS>;
    static constexpr int STEP_SPANS = SPANS * WARPGROUPS_K, BLOCK_K = STEP_SPANS * 128, TILES = 4 * WARPGROUPS_N,
                         CONSUMERS = WARPGROUPS_N * WARPGROUPS_K, ROWS = COLUMNS / 2;
    static constexpr int PER = BITS == 4 ? 2 : 1, SHARE = BITS == 1 ? 2 : 1;  // chunks of a span, spans of a chunk
    static constexpr int GROUPS = groups_of_step(GROUP, BLOCK_K);
    static constexpr int UNITS = ROWS <= 4 ? 4 : ROWS <= 8 ? 8 : 16;  // rows of units: as int8_planes.py has them
    static constexpr u32 PANEL = COLUMNS * 128, X_BYTES = STEP_SPANS * PANEL, CHUNK_BYTES = TILES * L::WORDS * 4,
                         W_BYTES = BLOCK_K / L::CHUNK * CHUNK_BYTES;
    static constexpr u32 META_BYTES = TILES * GROUPS * 32, METAS = X_BYTES + W_BYTES,
                         UNITS_AT = METAS + (ZEROS ? 2 : 1) * META_BYTES;
    static constexpr u32 LOADED = UNITS_AT + STEP_SPANS * UNITS * 8, STAGE_BYTES = (LOADED + 1023) / 1024 * 1024;
    static_assert(SPANS % SHARE == 0, "whole chunks for a warpgroup");
    static constexpr int ROW = 64 + 8;  // floats of a row of y in a warpgroup's staging: 8 more against bank conflicts
    static constexpr int APART = WARPGROUPS_N * ROWS * ROW;  // floats between the sums of warpgroups along K
    using Sums = int[ROWS];       // of a span: high and low planes in turn
    using Fragments = u32[4][4];  // A operands of a span
    using Units = float[ROWS / 4];

    static __device__ __forceinline__ void init_barriers(u32 full, u32 empty) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4 * CONSUMERS);
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }

    // Words, scales and zeros of step c of a tile.
    static __device__ __forceinline__ void load_weights(const TensorMap* words_map, const TensorMap* scales_map,
                                                        const TensorMap* zeros_map, u32 barrier, u32 at, int c, int tile,
                                                        int M) {
        barrier_expect(barrier, LOADED - STEP_SPANS * (COLUMNS - 2 * M) * 128);
#pragma unroll
        for (int u = 0; u < BLOCK_K / L::CHUNK; u++)
            tensor_load_once(at + X_BYTES + u * CHUNK_BYTES, words_map, (c * (BLOCK_K / L::CHUNK) + u) * L::WORDS,
                             tile * TILES, barrier);
        const int g = GROUP == 0 ? 0 : c * BLOCK_K / (GROUP ? GROUP : 1);
        tensor_load(at + METAS, scales_map, g * 16, tile * TILES, barrier);
        if (ZEROS) tensor_load(at + METAS + META_BYTES, zeros_map, g * 16, tile * TILES, barrier);
    }

    static __device__ __forceinline__ void alive(Fragments& a) {  // registers that wgmma reads meanwhile
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[i][j])::"memory");
    }

    static __device__ __forceinline__ void read_units(u32 at, int b, Units& unit, Units& total) {  // of the b-th span
#pragma unroll
        for (int i = 0; i < ROWS / 4; i += 2) {
            const u32 from = at + (b * UNITS + i) * 8;
            if (i + 1 < ROWS / 4)
                asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                             : "=f"(unit[i]), "=f"(total[i]), "=f"(unit[i + 1]), "=f"(total[i + 1])
                             : "r"(from)
                             : "memory");
            else asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(unit[i]), "=f"(total[i]) : "r"(from) : "memory");
        }
    }

    // Sums of a span, scaled, are added to acc.
    static __device__ __forceinline__ void flush(Sums& d, float2 by, float2 z, const Units& unit, const Units& total,
                                                 float (&acc)[ROWS / 2]) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            asm volatile("" : "+r"(d[2 * i]), "+r"(d[2 * i + 1])::"memory");
            const float v = __fmaf_rn(i % 2 ? -z.y : -z.x, total[i / 2], (float)(256 * d[2 * i] + d[2 * i + 1]));
            acc[i] = __fmaf_rn((i % 2 ? by.y : by.x) * unit[i / 2], v, acc[i]);
        }
    }

    static __device__ __forceinline__ void multiply(Sums& sum, Fragments& a, u64 planes) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i == 0) Wgmma8<true, COLUMNS>::first(sum, a[i], planes);
            else Wgmma8<true, COLUMNS>::run(sum, a[i], planes + 2 * i, 1);
        }
    }

    // Values that are not finite, of eight of y, are computed once more, one by one.
    static __device__ __forceinline__ void recompute(float* mine, int n, const u32* words, const u16* scales, const u16* zeros,
                                                 const u16* x, int K, int chunks, int groups) {
#pragma unroll 1
        for (int j = 0; j < 8; j++) {
            float one = mine[j];
            for (int k = 1; k < WARPGROUPS_K; k++) one += mine[k * APART + j];
            const int at = (n + j) / 16;
            const size_t meta = (size_t)at * groups * 16;
            const u16* const zero = ZEROS ? zeros + meta : nullptr;
            if (!(one * 0.f == 0.f))
                one = plainly<BITS, T, GROUP, 0>(words + (size_t)at * chunks * L::WORDS, scales + meta, zero, nullptr, x,
                                                 (n + j) % 16, K);
            mine[j] = one;
        }
    }

    // Eight values of row m of y, of all warpgroups along K.
    static __device__ __forceinline__ void store_row(float* mine, int m, int n, const u32* words, const u16* scales,
                                                     const u16* zeros, const u16* bias, const u16* x, u16* y, int N, int K,
                                                     int chunks, int groups) {
        float v[8], none = 0.f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = mine[j];
#pragma unroll
            for (int k = 1; k < WARPGROUPS_K; k++) v[j] += mine[k * APART + j];
            none = __fmaf_rn(v[j], 0.f, none);
        }
        if (!(none == 0.f)) {  // inf or nan
            recompute(mine, n, words, scales, zeros, x + (size_t)m * K, K, chunks, groups);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = mine[j];
        }
        if (bias) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] += n + j < N ? to_floats<T>(bias[n + j]).x : 0.f;
        }
        const uint4 eight = make_uint4(from_floats<T>(v[0], v[1]), from_floats<T>(v[2], v[3]), from_floats<T>(v[4], v[5]),
                                       from_floats<T>(v[6], v[7]));
        store8(y + (size_t)m * N + n, eight, N, n);
    }

    // Of a span of step c, the group among those in the stage.
    static __device__ __forceinline__ int group_of(int c, int span) {
        int at = 0;
        if (GROUP && BLOCK_K % (GROUP ? GROUP : 1) == 0) at = (span) * 128 / (GROUP ? GROUP : 1);
        else if (GROUP && GROUP % BLOCK_K)
            at = (c * BLOCK_K + (span) * 128) / (GROUP ? GROUP : 1) - c * BLOCK_K / (GROUP ? GROUP : 1);
        return at;
    }
};

template <int BITS, int T, int GROUP, bool ZEROS, int WARPGROUPS_N, int WARPGROUPS_K, int COLUMNS, int SPANS, int BUFFERS,
          int STAGES, int BLOCKS_PER_SM>
__global__ void __launch_bounds__(128 * (1 + WARPGROUPS_N * WARPGROUPS_K), BLOCKS_PER_SM)
tile_int8x2(const __grid_constant__ TensorMap planes_map, const __grid_constant__ TensorMap units_map,
            const __grid_constant__ TensorMap words_map, const __grid_constant__ TensorMap scales_map,
            const __grid_constant__ TensorMap zeros_map, const u16* __restrict__ x, const u32* __restrict__ words,
            const u16* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ bias,
            u16* __restrict__ y, int M, int N, int K, int steps, int row_tiles, int chunks, int groups) {
    using L = Tile<BITS>;
    using P = Int8x2<BITS, T, GROUP, ZEROS, WARPGROUPS_N, WARPGROUPS_K, COLUMNS, SPANS, STAGES>;
    constexpr int TILES = P::TILES, CONSUMERS = P::CONSUMERS, ROWS = P::ROWS, PER = P::PER, ROW = P::ROW;
    constexpr u32 PANEL = P::PANEL, STAGE_BYTES = P::STAGE_BYTES;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];  // full and empty, of each stage

    const int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // uniform, as ptxas sees it: else it serialises wgmma
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const u32 base = shared_address(shared), full = shared_address(barriers), empty = full + 8 * STAGES;
    const int tiles = (row_tiles + TILES - 1) / TILES;

    if (threadIdx.x == 32)
        prefetch(&words_map), prefetch(&scales_map), prefetch(&zeros_map), prefetch(&planes_map), prefetch(&units_map);
    if (threadIdx.x == 0) P::init_barriers(full, empty);
    __syncthreads();

    // of the registers a block starts with, the producer's warpgroup keeps these and the consumers' get the rest
    constexpr int THREADS = 128 * (1 + CONSUMERS), STARTED = 65536 / (BLOCKS_PER_SM * THREADS) / 8 * 8, KEPT = 32;
    if (group == 0) {  // ------------------------------------------------------------------------------- producer
        registers_down<KEPT>();
        if (threadIdx.x == 0) {
            auto load_weights = [&](int s, int c, int tile) {
                P::load_weights(&words_map, &scales_map, &zeros_map, full + 8 * s, base + s * STAGE_BYTES, c, tile, M);
            };
            int s = 0, round = 0, early = 0;
            if (blockIdx.x < tiles)  // weights do not depend on the kernel before, x does
                for (; early < STAGES && early < steps; early++) load_weights(early, early, blockIdx.x);
            previous_grid_wait();
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
                for (int c = 0; c < steps; c++) {
                    const u32 barrier = full + 8 * s, at = base + s * STAGE_BYTES;
                    if (early > 0) early--;
                    else {
                        barrier_wait(empty + 8 * s, (round & 1) ^ 1);
                        load_weights(s, c, tile);
                    }
#pragma unroll
                    for (int i = 0; i < P::STEP_SPANS; i++)
                        tensor_load(at + i * PANEL, &planes_map, (c * P::STEP_SPANS + i) * 128, 0, barrier);
                    tensor_load(at + P::UNITS_AT, &units_map, 0, c * P::STEP_SPANS, barrier);
                    if (++s == STAGES) s = 0, round++;
                }
        }
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    registers_up<smaller(240, (STARTED * THREADS - 128 * KEPT) / (128 * CONSUMERS) / 8 * 8)>();
    previous_grid_wait();
    next_grid_launch();
    const int g = group - 1, wn = g % WARPGROUPS_N, wk = WARPGROUPS_K > 1 ? g / WARPGROUPS_N : 0, t = wn * 4 + warp;
    u32 words_at = P::X_BYTES + wk * (SPANS * 128 / L::CHUNK) * P::CHUNK_BYTES + t * L::WORDS * 4 + lane * 16,
        meta_at = P::METAS + t * P::GROUPS * 32 + r * 4;
    u32 units_at = P::UNITS_AT + wk * SPANS * P::UNITS * 8 + q * (P::UNITS / 4) * 8;
    asm volatile("" : "+r"(words_at), "+r"(meta_at), "+r"(units_at));  // else ptxas makes them anew for each step
    float acc[ROWS / 2];  // [i][o]: row 4 * i + q of x, row r + 8 * o of W
    typename P::Sums sum[BUFFERS];
    typename P::Fragments a[BUFFERS];
    int s = 0;
    // low half of a descriptor
    u32 parity = 0, stage = base, barrier = full, panel = (u32)swizzled_tile(base) + wk * SPANS * (PANEL / 16);

    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.f;
        for (int c = 0; c < steps; c++) {
            u32 scale, zero = 0, w[PER][L::REGS];
            typename P::Units unit, total;
            auto read_metas = [&](int b) {  // scales, zeros, units: late, registers are short
                const int at = P::group_of(c, wk * SPANS + b);
                scale = read4(stage + meta_at + at * 32);
                if (ZEROS) zero = read4(stage + meta_at + P::META_BYTES + at * 32);
                P::read_units(stage + units_at, b, unit, total);
            };
            auto flush = [&](int which) {
                const float2 by = to_floats<T>(scale), z = ZEROS ? to_floats<T>(zero) : make_float2(mid<BITS>(), mid<BITS>());
                P::flush(sum[which], by, z, unit, total, acc);
            };
            barrier_wait(barrier, parity);
#pragma unroll
            for (int b = 0; b < SPANS; b++) {
                const int which = b % BUFFERS;
                if (b % P::SHARE == 0) {
#pragma unroll
                    for (int i = 0; i < PER; i++)
                        read_chunk<BITS>(stage + words_at + (b / P::SHARE * PER + i) * P::CHUNK_BYTES, lane, w[i]);
                }
                span_codes<BITS>(w, b, a[which]);
                P::alive(a[which]);
                products_fence();
                const u64 planes = swizzled_tile(0) & 0xffffffff00000000ull | panel + b * (PANEL / 16);
                P::multiply(sum[which], a[which], planes);
                products_commit();
                if (BUFFERS > 1 && b > 0) {
                    read_metas(b - 1);
                    products_wait<1>();
                    P::alive(a[which ^ 1]);
                    flush(which ^ 1);
                }
                if (BUFFERS == 1 || b + 1 == SPANS) {
                    read_metas(b);
                    products_wait<0>();
                    P::alive(a[which]);
                    if (b + 1 == SPANS && lane == 0) barrier_arrive(barrier + 8 * STAGES);  // all have read this stage
                    flush(which);
                }
            }
            stage += STAGE_BYTES, barrier += 8, panel += STAGE_BYTES / 16;
            if (++s == STAGES)
                s = 0, stage -= STAGES * STAGE_BYTES, barrier -= STAGES * 8, panel -= STAGES * (STAGE_BYTES / 16), parity ^= 1;
        }

        // ---------------------------------------------------------------------------------------------- epilogue
        // with the others along K
        auto together = [&] { asm volatile("bar.sync %0, %1;" ::"r"(wn + 1), "n"(128 * WARPGROUPS_K) : "memory"); };
        float* const sums = (float*)(shared + STAGES * STAGE_BYTES) + wn * ROWS * ROW;  // [wk][wn][row of x][row of W]
        together();  // the sums of the tile before have been read
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) sums[wk * P::APART + (i / 2 * 4 + q) * ROW + warp * 16 + r + i % 2 * 8] = acc[i];
        together();
#pragma unroll 1
        for (int e = wk * 128 + (threadIdx.x & 127); e < 8 * M; e += 128 * WARPGROUPS_K) {  // 8 columns of a row of y
            const int m = e / 8, n = (tile * WARPGROUPS_N + wn) * 64 + e % 8 * 8;
            if (n >= N) continue;
            P::store_row(sums + m * ROW + e % 8 * 8, m, n, words, scales, zeros, bias, x, y, N, K, chunks, groups);
        }
    }
}
