// y[M,N] = x[M,K] @ dequantize(W)^T + bias for large M on Hopper: W, dequantised, is wgmma's A operand in registers, x^T
// its B operand in shared memory.
//
// Tile    64*WARPGROUPS_N rows of W by BLOCK_M rows of x. A block takes tiles in turn (persistent), n fastest within bands of
//         BAND tiles of n, so that the blocks running together share x and W in L2. `whole` tiles are taken so; the steps of
//         the others are shared out evenly (Pieces), sums of parts of a tile meet in global memory. SPLIT_K blocks of a cluster
//         split K of one tile instead; then there is one cluster for each tile.
// Warps   one producer thread feeds a ring of STAGES stages by TMA, each a step of CHUNKS chunks of k: x (128-byte swizzled
//         panels of 64 k), words, scales and zeros. WARPGROUPS_N x WARPGROUPS_K consumer warpgroups: WARPGROUPS_N side by side
//         along N, WARPGROUPS_K taking the steps in turn, so that one dequantises while another multiplies. A warpgroup reads
//         words from shared memory, dequantises and scales BATCH k16 fragments into registers and hands them to wgmma; BUFFERS
//         = 2: it works on the next ones meanwhile. From 128 columns on products stay in flight from step to step (ACROSS);
//         with fewer, a step ends by a wait and two batches of it overlap: ptxas then keeps the sums of two groups apart and
//         the loop has no moves.
// EXACT   (fp16, few columns, groups of whole 128): a code in the low mantissa bits is the subnormal number code * 2^(p - 24),
//         one half2 fma makes it (code - zero) / 1024, and scales go on the fp32 sums of a group: 118 instructions for 16 x 128
//         weights where taking magic off and scaling took 165 (2 bits). Error 2.5e-4, not 4.0e-4: nothing is rounded twice.
// TABLE   FORM (0: no zeros, 1: zeros, or one of book.cuh's): values from a table are multiplied by their scale as halves, which
//         are bytes in memory where the scheme says so. A row tile's table or factor (one for table_rows rows of W; 0: for all)
//         is its warp's in shared memory; `unit` goes on the sums.
// Sums    fp32; over WARPGROUPS_K warpgroups through shared memory, over the cluster through distributed shared memory, over
//         blocks that share a tile through global memory, always in the same order. Outputs go through a transposing stmatrix,
//         so that a row of y is written 16 bytes at a time.
// Cache   weights that are read once (up to 32 rows; 8 bits: 128) leave the second-level cache first: 24.6 -> 22.4 us,
//         28672x4096, M = 16. BLOCKS_PER_SM > 1 fit an SM: the next kernel's first stages are loaded while this one's last sums
//         are written.
// Limits  WARPGROUPS_K > 1: STAGES a multiple of WARPGROUPS_K and at least 2 * WARPGROUPS_K, and steps of a tile a multiple of
//         WARPGROUPS_K or one tile a block: a stage always goes to the same warpgroups. One that misses a phase of its barrier
//         takes an old one for the next. Shared out: at least one span a block; `flags` zero before, and left so.
// Edges   TMA reads zeros outside x, words and scales; stores are masked. K a multiple of 8. A tile takes `rows` rows of x, no
//         more than there are: boxes that reach far past the end of x are slow. Sums of its other columns are of nothing, and
//         stay here. `loaded`: bytes of a stage then, a parameter, because worked out here it cost a register too many.
// GROUPED W is many weights of N rows side by side, `next` row tiles apart, and each tile of x has one of them, experts[tile of x]:
//         a mixture's products, rows of x sorted by expert; biases (E, N) too. Tiles from row *valid on are left alone. Both are read
//         from memory that the kernel before may have written.
// ptxas   waits for every single wgmma ("serialized" in its log, +20 to 60% time) where it thinks the path divergent, or
//         where registers are short; tests/kernels/test_cuda_compile.py refuses that.
// Source  own; y^T = W x^T with W from registers is Machete's plan, steps shared out evenly are Stream-K's (arXiv:2301.03598).
#include "book.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

