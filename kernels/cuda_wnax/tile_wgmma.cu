// y[M,N] = x[M,K] @ dequantize(W)^T + bias for large M on Hopper: W, dequantised, is wgmma's A operand in registers, x^T
// its B operand in shared memory.
//
// Tile    2*64*MH rows of W by NB rows of x. A block takes tiles in turn (persistent), n fastest within bands of BAND tiles
//         of n, so that the blocks running together share x and W in L2. SPLIT blocks of a cluster split K of one tile; then
//         there is one cluster for each tile.
// Warps   one producer thread feeds a ring of STAGES stages by TMA, each a chunk of k: x (128-byte swizzled panels of 64 k),
//         words, scales and zeros. Two consumer warpgroups own MH x 64 rows each: they read words from shared memory,
//         dequantise and scale four k16 steps into one of two register buffers while wgmma works on the other.
// Sums    fp32; across the cluster through distributed shared memory, in rank order. Outputs go through a transposing
//         stmatrix, so that a row of y is written 16 bytes at a time.
// Edges   TMA reads zeros outside x, words and scales; stores are masked. K a multiple of 8.
// Source  own; y^T = W x^T with W from registers is Machete's plan.
#include "tile.cuh"
#include "wgmma.cuh"

struct __align__(64) TensorMap { u64 opaque[16]; };

template <int REGISTERS>
__device__ __forceinline__ void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

