// One decoding step of attention: q/k norm, RoPE, cache write, and attention of each sequence's token over its cache, in one
// kernel.
//
// Shapes  qkv (B, (SHARE * G + 2) * HKV, D) in fp16 or bf16: heads of q, then of k, then of v; SHARE * G queries share a key
//         head, and a block takes a group of G of them. y (B, SHARE * G * HKV, D). The cache holds HKV key and value heads
//         of D per slot (token), in 16 bits or in codes (codes.cuh).
// Grid    (blocks of a group, groups of all key heads of all sequences). Short caches: a cluster of CLUSTER blocks, which meet
//         in shared memory. Long caches or many heads: CLUSTER 1 and up to gridDim.x blocks, one for each `least` tiles, which
//         meet in global memory (`partial`). Tiles of 16 slots go round the blocks, then round the warps of a block, so that a
//         short sequence keeps as many SMs busy as it has tiles.
// Rows    D / 4 lanes norm and rotate a head of the token in fp32, or a warp that holds D / 128 times four dims a lane; the
//         warps take its heads in turn. Queries are rounded once, into shared memory. In the block that has the newest tile the
//         new key and value follow: they go into the cache and, when that tile's turn comes, over what was fetched of it; slot
//         `pos` is never read from the cache.
// Warp    K q^T and V^T p by mma.sync, straight from registers. The order of head dims inside a product is free, so a lane
//         reads 16 bytes of a slot and takes its pairs in the order they have (codes.cuh). K: lane (g, t) has the t-th part of
//         slots g and g + 8; V: the g-th part of slots 2 t, 2 t + 1, 2 t + 8, 2 t + 9. Scores, transposed by movmatrix, are the
//         operand p.
// Top     Sums are of 2^(score - top). `top` is not the largest score so far but within 2^LIMIT of it: it moves only when a
//         score is past that, which is rare, and what the warp has summed so far is then multiplied once.
// Early   Position, angles and the first tiles of every warp are fetched before the previous kernel has ended, because an
//         earlier step wrote them (launch.py): 1024 slots of a key head are on the SMs when q arrives. They go to shared
//         memory: registers had room for one tile, and the second one cost 1.5 us (8B, 384 slots, clusters of 4).
// Sum     Warps meet in shared memory. Blocks of a cluster push their parts to the block that owns a slice of y (meet.cuh),
//         without a fence or a trip to memory. Without a cluster the last block to arrive adds up. Every sum has a fixed order.
//         Sums of warps lie over the fetched tiles, so that two blocks of 8 warps fit an SM.
// Order   With more heads than run at once, `order` gives the longest sequences the first turns, so that none of them ends
//         alone.
// Paged   PAGE slots per block of the cache (0: one cache per sequence), found by `table`, whose width is S. Tiles begin at
//         multiples of 16, so that none lies in two blocks; a warp looks up the block of the tile after the next one a tile
//         ahead.
// Codes   KV 8 or 4: heads are turned (Hadamard's) as they come, new keys and values are encoded, and y is turned back. A slot
//         has one scale, so it multiplies the score and p; no code is multiplied by it.
// Layout  of wide heads, a sum of 1: each head of q is followed by a gate, whose sigmoid multiplies y; 2: values are normed,
//         without weights; 4: there are no heads of v, values are keys before norm and rotation.
// Drafts  ROWS > 0: all rows are of one sequence, at positions one after another: its newest token and drafts after it. A block
//         takes ROWS of them as further queries of its key head, so a slot is read once for all of these. It prepares the keys
//         and values of all rows up to its last one, inserts them into its tiles, and writes those of its own rows to the
//         cache. Wide heads may have gates.
// Shared  WRITES 0: qkv holds queries alone, and the cache, another layer's, all keys and values. That layer wrote slot `pos`
//         in this step, so no tile is fetched before the previous kernel has ended.
// Groups  the blocks of each group of a key head read its keys and values, and those with the newest write the same bytes.
// Limits  fp16 or bf16; PAGE a power of two from 16 up; D 64 or 128, without codes also 256 or 512; R (dims that rotate) a
//         multiple of 64, up to 128 or all of D; G <= 8, of D 512 <= 4; codes: S a multiple of 16.
// Source  own; split-KV as in Flash-Decoding (Dao et al. 2023).
#include "codes.cuh"
#include "exp2.cuh"
#include "meet.cuh"

__device__ __forceinline__ u32 transposed(u32 v) {  // 8 x 8 halves of a warp: lane (g, t) has (g, 2 t), (g, 2 t + 1)
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
    return d;
}

// Four dims of a head per lane, from 4 * lane on: normed by `weight` where NORM, and rotated, in fp32.
template <int D, int R, int NORM>
__device__ __forceinline__ float4 prepared(float4 x, float4 weight, float4 cos, float4 sin, float eps, int lane) {
    if constexpr (NORM != 0) {
        const float squares = all<D / 4>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w, [](float a, float b) { return a + b; });
        const float mean = squares * (1.f / D) + eps;
        float inverse;
        asm("rsqrt.approx.f32 %0, %1;" : "=f"(inverse) : "f"(mean));
        x = make_float4(x.x * (inverse * weight.x), x.y * (inverse * weight.y), x.z * (inverse * weight.z),
                        x.w * (inverse * weight.w));
    }
    const float sign = lane < R / 8 ? -1.f : 1.f;
    auto rotated = [&](float v, float c, float s) {
        const float other = __shfl_xor_sync(0xffffffffu, v, R / 8);
        return 4 * lane < R ? v * c + sign * other * s : v;
    };
    return make_float4(rotated(x.x, cos.x, sin.x), rotated(x.y, cos.y, sin.y), rotated(x.z, cos.z, sin.z),
                       rotated(x.w, cos.w, sin.w));
}

constexpr int MOST_ROWS = 16;  // of one sequence: decode/reference.py has MOST_DRAFTS, and the newest token

struct AttendArguments {  // of a launch
    const u16* qkv;
    unsigned char *k_cache, *v_cache;
    const int *table;
    const u16 *cos_table, *sin_table;
    const void *q_norm, *k_norm;
    const float* sinks;
    u16* y;
    float4* partial;
    u32* arrived;
    unsigned char *k_scales, *v_scales;
    int S, HKV, window, least;
    float scale, eps, shorter;
};

