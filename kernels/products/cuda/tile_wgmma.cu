// y = x W^T + bias for many rows of x, on Hopper's wgmma. W lies in memory as packed codes and becomes halves in registers.
//
// Shapes    x (M, K) and y (M, N) in fp16 or bf16. W: N x K codes in the `tile` layout, with a scale and a zero per row and
//           GROUP k. The kernel computes y^T = W x^T: W is wgmma's A operand, in registers, and x^T its B operand, in shared
//           memory.
// Tile      64 * WARPGROUPS_N rows of W by BLOCK_M rows of x. A block is persistent and takes tiles in turn: n fastest within
//           bands of BAND tiles of n, so that blocks that run together share x and W in L2. The first `whole` tiles are taken
//           whole; the steps of the others are divided evenly among blocks (Pieces), and partial sums of a tile meet in global
//           memory. With SPLIT_K > 1, SPLIT_K blocks of a cluster divide the K of one tile instead, and each tile has a
//           cluster.
// Warps     One producer thread feeds a ring of STAGES stages by TMA. A stage is a step of CHUNKS chunks of k: x (128-byte
//           swizzled panels of 64 k), words, scales and zeros. WARPGROUPS_N x WARPGROUPS_K warpgroups consume: WARPGROUPS_N are
//           next to each other along N; WARPGROUPS_K take steps in turn, so that one unpacks while another multiplies.
// Step      A warpgroup reads words, unpacks and scales BATCH fragments of 16 k into registers, and starts their products. With
//           BUFFERS = 2 it unpacks the next batch meanwhile. From 128 rows of x on, products stay in flight from step to step
//           (ACROSS). With fewer, a step ends by a wait and its last two batches overlap: ptxas then keeps the sums of two
//           groups in different registers, and the loop has no moves.
// EXACT     For fp16, few rows of x and groups of whole 128 k (up to 16 rows: of 64). A code in the low mantissa bits is the
//           subnormal number code * 2^(p - 24); one half2 fma makes it (code - zero) / 1024, and the scale is applied to a
//           group's fp32 sum. 16 x 128 weights of 2 bits take 118 instructions instead of 165, and the error is 2.5e-4 instead
//           of 4.0e-4, as nothing is rounded twice.
// FORM      0: no zeros. 1: zeros. Others (book.cuh): values from a table, multiplied by their scales as halves; the scheme may
//           store those as bytes. A warp holds the table or the factor of its row tile in shared memory; there is one per
//           table_rows rows of W (0: one for all). The factor, `unit`, is applied to the final sums.
// Sums      fp32, always added in the same order: over WARPGROUPS_K through shared memory, over a cluster through distributed
//           shared memory, over blocks that share a tile through global memory. stmatrix transposes y, so that rows are written
//           16 bytes at a time.
// Cache     Weights that are read once (up to 32 rows of x; 8 bits: 128) leave L2 first: 22.4 us instead of 24.6 (28672 x 4096,
//           M 16). With BLOCKS_PER_SM > 1, the next kernel's first stages load while this one writes its last sums.
// GROUPED   W is many weights of N rows, `next` row tiles apart, and each tile of x has one of them, experts[tile of x]: a
//           mixture's products, with rows of x sorted by expert; bias is (E, N). Rows from *valid on are left alone. Both come
//           from memory that the previous kernel may have written. An expert's words leave L2 first, as most experts have one
//           tile of x.
// Limits    K a multiple of 8. With WARPGROUPS_K > 1, STAGES is a multiple of WARPGROUPS_K and at least twice it, and the steps
//           of a tile are a multiple of it, or there is one tile per block. So a stage always goes to the same warpgroups; one
//           that missed a phase of its barrier would take an old phase for the next. Divided tiles: at least one span per
//           block; `flags` is zero before the launch and after it.
// Edges     TMA reads zeros outside x, words and scales; stores are masked. A tile takes `rows` rows of x, never more than
//           there are: boxes that reach far past the end of x are slow. The sums of other columns are garbage and are not
//           stored. `loaded` is the bytes of a stage then; it is a parameter because computing it here took one register too
//           many.
// ptxas     serializes wgmma (a wait for each one, 20 to 60% slower) where it takes the path for divergent or runs short of
//           registers; tests/kernels/test_cuda_compile.py refuses that.
// Source    own. y^T = W x^T with W from registers is Machete's plan; evenly divided steps are Stream-K's (arXiv:2301.03598).
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
__device__ __forceinline__ float4 read_sums(const float4* from) {  // another block wrote them: L1 may hold older ones
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 twice(u32 halves, int which) { return __byte_perm(halves, 0, which ? 0x3232 : 0x1010); }

// The work of one block, piece by piece: first whole tiles in turn; then an equal run of all steps of the tiles from `whole` on
// (in spans of WARPGROUPS_K steps), from its end backwards. Only the first piece of a run can lack the end of its tile, and
// only the last piece its beginning. The block that has the end of a tile adds what blocks of lower index have summed: those
// started no later.
template <int WARPGROUPS_K>
struct Pieces {
    int tile, begin, part;  // this piece: steps [begin, begin + part) of the tile
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

struct Place {  // of a tile: its first row of x, and which tile along N
    int m0, n_tile;
};

struct WgmmaArguments {  // of a launch
    const TensorMap *x_map, *words_map, *scales_map, *zeros_map;
    const u16* bias;
    u16* y;
    int M, rows, loaded, N, steps, whole;
    float4* partials;
    u32* flags;
    const int *experts, *valid;
    int next;
    const float* tables;
    int table_rows;
};

// A thread of the kernel: its place in the block, and the phases that the kernel runs through. The phases get arrays of
// registers as arguments: as fields, they would lie in memory until the compiler has unrolled all loops over them.
template <int BITS, int T, int GROUP, int FORM, int WARPGROUPS_N, int WARPGROUPS_K, int BLOCK_M, int CHUNKS, int BATCH,
          int BUFFERS, int STAGES, int SPLIT_K, int BLOCKS_PER_SM, int BAND, bool GROUPED>
struct WgmmaThread : WgmmaArguments {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    using S = HalfScales<FORM, T>;
    using Masks = typename C::Masks;
    static constexpr bool ZEROS = FORM == 1, TABLE = of_table(FORM), BOOKED = (FORM & 15) == BOOK;
    static constexpr int BLOCK_K = CHUNKS * L::CHUNK, PANELS = BLOCK_K / 64;
    static constexpr int TILES = 4 * WARPGROUPS_N;  // row tiles of W in a block
    static constexpr int CONSUMERS = WARPGROUPS_N * WARPGROUPS_K, PARTS = SPLIT_K * WARPGROUPS_K;
    static_assert(SPLIT_K > 1 || BLOCK_M / 8 % WARPGROUPS_K == 0, "partial sums of a block are as many as its tile's");

    // ---- a stage of the ring: x, words, scales, zeros
    static constexpr int PAIR = of_bytes(FORM) ? 2 : 4;  // bytes of the scales of two rows
    static constexpr int GROUPS = groups_of_step(GROUP, BLOCK_K);
    static constexpr u32 X_BYTES = BLOCK_M * BLOCK_K * 2, CHUNK_BYTES = TILES * L::WORDS * 4, W_BYTES = CHUNKS * CHUNK_BYTES;
    static constexpr u32 METAS = X_BYTES + W_BYTES, META_BYTES = TILES * GROUPS * 8 * PAIR;
    static constexpr u32 STAGE_BYTES = (METAS + (ZEROS ? 2 : 1) * META_BYTES + 1023) / 1024 * 1024;

    // ---- after the ring: fp32 sums of a block, then the staging of y
    static constexpr u32 SUM_BYTES = PARTS > 1 ? CONSUMERS * BLOCK_M * 256 : 0;
    static constexpr int OUT = smaller(32, BLOCK_M);  // rows of y that pass through a warpgroup's staging at a time
    static constexpr int ROW = 64 + 8;                // halves of a row there: 16 bytes more than 128, against bank conflicts
    static constexpr int COLUMNS = (BLOCK_M / 8 + PARTS - 1) / PARTS * 8;  // rows of x whose y one warpgroup of k writes

    // ---- of the registers a block starts with, the producer's warpgroup keeps KEPT per thread and the consumers get the rest
    static constexpr int THREADS = 128 * (1 + CONSUMERS), STARTED = 65536 / (BLOCKS_PER_SM * THREADS) / 8 * 8;
    static constexpr int KEPT = (BLOCKS_PER_SM > 1 ? BLOCK_M < 64 : BLOCK_M < 128 || CONSUMERS < 4) ? 40 : 32;
    static constexpr int CONSUMER_REGISTERS = (STARTED * THREADS - 128 * KEPT) / (128 * CONSUMERS) / 8 * 8;

    // Whether weights leave L2 first. 64 rows of x, 4 bits, in a whole 8B step: 3773 us with the hint, 3706 us without. 8 bits
    // alone, 64 and 128 rows: 3 to 12% faster with it. For tiles of 256 rows a second way to load cost more.
    static constexpr bool ONCE = BLOCK_M <= 32 || (BITS == 8 && BLOCK_M * CONSUMERS < 512);

    // ---- a consumer's step
    static constexpr int BATCHES = BLOCK_K / 16 / BATCH;  // a batch: BATCH fragments of 16 k that go to wgmma together
    static constexpr int SPAN = GROUP ? gcd(GROUP ? GROUP : 1, BLOCK_K) : BLOCK_K;  // k of a step that surely share a group
    static constexpr bool EXACT =
        !TABLE && T == FP16 && (BLOCK_M <= 32 && SPAN % 128 == 0 || BLOCK_M <= 16 && SPAN % 64 == 0 && SPAN >= 16 * BATCH);
    static constexpr bool ACROSS = BLOCK_M >= 128;
    // 8-bit codes of small scales need no magic: 319 us instead of 333 (28672 x 4096, M 1024), because they take less power. M
    // <= 64 waits for memory.
    static constexpr bool BARE = BITS == 8 && BLOCK_M >= 128 && SPAN >= 16 * BATCH;
    static constexpr int SUMS = BLOCK_M / 2;                                    // fp32 sums of a thread
    static constexpr int TURNS = ACROSS && BUFFERS > 1 && BATCHES % 2 ? 2 : 1;  // steps after which A's buffers repeat
    static constexpr int UNITS = TABLE ? CONSUMERS * 4 : 1, BOOKS = BOOKED ? UNITS : 1;  // one for each consumer warp
    using Sums = float[SUMS];
    using GroupSums = float[2][SUMS];          // EXACT: of two groups in turn
    using Fragments = u32[BUFFERS][BATCH][4];  // A operands
    using Words = u32[L::REGS];                // packed codes of a chunk
    using Values = u32[4][4];                  // BOOKED: [j][fragment % 4], looked up in the table

    // ---- fields
    unsigned char* shared;
    float* units;                    // TABLE: [consumer warp]
    uint4 (*books)[2];               // BOOKED: [consumer warp]
    u32 base, full, empty;           // addresses of the ring and of the barriers of its stages
    int group, warp, lane;           // warpgroup of the block, warp of the warpgroup
    int rank, team, teams;           // block of the cluster; cluster of the grid, and their number
    int consumer, wn, wk, row_tile;  // consumer warpgroup, its place along N and k; row tile of W in the block
    u32 words_at, meta_at;           // where this lane's words and scales begin in a stage

    struct Ring {  // a consumer's place in it
        int s;
        u32 stage, parity, barrier;
        u32 done;  // ACROSS: the `empty` barrier of the previous stage, whose products may still be running
    };
    struct Scales {  // of rows r and r + 8: w = code * scale + offset, each twice in a word
        u32 both[2], scale[2], offset[2];
    };

    __device__ __forceinline__ WgmmaThread(const WgmmaArguments& launch, unsigned char* shared, u64* barriers, float* units,
                                           uint4 (*books)[2])
        : WgmmaArguments(launch), shared(shared), units(units), books(books) {
        // uniform over a warp as ptxas sees it: in a path that it takes for divergent it waits for every single wgmma
        group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
        warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
        base = shared_address(shared);
        full = shared_address(barriers), empty = full + 8 * STAGES;
        rank = SPLIT_K > 1 ? blockIdx.x % SPLIT_K : 0, team = blockIdx.x / SPLIT_K, teams = gridDim.x / SPLIT_K;
    }

    // ------------------------------------------------------------------------------------------------- which tiles
    // These are computed where they are needed: kept from the start on, they take registers next to the sums.
    __device__ __forceinline__ void find_valid() {  // GROUPED: only the device knows how many tiles there are; each is whole
        M = *valid;
        whole = M / BLOCK_M * ((N + 64 * WARPGROUPS_N - 1) / (64 * WARPGROUPS_N));
    }
    __device__ __forceinline__ int divided_spans() const {  // spans of all tiles that blocks divide
        const int all = (M + BLOCK_M - 1) / BLOCK_M * ((N + 64 * WARPGROUPS_N - 1) / (64 * WARPGROUPS_N));
        return (all - whole) * (steps / WARPGROUPS_K);
    }
    __device__ __forceinline__ Pieces<WARPGROUPS_K> pieces() const {
        const int share = (steps + SPLIT_K - 1) / SPLIT_K;
        const int begin = smaller(rank * share, steps), part = smaller(share, steps - begin);
        const int all = divided_spans(), low = team * all / teams, high = (team + 1) * all / teams;
        return Pieces<WARPGROUPS_K>{team - teams, begin, part, teams, whole, steps / WARPGROUPS_K, low, high};
    }
    __device__ __forceinline__ Place place(int tile) const {  // bands of BAND tiles of n; within one, n fastest, then m
        const int m_tiles = (M + BLOCK_M - 1) / BLOCK_M, n_tiles = (N + 64 * WARPGROUPS_N - 1) / (64 * WARPGROUPS_N);
        const int band = tile / (BAND * m_tiles), n_first = band * BAND, width = smaller(BAND, n_tiles - n_first);
        const int in_band = tile - band * BAND * m_tiles;
        const int n_tile = n_first + in_band % width, m0 = in_band / width * rows;
        return {m0, n_tile};
    }
    __device__ __forceinline__ int first_row(const Place& at) const {  // row tile of W
        return at.n_tile * TILES + (GROUPED ? experts[at.m0 / BLOCK_M] * next : 0);
    }

    __device__ __forceinline__ void start(u32* mask) const {
        if (threadIdx.x == 32) prefetch(words_map), prefetch(scales_map), prefetch(zeros_map), prefetch(x_map);
        if (threadIdx.x == 0) {
            Masks::store(mask);
            for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, 4 * WARPGROUPS_N);
            asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncthreads();
    }

    // ------------------------------------------------------------------------------------------------- producer
    __device__ __forceinline__ void load_weights(int s, int c, int row) const {
        const u32 barrier = full + 8 * s, words = base + s * STAGE_BYTES + X_BYTES, metas = words + W_BYTES;
        barrier_expect(barrier, loaded);
#pragma unroll
        for (int u = 0; u < CHUNKS; u++) {
            const u32 to = words + u * CHUNK_BYTES;
            const int from = (c * CHUNKS + u) * L::WORDS;
            if (ONCE && (GROUPED || M <= BLOCK_M)) tensor_load_once(to, words_map, from, row, barrier);
            else tensor_load(to, words_map, from, row, barrier);
        }
        const int g = GROUP == 0 ? 0 : c * BLOCK_K / (GROUP ? GROUP : 1);
        tensor_load(metas, scales_map, g * 16, row, barrier);
        if (ZEROS) tensor_load(metas + META_BYTES, zeros_map, g * 16, row, barrier);
    }
    __device__ __forceinline__ void load_x(int s, int c, int m0) const {
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            tensor_load(base + s * STAGE_BYTES + p * BLOCK_M * 128, x_map, c * BLOCK_K + p * 64, m0, full + 8 * s);
    }

    // ------------------------------------------------------------------------------------------------- consumers
    __device__ __forceinline__ void start_consumer(Masks& masks, const u32* mask) {
        consumer = group - 1, wn = consumer % WARPGROUPS_N, wk = WARPGROUPS_K > 1 ? consumer / WARPGROUPS_N : 0;
        row_tile = wn * 4 + warp;
        masks.load(mask);
        words_at = X_BYTES + row_tile * L::WORDS * 4 + lane * 16;
        meta_at = METAS + row_tile * GROUPS * 8 * PAIR + (lane >> 2) * PAIR;
        if (BLOCK_M == 16) asm volatile("" : "+r"(words_at), "+r"(meta_at));  // else ptxas computes them anew in each step
    }

    __device__ __forceinline__ int table_of(const Place& at) const {  // of this warp's row tile
        const int row = smaller(at.n_tile * TILES * 16 + row_tile * 16, N - 1);
        return table_rows ? row / table_rows + (GROUPED ? experts[at.m0 / BLOCK_M] * (N / table_rows) : 0) : 0;
    }
    __device__ __forceinline__ int consumer_warp() const { return TABLE ? consumer * 4 + warp : 0; }
    __device__ __forceinline__ void read_table(int table) const {  // by each warp, into its part of shared memory
        float unit;
        if constexpr (BOOKED)
            unit = make_book<BITS, T>(tables + ((size_t)table << BITS), (unsigned char*)books[consumer_warp()], lane);
        else
            unit = (tables ? tables[table] : 1.f) * __uint_as_float((127 + S::SHIFT) << 23);
        if (lane == 0) units[consumer_warp()] = unit;
        __syncwarp();
    }

    // The sums of a piece of a tile: all steps of this warpgroup.
    __device__ __forceinline__ void multiply(const Pieces<WARPGROUPS_K>& piece, int before, const Masks& masks, Sums& acc,
                                             GroupSums& sum, Fragments& a) const {
        Ring ring;
        ring.s = (before + wk) % STAGES;
        ring.parity = (before + wk) / STAGES & 1, ring.stage = base + ring.s * STAGE_BYTES, ring.barrier = full + 8 * ring.s;
        ring.done = 0;
        for (int c = wk; c < piece.part; c += TURNS * WARPGROUPS_K) {
            step(0, c, piece, ring, masks, acc, sum, a);
            if (TURNS > 1 && c + WARPGROUPS_K < piece.part) step(1, c + WARPGROUPS_K, piece, ring, masks, acc, sum, a);
        }
        if (ACROSS && ring.done && lane == 0) barrier_arrive(ring.done);
        if (EXACT) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) acc[i] *= 1024.f;
        }
        if constexpr (TABLE) {
            const float unit = units[consumer_warp()];
#pragma unroll
            for (int i = 0; i < SUMS; i++) acc[i] *= unit;
        }
    }

    __device__ __forceinline__ void advance(Ring& ring) const {
        ring.done = ring.barrier + 8 * STAGES;
        ring.stage += WARPGROUPS_K * STAGE_BYTES, ring.barrier += WARPGROUPS_K * 8;
        if (ACROSS ? ring.barrier >= empty : (ring.s += WARPGROUPS_K) >= STAGES)
            ring.s -= STAGES, ring.stage -= STAGES * STAGE_BYTES, ring.barrier -= STAGES * 8, ring.parity ^= 1;
    }

    // One step of a tile: wait for its stage; then, batch by batch, unpack W and multiply it by x. first: A's buffer of the
    // first batch.
    __device__ __forceinline__ void step(int first, int c, const Pieces<WARPGROUPS_K>& piece, Ring& ring, const Masks& masks,
                                         Sums& acc, GroupSums& sum, Fragments& a) const {
        barrier_wait(ring.barrier, ring.parity);
        Words w;
        Values looked_up;
        Scales scales;
        bool bare = false;
#pragma unroll
        for (int b = 0; b < BATCHES; b++) {
            const int buffer = (first + b) % BUFFERS, which = b * BATCH * 16 / SPAN % 2;
            const bool ends_group = EXACT && b * BATCH * 16 % SPAN == 0;  // the batch before was the last one of a group
            if (BUFFERS == 1 && (b > 0 || ACROSS)) {  // the batch before reads A until here
                products_wait<0>();
                pin(a[0]);
                if (ACROSS && b == 0 && ring.done && lane == 0) barrier_arrive(ring.done);
                if (ends_group) add_group(acc, sum[which ^ 1], scales.both[which ^ 1]);
            }
            unpack(b, piece.begin, c, ring.stage, masks, w, looked_up, scales, bare, which, a[buffer]);
            pin(a[buffer]);
            start_products(b, ring.stage, acc, sum[which], a[buffer]);
            if (ACROSS) {
                // the last wait is inside the loop: at the loop's exit the compiler may copy sums, which must not be in flight
                if (b + 1 == BATCHES && c + WARPGROUPS_K >= piece.part) products_wait<0>();
                else if (BUFFERS > 1) products_wait<1>();
                if (BUFFERS > 1) {
                    pin(a[buffer ^ 1]);                                               // the batch before read A until here,
                    if (b == 0 && ring.done && lane == 0) barrier_arrive(ring.done);  // and its stage is free now
                }
            } else {
                if (BUFFERS > 1 && b > 0) {
                    products_wait<1>();
                    pin(a[buffer ^ 1]);
                    if (ends_group) add_group(acc, sum[which ^ 1], scales.both[which ^ 1]);
                }
                if (b + 1 == BATCHES) {
                    products_wait<0>();
                    pin(a[buffer]);
                    if (lane == 0) barrier_arrive(ring.barrier + 8 * STAGES);
                    if (EXACT) add_group(acc, sum[which], scales.both[which]);
                }
            }
        }
        advance(ring);
    }

    // wgmma reads A's registers asynchronously, which the compiler does not know: it may not reuse them before here.
    static __device__ __forceinline__ void pin(u32 (&a)[BATCH][4]) {
#pragma unroll
        for (int f = 0; f < BATCH; f++)
#pragma unroll
            for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[f][j])::"memory");
    }

    static __device__ __forceinline__ void add_group(Sums& acc, Sums& sum, u32 scales) {  // EXACT: a group's sum, scaled
        const float2 by = to_floats<T>(scales);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            asm volatile("" : "+f"(sum[i])::"memory");
            acc[i] = __fmaf_rn(i % 4 < 2 ? by.x : by.y, sum[i], acc[i]);
        }
    }

    __device__ __forceinline__ void start_products(int b, u32 stage, Sums& acc, Sums& sum, u32 (&a)[BATCH][4]) const {
        products_fence();
#pragma unroll
        for (int f = 0; f < BATCH; f++) {
            const int at = b * BATCH + f;
            const u64 panel = swizzled_tile(stage) + at / 4 * BLOCK_M * 8 + 2 * (at % 4);
            if (EXACT && at * 16 % SPAN == 0) Wgmma<T, BLOCK_M>::first(sum, a[f], panel);
            else Wgmma<T, BLOCK_M>::run(EXACT ? sum : acc, a[f], panel);
        }
        products_commit();
    }

    // ------------------------------------------------------------------------------------------------- codes to halves
    // Batch b of a piece's step c into A's registers.
    __device__ __forceinline__ void unpack(int b, int begin, int c, u32 stage, const Masks& masks, Words& w, Values& looked_up,
                                           Scales& scales, bool& bare, int which, u32 (&a)[BATCH][4]) const {
        if (b * BATCH % L::FRAGS == 0) read_words(stage, b * BATCH, w);
        if (b * BATCH * 16 % SPAN == 0) read_scales(stage, begin, c, b * BATCH, which, scales, bare);
        if (BARE && bare) {
#pragma unroll
            for (int f = 0; f < BATCH; f++) {
                const int at = b * BATCH + f;
                if (f > 0 && at % L::FRAGS == 0) read_words(stage, at, w);
                unpack_bare(at, w, scales, a[f]);
            }
        } else {
#pragma unroll
            for (int f = 0; f < BATCH; f++) {
                const int at = b * BATCH + f;
                if (f > 0 && at % L::FRAGS == 0) read_words(stage, at, w);
                if (f > 0 && at * 16 % SPAN == 0) read_scales(stage, begin, c, at, which, scales, bare);
                if constexpr (TABLE) unpack_table(at, w, looked_up, scales, a[f]);
                else unpack_codes(at, w, masks, scales, a[f]);
            }
        }
    }

    __device__ __forceinline__ void read_words(u32 stage, int at, Words& w) const {
        read_chunk<BITS>(stage + words_at + at / L::FRAGS * CHUNK_BYTES, lane, w);
    }
    __device__ __forceinline__ void read_scales(u32 stage, int begin, int c, int at, int which, Scales& to, bool& bare) const {
        int i = at * 16 / SPAN;
        if (GROUP && BLOCK_K % (GROUP ? GROUP : 1) && GROUP % BLOCK_K)
            i = ((begin + c) * BLOCK_K + at * 16) / (GROUP ? GROUP : 1) - (begin + c) * BLOCK_K / (GROUP ? GROUP : 1);
        if constexpr (TABLE) {
            const u32 by = S::of(PAIR == 4 ? read4(stage + meta_at + i * 32) : read2(stage + meta_at + i * 16));
            to.scale[0] = twice(by, 0), to.scale[1] = twice(by, 1);
            return;
        }
        const u32 of = read4(stage + meta_at + i * 32);
        const u32 zero = ZEROS ? read4(stage + meta_at + i * 32 + META_BYTES) : Half<T>::power(BITS == 1 ? -1 : BITS - 1);
        const u32 minus = fma2<T>(EXACT ? Half<T>::power(-10) : of, zero ^ 0x80008000u, 0x80008000u);
        if constexpr (BARE) bare = __all_sync(0xffffffffu, C::small(of) && C::small(of >> 16));
        const u32 by = BARE && bare ? C::scale_of_bare(of) : C::WIDE ? fma2<T>(of, Half<T>::power(6), 0x80008000u) : of;
        to.both[which] = of;
        to.scale[0] = twice(by, 0), to.scale[1] = twice(by, 1);
        to.offset[0] = twice(minus, 0), to.offset[1] = twice(minus, 1);
    }

    __device__ __forceinline__ void unpack_table(int at, const Words& w, Values& looked_up, const Scales& scales,
                                                 u32 (&to)[4]) const {
        if (BOOKED && at % 4 == 0) {
            const uint4 book[2] = {books[consumer_warp() % BOOKS][0], books[consumer_warp() % BOOKS][1]};
#pragma unroll
            for (int j = 0; j < 4; j++) Book<BITS>::look_up(w, at % L::FRAGS / 4, j, book, looked_up[j]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            to[j] = S::scaled(BOOKED ? looked_up[j][at % 4] : small_e2m1<T>(w[j], at % L::FRAGS), scales.scale[j & 1]);
    }
    static __device__ __forceinline__ void unpack_bare(int at, const Words& w, const Scales& scales, u32 (&to)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) to[j] = fma2<T>(C::bare(w, at % L::FRAGS, j), scales.scale[j & 1], scales.offset[j & 1]);
    }
    static __device__ __forceinline__ void unpack_codes(int at, const Words& w, const Masks& masks, const Scales& scales,
                                                        u32 (&to)[4]) {
        const int f = at % L::FRAGS;
        if constexpr (!C::WIDE) C::template fragment<EXACT>(w, f, masks, to);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (C::WIDE) to[j] = fma2<T>(C::bare(w, f, j), Half<T>::power(127), 0x80008000u);  // code / 64
            else if (!EXACT) to[j] = add2<T>(to[j], C::magic(f) | 0x80008000u);
            to[j] = fma2<T>(to[j], EXACT ? Half<T>::power(14 - C::p(f)) : scales.scale[j & 1], scales.offset[j & 1]);
        }
    }

    // ------------------------------------------------------------------------------------------------- epilogue
    __device__ __forceinline__ void finish(const Pieces<WARPGROUPS_K>& piece, const Place& at, Sums& acc) const {
        const int n_first = (at.n_tile * WARPGROUPS_N + wn) * 64;  // of this warpgroup
        const int first = (rank * WARPGROUPS_K + wk) * COLUMNS;    // of the rows of x whose y this part writes
        if constexpr (PARTS > 1) add_parts(first, acc);
        if (first >= BLOCK_M) return;
        if constexpr (SPLIT_K == 1) {
            float4* sums = partials + consumer * FOURS * 128 + (threadIdx.x & 127);  // of this thread in block 0
            if (piece.begin + piece.part < steps) return leave_sums(sums, acc);
            if (piece.begin > 0) take_sums(piece, sums, acc);
        }
        if (bias) add_bias(n_first, at.m0, acc);
        store_y(n_first, at.m0 + first, smaller(M, at.m0 + rows), acc);
    }

    static __device__ __forceinline__ void consumers_sync() {
        asm volatile("bar.sync 8, %0;" ::"n"(CONSUMERS * 128) : "memory");
    }

    // Over warpgroups of k and blocks of the cluster: sums[wk][wn][i][thread], in the ring's place under a split. Then each
    // part adds up its columns, in the same order everywhere.
    __device__ __forceinline__ void add_parts(int first, Sums& acc) const {
        float* sums = (float*)(shared + (SPLIT_K > 1 ? 0 : STAGES * STAGE_BYTES)) + wn * SUMS * 128 + (threadIdx.x & 127);
        consumers_sync();  // the ring, or the sums of the tile before, have been read
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[(wk * WARPGROUPS_N * SUMS + i) * 128] = acc[i];
        if constexpr (SPLIT_K > 1) cluster_sync();
        else consumers_sync();
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) {
            if (first + i / 4 * 8 >= BLOCK_M) continue;
            float v = 0.f;
#pragma unroll
            for (int k = 0; k < PARTS; k++) {
                float* at = sums + (k % WARPGROUPS_K * WARPGROUPS_N * SUMS + first / 2 + i) * 128;
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

    // Between blocks that divide a tile, through global memory.
    static constexpr int FOURS = COLUMNS / 8, BLOCK_FOURS = CONSUMERS * FOURS * 128;  // float4 of a thread, of a block
    __device__ __forceinline__ void leave_sums(float4* to, const Sums& acc) const {  // another block has the end of the tile
#pragma unroll
        for (int i = 0; i < FOURS; i++)
            to[(size_t)team * BLOCK_FOURS + i * 128] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        warpgroup_sync(consumer);
        if ((threadIdx.x & 127) == 0) store_release(flags + team * CONSUMERS + consumer, 1);
    }
    __device__ __forceinline__ void take_sums(const Pieces<WARPGROUPS_K>& piece, const float4* from, Sums& acc) const {
        const int start = (piece.tile - whole) * piece.spans;  // of the tile; the block that has it, then all up to this one
        for (int other = ((start + 1) * teams - 1) / divided_spans(); other < team; other++) {
            if ((threadIdx.x & 127) == 0) {
                while (!load_acquire(flags + other * CONSUMERS + consumer)) {}
                flags[other * CONSUMERS + consumer] = 0;
            }
            warpgroup_sync(consumer);
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                const float4 v = read_sums(from + (size_t)other * BLOCK_FOURS + i * 128);
                acc[4 * i] += v.x, acc[4 * i + 1] += v.y, acc[4 * i + 2] += v.z, acc[4 * i + 3] += v.w;
            }
        }
    }

    __device__ __forceinline__ void add_bias(int n_first, int m0, Sums& acc) const {
#pragma unroll
        for (int o = 0; o < 2; o++) {
            const int n = n_first + warp * 16 + (lane >> 2) + 8 * o;
            const float b = n < N ? to_floats<T>(bias[n + (GROUPED ? experts[m0 / BLOCK_M] * (size_t)N : 0)]).x : 0.f;
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) acc[4 * i + 2 * o] += b, acc[4 * i + 2 * o + 1] += b;
        }
    }

    __device__ __forceinline__ void store_y(int n_first, int m_first, int m_end, const Sums& acc) const {
        const u32 staging = base + (SPLIT_K > 1 ? 0 : STAGES * STAGE_BYTES + SUM_BYTES) + consumer * OUT * ROW * 2;
#pragma unroll
        for (int b = 0; b < (COLUMNS + OUT - 1) / OUT; b++) {
            warpgroup_sync(consumer);  // the staging is free
#pragma unroll
            for (int i = 0; i < OUT / 8; i++) {  // two 8x8 matrices: rows n 0-7 and 8-15, columns m; stored transposed
                if (b * (OUT / 8) + i >= COLUMNS / 8) continue;
                const float* v = acc + (b * (OUT / 8) + i) * 4;
                const u32 at = staging + ((i * 8 + (lane & 7)) * ROW + warp * 16 + ((lane >> 3) & 1) * 8) * 2;
                store_transposed<T>(at, v);
            }
            warpgroup_sync(consumer);
#pragma unroll 2
            for (int e = threadIdx.x & 127; e < OUT * 8; e += 128) {  // 16 bytes of a row of y
                const int row = b * OUT + e / 8, n = e % 8 * 8, m = m_first + row, column = n_first + n;
                if (row >= COLUMNS || m >= m_end || column >= N) continue;
                store8(y + (size_t)m * N + column, staging + (e / 8 * ROW + n) * 2, N, column);
            }
        }
    }
};