__device__ __forceinline__ void tensor_load(u32 shared, const TensorMap* map, int inner, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
                 "l"(map), "r"(inner), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ u32 twice(u32 halves, int which) { return __byte_perm(halves, 0, which ? 0x3232 : 0x1010); }

template <int BITS, int T, int GROUP, bool ZEROS, int MH, int NB, int STAGES, int SPLIT, int BAND>
__global__ void __launch_bounds__(384, 1)
tile_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap words_map,
           const __grid_constant__ TensorMap scales_map, const __grid_constant__ TensorMap zeros_map,
           const u16* __restrict__ bias, u16* __restrict__ y, int M, int N, int chunks) {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    constexpr int TILES = 8 * MH, PANELS = L::CHUNK / 64;
    constexpr int GROUPS = GROUP == 0 || GROUP % L::CHUNK == 0 ? 1
                         : L::CHUNK % GROUP == 0 ? L::CHUNK / GROUP : (L::CHUNK - 1) / GROUP + 2;  // that a chunk may meet
    constexpr u32 X_BYTES = NB * L::CHUNK * 2, W_BYTES = TILES * L::WORDS * 4, META_BYTES = TILES * GROUPS * 32;
    constexpr u32 STAGE_BYTES = X_BYTES + W_BYTES + (ZEROS ? 2 : 1) * META_BYTES;
    constexpr int ROW = 64 * MH + 8;  // halves of a row of the output staging: 16 bytes more than 128, against bank conflicts
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ u32 mask[C::PLACES];

    const int group = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, r = lane >> 2;
    const u32 base = shared_address(shared);
    auto x_stage = [&](int s) { return base + s * X_BYTES; };
    auto w_stage = [&](int s) { return base + STAGES * X_BYTES + s * W_BYTES; };
    auto meta_stage = [&](int s) { return base + STAGES * (X_BYTES + W_BYTES) + s * (STAGE_BYTES - X_BYTES - W_BYTES); };

    const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, team = blockIdx.x / SPLIT, teams = gridDim.x / SPLIT;
    const int share = (chunks + SPLIT - 1) / SPLIT, begin = smaller(rank * share, chunks), part = smaller(share, chunks - begin);
    const int m_tiles = (M + NB - 1) / NB, n_tiles = (N + 128 * MH - 1) / (128 * MH), all = m_tiles * n_tiles;
    auto place = [&](int tile, int& m0, int& n_tile) {  // bands of BAND tiles of n; within one, n fastest, then m
        const int band = tile / (BAND * m_tiles), n_first = band * BAND, width = smaller(BAND, n_tiles - n_first);
        const int in_band = tile - band * BAND * m_tiles;
        n_tile = n_first + in_band % width, m0 = in_band / width * NB;
    };

    if (threadIdx.x == 0) {
        C::Masks::store(mask);
        for (int i = 0; i < STAGES; i++) barrier_init(shared_address(full + i), 1), barrier_init(shared_address(empty + i), 8);
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {  // ------------------------------------------------------------------------------- producer
        registers_down<40>();
        if (threadIdx.x == 0) {
            auto load_weights = [&](int s, int c, int n_tile) {
                const u32 barrier = shared_address(full + s);
                barrier_expect(barrier, STAGE_BYTES);
                tensor_load(w_stage(s), &words_map, c * L::WORDS, n_tile * TILES, barrier);
                const int g = GROUP == 0 ? 0 : c * L::CHUNK / (GROUP ? GROUP : 1);
                tensor_load(meta_stage(s), &scales_map, g * 16, n_tile * TILES, barrier);
                if (ZEROS) tensor_load(meta_stage(s) + META_BYTES, &zeros_map, g * 16, n_tile * TILES, barrier);
            };
            auto load_x = [&](int s, int c, int m0) {
#pragma unroll
                for (int p = 0; p < PANELS; p++)
                    tensor_load(x_stage(s) + p * NB * 128, &x_map, c * L::CHUNK + p * 64, m0, shared_address(full + s));
            };
            int s = 0, round = 0, early = 0;
            if (team < all) {  // weights do not depend on the kernel before, x does
                int m0, n_tile;
                place(team, m0, n_tile);
                for (; early < STAGES && early < part; early++) load_weights(early, begin + early, n_tile);
            }
            previous_grid_wait();
            for (int tile = team; tile < all; tile += teams) {
                int m0, n_tile;
                place(tile, m0, n_tile);
                for (int c = 0; c < part; c++) {
                    if (early > 0) early--;
                    else {
                        barrier_wait(shared_address(empty + s), (round & 1) ^ 1);
                        load_weights(s, begin + c, n_tile);
                    }
                    load_x(s, begin + c, m0);
                    if (++s == STAGES) s = 0, round++;
                }
            }
        }
        if constexpr (SPLIT > 1) cluster_sync(), cluster_sync();
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    registers_up<232>();
    previous_grid_wait();
    next_grid_launch();
    const int g = group - 1;
    typename C::Masks masks;
    masks.load(mask);
    float acc[MH][NB / 2];
    u32 a[2][4][4];
    int s = 0, round = 0;

    for (int tile = team; tile < all; tile += teams) {
        int m0, n_tile;
        place(tile, m0, n_tile);
#pragma unroll
        for (int h = 0; h < MH; h++)
#pragma unroll
            for (int i = 0; i < NB / 2; i++) acc[h][i] = 0.f;

        auto chunk = [&](int parity, int c) {  // parity: the A buffer that the chunk's first batch takes
            barrier_wait(shared_address(full + s), round & 1);
#pragma unroll
            for (int h = 0; h < MH; h++) {
                const int t = (g * MH + h) * 4 + warp;
                u32 w[L::REGS];
                const u32 words = w_stage(s) + t * L::WORDS * 4;
                read_chunk<BITS>(words, lane, w);
                u32 scale[2], offset[2];  // of rows r and r + 8: w = code * scale + offset, twice each
#pragma unroll
                for (int p = 0; p < PANELS; p++) {
                    const int buffer = (parity + h * PANELS + p) & 1;
#pragma unroll
                    for (int f = 0; f < 4; f++) {
                        const int at = p * 4 + f, step = GROUP ? gcd(GROUP ? GROUP : 1, L::CHUNK) : L::CHUNK;
                        if (at * 16 % step == 0) {
                            int i = at * 16 / step;
                            if (GROUP && L::CHUNK % (GROUP ? GROUP : 1) && GROUP % L::CHUNK)
                                i = ((begin + c) * L::CHUNK + at * 16) / (GROUP ? GROUP : 1) - (begin + c) * L::CHUNK / (GROUP ? GROUP : 1);
                            const u32 from = meta_stage(s) + (t * GROUPS + i) * 32 + r * 4;
                            const u32 both = read4(from);
                            const float2 sf = to_floats<T>(both);
                            float2 zf = make_float2(mid<BITS>(), mid<BITS>());
                            if (ZEROS) zf = to_floats<T>(read4(from + META_BYTES));
                            const u32 minus = from_floats<T>(-sf.x * zf.x, -sf.y * zf.y);
                            scale[0] = twice(both, 0), scale[1] = twice(both, 1);
                            offset[0] = twice(minus, 0), offset[1] = twice(minus, 1);
                        }
                        u32 (&to)[4] = a[buffer][f];
                        C::fragment(w, at, masks, to);
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            if (!C::WIDE) to[j] = add2<T>(to[j], C::magic(at) | 0x80008000u);
                            to[j] = fma2<T>(to[j], scale[j & 1], offset[j & 1]);
                        }
                    }
#pragma unroll
                    for (int f = 0; f < 4; f++)
#pragma unroll
                        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[buffer][f][j])::"memory");
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                    // x panel: 128-byte swizzle, 8 rows of 128 bytes 1024 bytes apart
                    const u64 panel = (u64)(((x_stage(s) + p * NB * 128) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
#pragma unroll
                    for (int f = 0; f < 4; f++) Wgmma<T, NB>::run(acc[h], a[buffer][f], panel + 2 * f);
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    // the last wait sits inside the loop: at its exit the compiler may copy accumulators, not while in flight
                    if (c + 1 == part && h + 1 == MH && p + 1 == PANELS) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                    else asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                    // the batch before read its A registers until here
#pragma unroll
                    for (int f = 0; f < 4; f++)
#pragma unroll
                        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[buffer ^ 1][f][j])::"memory");
                    // and with its first batch behind it, nobody reads the chunk before any more
                    if (h == 0 && p == 0 && c > 0 && lane == 0) barrier_arrive(shared_address(empty + (s == 0 ? STAGES - 1 : s - 1)));
                }
            }
            if (c + 1 == part && lane == 0) barrier_arrive(shared_address(empty + s));
            if (++s == STAGES) s = 0, round++;
        };
        constexpr int BATCHES = MH * PANELS;
        for (int c = 0; c < part; c += BATCHES % 2 ? 2 : 1) {
            chunk(0, c);
            if (BATCHES % 2 && c + 1 < part) chunk(1, c + 1);
        }

        // ---------------------------------------------------------------------------------------------- epilogue
        const int n_first = n_tile * 128 * MH + g * MH * 64;  // of this warpgroup
        constexpr int COLUMNS = NB / SPLIT;                   // of x that this block of the cluster writes
        if constexpr (SPLIT > 1) {  // sums[h][i][thread] of both warpgroups over the ring, then everyone sums its columns
            float* sums = (float*)shared + g * MH * (NB / 2) * 128 + (threadIdx.x & 127);
            asm volatile("bar.sync 3, 256;" ::: "memory");  // both warpgroups have read the ring
#pragma unroll
            for (int h = 0; h < MH; h++)
#pragma unroll
                for (int i = 0; i < NB / 2; i++) sums[(h * (NB / 2) + i) * 128] = acc[h][i];
            cluster_sync();
#pragma unroll
            for (int h = 0; h < MH; h++)
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++) {
                    const u32 here = shared_address(sums + (h * (NB / 2) + rank * (COLUMNS / 2) + i) * 128);
                    float v = 0.f;
#pragma unroll
                    for (int k = 0; k < SPLIT; k++) {
                        u32 there;
                        float one;
                        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(k));
                        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(one) : "r"(there) : "memory");
                        v += one;
                    }
                    acc[h][i] = v;
                }
            cluster_sync();
        }
        if (bias) {
#pragma unroll
            for (int h = 0; h < MH; h++)
#pragma unroll
                for (int o = 0; o < 2; o++) {
                    const int n = n_first + h * 64 + warp * 16 + r + 8 * o;
                    const float b = n < N ? to_floats<T>(bias[n]).x : 0.f;
#pragma unroll
                    for (int i = 0; i < COLUMNS / 8; i++) acc[h][4 * i + 2 * o] += b, acc[h][4 * i + 2 * o + 1] += b;
                }
        }
        constexpr int BAND_ROWS = COLUMNS < 32 ? COLUMNS : 32;  // rows of y that pass through the staging at a time
        const u32 staging = base + (SPLIT > 1 ? 0 : STAGES * STAGE_BYTES) + g * 32 * ROW * 2;
        const int m_first = m0 + (SPLIT > 1 ? rank * COLUMNS : 0);