// A thread of the kernel: its place among the blocks and in the sequence, and the phases that the kernel runs through. The
// phases get arrays of registers as arguments: as fields, they would lie in memory until the compiler has unrolled all loops
// over them. Some loops are in the kernel itself (heads of the token, q k^T, sums of warps and blocks): as phases, ptxas gave
// them other registers than in the code that was measured.
template <int T, int D, int R, int G, int NORM, int WARPS, int CLUSTER, int STAGES, int PAGE, int KV, int SHARE, int WRITES,
          int LAYOUT, int ROWS>
struct AttendThread : AttendArguments {
    using C = Held<KV, D>;
    static constexpr int Q = ROWS ? ROWS * G : G;  // queries of a block
    static constexpr int MT = KV ? FP16 : T;  // type of what is multiplied
    static constexpr int STEPS = D / 16;      // mma of q k^T, of V^T p
    static constexpr int ROW = D + 4;         // floats of a query's sums in shared memory, against bank conflicts
    // float4 of y, and those that this block adds up at the end: of codes whole heads, which are turned back
    static constexpr int ITEMS = Q * D / 4, MINE = KV ? D / 4 : ITEMS / CLUSTER;
    static constexpr int ALL = KV ? (ITEMS + 31) / 32 * 32 : ITEMS;  // turning takes whole warps: some do the last item again
    static constexpr int PARTIAL = ITEMS + (Q + 1) / 2;  // float4 that a block leaves in global memory: sums, tops and totals
    static constexpr int AT_ONCE = WARPS == 8 ? 16 : 8;  // parts that a thread loads at once there: one trip to memory
    static constexpr int WIDE = D > 128 ? D / 128 : 1;  // times that a lane has four dims of a head of the token
    static constexpr int LANES = D / 4 / WIDE, AHEAD = WARPS * 32 / LANES;  // of a head of the token; heads at a time
    static_assert(WIDE == 1 || KV == 0, "codes of heads of up to 128 dims");
    static_assert(WIDE > 1 || LAYOUT == 0, "other layouts of wide heads");
    static constexpr bool GATED_HEADS = LAYOUT & 1, V_NORMED = LAYOUT & 2, V_IS_K = LAYOUT & 4;
    static constexpr int EACH = GATED_HEADS ? 2 : 1;  // heads of qkv for a query: itself, and its gate
    static constexpr int OF_TOKEN = EACH * SHARE * G + (V_IS_K ? 1 : 2) * WRITES;  // heads of qkv for a key head
    static constexpr int ROUNDS = (G + 2 + AHEAD - 1) / AHEAD;
    static constexpr int ROW_ROUNDS = (Q + 2 * MOST_ROWS + AHEAD - 1) / AHEAD;
    static_assert(ROWS == 0 || (KV == 0 && SHARE == 1 && WRITES == 1 && !V_NORMED && !V_IS_K),
                  "rows of one sequence: the plain form, or with gates");
    static constexpr float NONE = -1e30f;  // the top of no scores: finite, so that differences stay numbers
    // The score of a slot that a row may not see. All slots of a tile may be such; score * by - top is then 0 however it is
    // rounded, because the product with a power of two is exact.
    static constexpr float HIDDEN = -0x1p99f;
    // p of the largest score is 2^HEAD to 2^LIMIT: of codes p * step is a half
    static constexpr float HEAD = KV ? 5.f : 0.f, LIMIT = HEAD + 3.f;

    using Queries = u32[STEPS][2];   // B operands
    using Pair = float[2];           // of queries 2 t and 2 t + 1, or of slots g and g + 8
    using Values = float[STEPS][4];  // [m][c]: query 2 t + c % 2, dim 2 m + c / 2 of those that lane g has
    using Scores = float[4];         // slots g and g + 8 of each of the lane's two queries
    using Keys = u32[2][C::K_WORDS];
    using CachedValues = u32[4][C::V_WORDS];

    // ---- shared memory
    float4 *shared, *parts;  // [warp][stage][piece][lane] a piece; at the end, over it: [warp][query][dim]
    float4* encoded;         // heads on their way to codes
    float *tops, *totals;    // [warp][query]
    uint2* queries;          // halves
    float* query_sums;
    uint4* newest;           // the token's key and value as they go into the cache, and their scales

    // ---- place
    int warp, lane, g, t, rank, b, h, group;
    int pos, seen_from, first;  // slots: the token's, the first in the window, the first tile's
    int tiles, last, blocks;    // tiles of the sequence, the newest one, blocks that share them
    u32 ring;                                        // bytes into `shared`
    const unsigned char *k_mine, *v_mine, *its_scales;
    bool has_scales;
    int base, own;  // of drafts: the position of the sequence's newest token, and the number of this block's first row

    // ------------------------------------------------------------------------------------------------- tiles of the cache
    __device__ __forceinline__ size_t row_of(int page, int slot) const {  // of the cache, in slots
        if constexpr (PAGE == 0) return ((size_t)b * HKV + h) * S + slot;
        else return ((size_t)page * HKV + h) * PAGE + (slot & (PAGE - 1));
    }
    // Where this lane's pieces lie in a stage. A lane fetches the pieces it will read, so it waits for no other thread.
    __device__ __forceinline__ int v_slot(int i) const { return 2 * t + (i & 1) + 8 * (i >> 1); }
    __device__ __forceinline__ int k_at(int i, int j) const { return ((i * C::K_PIECES + j) * 32 + lane) * C::K_BYTES; }
    __device__ __forceinline__ int v_at(int i, int j) const {
        return C::K_AT + ((i * C::V_PIECES + j) * 32 + lane) * C::V_BYTES;
    }

