// y[M,N] = x8[M,K] @ dequantize(W)^T * x_scales + bias on Hopper's 8-bit tensor cores: x rounded to e4m3 or int8 per token
// (act_rows.cu), W's codes as they are.
//
// Maths   sum_k x w = sum_g s[g] * (sum_k x c) - sum_g s[g] z[g] * (sum_k x),  k in group g
// Codes   a byte that holds a code of 4 bits or fewer is an e4m3 number as it stands: code * 2^-9, subnormal or of the lowest
//         exponent, which are one scale. int8 takes bytes as u8. So a mask (8 bits: nothing) makes wgmma's A operand in
//         registers.
// Order   a lane's word holds, bytewise, codes of two fragments of 16 k: x lies in that order (act_rows.cu has it), B in shared
//         memory.
// Zeros   the second sum is a product of its own, -(s z)[N, K/SG] by sums of x[M, K/SG] in 16 bits, 32 columns after every 32
//         sums: K/64 of the work, and exact sums of groups where each code would cost an FMA. Three warps beside the producer
//         read scales and zeros ahead, and lay -(s z) in shared memory as consumers read it.
// Sums    of SG = 128 k (64 where groups are) in the tensor core, scaled and added in fp32: e4m3 products keep fewer than 23
//         bits.
// Tile    128*ROW_TILES_64 rows of W by BLOCK_M rows of x, a warpgroup owns half of the rows. Persistent, bands of BAND tiles
//         of W; SPLIT_K blocks of a cluster split K of one tile. A producer thread feeds a ring of STAGES stages of 128 k by
//         TMA; y goes through two stagings of PIECE rows, by TMA too, so that it leaves while the next tile is computed.
// GROUPED W is many weights of N rows, each row_tiles row tiles, and each tile of x has one of them, experts[tile of x]: a
//         mixture's products, with rows of x sorted by expert; bias is (E, N). Tiles from row *valid on are left alone. Both
//         come from memory that the previous kernel may have written.
// MX      MXFP4: codes are e2m1, groups of 32 have a power of two, there are no zeros and no sums of x. With the group's power
//         relative to the largest of its 128 k, a value is an e4m3 number: 2^(d - 6) times e2m1, 1 <= d <= 12, and `prmt` looks
//         up four codes among the eight magnitudes that the group has then. A group that is 2^12 times smaller than the
//         largest of its 128 k counts as 0. x lies so that each 32 bytes are a group's.
// Limits  groups of 64 (8 and 4 bits) or a multiple of 128, or one group; 8 bits with int8 only.
// Edges   TMA reads zeros outside, and stores nothing there; where rows of y are no multiple of 16 bytes, masked stores.
// Source  own.
#include "tile.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"
#include "wgmma8.cuh"

template <bool INT8>
struct Sum8 {  // what the tensor core adds up
    using type = float;
    static __device__ __forceinline__ void alive(float& v) { asm volatile("" : "+f"(v)::"memory"); }
};
template <>
struct Sum8<true> {
    using type = int;
    static __device__ __forceinline__ void alive(int& v) { asm volatile("" : "+r"(v)::"memory"); }
};

template <bool INT8, int COUNT>
__device__ __forceinline__ void alive(typename Sum8<INT8>::type (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) Sum8<INT8>::alive(sums[i]);
}
template <int F>
__device__ __forceinline__ void alive(u32 (&a)[F][4]) {  // registers that wgmma reads meanwhile
#pragma unroll
    for (int f = 0; f < F; f++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[f][j])::"memory");
}

template <int BITS>
__device__ __forceinline__ void codes8(const u32 (&w)[Tile<BITS>::REGS], int i, u32 (&a)[4]) {  // A of the chunk's i-th wgmma
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if constexpr (BITS == 8) a[j] = w[4 * i + j];
        else {
            constexpr int FIELD = BITS == 4 ? 4 : 2;
            a[j] = (w[j] >> (i * FIELD)) & (FIELD == 4 ? 0x0f0f0f0fu : 0x03030303u);
            if constexpr (BITS == 3) {  // the third bit lies at 2 * i + j % 2 of its byte and belongs at 2
                const int right = 2 * i + (j & 1) - 2;
                const u32 h = w[4 + (j >> 1)];
                a[j] |= (right >= 0 ? h >> (right & 31) : h << (-right & 31)) & 0x04040404u;
            }
        }
    }
}