#pragma unroll
        for (int b = 0; b < COLUMNS / BAND_ROWS; b++) {
            warpgroup_sync(g);  // the staging is free
#pragma unroll
            for (int h = 0; h < MH; h++)
#pragma unroll
                for (int i = 0; i < BAND_ROWS / 8; i++) {  // two 8x8 matrices: rows n 0-7 and 8-15, columns m; stored transposed
                    const float* v = acc[h] + (b * BAND_ROWS / 8 + i) * 4;
                    const u32 at = staging + ((i * 8 + (lane & 7)) * ROW + h * 64 + warp * 16 + ((lane >> 3) & 1) * 8) * 2;
                    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at),
                                 "r"(from_floats<T>(v[0], v[1])), "r"(from_floats<T>(v[2], v[3])) : "memory");
                }
            warpgroup_sync(g);
#pragma unroll 4
            for (int e = threadIdx.x & 127; e < BAND_ROWS * MH * 8; e += 128) {  // 16 bytes of a row of y
                const int row = e / (MH * 8), n = e % (MH * 8) * 8, m = m_first + b * BAND_ROWS + row, column = n_first + n;
                if (m >= M || column >= N) continue;
                uint4 v;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(staging + (row * ROW + n) * 2));
                u16* to = y + (size_t)m * N + column;
                if (N % 8 == 0) {
                    *(uint4*)to = v;
                } else {
                    const u32 four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        if (column + i < N) to[i] = (u16)(four[i / 2] >> (i % 2 * 16));
                }
            }
        }
    }
}