    __device__ __forceinline__ void copy(int stage, int tile, int page) const {
        if (tile < tiles) {
            const int start = first + tile * 16, old = (ROWS ? base : pos) - start + !WRITES;  // slots of it that are written
            const size_t row = row_of(page, start);
            const u32 to = shared_address(shared) + ring + stage * C::STAGE;
            const unsigned char *k = k_mine + row * C::ROW, *v = v_mine + row * C::ROW;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < C::K_PIECES; j++)  // codes past the newest are arbitrary numbers, which p = 0 removes
                    copy_or_zero<C::K_BYTES>(to + k_at(i, j), k + 8 * i * C::ROW + 64 * j, KV || g + 8 * i < old);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < C::V_PIECES; j++)
                    copy_or_zero<C::V_BYTES>(to + v_at(i, j), v + ((i & 1) + 8 * (i >> 1)) * C::ROW + 128 * j,
                                             KV || v_slot(i) < old);
            if (has_scales)
                copy_or_zero<4>(to + C::K_AT + C::V_AT + 4 * lane, its_scales + row * C::SCALE, KV == 8 || lane % 16 < old);
        }
        copy_commit();
    }

    // ------------------------------------------------------------------------------------------------- the token's heads
    // A row of the token: of this group's queries, of its key and of its value; among its heads of q, then of k, then of v.
    __device__ __forceinline__ size_t head_of(int row) const {
        int there = row < G ? EACH * (group * G + row) : HKV * ((EACH * SHARE - 1) * G + row) + h;
        if (V_IS_K && row == G + 1) there -= HKV;
        return (size_t)b * OF_TOKEN * HKV + there;
    }
    static __device__ __forceinline__ float4 four(const u16* from) {
        u32 v[2];
        asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(from) : "memory");
        const float2 low = to_floats<T>(v[0]), high = to_floats<T>(v[1]);
        return make_float4(low.x, low.y, high.x, high.y);
    }
    static __device__ __forceinline__ float4 four(uint2 v) {
        const float2 low = to_floats<T>(v.x), high = to_floats<T>(v.y);
        return make_float4(low.x, low.y, high.x, high.y);
    }
    // A piece of the token's key or value into the cache and, for the newest tile, into shared memory.
    __device__ __forceinline__ void write_newest(int row, int part, int newest_page, u32 low, u32 high, u32 scales) const {
        const size_t slot = row_of(newest_page, pos);
        unsigned char* here = (unsigned char*)(newest + (row - G) * (C::ROW / 16 + 1)) + C::ROW / (D / 4) * part;
        unsigned char* to = (row == G ? k_cache : v_cache) + slot * C::ROW + C::ROW / (D / 4) * part;
        unsigned char* its = row == G ? k_scales : v_scales;
        if constexpr (KV == 0) *(uint2*)here = *(uint2*)to = uint2{low, high};
        else if constexpr (KV == 8) *(u32*)here = *(u32*)to = low;
        else *(u16*)here = *(u16*)to = (u16)low;
        if (KV != 0 && part == 0) {
            *(u32*)(newest + (row - G) * (C::ROW / 16 + 1) + C::ROW / 16) = scales;
            if constexpr (KV == 8) its[slot] = (unsigned char)scales;
            else ((u32*)its)[slot] = scales;
        }
    }
    // A head that is wider than a warp: a lane has the four dims from 4 * lane on of each 128.
    static __device__ __forceinline__ void norm_wide(float4 (&x)[WIDE], const float4 (&weight)[WIDE], float eps) {
        float squares = 0.f;
#pragma unroll
        for (int j = 0; j < WIDE; j++) squares += x[j].x * x[j].x + x[j].y * x[j].y + x[j].z * x[j].z + x[j].w * x[j].w;
        const float mean = all<LANES>(squares, [](float a, float b) { return a + b; }) * (1.f / D) + eps;
        float inverse;
        asm("rsqrt.approx.f32 %0, %1;" : "=f"(inverse) : "f"(mean));
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            x[j] = make_float4(x[j].x * (inverse * weight[j].x), x[j].y * (inverse * weight[j].y),
                               x[j].z * (inverse * weight[j].z), x[j].w * (inverse * weight[j].w));
    }
    static __device__ __forceinline__ void turn_wide(float4 (&x)[WIDE], const float4 (&cos)[WIDE], const float4 (&sin)[WIDE],
                                                     int lane) {
        if constexpr (R < D) {
            x[0] = prepared<128, R, 0>(x[0], x[0], cos[0], sin[0], 0.f, lane);
        } else {
#pragma unroll
            for (int j = 0; j < WIDE / 2; j++) {
                const int i = j + WIDE / 2;
                const float4 a = x[j], b = x[i];
                x[j] = make_float4(a.x * cos[j].x - b.x * sin[j].x, a.y * cos[j].y - b.y * sin[j].y,
                                   a.z * cos[j].z - b.z * sin[j].z, a.w * cos[j].w - b.w * sin[j].w);
                x[i] = make_float4(b.x * cos[i].x + a.x * sin[i].x, b.y * cos[i].y + a.y * sin[i].y,
                                   b.z * cos[i].z + a.z * sin[i].z, b.w * cos[i].w + a.w * sin[i].w);
            }
        }
    }
    // What the kernel's loop over the heads of the token does, for the block's rows, and for keys and values of the rows
    // before them. A lane fetches into `raw` what it will read itself. turns: cos and sin of all rows.
    __device__ __forceinline__ void heads_of_rows(uint2* raw, uint4* turns) const {
        // the first row with a slot in the tiles, and the first of the two tiles that the rows' slots are in
        const int lowest = base < first ? first - base : 0, newest_tile = (base + lowest - first) / 16;
        const bool owner = last % blocks == rank || newest_tile % blocks == rank;
        const int part = lane % LANES, of_warp = 32 / LANES * warp;
        for (int i = threadIdx.x; i < (own + ROWS) * R / 8; i += WARPS * 32) {
            copy_or_zero<16>(shared_address(turns + i), cos_table + (size_t)base * R + 8 * i, true);
            copy_or_zero<16>(shared_address(turns + MOST_ROWS * R / 8 + i), sin_table + (size_t)base * R + 8 * i, true);
        }
        float4 q_weight = make_float4(1.f, 1.f, 1.f, 1.f), k_weight = q_weight;
        if constexpr (NORM == 1) q_weight = four((const u16*)q_norm + 4 * part), k_weight = four((const u16*)k_norm + 4 * part);
        if constexpr (NORM == 2) q_weight = ((const float4*)q_norm)[part], k_weight = ((const float4*)k_norm)[part];
        if constexpr (CLUSTER > 1) joined();
        previous_grid_wait();

        const int heads = owner ? Q + 2 * (own + ROWS - lowest) : Q;  // queries, then a key and a value of each row
        auto row_of_head = [&](int i) { return i < Q ? own + i / G : lowest + (i - Q) / 2; };
#pragma unroll 1
        for (int u = 0; u * AHEAD + of_warp < heads; u++) {
            const int i = smaller(u * AHEAD + threadIdx.x / LANES, heads - 1);
            const int there = i < Q ? h * G + i % G : HKV * (G + (i - Q) % 2) + h;
            copy_or_zero<8>(shared_address(raw + u * WARPS * 32 + threadIdx.x),
                            qkv + ((size_t)row_of_head(i) * (G + 2) * HKV + there) * D + 4 * part, true);
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (int u = 0; u * AHEAD + of_warp < heads; u++) {
            const int i = u * AHEAD + threadIdx.x / LANES, one = smaller(i, heads - 1), row = row_of_head(one);
            const float4 input = four(raw[u * WARPS * 32 + threadIdx.x]);
            const uint2* angle = (const uint2*)turns + (row * R + smaller(4 * part, R - 4)) / 4;
            const float4 cos = four(angle[0]), sin = four(angle[MOST_ROWS * R / 4]);
            float4 x = prepared<D, R, NORM>(input, one < Q ? q_weight : k_weight, cos, sin, eps, part);
            const bool value = one >= Q && (one - Q) % 2;
            if (value) x = input;
            const uint2 halves = {from_floats<T>(x.x, x.y), from_floats<T>(x.z, x.w)};
            if (one < Q) queries[(one * (D + 8) + 4 * part) / 4] = halves;
            if (one < Q || i >= heads) continue;
            ((uint2*)(newest + (2 * row + value) * (C::ROW / 16 + 1)))[part] = halves;
            const int tile = (base + row - first) / 16;
            if (row < own || tile % blocks != rank) continue;
            int page = 0;
            if constexpr (PAGE != 0) page = table[(size_t)b * S + (base + row) / PAGE];
            ((uint2*)((value ? v_cache : k_cache) + row_of(page, base + row) * C::ROW))[part] = halves;
        }
    }
    // The same of wide heads: a warp asks for BATCH of its heads at once.
    __device__ __forceinline__ void wide_heads_of_rows() const {
        constexpr int BATCH = 4;
        const int lowest = base < first ? first - base : 0, newest_tile = (base + lowest - first) / 16;
        const bool owner = last % blocks == rank || newest_tile % blocks == rank;
        float4 q_weight[WIDE], k_weight[WIDE];
#pragma unroll
        for (int j = 0; j < WIDE; j++) wide_weights(128 * j + 4 * lane, q_weight[j], k_weight[j]);
        if constexpr (CLUSTER > 1) joined();
        previous_grid_wait();

        const int heads = owner ? Q + 2 * (own + ROWS - lowest) : Q;
        auto row_of_head = [&](int i) { return i < Q ? own + i / G : lowest + (i - Q) / 2; };
        for (int from = warp; from < heads; from += BATCH * WARPS) {
            float4 head[BATCH][WIDE], cos[BATCH][WIDE], sin[BATCH][WIDE];
#pragma unroll
            for (int u = 0; u < BATCH; u++) {
                const int i = smaller(from + u * WARPS, heads - 1), row = row_of_head(i);
                const size_t there =
                    i < Q ? query_of_row(i) : (size_t)row * OF_TOKEN * HKV + HKV * (EACH * G + (i - Q) % 2) + h;
#pragma unroll
                for (int j = 0; j < WIDE; j++) {
                    const int dim = 128 * j + 4 * lane;
                    const size_t angle = (size_t)(base + row) * R + smaller(dim, R - 4);
                    head[u][j] = four(qkv + there * D + dim);
                    cos[u][j] = four(cos_table + angle), sin[u][j] = four(sin_table + angle);
                }
            }
#pragma unroll
            for (int u = 0; u < BATCH; u++) {
                const int i = from + u * WARPS;
                if (i >= heads) break;
                const int row = row_of_head(i), value = i >= Q && (i - Q) % 2;
                float4 weight[WIDE];
#pragma unroll
                for (int j = 0; j < WIDE; j++) weight[j] = i < Q ? q_weight[j] : k_weight[j];
                if (NORM != 0 && !value) norm_wide(head[u], weight, eps);
                if (!value) turn_wide(head[u], cos[u], sin[u], lane);
                const int slot = base + row;
                const bool writes = i >= Q && row >= own && (slot - first) / 16 % blocks == rank;
                int page = 0;
                if constexpr (PAGE != 0) page = writes ? table[(size_t)b * S + slot / PAGE] : 0;
#pragma unroll
                for (int j = 0; j < WIDE; j++) {
                    const uint2 halves = {from_floats<T>(head[u][j].x, head[u][j].y),
                                          from_floats<T>(head[u][j].z, head[u][j].w)};
                    if (i < Q) queries[(i * (D + 8) + 128 * j + 4 * lane) / 4] = halves;
                    else ((uint2*)(newest + (2 * row + value) * (C::ROW / 16 + 1)))[32 * j + lane] = halves;
                    if (writes) ((uint2*)((value ? v_cache : k_cache) + row_of(page, slot) * C::ROW))[32 * j + lane] = halves;
                }
            }
        }
    }
    // Of a block's rows of one sequence: the head of qkv that is query i.
    __device__ __forceinline__ size_t query_of_row(int i) const {
        return (size_t)(own + i / G) * OF_TOKEN * HKV + EACH * (h * G + i % G);
    }
    __device__ __forceinline__ void wide_weights(int dim, float4& q_weight, float4& k_weight) const {
        q_weight = k_weight = make_float4(1.f, 1.f, 1.f, 1.f);
        if constexpr (NORM == 1) q_weight = four((const u16*)q_norm + dim), k_weight = four((const u16*)k_norm + dim);
        if constexpr (NORM == 2) q_weight = *(float4*)((float*)q_norm + dim), k_weight = *(float4*)((float*)k_norm + dim);
    }
    // As the kernel's own loop over the heads of the token.
    __device__ __forceinline__ void wide_heads(bool owner, int newest_page) const {
        float4 cos[WIDE], sin[WIDE], q_weight[WIDE], k_weight[WIDE], head[ROUNDS][WIDE];
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            const int dim = 128 * j + 4 * lane;
            const size_t angle = (size_t)pos * R + smaller(dim, R - 4);
            cos[j] = four(cos_table + angle), sin[j] = four(sin_table + angle);
            wide_weights(dim, q_weight[j], k_weight[j]);
        }
        if constexpr (CLUSTER > 1) joined();
        previous_grid_wait();
        const int rows = owner ? G + 2 : G;
#pragma unroll
        for (int u = 0; u < ROUNDS; u++)
#pragma unroll
            for (int j = 0; j < WIDE; j++)
                head[u][j] = four(qkv + (size_t)head_of(smaller(u * AHEAD + warp, rows - 1)) * D + 128 * j + 4 * lane);
#pragma unroll 1
        for (int u = 0; u * AHEAD + warp < rows; u++) {
            const int row = u * AHEAD + warp;
            float4 x[WIDE], weight[WIDE];
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                x[j] = u == 0 ? head[0][j] : u == 1 ? head[1 % ROUNDS][j] : head[2 % ROUNDS][j];
                weight[j] = row < G ? q_weight[j] : row == G ? k_weight[j] : make_float4(1.f, 1.f, 1.f, 1.f);
            }
            if (row <= G ? NORM != 0 : V_NORMED) norm_wide(x, weight, eps);
            if (row <= G) turn_wide(x, cos, sin, lane);
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                const u32 low = from_floats<T>(x[j].x, x[j].y), high = from_floats<T>(x[j].z, x[j].w);
                if (row < G) queries[(row * (D + 8) + 128 * j + 4 * lane) / 4] = uint2{low, high};
                else write_newest(row, 32 * j + lane, newest_page, low, high, 0);
            }
        }
    }
    __device__ __forceinline__ void read_queries(Queries& q) const {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const u16* dims = (const u16*)queries + smaller(g, Q - 1) * (D + 8) + C::k_dim(t, s);
            C::query(*(const u32*)dims, *(const u32*)(dims + C::NEXT), q[s][0], q[s][1]);
        }
    }

    // ------------------------------------------------------------------------------------------------- one tile
    // The token's key and value over what was fetched of their slot. Every lane writes over pieces of its own, and one the
    // scales.
    __device__ __forceinline__ void insert_newest(u32 at, int start) const {
        char* over = (char*)shared + at;
        const char *k = (const char*)newest, *v = k + C::ROW + 16;
        const int slot = pos - start;
        auto write = [&](int there, const char* piece, int bytes) {
            for (int i = 0; i < bytes; i += 4) *(u32*)(over + there + i) = *(const u32*)(piece + i);
        };
#pragma unroll
        for (int j = 0; j < C::K_PIECES; j++)
            if (slot % 8 == g) write(k_at(slot / 8, j), k + C::k_piece(t, j), C::K_BYTES);
#pragma unroll
        for (int j = 0; j < C::V_PIECES; j++)
            if (slot % 8 / 2 == t) write(v_at(slot / 8 * 2 + slot % 2, j), v + C::v_piece(g, j), C::V_BYTES);
        if (KV != 0) __syncwarp();
        if (KV != 0 && lane < 2) {
            char* its = over + C::K_AT + C::V_AT + (16 * lane + slot) * C::SCALE;
            const u32 w = *(const u32*)((lane ? v : k) + C::ROW);
            if constexpr (KV == 4) *(u32*)its = w;
            else *its = (char)w;
        }
    }

    // The same for drafts: all rows up to the block's last one.
    __device__ __forceinline__ void insert_rows(u32 at, int start) const {
        char* over = (char*)shared + at;
        auto write = [&](int there, int slot, int value, int piece, int bytes) {
            const int row = slot - base;
            if (row < 0 || slot > pos) return;
            const char* from = (const char*)(newest + (2 * row + value) * (C::ROW / 16 + 1)) + piece;
            for (int i = 0; i < bytes; i += 4) *(u32*)(over + there + i) = *(const u32*)(from + i);
        };
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < C::K_PIECES; j++) write(k_at(i, j), start + g + 8 * i, 0, C::k_piece(t, j), C::K_BYTES);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < C::V_PIECES; j++) write(v_at(i, j), start + v_slot(i), 1, C::v_piece(g, j), C::V_BYTES);
    }

    __device__ __forceinline__ void read_keys(u32 from, Keys& k) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < C::K_PIECES; j++) read_words<C::K_BYTES>(k[i] + j * C::K_BYTES / 4, from + k_at(i, j));
    }
    // The scores are score + other, times the keys' scales. v_step, v_low: scales of the values.
    __device__ __forceinline__ void scale_scores(u32 from, const Pair& q_sum, Scores& score, const Scores& other, Pair& v_step,
                                                 Pair& v_low) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float step = 1.f, low = 0.f;
            if constexpr (KV != 0) {
                C::scales(from + C::K_AT + C::V_AT, g + 8 * i, step, low);
                C::scales(from + C::K_AT + C::V_AT + 16 * C::SCALE, g + 8 * i, v_step[i], v_low[i]);
            }
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float& s = score[2 * i + c];
                s += other[2 * i + c];
                if constexpr (KV == 8) s *= step;
                if constexpr (KV == 4) s = s * step + q_sum[c] * low;
            }
        }
    }
    __device__ __forceinline__ void hide(int start, Scores& score) const {  // slots after the token and before the window
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int slot = start + g + 8 * (i >> 1);
            if (slot > pos || slot < seen_from) score[i] = NONE;
        }
    }
    __device__ __forceinline__ void hide_from_rows(int start, Scores& score) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int slot = start + g + 8 * (i >> 1), its = base + own + smaller(2 * t + (i & 1), Q - 1) / G;
            if (slot > its || slot <= its - window) score[i] = HIDDEN;
        }
    }

    // p = 2^(score - top), and `top` moved where some p would be past 2^LIMIT.
    static __device__ __forceinline__ void exponentials(const Scores& score, float by, const Pair& v_step, const Pair& v_low,
                                                        Pair& top, Pair& total, Pair& rest, Values& acc, Scores& p) {
        bool within = true;
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = score[i] * by - top[i & 1], within = within && p[i] <= LIMIT;
        if (!__all_sync(0xffffffffu, within)) move_top(score, by, top, total, rest, acc, p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = exp2_of(p[i]), total[i & 1] += p[i];
            if constexpr (KV == 4) rest[i & 1] += p[i] * v_low[i >> 1];
            if constexpr (KV != 0) p[i] *= v_step[i >> 1];
        }
    }
    static __device__ __forceinline__ void move_top(const Scores& score, float by, Pair& top, Pair& total, Pair& rest,
                                                    Values& acc, Scores& p) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float most = (score[c] > score[2 + c] ? score[c] : score[2 + c]) * by;
