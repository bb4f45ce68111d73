// y[M,N] = x[M,K] @ W[N,K]^T of e4m3 matrices with scales, on Hopper: wgmma with both operands from shared memory.
//
// Operands A (wgmma's 64 rows) and B (its columns). SWAP false: A = x, B = W, for large M. SWAP true: A = W, B = x, for small
//         M: eight columns are the least, where 64 rows would be.
// Scales  of each operand, by mode. VECTOR: one per row, applied at the end (per token, per channel). GROUP: one per row and
//         128 k, read by TMA with the tile. BLOCK: one per 2^shift rows and 128 or 256 k, the same for a whole tile.
// Sums    the tensor core keeps fewer than 23 bits: every 128 k its sums are scaled and added to fp32 sums in registers.
// Warps   two consumer warpgroups own ROW_TILES_64 x 64 rows of A each and never meet: while one scales, the other one's
//         products run. A producer thread feeds a ring of STAGES stages, 128 k each, by TMA (128-byte swizzle). BLOCKS_PER_SM
//         2: so that the next kernel's weights are on their way while this one's last sums are written.
// Grid    persistent, bands of BAND tiles of B. SPLIT_K (with SWAP): blocks of a cluster split K, partial sums meet in rank
//         order. WARPGROUPS_K = 2 (with SWAP): both warpgroups own the same 64 rows and take chunks of k in turn.
// Limits  WARPGROUPS_K = 2: STAGES even, so that a stage always goes to the same warpgroup. One that skips a phase of a full
//         barrier takes the phase before it for its own, and reads a stage that is not there yet when loads arrive out of order
//         (a busy GPU).
// Edges   TMA reads zeros outside; stores are masked. K a multiple of 16.
// Source  own; two-level sums after DeepGEMM, 2-D scales after GridQuant.
#include "tile.cuh"
#include "hopper.cuh"
#include "wgmma_fp8.cuh"

enum { VECTOR = 0, GROUP = 1, BLOCK = 2 };

__device__ __forceinline__ float read_float(u32 shared) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ float2 read_float2(u32 shared) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared) : "memory");
    return v;
}

// The phases of the kernel, as functions of their arguments; loops over row tiles stay in the kernel (see tile_wgmma8.cu).
template <bool SWAP, int T, int A_SCALE, int B_SCALE, int ROW_TILES_64, int TILE_COLUMNS, int STAGES, int SPLIT_K,
          int WARPGROUPS_K, int BLOCKS_PER_SM>
struct PhasesFp8 {
    static constexpr int ROWS = 128 * ROW_TILES_64 / WARPGROUPS_K;  // of A in a tile
    static constexpr u32 A_BYTES = ROWS * 128, B_BYTES = TILE_COLUMNS * 128;
    static constexpr int GROUPS = A_SCALE == GROUP ? ROWS : B_SCALE == GROUP ? TILE_COLUMNS : 0;
    static constexpr u32 G_BYTES = GROUPS * 4, G_STEP = (G_BYTES + 127) / 128 * 128;
    // every block of a split sums some columns, or the first one all
    static constexpr bool SHARED_SUM = TILE_COLUMNS / SPLIT_K >= 8;
    static constexpr int COLUMNS = SPLIT_K > 1 && SHARED_SUM ? TILE_COLUMNS / SPLIT_K : TILE_COLUMNS;
    using Sums = float[TILE_COLUMNS / 2];
    using ColumnScales = float2[B_SCALE == GROUP ? TILE_COLUMNS / 8 : 1];

    static __device__ __forceinline__ u32 a_stage(u32 base, int s) { return base + s * A_BYTES; }
    static __device__ __forceinline__ u32 b_stage(u32 base, int s) { return base + STAGES * A_BYTES + s * B_BYTES; }
    static __device__ __forceinline__ u32 g_stage(u32 base, int s) { return base + STAGES * (A_BYTES + B_BYTES) + s * G_STEP; }