constexpr int larger(int a, int b) { return a > b ? a : b; }
template <bool V> struct Known { static constexpr bool value = V; };  // a number that a lambda's type holds

// The phases of the kernel, as functions of their arguments: with fields of a struct, or with the loops over row tiles in a
// phase, ptxas gave the kernel other registers than in the code that was measured.
template <int BITS, int T, bool INT8, int GROUP, bool ZEROS, int ROW_TILES_64, int BLOCK_M, int BATCH, int STAGES, int SPLIT_K,
          bool GROUPED, bool MX>
struct Phases8 {
    using L = Tile<BITS>;
    static constexpr int SG = GROUP == 64 ? 64 : 128, PARTS = 128 / SG, CHUNKS = 128 / L::CHUNK, TILES = 8 * ROW_TILES_64;
    static constexpr int PER_CHUNK = L::CHUNK / 32, PER_SUM = SG / 32;  // fragments
    static constexpr u32 X_BYTES = BLOCK_M * 128, CHUNK_BYTES = TILES * L::WORDS * 4, W_BYTES = CHUNKS * CHUNK_BYTES,
                         META_BYTES = TILES * (MX ? 64 : PARTS * 32);
    static constexpr u32 LOADED = X_BYTES + W_BYTES + META_BYTES, STAGE_BYTES = (LOADED + 1023) / 1024 * 1024;
    static_assert(SG / 32 % BATCH == 0, "one wgmma batch, one sum");
    static constexpr int EVERY = 32 / PARTS;  // steps of x whose sums are a step of sums: 32 columns
    static constexpr u32 ZEROS_BYTES = MX ? 0 : TILES * 1024;  // of -s z for a step of sums
    static constexpr int SUM_STEP = MX ? 0 : 1;  // steps of sums behind those of x
    static constexpr int COLUMNS = BLOCK_M / SPLIT_K;  // of x that a block writes
    static constexpr int PIECE = COLUMNS < 64 ? COLUMNS : 64;  // rows of y that are stored at a time, 64 columns each
    static constexpr u32 PIECE_BYTES = PIECE * 128 < 1024 ? 1024 : PIECE * 128;
    using Sums = float[BLOCK_M / 2];
    using XScales = float[COLUMNS / 4];
    using StepSums = typename Sum8<INT8>::type[BLOCK_M / 2];

    static __device__ __forceinline__ void init_barriers(u32 full, u32 empty) {  // the last pair: of -s z
        for (int i = 0; i <= STAGES; i++) barrier_init(full + 8 * i, i < STAGES ? 1 : 96), barrier_init(empty + 8 * i, 8);
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }

    // The step of x before which a step of sums comes.
    static __device__ __forceinline__ int sums_due(int sum, int sum_steps, int part) {
        return sum + 1 < sum_steps && !MX ? smaller((sum + 1) * EVERY, part) : part;
    }

    static __device__ __forceinline__ void load_weights(const TensorMap& words_map, const TensorMap& scales_map, u32 base,
                                                        u32 full, int s, int c, int first_tile) {
        const u32 barrier = full + 8 * s, words = base + s * STAGE_BYTES + X_BYTES;
        barrier_expect(barrier, LOADED);
#pragma unroll
        for (int u = 0; u < CHUNKS; u++)
            tensor_load(words + u * CHUNK_BYTES, &words_map, (c * CHUNKS + u) * L::WORDS, first_tile, barrier);
        tensor_load(words + W_BYTES, &scales_map, (GROUP == 0 ? 0 : c * 128 / (GROUP ? GROUP : 1)) * 16, first_tile,
                    barrier);
    }
    // The producer thread. load(stage, step, first_tile) asks for the words and scales of a step of row tiles from first_tile
    // on; place(tile, m0, first_tile) says whether the tile has rows.
    template <class Load, class Place>
    static __device__ __forceinline__ void produce(const TensorMap& x_map, const TensorMap& sums_map, Load load, Place place,
                                                   u32 base, u32 full, u32 empty, int team, int teams, int all,
                                                   int begin, int part, int sum_steps, int sums_at) {
        int s = 0, round = 0, early = 0;
        if (!GROUPED && team < all) {  // weights do not depend on the kernel before, x does
            int m0, first_tile;
            place(team, m0, first_tile);
            for (; early < STAGES && early < sums_due(0, sum_steps, part); early++) load(early, begin + early, first_tile);
        }
        previous_grid_wait();
        for (int tile = team; tile < all; tile += teams) {
            int m0, first_tile;
            if (!place(tile, m0, first_tile)) continue;
            for (int sum = 0, c = 0; sum < sum_steps; sum++) {  // of x, EVERY steps each; a step of sums after each of them
#pragma unroll 1
                for (const int end = sums_due(sum, sum_steps, part); c < end + SUM_STEP; c++) {
                    const u32 barrier = full + 8 * s;
                    if (early > 0) early--;
                    else {
                        barrier_wait(empty + 8 * s, (round & 1) ^ 1);
                        if (c < end) load(s, begin + c, first_tile);
                    }
                    if (c < end) tensor_load(base + s * STAGE_BYTES, &x_map, (begin + c) * 128, m0, barrier);
                    else {
                        barrier_expect(barrier, X_BYTES);
                        tensor_load(base + s * STAGE_BYTES, &sums_map, sums_at + sum * 32, m0, barrier);
                    }
                    if (++s == STAGES) s = 0, round++;
                }
                c -= SUM_STEP;
            }
        }
    }