#pragma unroll
            for (int d = 4; d < 32; d *= 2) {
                const float its = __shfl_xor_sync(0xffffffffu, most, d);
                most = its > most ? its : most;
            }
            if (most - top[c] > LIMIT) {
                const float fade = exp2_of(top[c] - (most - HEAD));
                top[c] = most - HEAD, total[c] *= fade, rest[c] *= fade;
                p[c] = score[c] * by - top[c], p[2 + c] = score[2 + c] * by - top[c];
#pragma unroll
                for (int m = 0; m < STEPS; m++) acc[m][c] *= fade, acc[m][2 + c] *= fade;
            }
        }
    }
    __device__ __forceinline__ void read_values(u32 from, CachedValues& v) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < C::V_PIECES; j++) read_words<C::V_BYTES>(v[i] + j * C::V_BYTES / 4, from + v_at(i, j));
    }
    static __device__ __forceinline__ void multiply_values(const CachedValues& v, u32 p0, u32 p1, Values& acc) {
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            u32 a[4];
            C::values(v[0], v[1], m, a[0], a[1]), C::values(v[2], v[3], m, a[2], a[3]);
            mma<MT>(acc[m], a, p0, p1, acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
        }
    }

    // ------------------------------------------------------------------------------------------------- sums
    __device__ __forceinline__ void start_sums(Pair& top, Pair& total, Pair& q_sum) const {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int query = smaller(2 * t + c, Q - 1);
            if constexpr (KV == 4) q_sum[c] = query_sums[query];
            if (sinks != nullptr && rank == 0 && warp == 0)  // one more score, without a value
                top[c] = sinks[group * G + (ROWS ? query % G : query)] * 1.44269504f, total[c] = g == 0 ? 1.f : 0.f;
        }
    }
    // Of a warp, in shared memory.
    __device__ __forceinline__ void leave_sums(const Pair& top, Pair& total, Pair& rest, const Values& acc) const {
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int d = 4; d < 32; d *= 2) {
                total[c] += __shfl_xor_sync(0xffffffffu, total[c], d);
                if constexpr (KV == 4) rest[c] += __shfl_xor_sync(0xffffffffu, rest[c], d);
            }
            if (2 * t + c >= Q) continue;