    static __device__ __forceinline__ void init_barriers(u32 full, u32 empty) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 8 / WARPGROUPS_K);
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }

    static __device__ __forceinline__ void load_b(const TensorMap& b_map, const TensorMap& groups_map, u32 base, u32 full,
                                                  int s, int c, int a0, int b0) {
        tensor_load(b_stage(base, s), &b_map, c * 128, b0, full + 8 * s);
        const int first = A_SCALE == GROUP ? a0 : b0;
        if constexpr (GROUPS > 0) tensor_load(g_stage(base, s), &groups_map, first, c, full + 8 * s);
    }
    static __device__ __forceinline__ void load_a(const TensorMap& a_map, u32 base, u32 full, int s, int c, int a0, int B) {
        barrier_expect(full + 8 * s, A_BYTES + B_BYTES + G_BYTES);
        // read once, and first to leave L2: 2 to 4% faster with 16 to 64 rows
        if (SWAP && B <= TILE_COLUMNS) tensor_load_once(a_stage(base, s), &a_map, c * 128, a0, full + 8 * s);
        else tensor_load(a_stage(base, s), &a_map, c * 128, a0, full + 8 * s);
    }
    // The producer thread. load_a(stage, chunk, a0), load_b(stage, chunk, a0, b0); place(tile, a0, b0).
    template <class LoadA, class LoadB, class Place>
    static __device__ __forceinline__ void produce(LoadA load_a, LoadB load_b, Place place, u32 empty, int team, int teams,
                                                   int all, int begin, int part) {
        int s = 0, round = 0, early = 0;
        if (SWAP && team < all) {  // weights do not depend on the kernel before, x does
            int a0, b0;
            place(team, a0, b0);
            for (; early < STAGES && early < part; early++) load_a(early, begin + early, a0);
        }
        previous_grid_wait();
        for (int tile = team; tile < all; tile += teams) {
            int a0, b0;
            place(tile, a0, b0);
            for (int c = 0; c < part; c++) {
                if (early > 0) early--;
                else {
                    barrier_wait(empty + 8 * s, (round & 1) ^ 1);
                    load_a(s, begin + c, a0);
                }
                load_b(s, begin + c, a0, b0);
                if (++s == STAGES) s = 0, round++;
            }
        }
    }

    // ------------------------------------------------------------------------------------------------- products of a chunk
    static __device__ __forceinline__ void alive(Sums& sums) {
#pragma unroll
        for (int i = 0; i < TILE_COLUMNS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    }
    static __device__ __forceinline__ void start_products(Sums& sums, u64 a_tile, u64 b_tile) {
        alive(sums);
        products_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) WgmmaFp8<TILE_COLUMNS>::run(sums, a_tile + 2 * k, b_tile + 2 * k, k > 0);
        products_commit();
    }

    // Scales of two columns, times those of blocks.
    static __device__ __forceinline__ void read_column(u32 base, int s, int i, int lane, float factor, ColumnScales& columns) {
        const float2 f = read_float2(g_stage(base, s) + (i * 8 + (lane & 3) * 2) * 4);
        columns[i] = make_float2(f.x * factor, f.y * factor);
    }

    static __device__ __forceinline__ void add_scaled(Sums& acc, const Sums& sums, float factor, const float (&rows)[2],
                                                      ColumnScales& columns, u32 base, int s, int lane) {
#pragma unroll
        for (int i = 0; i < TILE_COLUMNS / 2; i++) {
            // two blocks on an SM have few registers: scales of one column pair at a time
            if (B_SCALE == GROUP && BLOCKS_PER_SM == 2 && i % 4 == 0) read_column(base, s, i / 4, lane, factor, columns);
            float f = factor;
            if constexpr (A_SCALE == GROUP) f = rows[(i >> 1) & 1];
            if constexpr (B_SCALE == GROUP) f = i & 1 ? columns[i >> 2].y : columns[i >> 2].x;
            acc[i] += f * sums[i];
        }
    }

    // ------------------------------------------------------------------------------------------------- epilogue
    // Scales of rows `first` and first + 8 of A, and their bias.
    static __device__ __forceinline__ void read_rows(const float* a_scales, const u16* bias, int first, int A, float (&by)[2],
                                                     float (&more)[2]) {
#pragma unroll
        for (int o = 0; o < 2; o++) {
            const int at = first + 8 * o;
            if (A_SCALE == VECTOR) by[o] = at < A ? a_scales[at] : 0.f;
            if (SWAP && bias) more[o] = at < A ? to_floats<T>(bias[at]).x : 0.f;
        }
    }
    // The same of columns `first` and first + 1 of B.
    static __device__ __forceinline__ void read_columns(const float* b_scales, const u16* bias, int first, int B,
                                                        float (&by)[2], float (&more)[2]) {
#pragma unroll
        for (int o = 0; o < 2; o++) {
            const int at = first + o;
            if (B_SCALE == VECTOR) by[o] = at < B ? b_scales[at] : 0.f;
            if (!SWAP && bias) more[o] = at < B ? to_floats<T>(bias[at]).x : 0.f;
        }
    }
    // Sums of a cluster's blocks: sums[h][i][thread] of both warpgroups over the ring, then each block adds up its columns.
    static __device__ __forceinline__ void meet_cluster(float* all_sums, int g, int rank, Sums (&acc)[ROW_TILES_64]) {
        float* const sums = all_sums + g * ROW_TILES_64 * (TILE_COLUMNS / 2) * 128;
        asm volatile("bar.sync 3, 256;" ::: "memory");  // both warpgroups have read the ring
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++)
#pragma unroll
            for (int i = 0; i < TILE_COLUMNS / 2; i++) sums[(h * (TILE_COLUMNS / 2) + i) * 128] = acc[h][i];
        cluster_sync();
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) {
                const u32 here = shared_address((WARPGROUPS_K == 2 ? all_sums : sums) +
                                                (h * (TILE_COLUMNS / 2) + (SHARED_SUM ? rank * (COLUMNS / 2) : 0) + i) * 128);
                float v = 0.f;
                if (SHARED_SUM || rank == 0) {
#pragma unroll
                    for (int k = 0; k < SPLIT_K * WARPGROUPS_K; k++)
                        v += read_cluster(in_block(here, k / WARPGROUPS_K) + (k % WARPGROUPS_K) * (TILE_COLUMNS / 2) * 512);
                }
                acc[h][i] = v;
            }
        cluster_sync();
    }
    // The second warpgroup's sums are added to the first one's.
    static __device__ __forceinline__ void meet_block(float* sums, int g, Sums& acc) {
        if (g == 1) {
#pragma unroll
            for (int i = 0; i < TILE_COLUMNS / 2; i++) sums[i * 128] = acc[i];
        }
        asm volatile("bar.sync 3, 256;" ::: "memory");
        if (g == 0) {
#pragma unroll
            for (int i = 0; i < TILE_COLUMNS / 2; i++) acc[i] += sums[i * 128];
        }
        asm volatile("bar.sync 3, 256;" ::: "memory");  // read: the other one may write the next tile's
    }
    // A warp's sixteen rows of y, by way of its staging: 64 columns at a time.
    static __device__ __forceinline__ void store_rows(const Sums& acc, unsigned char* stage_out, int w8, int lane, int row,
                                                      int b0, int A, int B, u16* y) {
        // halves: 16 bytes more than are staged, against bank conflicts
        constexpr int WIDE = TILE_COLUMNS < 64 ? TILE_COLUMNS : 64, LINE = WIDE + 8;
        const u32 staging = shared_address(stage_out) + w8 * 16 * LINE * 2;
#pragma unroll
        for (int b = 0; b < TILE_COLUMNS / WIDE; b++) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < WIDE / 8; i += 2) {
                const float* v = acc + 4 * (b * (WIDE / 8) + i);
                const u32 at = staging + ((lane & 15) * LINE + (i + (lane >> 4)) * 8) * 2;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                             "r"(from_floats<T>(v[0], v[1])), "r"(from_floats<T>(v[2], v[3])), "r"(from_floats<T>(v[4], v[5])),
                             "r"(from_floats<T>(v[6], v[7]))
                             : "memory");
            }
            __syncwarp();