    // ------------------------------------------------------------------------------------------------- products of a step
    // A operands of the b-th BATCH of fragments, from words of a row tile. w keeps a chunk's words for the batches that follow.
    static __device__ __forceinline__ void read_codes(int b, u32 words, int lane, u32 (&w)[L::REGS], u32 (&a)[BATCH][4]) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int at = b * BATCH + i;
            if (at % PER_CHUNK == 0) read_chunk<BITS>(words + at / PER_CHUNK * CHUNK_BYTES, lane, w);
            codes8<BITS>(w, at % PER_CHUNK, a[i]);
        }
    }
    // MX: A operands of 128 k from words of a row tile and their groups' powers, and what the sums of rows r and r + 8 lack.
    static __device__ __forceinline__ float2 read_e2m1(u32 words, u32 powers, int lane, u32 (&a)[4][4]) {
        static_assert(BITS == 4 && !INT8 && GROUP == 32 && BATCH == 4, "MXFP4 by e4m3");
        constexpr int MOST = 12;  // d of the largest group: 6 * 2^(12 - 6) = 384, the next power is no e4m3 number
        int power[4][2], most[2] = {0, 0}, least[2] = {255, 255};
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const u32 both = read2(powers + g * 16 + (lane >> 2) * 2);
            power[g][0] = both & 255, power[g][1] = both >> 8;
#pragma unroll
            for (int o = 0; o < 2; o++) most[o] = larger(most[o], power[g][o]), least[o] = smaller(least[o], power[g][o]);
        }
        auto decode = [&](auto far) {
            u32 w[L::REGS];
#pragma unroll
            for (int g = 0; g < 4; g++) {
                u32 low[2], high[2];  // of each row: 0, 0.5, 1, 1.5; 2, 3, 4, 6
#pragma unroll
                for (int o = 0; o < 2; o++) {
                    const u32 d = power[g][o] - most[o] + MOST;
                    low[o] = d * 0x08080800u + 0x0c080000u, high[o] = d * 0x08080808u + 0x1c181410u;
                    if (decltype(far)::value && most[o] - power[g][o] >= MOST) low[o] = high[o] = 0;
                }
                if (g % 2 == 0) read_chunk<BITS>(words + g / 2 * CHUNK_BYTES, lane, w);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 codes = __byte_perm(w[j] & 0x77777777u, 0, g % 2 ? 0x4431 : 0x4420);  // bytes g % 2 and g % 2 + 2
                    const u32 signs = __byte_perm(w[j] << 4, w[j], g % 2 ? 0x7351 : 0x6240);  // at the top of each code's byte
                    a[g][j] = __byte_perm(low[j & 1], high[j & 1], codes) | (signs & 0x80808080u);
                }
            }
        };
        // two branches, so that the usual one has no selections
        if (__any_sync(0xffffffffu, most[0] - least[0] >= MOST || most[1] - least[1] >= MOST)) decode(Known<true>{});
        else decode(Known<false>{});
        return make_float2(power_of(most[0] - MOST + 6), power_of(most[1] - MOST + 6));
    }
    static __device__ __forceinline__ float power_of(int exponent) {  // 2^(exponent - 127), down to subnormal numbers
        return __uint_as_float(exponent > 0 ? exponent << 23 : 1u << (22 + exponent));
    }
    static __device__ __forceinline__ void start_products(StepSums& sums, u32 (&a)[BATCH][4], u64 panel, int b) {
        alive(a), alive<INT8>(sums);
        products_fence();
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            Wgmma8<INT8, BLOCK_M>::run(sums, a[i], panel + 2 * (b * BATCH + i), (b * BATCH + i) % PER_SUM > 0);
        products_commit();
    }
    static __device__ __forceinline__ void add_scaled(Sums& acc, const StepSums& sums, float2 by) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i++) acc[i] += (i & 2 ? by.y : by.x) * (float)sums[i];
    }

    // ------------------------------------------------------------------------------------------------- zeros
    // -(s z) of rows r and r + 8 of row tile t, behind `before` of other experts, in the group that a column of the sums of x
    // has; 0 outside.
    static __device__ __forceinline__ u32 minus_zero(int column, int begin, int end, int t, int before, int row_tiles,
                                                     int groups, int r, const u32* scales, const u32* zeros) {
        const int g = GROUP == 0 ? 0 : smaller(column * SG / (GROUP ? GROUP : 1), groups - 1);
        const bool inside = t < row_tiles && column >= begin && column < end;
        const int at = inside ? ((before + t) * groups + g) * 8 + r : 0;
        const u32 zero = ZEROS ? __ldg(zeros + at) : Half<T>::power(BITS - 1);
        return inside ? fma2<T>(__ldg(scales + at), zero ^ 0x80008000u, 0x80008000u) : 0u;
    }
    // Three warps prepare wgmma's A operands of each step of sums, as lanes hold them: fragments (row tile, 16 columns).
    // read_scales() is called once, where consumers have left the tile before the last.
    template <class ReadScales>
    static __device__ __forceinline__ void make_zeros(ReadScales read_scales, u32 to, u32 full, u32 empty, int first, int lane,
                                                      int first_tile, int before, int sums_at, int begin, int end,
                                                      int row_tiles, int groups, const u32* scales, const u32* zeros,
                                                      int sum_steps, u32& parity) {
        if constexpr (SPLIT_K > 1) read_scales();  // its only tile, maybe without a share of K: consumers meet the cluster next
        for (int sum = 0; sum < sum_steps; sum++) {
            barrier_wait(empty, parity ^ 1);
            if (SPLIT_K == 1 && sum == 0) read_scales();
#pragma unroll 1
            for (int i = MX ? 2 * TILES : first; i < 2 * TILES; i += 3) {
                u32 minus[4], a[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int column = sums_at + sum * 32 + i % 2 * 16 + 2 * (lane & 3) + (e & 1) + (e & 2) * 4;
                    minus[e] = minus_zero(column, begin, end, first_tile + i / 2, before, row_tiles, groups, lane >> 2, scales,
                                          zeros);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) a[e] = __byte_perm(minus[e & 2], minus[(e & 2) + 1], e & 1 ? 0x7632 : 0x5410);
                asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + (i * 32 + lane) * 16), "r"(a[0]), "r"(a[1]),
                             "r"(a[2]), "r"(a[3]) : "memory");
            }
            barrier_arrive(full);  // each lane: of lane 0 behind a __syncwarp, racecheck does not see that it speaks for all
            parity ^= 1;
        }
    }
    static __device__ __forceinline__ void multiply_sums(Sums& product, u32 fragments, u64 panel) {
        u32 a[2][4];
#pragma unroll
        for (int f = 0; f < 2; f++)
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a[f][0]), "=r"(a[f][1]), "=r"(a[f][2]), "=r"(a[f][3])
                         : "r"(fragments + f * 512) : "memory");
        alive(a), alive<false>(product);
        products_fence();
        Wgmma<T, BLOCK_M>::first(product, a[0], panel);
        Wgmma<T, BLOCK_M>::run(product, a[1], panel + 2);
        products_commit();
        products_wait<0>();
        alive(a), alive<false>(product);
    }

    // ------------------------------------------------------------------------------------------------- epilogue
    // The sums of a cluster's blocks: sums[h][i][thread] in the ring's place, then each block adds up its columns in rank
    // order.
    static __device__ __forceinline__ void add_parts(float* sums, int rank, Sums (&acc)[ROW_TILES_64]) {
        asm volatile("bar.sync 3, 256;" ::: "memory");  // both warpgroups have read the ring
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++)
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; i++) sums[(h * (BLOCK_M / 2) + i) * 128] = acc[h][i];
        cluster_sync();
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) {
                const u32 here = shared_address(sums + (h * (BLOCK_M / 2) + rank * (COLUMNS / 2) + i) * 128);
                float v = 0.f;
#pragma unroll
                for (int k = 0; k < SPLIT_K; k++) v += read_cluster(in_block(here, k));
                acc[h][i] = v;
            }
        cluster_sync();
    }
    static __device__ __forceinline__ void read_x_scales(const float* x_scales, int first, XScales& x_scale) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            const float2 two = *(const float2*)(x_scales + first + i * 8);
            x_scale[2 * i] = two.x, x_scale[2 * i + 1] = two.y;
        }
    }
    // acc of rows n and n + 8 of W becomes y: scales of x, and the bias.
    static __device__ __forceinline__ void finish(Sums& acc, const XScales& x_scale, const u16* bias, int n, int N) {
#pragma unroll
        for (int o = 0; o < 2; o++) {
            const int at = n + 8 * o;
            const float b = bias && at < N ? to_floats<T>(bias[at]).x : 0.f;
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; i++) {
                float& v = acc[i / 2 * 4 + 2 * o + i % 2];
                v = v * x_scale[i] + b;
            }
        }
    }
    // The b-th PIECE rows of y and 64 columns from n_first on, by way of one of two stagings, 128-byte swizzled: TMA stores
    // them while the next ones are computed, or threads do where rows of y do not begin at a multiple of 16 bytes.
    static __device__ __forceinline__ void store(int b, const Sums& acc, u32 staging, const TensorMap& y_map, int group,
                                                 int warp, int lane, int m_first, int m_end, int n_first, int N, u16* y) {
        const bool first = (threadIdx.x & 127) == 0;
        if (first) stores_read<1>();
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // the staging is free
#pragma unroll
        for (int i = 0; i < PIECE / 8; i++) {  // two 8x8 matrices: rows n 0-7 and 8-15, columns m; stored transposed
            const u32 at = staging + (i * 8 + (lane & 7)) * 128 + ((warp * 32 + (lane & 8) * 2) ^ (lane & 7) * 16);
            store_transposed<T>(at, acc + (b * PIECE / 8 + i) * 4);
        }
        shared_fence();
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
        if (N % 8 == 0) {
            if (first) tensor_store(&y_map, n_first, m_first + b * PIECE, staging);
            return;
        }
        for (int e = threadIdx.x & 127; e < PIECE * 8; e += 128) {  // 16 bytes of a row of y
            const int row = e / 8, m = m_first + b * PIECE + row, column = n_first + e % 8 * 8;
            if (m < m_end && column < N)
                store8(y + (size_t)m * N + column, staging + row * 128 + (e % 8 ^ row % 8) * 16, N, column);
        }
    }
};