#pragma unroll
            for (int m = 0; m < STEPS; m += 2) {
                auto sum = [&](int m, int odd) {
                    const float v = acc[m][2 * odd + c];
                    return KV ? v * (odd ? C::FACTOR * C::ODD : C::FACTOR) + rest[c] : v;
                };
                parts[((warp * Q + 2 * t + c) * ROW + (KV ? D / 8 * g + 2 * m : 64 * (m / 4) + 8 * g + 2 * (m % 4))) / 4] =
                    make_float4(sum(m, 0), sum(m, 1), sum(m + 1, 0), sum(m + 1, 1));
            }
            if (g == 0) tops[warp * Q + 2 * t + c] = top[c], totals[warp * Q + 2 * t + c] = total[c];
        }
    }
    static __device__ __forceinline__ void store(u16* heads, int item, float4 sum, float whole, int lane) {  // four dims of y
        if constexpr (KV != 0) sum = turned<D>(sum, lane);
        if (item >= ITEMS) return;
        const float inverse = 1.f / whole;
        u32* to = (u32*)(heads + 4 * item);
        to[0] = from_floats<T>(sum.x * inverse, sum.y * inverse);
        to[1] = from_floats<T>(sum.z * inverse, sum.w * inverse);
    }

    // Four dims of y by the sigmoid of their gates.
    __device__ __forceinline__ float4 opened(int item, float4 sum) const {
        const int query = item / (D / 4);
        const float4 gate = four(qkv + ((ROWS ? query_of_row(query) : head_of(query)) + 1) * D + item % (D / 4) * 4);
        auto by = [](float v) { return 1.f / (1.f + exp2_of(v * -1.44269504f)); };
        return make_float4(sum.x * by(gate.x), sum.y * by(gate.y), sum.z * by(gate.z), sum.w * by(gate.w));
    }

    // Without a cluster: parts of blocks from `from` on.
    static __device__ __forceinline__ void read_parts(const float4* first_part, const float2* of_query, int item, int from,
                                                      int blocks, float2 (&its)[AT_ONCE], float4 (&one)[AT_ONCE]) {
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int r = smaller(from + u, blocks - 1);
            its[u] = of_query[r * PARTIAL * 2], one[u] = first_part[r * PARTIAL + item];
        }
    }

    // In a cluster: an item of this block's slice of y, of the parts that all blocks have pushed here.
    static __device__ __forceinline__ void sum_inbox(const float4* inbox, const float2* inbox_sums, int item, float& whole,
                                                     float4& sum) {
        float most = inbox_sums[item].x;
        whole = 0.f;
#pragma unroll
        for (int r = 1; r < CLUSTER; r++)
            most = inbox_sums[r * MINE + item].x > most ? inbox_sums[r * MINE + item].x : most;
        sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) {
            const float share = exp2_of(inbox_sums[r * MINE + item].x - most);
            const float4 one = inbox[r * MINE + item];
            whole += inbox_sums[r * MINE + item].y * share;
            sum.x += one.x * share, sum.y += one.y * share, sum.z += one.z * share, sum.w += one.w * share;
        }
    }
};