#pragma unroll 4
            for (int e = lane; e < 16 * WIDE / 8; e += 32) {
                const int i = e / (WIDE / 8), m = row + i, n = b0 + b * WIDE + e % (WIDE / 8) * 8;
                if (m < A && n < B) store8(y + (size_t)m * B + n, staging + (i * LINE + e % (WIDE / 8) * 8) * 2, B, n);
            }
        }
    }
    // SWAP: sixteen columns of y, transposed by way of the staging.
    static __device__ __forceinline__ void store_columns(const Sums& acc, unsigned char* stage_out, int w8, int lane, int row,
                                                         int b_first, int A, int B, u16* y) {
        constexpr int LINE = 24;  // 16 halves of n, and 16 bytes more
        __syncwarp();
        const u32 staging = shared_address(stage_out) + w8 * COLUMNS * LINE * 2;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            const float* v = acc + 4 * i;
            const u32 at = staging + ((i * 8 + (lane & 7)) * LINE + ((lane >> 3) & 1) * 8) * 2;
            store_transposed<T>(at, v);
        }
        __syncwarp();
#pragma unroll 2
        for (int e = lane; e < COLUMNS * 2; e += 32) {
            const int m = b_first + (e >> 1), n = row + (e & 1) * 8;
            if (m < B && n < A) store8(y + (size_t)m * A + n, staging + ((e >> 1) * LINE + (e & 1) * 8) * 2, A, n);
        }
    }
};