template <int BITS, int T, bool INT8, int GROUP, bool ZEROS, int ROW_TILES_64, int BLOCK_M, int BATCH, int STAGES, int SPLIT_K,
          int BAND, bool GROUPED = false, bool MX = false>
__global__ void __launch_bounds__(384, 1)
tile_wgmma8(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap sums_map,
            const __grid_constant__ TensorMap words_map, const __grid_constant__ TensorMap scales_map,
            const __grid_constant__ TensorMap y_map, const u32* __restrict__ scales, const u32* __restrict__ zeros,
            const float* __restrict__ x_scales, const u16* __restrict__ bias, u16* __restrict__ y, int M, int N, int steps,
            int row_tiles, int groups, const int* __restrict__ experts, const int* __restrict__ valid) {
    using P = Phases8<BITS, T, INT8, GROUP, ZEROS, ROW_TILES_64, BLOCK_M, BATCH, STAGES, SPLIT_K, GROUPED, MX>;
    using L = Tile<BITS>;
    constexpr int PARTS = P::PARTS, TILES = P::TILES, COLUMNS = P::COLUMNS;
    constexpr u32 X_BYTES = P::X_BYTES, W_BYTES = P::W_BYTES, STAGE_BYTES = P::STAGE_BYTES;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES + 2];  // full and empty, of each stage and of -s z
    __shared__ float scales_of_x[2][BLOCK_M];  // of a tile's rows, and of the next one's

    const int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);  // uniform, as ptxas sees it: else it serialises wgmma
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
    const u32 base = shared_address(shared), full = shared_address(barriers), empty = full + 8 * (STAGES + 1),
              made = base + STAGES * STAGE_BYTES;  // -s z
    const int rank = SPLIT_K > 1 ? blockIdx.x % SPLIT_K : 0, team = blockIdx.x / SPLIT_K, teams = gridDim.x / SPLIT_K;
    const int share = (steps + SPLIT_K - 1) / SPLIT_K, begin = smaller(rank * share, steps),
              part = smaller(share, steps - begin);
    // sums of x from sums_at on, in steps of 32 among those of x; TMA wants 16-byte aligned addresses (illegal instruction)
    const int sums_begin = begin * PARTS, sums_at = sums_begin & ~7, sums_end = sums_begin + part * PARTS;
    const int sum_steps = part > 0 ? MX ? 1 : (sums_end - sums_at + 31) / 32 : 0;
    const int m_tiles = (M + BLOCK_M - 1) / BLOCK_M, n_tiles = (row_tiles + TILES - 1) / TILES, all = m_tiles * n_tiles;
    auto place = [&](int tile, int& m0, int& n_tile) {  // bands of BAND tiles of n; within one, n fastest, then m
        const int band = tile / (BAND * m_tiles), n_first = band * BAND, width = smaller(BAND, n_tiles - n_first);
        const int in_band = tile - band * BAND * m_tiles;
        n_tile = n_first + in_band % width, m0 = in_band / width * BLOCK_M;
    };
    auto empty_tile = [&](int m0) { return GROUPED && m0 >= *valid; };
    auto expert_of = [&](int m0) { return GROUPED ? experts[m0 / BLOCK_M] : 0; };

    if (threadIdx.x == 0) P::init_barriers(full, empty);
    __syncthreads();

    if (group == 2) {  // ------------------------------------------------------------------------------- producer
        registers_down<40>();
        if (threadIdx.x == 256) {
            auto load = [&](int s, int c, int first) { P::load_weights(words_map, scales_map, base, full, s, c, first); };
            auto row_tiles_of = [&](int tile, int& m0, int& first_tile) {
                int n_tile;
                place(tile, m0, n_tile);
                if (empty_tile(m0)) return false;
                first_tile = n_tile * TILES + expert_of(m0) * row_tiles;
                return true;
            };
            P::produce(x_map, sums_map, load, row_tiles_of, base, full, empty, team, teams, all, begin, part, sum_steps,
                       sums_at);
        } else if (warp > 0) {
            u32 parity = 0, odd = 0;
            previous_grid_wait();
            for (int tile = team; tile < all; tile += teams, odd ^= 1) {
                int m0, n_tile;
                place(tile, m0, n_tile);
                if (empty_tile(m0)) {
                    odd ^= 1;
                    continue;
                }
                auto read_scales = [&] {
                    for (int m = warp * 32 - 32 + lane; m < BLOCK_M; m += 96)
                        scales_of_x[odd][m] = m0 + m < M ? __ldg(x_scales + m0 + m) : 0.f;
                };
                P::make_zeros(read_scales, made, full + 8 * STAGES, empty + 8 * STAGES, warp - 1, lane, n_tile * TILES,
                              expert_of(m0) * row_tiles, sums_at, sums_begin, sums_end, row_tiles, groups, scales, zeros,
                              sum_steps, parity);
            }
        }
        __syncwarp();
        if constexpr (SPLIT_K > 1) cluster_sync(), cluster_sync();
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    registers_up<232>();
    previous_grid_wait();
    next_grid_launch();
    const int t_first = group * ROW_TILES_64 * 4 + warp;  // of this warp's 16-row tiles; the next one is four on
    typename P::Sums acc[ROW_TILES_64];
    typename P::StepSums sums8;
    int s = 0;
    u32 parity = 0, zeros_parity = 0, odd = 0;
    auto release = [&] {  // this stage, and go on to the next
        if (lane == 0) barrier_arrive(empty + 8 * s);
        if (++s == STAGES) s = 0, parity ^= 1;
    };

    for (int tile = team; tile < all; tile += teams, odd ^= 1) {
        int m0, n_tile;
        place(tile, m0, n_tile);
        if (empty_tile(m0)) {
            odd ^= 1;
            continue;
        }
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++)
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; i++) acc[h][i] = 0.f;

        for (int sum = 0, c = 0; sum < sum_steps; sum++) {
            for (const int end = P::sums_due(sum, sum_steps, part); c < end; c++) {
                barrier_wait(full + 8 * s, parity);
                const u32 stage = base + s * STAGE_BYTES;
                const u64 panel = swizzled_tile(stage);
#pragma unroll
                for (int h = 0; h < ROW_TILES_64; h++) {
                    const int t = t_first + 4 * h;
                    u32 w[L::REGS];
#pragma unroll
                    for (int b = 0; b < 4 / BATCH; b++) {  // of BATCH fragments, that go to wgmma together
                        u32 a[BATCH][4];
                        const u32 words = stage + X_BYTES + t * L::WORDS * 4 + lane * 16;
                        float2 f;
                        if constexpr (MX) f = P::read_e2m1(words, stage + X_BYTES + W_BYTES + t * 64, lane, a);
                        else P::read_codes(b, words, lane, w, a);
                        const int p = b * BATCH / P::PER_SUM;
                        const bool whole = (b + 1) * BATCH % P::PER_SUM == 0;  // a sum ends
                        u32 both = 0;  // scales of rows r and r + 8; read before the product: shared memory is slow behind one
                        if (whole && !MX) both = read4(stage + X_BYTES + W_BYTES + t * PARTS * 32 + p * 32 + r * 4);
                        P::start_products(sums8, a, panel, b);
                        if (!MX) f = to_floats<T>(both);
                        if (!INT8 && !MX) f.x *= 512.f, f.y *= 512.f;
                        products_wait<0>();
                        alive(a), alive<INT8>(sums8);
                        if (h + 1 == ROW_TILES_64 && (b + 1) * BATCH == 4) release();
                        if (whole) P::add_scaled(acc[h], sums8, f);
                    }
                }
            }
            if (!MX) barrier_wait(full + 8 * s, parity);  // minus s z, by the sums of x
            barrier_wait(full + 8 * STAGES, zeros_parity);
            const u64 panel = swizzled_tile(base + s * STAGE_BYTES);
#pragma unroll
            for (int h = 0; h < (MX ? 0 : ROW_TILES_64); h++) {
                typename P::Sums product;  // not acc itself: as a target of wgmma it costs ptxas more registers than there are
                P::multiply_sums(product, made + ((t_first + 4 * h) * 64 + lane) * 16, panel);
#pragma unroll
                for (int i = 0; i < BLOCK_M / 2; i++) acc[h][i] += product[i];
            }
            // Lane 0 arrives for its warp, though racecheck does not see why it may: what the other lanes loaded are operands
            // of a wgmma, which is complete for all of them behind wgmma.wait_group, an instruction of the whole warp
            // (.sync.aligned).
            if (lane == 0) barrier_arrive(empty + 8 * STAGES);
            zeros_parity ^= 1;
            if (!MX) release();
        }

        // ---------------------------------------------------------------------------------------------- epilogue
        const int m_first = m0 + rank * COLUMNS, m_end = smaller(M, m0 + BLOCK_M);
        if constexpr (SPLIT_K > 1)
            P::add_parts((float*)shared + group * ROW_TILES_64 * (BLOCK_M / 2) * 128 + (threadIdx.x & 127), rank, acc);
        typename P::XScales x_scale;
        P::read_x_scales(scales_of_x[odd], rank * COLUMNS + 2 * q, x_scale);
        const u32 staging = base + (SPLIT_K > 1 ? 0 : STAGES * STAGE_BYTES + P::ZEROS_BYTES) + group * 2 * P::PIECE_BYTES;
#pragma unroll
        for (int h = 0; h < ROW_TILES_64; h++) {
            const int n_first = (n_tile * TILES + (group * ROW_TILES_64 + h) * 4) * 16;
            const u16* const of_expert = bias && GROUPED ? bias + expert_of(m0) * (size_t)N : bias;
            P::finish(acc[h], x_scale, of_expert, n_first + warp * 16 + r, N);
#pragma unroll
            for (int b = 0; b < COLUMNS / P::PIECE; b++)
                P::store(b, acc[h], staging + (h * (COLUMNS / P::PIECE) + b) % 2 * P::PIECE_BYTES, y_map, group, warp, lane,
                         m_first, m_end, n_first, N, y);
        }
    }
    if ((threadIdx.x & 127) == 0) stores_written();
}