// STAGES: tiles per warp
template <int T, int D, int R, int G, int NORM, int WARPS, int CLUSTER, int STAGES, int PAGE, int KV, int SHARE = 1,
          int WRITES = 1, int LAYOUT = 0, int ROWS = 0>
__global__ void __launch_bounds__(WARPS * 32, D > 128 ? 8 / WARPS : WARPS == 8 && STAGES > 1 ? 1 : 16 / WARPS)
attend(const u16* qkv, unsigned char* k_cache, unsigned char* v_cache, const int* positions, const int* table, const int* order,
       const u16* cos_table, const u16* sin_table, const void* q_norm, const void* k_norm, const float* sinks, u16* y,
       float4* partial, u32* arrived, unsigned char* k_scales, unsigned char* v_scales, int S, int HKV, int window, int least,
       float scale, float eps, float shorter) {
    using Thread = AttendThread<T, D, R, G, NORM, WARPS, CLUSTER, STAGES, PAGE, KV, SHARE, WRITES, LAYOUT, ROWS>;
    using C = typename Thread::C;
    constexpr int LANES = Thread::LANES, AHEAD = Thread::AHEAD, ROUNDS = Thread::ROUNDS;
    constexpr int Q = Thread::Q, ITEMS = Thread::ITEMS, MINE = Thread::MINE, AT_ONCE = Thread::AT_ONCE;
    extern __shared__ float4 shared[];
    __shared__ float4 encoded[KV ? WARPS * 32 : 1];
    __shared__ float tops[WARPS * Q];
    __shared__ float totals[WARPS * Q];
    __shared__ float4 inbox[CLUSTER * MINE];  // [from block][item]
    __shared__ float2 inbox_sums[CLUSTER * MINE];
    __shared__ u64 all_there[1];
    __shared__ u32 turn[1];
    __shared__ uint2 queries[Q * (D + 8) / 4];
    __shared__ float query_sums[Q];
    __shared__ uint4 newest[(ROWS ? MOST_ROWS : 1) * 2 * (C::ROW / 16 + 1)];
    __shared__ uint2 raw[ROWS && D <= 128 ? Thread::ROW_ROUNDS * WARPS * 32 : 1];
    __shared__ uint4 turns[ROWS && D <= 128 ? 2 * MOST_ROWS * R / 8 : 1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int rank = blockIdx.x, turn_of = blockIdx.y / (HKV * SHARE), group = blockIdx.y % (HKV * SHARE), h = group / SHARE;
    const int b = ROWS ? (PAGE ? 0 : table[0]) : order == nullptr ? turn_of : order[turn_of];  // of the cache or its table
    next_grid_launch();
    const u32 meeting = shared_address(all_there);
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) open(meeting, CLUSTER * MINE * 24);
        join();
    }
    const int own = ROWS * turn_of, base = positions[0], pos = ROWS ? base + own + ROWS - 1 : positions[b];
    const int n = pos + 1 - (ROWS ? ROWS - 1 : 0), seen_from = n > window ? n - window : 0, first = seen_from & ~15;
    const int tiles = (pos + 1 - first + 15) / 16, last = tiles - 1;
    const int blocks = CLUSTER > 1 ? CLUSTER : tiles < 2 * least ? 1 : smaller(tiles / least, gridDim.x);
    if (CLUSTER == 1 && rank >= blocks) return;

    auto page_of = [&](int tile) {  // of a tile's slots; block 0 after the last of them
        if constexpr (PAGE == 0) return 0;
        else return tile < tiles ? table[(size_t)b * S + (first + tile * 16) / PAGE] : 0;
    };

    // ---- the first tiles
    const u32 ring = warp * STAGES * C::STAGE;
    const unsigned char *k_mine = k_cache + g * C::ROW + C::k_piece(t, 0);
    const unsigned char *v_mine = v_cache + 2 * t * C::ROW + C::v_piece(g, 0), *its_scales = nullptr;
    bool has_scales = false;  // of codes, 16 scales of keys per tile, then those of values, four bytes a lane
    if constexpr (KV != 0)
        has_scales = lane < 8 * C::SCALE, its_scales = (lane < 4 * C::SCALE ? k_scales : v_scales) + lane % (4 * C::SCALE) * 4;
    const Thread thread{{qkv, k_cache, v_cache, table, cos_table, sin_table, q_norm, k_norm, sinks, y, partial, arrived,
                         k_scales, v_scales, S, HKV, window, least, scale, eps, shorter},
                        shared, shared, encoded, tops, totals, queries, query_sums, newest, warp, lane, g, t, rank, b, h, group,
                        pos, seen_from, first, tiles, last, blocks, ring, k_mine, v_mine, its_scales, has_scales, base, own};
    auto copy = [&](int stage, int tile, int page) { thread.copy(stage, tile, page); };
    if constexpr (WRITES == 0) previous_grid_wait();  // another layer has written slot `pos` in this step
    const int ROUND = WARPS * blocks;
    const int mine = warp * blocks + rank;  // this warp's first tile