template <bool SWAP, int T, int A_SCALE, int B_SCALE, int ROW_TILES_64, int TILE_COLUMNS, int STAGES, int SPLIT_K,
          int WARPGROUPS_K, int BLOCKS_PER_SM, int BAND>
__global__ void __launch_bounds__(BLOCKS_PER_SM == 2 ? 288 : 384, BLOCKS_PER_SM)
fp8_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         const __grid_constant__ TensorMap groups_map, const float* __restrict__ a_scales,
         const float* __restrict__ b_scales, const u16* __restrict__ bias, u16* __restrict__ y, int A, int B, int chunks,
         int a_shift, int b_shift, int a_stride, int b_stride, int a_k_shift, int b_k_shift) {
    static_assert(A_SCALE != GROUP || B_SCALE != GROUP, "only x has groups");
    static_assert(WARPGROUPS_K == 1 || (SWAP && ROW_TILES_64 == 1), "only one half of rows is shared by warpgroups");
    static_assert(STAGES % WARPGROUPS_K == 0, "a stage always goes to the same warpgroup");
    using P = PhasesFp8<SWAP, T, A_SCALE, B_SCALE, ROW_TILES_64, TILE_COLUMNS, STAGES, SPLIT_K, WARPGROUPS_K, BLOCKS_PER_SM>;
    constexpr int ROWS = P::ROWS, GROUPS = P::GROUPS;
    constexpr u32 A_BYTES = P::A_BYTES, B_BYTES = P::B_BYTES, G_BYTES = P::G_BYTES, G_STEP = P::G_STEP;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];  // full and empty, of each stage

    const int g = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // uniform, as ptxas sees it: 5 to 8% faster
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, r = lane >> 2;
    const u32 base = shared_address(shared), full = shared_address(barriers), empty = full + 8 * STAGES;

    const int rank = SPLIT_K > 1 ? blockIdx.x % SPLIT_K : 0, team = blockIdx.x / SPLIT_K, teams = gridDim.x / SPLIT_K;
    const int share = (chunks + SPLIT_K - 1) / SPLIT_K, begin = SPLIT_K > 1 ? smaller(rank * share, chunks) : 0,
              part = smaller(share, chunks - begin);
    const int a_tiles = (A + ROWS - 1) / ROWS, b_tiles = (B + TILE_COLUMNS - 1) / TILE_COLUMNS, all = a_tiles * b_tiles;
    auto place = [&](int tile, int& a0, int& b0) {  // bands of BAND tiles of B; within one, B fastest, then A
        const int band = tile / (BAND * a_tiles), first = band * BAND, width = smaller(BAND, b_tiles - first);
        const int in_band = tile - band * BAND * a_tiles;
        b0 = (first + in_band % width) * TILE_COLUMNS, a0 = in_band / width * ROWS;
    };

    if (threadIdx.x == 0) P::init_barriers(full, empty);
    __syncthreads();

    if (g == 2) {  // ----------------------------------------------------------------------------------- producer
        if constexpr (BLOCKS_PER_SM == 1) registers_down<40>();
        if (threadIdx.x == 256) {
            auto load_a = [&](int s, int c, int a0) { P::load_a(a_map, base, full, s, c, a0, B); };
            auto load_b = [&](int s, int c, int a0, int b0) { P::load_b(b_map, groups_map, base, full, s, c, a0, b0); };
            P::produce(load_a, load_b, place, empty, team, teams, all, begin, part);
        }
        __syncwarp();
        if constexpr (SPLIT_K > 1) cluster_sync(), cluster_sync();
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    if constexpr (BLOCKS_PER_SM == 1) registers_up<232>();
    previous_grid_wait();
    next_grid_launch();
    typename P::Sums acc[ROW_TILES_64], part_sums;
    // of this warpgroup
    const int first_row = WARPGROUPS_K == 2 ? 0 : g * ROW_TILES_64 * 64, k_group = WARPGROUPS_K == 2 ? g : 0;

    auto release = [&](int stage) {
        if (lane == 0) barrier_arrive(empty + 8 * stage);
    };

    for (int tile = team, before = k_group; tile < all; tile += teams, before += part) {
        int a0, b0;
        place(tile, a0, b0);
        const int a_first = a0 + first_row;
        int s = before % STAGES, round = before / STAGES;
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++)
#pragma unroll
            for (int i = 0; i < TILE_COLUMNS / 2; i++) acc[h][i] = 0.f;

        const float* a_block = A_SCALE == BLOCK ? a_scales + (size_t)(smaller(a_first, A - 1) >> a_shift) * a_stride : nullptr;
        const float* b_block = B_SCALE == BLOCK ? b_scales + (size_t)(b0 >> b_shift) * b_stride : nullptr;
        float a_ahead = 1.f, b_ahead = 1.f;  // of the next chunk (FAR: the one after it): two loads that nobody waits for
        // FAR, and the pointers kept in registers: 1% faster with groups of x, 2% slower without
        constexpr bool FAR = A_SCALE == GROUP && B_SCALE == BLOCK;
        if constexpr (FAR) asm volatile("" : "+l"(b_block));
        auto look_ahead = [&](int c) {
            if (!FAR && c >= part) return;
            if constexpr (FAR) c = smaller(c, part - 1);
            if constexpr (A_SCALE == BLOCK) a_ahead = __ldg(a_block + ((begin + c) >> a_k_shift));
            if constexpr (B_SCALE == BLOCK) b_ahead = __ldg(b_block + ((begin + c) >> b_k_shift));
        };
        look_ahead(k_group);
        float b_next = b_ahead;
        if constexpr (FAR) look_ahead(k_group + WARPGROUPS_K);

        for (int c = k_group; c < part; c += WARPGROUPS_K) {
            barrier_wait(full + 8 * s, round & 1);
            float factor = 1.f, rows[ROW_TILES_64][2];
            if constexpr (A_SCALE == GROUP) {  // before the product: shared memory is slow behind one
#pragma unroll
                for (int h = 0; h < ROW_TILES_64; h++)
#pragma unroll
                    for (int o = 0; o < 2; o++)
                        rows[h][o] = read_float(P::g_stage(base, s) + (first_row + h * 64 + warp * 16 + r + 8 * o) * 4);
            }
#pragma unroll
            for (int h = 0; h < ROW_TILES_64; h++) {
                P::start_products(part_sums, swizzled_tile(P::a_stage(base, s) + (first_row + h * 64) * 128),
                                  swizzled_tile(P::b_stage(base, s)));
                if (h == 0) {  // scales are read while the tensor cores work
                    factor = a_ahead * (FAR ? b_next : b_ahead);
                    b_next = b_ahead;
                    look_ahead(c + (FAR ? 2 : 1) * WARPGROUPS_K);
                }
                typename P::ColumnScales columns;
                if constexpr (B_SCALE == GROUP && BLOCKS_PER_SM == 1) {
#pragma unroll
                    for (int i = 0; i < TILE_COLUMNS / 8; i++) P::read_column(base, s, i, lane, factor, columns);
                }
                products_wait<0>();
                float scaled[2];
                if constexpr (A_SCALE == GROUP) scaled[0] = factor * rows[h][0], scaled[1] = factor * rows[h][1];
                P::alive(part_sums);
                if (h + 1 == ROW_TILES_64 && BLOCKS_PER_SM == 1) release(s);
                P::add_scaled(acc[h], part_sums, factor, scaled, columns, base, s, lane);
                if (h + 1 == ROW_TILES_64 && BLOCKS_PER_SM == 2) release(s);
            }
            if ((s += WARPGROUPS_K) >= STAGES) s -= STAGES, round++;
        }

        // ---------------------------------------------------------------------------------------------- epilogue
        const int b_first = b0 + (SPLIT_K > 1 && P::SHARED_SUM ? rank * P::COLUMNS : 0);
        if constexpr (SPLIT_K > 1) {
            P::meet_cluster((float*)shared + (threadIdx.x & 127), g, rank, acc);
            if ((!P::SHARED_SUM && rank != 0) || (WARPGROUPS_K == 2 && g == 1)) continue;
        } else if constexpr (WARPGROUPS_K == 2) {
            P::meet_block((float*)(shared + STAGES * (A_BYTES + B_BYTES + G_STEP)) + (threadIdx.x & 127), g, acc[0]);
            if (g == 1) continue;
        }
        unsigned char* const stage_out =
            shared + (SPLIT_K > 1 ? 0 : STAGES * (A_BYTES + B_BYTES + G_STEP) + (WARPGROUPS_K == 2 ? TILE_COLUMNS * 256 : 0));
        const int w8 = g * 4 + warp;
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++) {
            const int row = a_first + h * 64 + warp * 16;  // of A, the first of this warp's sixteen
            // scales of rows and columns, and the bias; as a function of its own this loop gave small M other registers
            float fa[2] = {1.f, 1.f}, ba[2] = {0.f, 0.f};
            P::read_rows(a_scales, bias, row + r, A, fa, ba);
#pragma unroll
            for (int i = 0; i < P::COLUMNS / 8; i++) {
                float fb[2] = {1.f, 1.f}, bb[2] = {0.f, 0.f};
                P::read_columns(b_scales, bias, b_first + i * 8 + (lane & 3) * 2, B, fb, bb);
#pragma unroll
                for (int o = 0; o < 4; o++)
                    acc[h][4 * i + o] = acc[h][4 * i + o] * fa[o >> 1] * fb[o & 1] + ba[o >> 1] + bb[o & 1];
            }
            if constexpr (!SWAP) P::store_rows(acc[h], stage_out, w8, lane, row, b0, A, B, y);
            else P::store_columns(acc[h], stage_out, w8, lane, row, b_first, A, B, y);
        }
    }
}