template <int BITS, int T, int GROUP, int FORM, int WARPGROUPS_N, int WARPGROUPS_K, int BLOCK_M, int CHUNKS, int BATCH,
          int BUFFERS, int STAGES, int SPLIT_K, int BLOCKS_PER_SM, int BAND, bool GROUPED = false>
__global__ void __launch_bounds__(128 * (1 + WARPGROUPS_N * WARPGROUPS_K), BLOCKS_PER_SM)
tile_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap words_map,
           const __grid_constant__ TensorMap scales_map, const __grid_constant__ TensorMap zeros_map,
           const u16* __restrict__ bias, u16* __restrict__ y, int M, int rows, int loaded, int N, int steps, int whole,
           float4* partials, u32* flags, const int* __restrict__ experts, const int* __restrict__ valid, int next,
           const float* __restrict__ tables, int table_rows) {
    using Thread = WgmmaThread<BITS, T, GROUP, FORM, WARPGROUPS_N, WARPGROUPS_K, BLOCK_M, CHUNKS, BATCH, BUFFERS, STAGES,
                               SPLIT_K, BLOCKS_PER_SM, BAND, GROUPED>;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];  // full and empty, of each stage
    __shared__ u32 mask[Codes<BITS, T>::PLACES];
    __shared__ float units[Thread::UNITS];
    __shared__ uint4 books[Thread::BOOKS][2];
    const WgmmaArguments launch = {&x_map, &words_map, &scales_map, &zeros_map, bias, y, M, rows, loaded, N, steps, whole,
                                   partials, flags, experts, valid, next, tables, table_rows};
    Thread thread(launch, shared, barriers, units, books);
    thread.start(mask);

    if (thread.group == 0) {  // ------------------------------------------------------------------------- producer
        registers_down<Thread::KEPT>();
        if (threadIdx.x == 0) {
            int s = 0, round = 0, early = 0;
            if (GROUPED) previous_grid_wait(), thread.find_valid();
            Pieces<WARPGROUPS_K> piece = thread.pieces();
            bool more = piece.next();
            if (more && !GROUPED) {  // weights do not depend on the previous kernel, x does
                const Place at = thread.place(piece.tile);
                for (; early < STAGES && early < piece.part; early++)
                    thread.load_weights(early, piece.begin + early, at.n_tile * Thread::TILES);
            }
            if (!GROUPED) previous_grid_wait();
            for (; more; more = piece.next()) {
                const Place at = thread.place(piece.tile);
                const int row = thread.first_row(at);
                for (int c = 0; c < piece.part; c++) {
                    if (early > 0) early--;
                    else {
                        barrier_wait(thread.empty + 8 * s, (round & 1) ^ 1);
                        thread.load_weights(s, piece.begin + c, row);
                    }
                    thread.load_x(s, piece.begin + c, at.m0);
                    if (++s == STAGES) s = 0, round++;
                }
            }
        }
        if constexpr (SPLIT_K > 1) __syncwarp(), cluster_sync(), cluster_sync();
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    registers_up<Thread::CONSUMER_REGISTERS>();
    previous_grid_wait();
    next_grid_launch();
    if (GROUPED) thread.find_valid();
    typename Thread::Masks masks;
    thread.start_consumer(masks, mask);
    typename Thread::Sums acc;
    typename Thread::GroupSums sum;
    typename Thread::Fragments a;
    Pieces<WARPGROUPS_K> piece = thread.pieces();
    for (int before = 0; piece.next(); before += piece.part) {  // before: steps of earlier pieces
        const Place at = thread.place(piece.tile);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i++) acc[i] = 0.f;
        if constexpr (Thread::TABLE) thread.read_table(thread.table_of(at));
        thread.multiply(piece, before, masks, acc, sum, a);
        thread.finish(piece, at, acc);
    }
}