#pragma unroll
    for (int u = 0; u < STAGES; u++) copy(u, mine + u * ROUND, page_of(mine + u * ROUND));
    int page = page_of(mine + STAGES * ROUND);  // of the tile to be copied next

    // ---- the token's heads
    const bool owner = WRITES && last % blocks == rank;  // some warp of this block has the newest tile
    const int newest_page = page_of(last);
    float4 head[ROUNDS];  // declared in the branch, ptxas gives codes other registers
    if constexpr (ROWS != 0 && Thread::WIDE > 1) {
        thread.wide_heads_of_rows();
    } else if constexpr (ROWS != 0) {
        thread.heads_of_rows(raw, turns);
    } else if constexpr (Thread::WIDE > 1) {
        thread.wide_heads(owner, newest_page);
    } else {
        const int part = threadIdx.x % LANES, of_warp = 32 / LANES * warp;
        const size_t angle = (size_t)pos * R + smaller(4 * part, R - 4);
        const float4 cos = Thread::four(cos_table + angle), sin = Thread::four(sin_table + angle);
        float4 q_weight = make_float4(1.f, 1.f, 1.f, 1.f), k_weight = q_weight;
        if constexpr (NORM == 1)
            q_weight = Thread::four((const u16*)q_norm + 4 * part), k_weight = Thread::four((const u16*)k_norm + 4 * part);
        if constexpr (NORM == 2) q_weight = ((const float4*)q_norm)[part], k_weight = ((const float4*)k_norm)[part];
        if constexpr (CLUSTER > 1) joined();
        previous_grid_wait();

        const int rows = owner ? G + 2 : G;  // queries, key, value
#pragma unroll
        for (int u = 0; u < ROUNDS; u++) {
            const int row = smaller(u * AHEAD + threadIdx.x / LANES, rows - 1);
            head[u] = Thread::four(qkv + thread.head_of(row) * D + 4 * part);
        }
#pragma unroll 1  // instructions that are fetched once per layer: fewer are faster
        for (int u = 0; u < ROUNDS; u++) {
            if (u * AHEAD + of_warp >= rows) break;
            const int row = u * AHEAD + threadIdx.x / LANES;
            const float4 raw = u == 0 ? head[0] : u == 1 ? head[1 % ROUNDS] : head[2 % ROUNDS];
            float4 x = prepared<D, R, NORM>(raw, row < G ? q_weight : k_weight, cos, sin, eps, part);
            if (row >= G + 1) x = raw;
            u32 low = from_floats<T>(x.x, x.y), high = from_floats<T>(x.z, x.w), scales = 0;
            if constexpr (KV != 0) {
                const float2 a = to_floats<T>(low), c = to_floats<T>(high);
                x = turned<D>(make_float4(a.x, a.y, c.x, c.y), part);
                low = from_floats<FP16>(x.x, x.y * C::ODD), high = from_floats<FP16>(x.z, x.w * C::ODD);
                const float2 d = to_floats<FP16>(low), e = to_floats<FP16>(high);
                const float sum = all<LANES>(d.x + d.y / C::ODD + e.x + e.y / C::ODD, [](float a, float b) { return a + b; });
                if (row < G && part == 0) query_sums[row] = sum * (1.f / C::FACTOR);
            }
            if (row < G) queries[(row * (D + 8) + 4 * part) / 4] = uint2{low, high};
            if (!owner || u * AHEAD + of_warp + 32 / LANES <= G) continue;
            if constexpr (KV != 0) encode<KV, D>(x, encoded + 32 * warp + lane / LANES * LANES, part, shorter, low, scales);
            if (row < G || row >= rows) continue;
            thread.write_newest(row, part, newest_page, low, high, scales);
        }
    }
    __syncthreads();

    // ---- this warp's tiles
    typename Thread::Queries q;
    thread.read_queries(q);
    typename Thread::Pair top = {Thread::NONE, Thread::NONE}, total = {}, rest = {}, q_sum = {};
    typename Thread::Values acc = {};
    thread.start_sums(top, total, q_sum);
    const float by = scale * C::FACTOR;
    int stage = 0;
    for (int tile = mine; tile < tiles; tile += ROUND) {
        const int start = first + tile * 16;
        const u32 at = ring + stage * C::STAGE, from = shared_address(shared) + at;
        copy_wait<STAGES - 1>();
        if constexpr (ROWS != 0) {
            if (start + 15 >= base) thread.insert_rows(at, start);
        } else if (WRITES && tile == last) thread.insert_newest(at, start);
        if constexpr (KV != 0) __syncwarp();  // scales are fetched for other lanes, too
        typename Thread::Keys k;
        typename Thread::CachedValues v;
        thread.read_keys(from, k);
        typename Thread::Scores score = {}, other = {}, p;  // two sums, as one waits for the mma before
#pragma unroll
        for (int s = 0; s < D / 16; s++) {
            u32 a[4];
            C::key(k[0], s, a[0], a[2]), C::key(k[1], s, a[1], a[3]);
            float (&d)[4] = s % 2 ? other : score;
            mma<Thread::MT>(d, a, q[s][0], q[s][1], d[0], d[1], d[2], d[3]);
        }
        typename Thread::Pair v_step, v_low;
        thread.scale_scores(from, q_sum, score, other, v_step, v_low);
        if constexpr (ROWS != 0) {
            if (start + 15 > base + own || tile <= 1) thread.hide_from_rows(start, score);
        } else if (tile == last || tile == 0) thread.hide(start, score);
        Thread::exponentials(score, by, v_step, v_low, top, total, rest, acc, p);
        const u32 p0 = transposed(from_floats<Thread::MT>(p[0], p[1])), p1 = transposed(from_floats<Thread::MT>(p[2], p[3]));
        thread.read_values(from, v);
        Thread::multiply_values(v, p0, p1, acc);
        copy(stage, tile + STAGES * ROUND, page);
        page = page_of(tile + (STAGES + 1) * ROUND);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // ---- sums over warps, then over blocks
    __syncthreads();  // every warp has read its last tile
    thread.leave_sums(top, total, rest, acc);
    __syncthreads();
    auto store = [&](int item, float4 sum, float whole) {
        if constexpr (Thread::GATED_HEADS) sum = thread.opened(item, sum);
        if constexpr (ROWS != 0) {  // a row's heads are side by side, not those of the block's rows
            const int row = smaller(item, ITEMS - 1) / (G * D / 4);
            Thread::store(y + (((size_t)(own + row) * HKV + h) * G - row * G) * D, item, sum, whole, lane);
        } else Thread::store(y + ((size_t)b * (HKV * SHARE) + group) * G * D, item, sum, whole, lane);
    };
    for (int item = threadIdx.x; item < Thread::ALL; item += WARPS * 32) {
        const int query = smaller(item, ITEMS - 1) / (D / 4), place = item % (D / 4);
        float most = tops[query], whole = 0.f;
#pragma unroll
        for (int w = 1; w < WARPS; w++) most = tops[w * Q + query] > most ? tops[w * Q + query] : most;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float share = exp2_of(tops[w * Q + query] - most);
            const float4 one = shared[(w * Q + query) * Thread::ROW / 4 + place];
            whole += totals[w * Q + query] * share;
            sum.x += one.x * share, sum.y += one.y * share, sum.z += one.z * share, sum.w += one.w * share;
        }
        if constexpr (CLUSTER == 1) {
            if (blocks == 1) {
                store(item, sum, whole);
            } else if (item < ITEMS) {
                float4* to = partial + ((size_t)blockIdx.y * gridDim.x + rank) * Thread::PARTIAL;
                to[item] = sum;
                if (place == 0) ((float2*)(to + ITEMS))[query] = make_float2(most, whole);
            }
        } else if (item < ITEMS) {
            const int there = rank * MINE + item % MINE;
            push(item / MINE, meeting, shared_address(inbox + there), sum);
            push(item / MINE, meeting, shared_address(inbox_sums + there), make_float2(most, whole));
        }
    }
    if constexpr (CLUSTER == 1) {
        if (blocks == 1) return;
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 before;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                         : "=r"(before) : "l"(arrived + blockIdx.y), "r"(1) : "memory");
            turn[0] = before;
        }
        __syncthreads();
        if (turn[0] + 1 != blocks) return;  // the last block to arrive adds up the parts of all
        const float4* first_part = partial + (size_t)blockIdx.y * gridDim.x * Thread::PARTIAL;
        for (int item = threadIdx.x; item < Thread::ALL; item += WARPS * 32) {
            const int there = smaller(item, ITEMS - 1);
            const float2* of_query = (const float2*)(first_part + ITEMS) + there / (D / 4);
            float most = Thread::NONE, whole = 0.f;
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
            for (int from = 0; from < blocks; from += AT_ONCE) {
                float2 its[AT_ONCE];
                float4 one[AT_ONCE];
                Thread::read_parts(first_part, of_query, there, from, blocks, its, one);
                float higher = most;
#pragma unroll
                for (int u = 0; u < AT_ONCE; u++) higher = its[u].x > higher ? its[u].x : higher;
                const float fade = exp2_of(most - higher);
                most = higher, whole *= fade;
                sum.x *= fade, sum.y *= fade, sum.z *= fade, sum.w *= fade;
#pragma unroll
                for (int u = 0; u < AT_ONCE; u++) {
                    const float share = from + u < blocks ? exp2_of(its[u].x - most) : 0.f;
                    whole += its[u].y * share;
                    sum.x += one[u].x * share, sum.y += one[u].y * share, sum.z += one[u].z * share, sum.w += one[u].w * share;
                }
            }
            store(item, sum, whole);
        }
        if (threadIdx.x == 0) arrived[blockIdx.y] = 0;
    }
    if constexpr (CLUSTER > 1) {
        if (rank * MINE >= ITEMS) return;
        barrier_wait(meeting, 0);
        constexpr int WHOLE = KV ? (MINE + 31) / 32 * 32 : MINE;
        for (int wanted = threadIdx.x; wanted < WHOLE; wanted += WARPS * 32) {
            const int item = smaller(wanted, MINE - 1);
            float whole;
            float4 sum;
            Thread::sum_inbox(inbox, inbox_sums, item, whole, sum);
            if (wanted < MINE || KV) store(wanted < MINE ? rank * MINE + item : ITEMS, sum, whole);
        }
    }
}