__device__ __forceinline__ void warpgroup_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void store_release(u32* to, u32 v) {
    asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ float4 read_sums(const float4* from) {  // of another block: not from L1
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 twice(u32 halves, int which) { return __byte_perm(halves, 0, which ? 0x3232 : 0x1010); }

// The work of one block, piece by piece: whole tiles in turn; then, of the tiles from `whole` on, an equal run of all their
// steps (spans of WARPGROUPS_K), from its end backwards. Only the first piece of a run can lack the end of its tile, only the last its
// beginning. Whoever has the end of a tile adds what blocks of lower index have summed: they were started no later.
template <int WARPGROUPS_K>
struct Pieces {
    int tile, begin, part;  // of the piece: steps [begin, begin + part) of the tile
    int stride, whole, spans, low, high;
    __device__ __forceinline__ bool next() {
        tile += stride;
        if (tile < whole) return true;
        if (high <= low) return false;
        const int t = (high - 1) / spans, start = t * spans > low ? t * spans : low;
        tile = whole + t, begin = (start - t * spans) * WARPGROUPS_K, part = (high - start) * WARPGROUPS_K, high = start;
        return true;
    }
};

template <int BITS, int T, int GROUP, int FORM, int WARPGROUPS_N, int WARPGROUPS_K, int BLOCK_M, int CHUNKS, int BATCH, int
          BUFFERS, int STAGES, int SPLIT_K, int BLOCKS_PER_SM, int BAND, bool GROUPED = false>
__global__ void __launch_bounds__(128 * (1 + WARPGROUPS_N * WARPGROUPS_K), BLOCKS_PER_SM)
tile_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap words_map,
           const __grid_constant__ TensorMap scales_map, const __grid_constant__ TensorMap zeros_map,
           const u16* __restrict__ bias, u16* __restrict__ y, int M, int rows, int loaded, int N, int steps, int whole, float4* partials, u32* flags,
           const int* __restrict__ experts, const int* __restrict__ valid, int next, const float* __restrict__ tables, int table_rows) {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    using S = HalfScales<FORM, T>;
    constexpr bool ZEROS = FORM == 1, TABLE = of_table(FORM), BOOKED = (FORM & 15) == BOOK;
    constexpr int PAIR = of_bytes(FORM) ? 2 : 4;  // bytes of the scales of two rows
    constexpr int BLOCK_K = CHUNKS * L::CHUNK, TILES = 4 * WARPGROUPS_N, PANELS = BLOCK_K / 64, CONSUMERS = WARPGROUPS_N * WARPGROUPS_K, PARTS = SPLIT_K * WARPGROUPS_K;
    static_assert(SPLIT_K > 1 || BLOCK_M / 8 % WARPGROUPS_K == 0, "partial sums of a block are as many as its tile's");
    constexpr int GROUPS = groups_of_step(GROUP, BLOCK_K);
    constexpr u32 X_BYTES = BLOCK_M * BLOCK_K * 2, CHUNK_BYTES = TILES * L::WORDS * 4, W_BYTES = CHUNKS * CHUNK_BYTES, META_BYTES = TILES * GROUPS * 8 * PAIR;
    constexpr u32 STAGE_BYTES = (X_BYTES + W_BYTES + (ZEROS ? 2 : 1) * META_BYTES + 1023) / 1024 * 1024;
    constexpr u32 SUM_BYTES = PARTS > 1 ? CONSUMERS * BLOCK_M * 256 : 0;  // fp32 sums of a block
    constexpr int OUT = smaller(32, BLOCK_M);  // rows of y that pass through a warpgroup's staging at a time
    constexpr int ROW = 64 + 8;  // halves of a row there: 16 bytes more than 128, against bank conflicts
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];  // full and empty, of each stage
    __shared__ u32 mask[C::PLACES];
    constexpr int OWN = TABLE ? CONSUMERS * 4 : 1, BOOKS = BOOKED ? OWN : 1;  // of each warp
    __shared__ float units[OWN];
    __shared__ uint4 books[BOOKS][2];

    // uniform over a warp as ptxas sees it: in a path that it thinks divergent it waits for every single wgmma
    const int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, r = lane >> 2;
    const u32 base = shared_address(shared);
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int rank = SPLIT_K > 1 ? blockIdx.x % SPLIT_K : 0, team = blockIdx.x / SPLIT_K, teams = gridDim.x / SPLIT_K;
    // What follows is worked out where it is needed: kept from here on, it costs registers beside the sums.
    auto streamed = [&] {  // spans of all tiles that blocks share
        const int all = (M + BLOCK_M - 1) / BLOCK_M * ((N + 64 * WARPGROUPS_N - 1) / (64 * WARPGROUPS_N));
        return (all - whole) * (steps / WARPGROUPS_K);
    };
    auto pieces = [&] {
        const int share = (steps + SPLIT_K - 1) / SPLIT_K, begin = smaller(rank * share, steps), part = smaller(share, steps - begin);
        const int all = streamed(), low = team * all / teams, high = (team + 1) * all / teams;
        return Pieces<WARPGROUPS_K>{team - teams, begin, part, teams, whole, steps / WARPGROUPS_K, low, high};
    };
    auto place = [&](int tile, int& m0, int& n_tile) {  // bands of BAND tiles of n; within one, n fastest, then m
        const int m_tiles = (M + BLOCK_M - 1) / BLOCK_M, n_tiles = (N + 64 * WARPGROUPS_N - 1) / (64 * WARPGROUPS_N);
        const int band = tile / (BAND * m_tiles), n_first = band * BAND, width = smaller(BAND, n_tiles - n_first);
        const int in_band = tile - band * BAND * m_tiles;
        n_tile = n_first + in_band % width, m0 = in_band / width * rows;
    };

    auto first_row = [&](int n_tile, int m0) { return n_tile * TILES + (GROUPED ? experts[m0 / BLOCK_M] * next : 0); };  // row tile of W

    if (threadIdx.x == 32) prefetch(&words_map), prefetch(&scales_map), prefetch(&zeros_map), prefetch(&x_map);
    if (threadIdx.x == 0) {
        C::Masks::store(mask);
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4 * WARPGROUPS_N);
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    // of the registers a block starts with, the producer's warpgroup keeps these and the consumers' get the rest
    constexpr int THREADS = 128 * (1 + CONSUMERS), STARTED = 65536 / (BLOCKS_PER_SM * THREADS) / 8 * 8, KEPT = (BLOCKS_PER_SM > 1 ? BLOCK_M < 64 : BLOCK_M < 128 || CONSUMERS < 4) ? 40 : 32;
    if (group == 0) {  // ------------------------------------------------------------------------------- producer
        registers_down<KEPT>();
        if (threadIdx.x == 0) {
            // 64 rows, 4 bits, in a whole 8B step: 3773 us with the hint, 3706 without. 8 bits alone, 64 and 128 rows: 3 to
            // 12% less with it. For tiles of 256 rows a second way to load cost more.
            constexpr bool ONCE = BLOCK_M <= 32 || (BITS == 8 && BLOCK_M * CONSUMERS < 512);
            auto load_weights = [&](int s, int c, int row) {
                const u32 barrier = full + 8 * s, words = base + s * STAGE_BYTES + X_BYTES, metas = words + W_BYTES;
                barrier_expect(barrier, loaded);
#pragma unroll
                for (int u = 0; u < CHUNKS; u++) {
                    if (ONCE && M <= BLOCK_M) tensor_load_once(words + u * CHUNK_BYTES, &words_map, (c * CHUNKS + u) * L::WORDS, row, barrier);
                    else tensor_load(words + u * CHUNK_BYTES, &words_map, (c * CHUNKS + u) * L::WORDS, row, barrier);
                }
                const int g = GROUP == 0 ? 0 : c * BLOCK_K / (GROUP ? GROUP : 1);
                tensor_load(metas, &scales_map, g * 16, row, barrier);
                if (ZEROS) tensor_load(metas + META_BYTES, &zeros_map, g * 16, row, barrier);
            };
            auto load_x = [&](int s, int c, int m0) {
#pragma unroll
                for (int p = 0; p < PANELS; p++)
                    tensor_load(base + s * STAGE_BYTES + p * BLOCK_M * 128, &x_map, c * BLOCK_K + p * 64, m0, full + 8 * s);
            };
            int s = 0, round = 0, early = 0;
            Pieces<WARPGROUPS_K> piece = pieces();
            bool more = piece.next();
            if (more && !GROUPED) {  // weights do not depend on the kernel before, x does
                int m0, n_tile;
                place(piece.tile, m0, n_tile);
                for (; early < STAGES && early < piece.part; early++) load_weights(early, piece.begin + early, n_tile * TILES);
            }
            previous_grid_wait();
            for (; more; more = piece.next()) {
                int m0, n_tile;
                place(piece.tile, m0, n_tile);
                if (GROUPED && m0 >= *valid) continue;
                const int row = first_row(n_tile, m0);
                for (int c = 0; c < piece.part; c++) {
                    if (early > 0) early--;
                    else {
                        barrier_wait(empty + 8 * s, (round & 1) ^ 1);
                        load_weights(s, piece.begin + c, row);
                    }
                    load_x(s, piece.begin + c, m0);
                    if (++s == STAGES) s = 0, round++;
                }
            }
        }
        if constexpr (SPLIT_K > 1) __syncwarp(), cluster_sync(), cluster_sync();
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    registers_up<(STARTED * THREADS - 128 * KEPT) / (128 * CONSUMERS) / 8 * 8>();
    previous_grid_wait();
    next_grid_launch();
    const int g = group - 1, wn = g % WARPGROUPS_N, wk = WARPGROUPS_K > 1 ? g / WARPGROUPS_N : 0, t = wn * 4 + warp;
    typename C::Masks masks;
    masks.load(mask);
    constexpr int BATCHES = BLOCK_K / 16 / BATCH;  // of BATCH fragments, that go to wgmma together
    constexpr int SPAN = GROUP ? gcd(GROUP ? GROUP : 1, BLOCK_K) : BLOCK_K;  // k of a step that surely share a group
    constexpr bool EXACT = !TABLE && T == FP16 && BLOCK_M <= 32 && SPAN % 128 == 0;
    constexpr bool ACROSS = BLOCK_M >= 128;
    // 8-bit codes of small scales need no magic. 28672x4096, M = 1024: 333 -> 319 us, by less power; M <= 64 waits for reads
    constexpr bool BARE = BITS == 8 && BLOCK_M >= 128 && SPAN >= 16 * BATCH;
    u32 words_at = X_BYTES + t * L::WORDS * 4 + lane * 16, meta_at = X_BYTES + W_BYTES + t * GROUPS * 8 * PAIR + r * PAIR;
    if (BLOCK_M == 16) asm volatile("" : "+r"(words_at), "+r"(meta_at));  // else ptxas makes them anew for each step
    float acc[BLOCK_M / 2], sum[2][BLOCK_M / 2];  // sum: of two groups in turn, if EXACT
    u32 a[BUFFERS][BATCH][4];

    Pieces<WARPGROUPS_K> piece = pieces();
    for (int before = 0; piece.next(); before += piece.part) {
        const int begin = piece.begin, part = piece.part;
        int m0, n_tile;
        place(piece.tile, m0, n_tile);
        if (GROUPED && m0 >= *valid) {
            before -= part;
            continue;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i++) acc[i] = 0.f;
        const int mine = TABLE ? g * 4 + warp : 0;
        if constexpr (TABLE) {
            const int row = smaller(n_tile * TILES * 16 + t * 16, N - 1);
            const int own = table_rows ? row / table_rows + (GROUPED ? experts[m0 / BLOCK_M] * (N / table_rows) : 0) : 0;
            float unit;
            if constexpr (BOOKED) unit = make_book<BITS, T>(tables + ((size_t)own << BITS), (unsigned char*)books[mine], lane);
            else unit = (tables ? tables[own] : 1.f) * __uint_as_float((127 + S::SHIFT) << 23);
            if (lane == 0) units[mine] = unit;
            __syncwarp();
        }

        int s = (before + wk) % STAGES;
        u32 parity = (before + wk) / STAGES & 1, stage = base + s * STAGE_BYTES, barrier = full + 8 * s;
        u32 done = 0;  // ACROSS: the barrier of the stage before, to tell the producer
        auto alive = [&](int buffer) {
#pragma unroll
            for (int f = 0; f < BATCH; f++)
#pragma unroll
                for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[buffer][f][j])::"memory");
        };
        auto flush = [&](int which, u32 scales) {
            const float2 by = to_floats<T>(scales);
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; i++) {
                asm volatile("" : "+f"(sum[which][i])::"memory");
                acc[i] = __fmaf_rn(i % 4 < 2 ? by.x : by.y, sum[which][i], acc[i]);
            }
        };
        auto step = [&](int first, int c) {  // first: the A buffer of its first batch
            barrier_wait(barrier, parity);
            u32 w[L::REGS], both[2], looked_up[4][4];  // [j][fragment % 4]
            u32 scale[2], offset[2];  // of rows r and r + 8: w = code * scale + offset, twice each
            bool bare = false;
#pragma unroll
            for (int b = 0; b < BATCHES; b++) {
                const int buffer = (first + b) % BUFFERS, which = b * BATCH * 16 / SPAN % 2;
                if (BUFFERS == 1 && (b > 0 || ACROSS)) {  // the batch before reads A until here
                    products_wait<0>();
                    alive(0);
                    if (ACROSS && b == 0 && done && lane == 0) barrier_arrive(done);
                    if (EXACT && b * BATCH * 16 % SPAN == 0) flush(which ^ 1, both[which ^ 1]);
                }
                auto scales_of = [&](int at) {
                    int i = at * 16 / SPAN;
                    if (GROUP && BLOCK_K % (GROUP ? GROUP : 1) && GROUP % BLOCK_K)
                        i = ((begin + c) * BLOCK_K + at * 16) / (GROUP ? GROUP : 1) - (begin + c) * BLOCK_K / (GROUP ? GROUP : 1);
                    if constexpr (TABLE) {
                        const u32 by = S::of(PAIR == 4 ? read4(stage + meta_at + i * 32) : read2(stage + meta_at + i * 16));
                        scale[0] = twice(by, 0), scale[1] = twice(by, 1);
                        return;
                    }
                    const u32 of = read4(stage + meta_at + i * 32);
                    const u32 zero = ZEROS ? read4(stage + meta_at + i * 32 + META_BYTES) : Half<T>::power(BITS == 1 ? -1 : BITS - 1);
                    const u32 minus = fma2<T>(EXACT ? Half<T>::power(-10) : of, zero ^ 0x80008000u, 0x80008000u);
                    if constexpr (BARE) bare = __all_sync(0xffffffffu, C::small(of) && C::small(of >> 16));
                    const u32 by = BARE && bare ? C::scale_of_bare(of) : C::WIDE ? fma2<T>(of, Half<T>::power(6), 0x80008000u) : of;
                    both[which] = of;
                    scale[0] = twice(by, 0), scale[1] = twice(by, 1);
                    offset[0] = twice(minus, 0), offset[1] = twice(minus, 1);
                };
                auto words_of = [&](int at) { read_chunk<BITS>(stage + words_at + at / L::FRAGS * CHUNK_BYTES, lane, w); };
                if (b * BATCH % L::FRAGS == 0) words_of(b * BATCH);
                if (b * BATCH * 16 % SPAN == 0) scales_of(b * BATCH);
                if constexpr (TABLE) {
#pragma unroll
                    for (int f = 0; f < BATCH; f++) {
                        const int at = b * BATCH + f;
                        if (f > 0 && at % L::FRAGS == 0) words_of(at);
                        if (f > 0 && at * 16 % SPAN == 0) scales_of(at);
                        if (BOOKED && at % 4 == 0) {
                            const uint4 book[2] = {books[mine % BOOKS][0], books[mine % BOOKS][1]};
#pragma unroll
                            for (int j = 0; j < 4; j++) Book<BITS>::look_up(w, at % L::FRAGS / 4, j, book, looked_up[j]);
                        }
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            a[buffer][f][j] = S::scaled(BOOKED ? looked_up[j][at % 4] : small_e2m1<T>(w[j], at % L::FRAGS), scale[j & 1]);
                    }
                } else if (BARE && bare) {
#pragma unroll
                    for (int f = 0; f < BATCH; f++) {
                        const int at = b * BATCH + f;
                        if (f > 0 && at % L::FRAGS == 0) words_of(at);
#pragma unroll
                        for (int j = 0; j < 4; j++) a[buffer][f][j] = fma2<T>(C::bare(w, at % L::FRAGS, j), scale[j & 1], offset[j & 1]);
                    }
                } else {
#pragma unroll
                    for (int f = 0; f < BATCH; f++) {
                        const int at = b * BATCH + f;
                        if (f > 0 && at % L::FRAGS == 0) words_of(at);
                        if (f > 0 && at * 16 % SPAN == 0) scales_of(at);
                        u32 (&to)[4] = a[buffer][f];
                        if constexpr (!C::WIDE) C::template fragment<EXACT>(w, at % L::FRAGS, masks, to);
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            if constexpr (C::WIDE) to[j] = fma2<T>(C::bare(w, at % L::FRAGS, j), Half<T>::power(127), 0x80008000u);  // code / 64
                            else if (!EXACT) to[j] = add2<T>(to[j], C::magic(at % L::FRAGS) | 0x80008000u);
                            to[j] = fma2<T>(to[j], EXACT ? Half<T>::power(14 - C::p(at % L::FRAGS)) : scale[j & 1], offset[j & 1]);
                        }
                    }
                }
                alive(buffer);
                products_fence();
#pragma unroll
                for (int f = 0; f < BATCH; f++) {
                    const int at = b * BATCH + f;
                    const u64 panel = swizzled_tile(stage) + at / 4 * BLOCK_M * 8 + 2 * (at % 4);
                    if (EXACT && at * 16 % SPAN == 0) Wgmma<T, BLOCK_M>::first(sum[which], a[buffer][f], panel);
                    else Wgmma<T, BLOCK_M>::run(EXACT ? sum[which] : acc, a[buffer][f], panel);
                }
                products_commit();
                if (ACROSS) {
                    // the last wait sits inside the loop: at its exit the compiler may copy accumulators, not while in flight
                    if (b + 1 == BATCHES && c + WARPGROUPS_K >= part) products_wait<0>();
                    else if (BUFFERS > 1) products_wait<1>();
                    if (BUFFERS > 1) {
                        alive(buffer ^ 1);  // the batch before read A until here,
                        if (b == 0 && done && lane == 0) barrier_arrive(done);  // and nobody reads its stage any more
                    }
                } else {
                    if (BUFFERS > 1 && b > 0) {
                        products_wait<1>();
                        alive(buffer ^ 1);
                        if (EXACT && b * BATCH * 16 % SPAN == 0) flush(which ^ 1, both[which ^ 1]);
                    }
                    if (b + 1 == BATCHES) {
                        products_wait<0>();
                        alive(buffer);
                        if (lane == 0) barrier_arrive(barrier + 8 * STAGES);
                        if (EXACT) flush(which, both[which]);
                    }
                }
            }
            done = barrier + 8 * STAGES;
            stage += WARPGROUPS_K * STAGE_BYTES, barrier += WARPGROUPS_K * 8;
            if (ACROSS ? barrier >= empty : (s += WARPGROUPS_K) >= STAGES) s -= STAGES, stage -= STAGES * STAGE_BYTES, barrier -= STAGES * 8, parity ^= 1;
        };
        constexpr int TURNS = ACROSS && BUFFERS > 1 && BATCHES % 2 ? 2 : 1;
        for (int c = wk; c < part; c += TURNS * WARPGROUPS_K) {
            step(0, c);
            if (TURNS > 1 && c + WARPGROUPS_K < part) step(1, c + WARPGROUPS_K);
        }
        if (ACROSS && done && lane == 0) barrier_arrive(done);
        if (EXACT) {
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; i++) acc[i] *= 1024.f;
        }
        if constexpr (TABLE) {
            const float unit = units[mine];
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; i++) acc[i] *= unit;
        }

        // ---------------------------------------------------------------------------------------------- epilogue
        const int n_first = (n_tile * WARPGROUPS_N + wn) * 64;  // of this warpgroup
        constexpr int COLUMNS = (BLOCK_M / 8 + PARTS - 1) / PARTS * 8;  // of x that a part (a warpgroup of k) writes
        const int first = (rank * WARPGROUPS_K + wk) * COLUMNS;
        auto everyone = [&] { asm volatile("bar.sync 8, %0;" ::"n"(CONSUMERS * 128) : "memory"); };
        if constexpr (PARTS > 1) {  // sums[wk][wn][i][thread], in the ring's place under a split; then each part sums its columns
            float* sums = (float*)(shared + (SPLIT_K > 1 ? 0 : STAGES * STAGE_BYTES)) + wn * (BLOCK_M / 2) * 128 + (threadIdx.x & 127);
            everyone();  // the ring, or the sums of the tile before, have been read
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; i++) sums[(wk * WARPGROUPS_N * (BLOCK_M / 2) + i) * 128] = acc[i];
            if constexpr (SPLIT_K > 1) cluster_sync();
            else everyone();
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) {
                if (first + i / 4 * 8 >= BLOCK_M) continue;
                float v = 0.f;
#pragma unroll
                for (int k = 0; k < PARTS; k++) {
                    float* at = sums + (k % WARPGROUPS_K * WARPGROUPS_N * (BLOCK_M / 2) + first / 2 + i) * 128;
                    if constexpr (SPLIT_K > 1) {
                        v += read_cluster(in_block(shared_address(at), k / WARPGROUPS_K));
                    } else {
                        v += *at;
                    }
                }
                acc[i] = v;
            }
            if constexpr (SPLIT_K > 1) cluster_sync();
        }
        if (first >= BLOCK_M) continue;
        if constexpr (SPLIT_K == 1) {
            constexpr int FOURS = COLUMNS / 8, BLOCK = CONSUMERS * FOURS * 128;  // float4 of a warpgroup's thread, of a block
            float4* mine = partials + g * FOURS * 128 + (threadIdx.x & 127);
            if (begin + part < steps) {  // the end of the tile is another block's: leave it our sums
#pragma unroll
                for (int i = 0; i < FOURS; i++) mine[(size_t)team * BLOCK + i * 128] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
                warpgroup_sync(g);
                if ((threadIdx.x & 127) == 0) store_release(flags + team * CONSUMERS + g, 1);
                continue;
            }
            if (begin > 0) {
                const int start = (piece.tile - whole) * piece.spans;  // the block with the tile's first step, then all up to us
                for (int other = ((start + 1) * teams - 1) / streamed(); other < team; other++) {
                    if ((threadIdx.x & 127) == 0) {
                        while (!load_acquire(flags + other * CONSUMERS + g)) {}
                        flags[other * CONSUMERS + g] = 0;
                    }
                    warpgroup_sync(g);
#pragma unroll
                    for (int i = 0; i < FOURS; i++) {
                        const float4 v = read_sums(mine + (size_t)other * BLOCK + i * 128);
                        acc[4 * i] += v.x, acc[4 * i + 1] += v.y, acc[4 * i + 2] += v.z, acc[4 * i + 3] += v.w;
                    }
                }
            }
        }
        if (bias) {
#pragma unroll
            for (int o = 0; o < 2; o++) {
                const int n = n_first + warp * 16 + r + 8 * o;
                const float b = n < N ? to_floats<T>(bias[n + (GROUPED ? experts[m0 / BLOCK_M] * (size_t)N : 0)]).x : 0.f;
#pragma unroll
                for (int i = 0; i < COLUMNS / 8; i++) acc[4 * i + 2 * o] += b, acc[4 * i + 2 * o + 1] += b;
            }
        }
        const u32 staging = base + (SPLIT_K > 1 ? 0 : STAGES * STAGE_BYTES + SUM_BYTES) + g * OUT * ROW * 2;
        const int m_first = m0 + first, m_end = smaller(M, m0 + rows);
#pragma unroll
        for (int b = 0; b < (COLUMNS + OUT - 1) / OUT; b++) {
            warpgroup_sync(g);  // the staging is free
#pragma unroll
            for (int i = 0; i < OUT / 8; i++) {  // two 8x8 matrices: rows n 0-7 and 8-15, columns m; stored transposed
                if (b * (OUT / 8) + i >= COLUMNS / 8) continue;
                const float* v = acc + (b * (OUT / 8) + i) * 4;
                const u32 at = staging + ((i * 8 + (lane & 7)) * ROW + warp * 16 + ((lane >> 3) & 1) * 8) * 2;
                store_transposed<T>(at, v);
            }
            warpgroup_sync(g);
#pragma unroll 2
            for (int e = threadIdx.x & 127; e < OUT * 8; e += 128) {  // 16 bytes of a row of y
                const int row = b * OUT + e / 8, n = e % 8 * 8, m = m_first + row, column = n_first + n;
                if (row >= COLUMNS || m >= m_end || column >= N) continue;
                store8(y + (size_t)m * N + column, staging + (e / 8 * ROW + n) * 2, N, column);
            }
        }
    }
}
