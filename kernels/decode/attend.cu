// One token's q/k norm, RoPE, cache write and attention over its sequence's cache, in one kernel (attend_cuda.py launches it).
//
// Grid    (blocks of a key head, key heads of all sequences): a cluster of CLUSTER blocks, which meet in shared memory, or, for
//         long caches and many heads, CLUSTER 1 and up to gridDim.x blocks, one for each `least` tiles, which meet in global
//         memory (`partial`). Tiles of 16 slots go round the blocks, then round the warps of a block: a short text keeps as
//         many SMs busy as it has tiles.
// Warp    q K^T and V^T p^T by mma.sync straight from registers: the order of head dims inside a product is free, so a lane
//         reads 16 bytes of a slot and calls its pairs what it likes. K: lane (g, t) has dims 8 t + 32 j of slots g, g + 8; V:
//         dims 8 g + 64 i of slots 2 t, 2 t + 1, 2 t + 8, 2 t + 9. A score's accumulator is p's operand as it stands.
// New     the token's own k and v go from registers into the tile as well as into the cache: nobody reads slot `pos`.
// Early   position, tables and the first two tiles of every warp are fetched before the previous kernel has ended (they were
//         written in an earlier step): 1024 slots of a key head are on the multiprocessors when q arrives. By way of shared
//         memory: in registers there was room for one tile, and the second one cost 1.5 us (8B, 384 slots, clusters of 4).
// Sum     warps meet in shared memory, blocks push their parts to the block that owns a slice of y (distributed shared
//         memory): one cluster barrier, no trip to memory. Without a cluster the last block to arrive adds up. Every sum has a
//         fixed order.
// Paged   PAGE slots a block of the cache (0: a cache a sequence), found by `table`, S its width; tiles begin at multiples of 16,
//         so that none lies in two blocks, and a warp asks for the block of the tile after the next one a tile ahead.
// Codes   KV 8 or 4 (codes.cuh): q comes ready, and the newest slot is read like the others, both by another kernel (place.cu);
//         tiles begin at multiples of 16; y, summed as the values were turned, is turned back. No clusters.
// Limits  fp16 or bf16, PAGE a power of two from 16 up, D of 64 or 128, R a multiple of 64, G <= 8.
// Source  own; split-KV as in Flash-Decoding (Dao et al. 2023).
#include "codes.cuh"

__device__ __forceinline__ uint4 load16(const u16* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint4 read16(u32 shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float exp2_of(float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
    return e;
}
__device__ __forceinline__ u32 halves(u32 a, u32 b, int which) {  // the lower (0) or upper (1) halves of a and b
    return which ? (a >> 16) | (b & 0xffff0000u) : (a & 0xffffu) | (b << 16);
}
template <int T>
__device__ __forceinline__ void floats(const uint4& v, float (&f)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = to_floats<T>(word(v, i));
        f[2 * i] = two.x, f[2 * i + 1] = two.y;
    }
}
template <int T>
__device__ __forceinline__ uint4 packed(const float (&f)[8]) {
    return make_uint4(from_floats<T>(f[0], f[1]), from_floats<T>(f[2], f[3]), from_floats<T>(f[4], f[5]), from_floats<T>(f[6], f[7]));
}

// A lane's part of one head, dims 8 t + 32 j: normed (NORM 1: weights of type T, 2: fp32) and rotated in fp32, rounded once.
template <int T, int D, int R, int NORM>
__device__ __forceinline__ void prepare(uint4 (&row)[D / 32], const uint4 (&cos)[R / 32], const uint4 (&sin)[R / 32], const void* norm,
                                        float eps, int t) {
    float inverse = 1.f;
    if constexpr (NORM != 0) {
        float squares = 0.f;
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            float x[8];
            floats<T>(row[j], x);
#pragma unroll
            for (int i = 0; i < 8; i++) squares += x[i] * x[i];
        }
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        const float mean = squares * (1.f / D) + eps;
        asm("rsqrt.approx.f32 %0, %1;" : "=f"(inverse) : "f"(mean));
    }
    auto normed = [&](int j, float (&x)[8]) {
        floats<T>(row[j], x);
        if constexpr (NORM != 0) {
            const int at = 8 * t + 32 * j;
            float w[8];
            if constexpr (NORM == 1) {
                floats<T>(load16((const u16*)norm + at), w);
            } else {
                const uint4 a = load16((const u16*)norm + 2 * at), b = load16((const u16*)norm + 2 * at + 8);
#pragma unroll
                for (int i = 0; i < 4; i++) w[i] = __uint_as_float(word(a, i)), w[4 + i] = __uint_as_float(word(b, i));
            }
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] *= inverse * w[i];
        }
    };
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        if (j >= R / 64 && j < R / 32) continue;  // turned with the first of its pair
        float first[8], second[8];
        normed(j, first);
        if (j < R / 64) {
            normed(j + R / 64, second);
            float c[8], s[8], other[8];
            floats<T>(cos[j], c), floats<T>(sin[j], s);
#pragma unroll
            for (int i = 0; i < 8; i++) other[i] = first[i], first[i] = first[i] * c[i] - second[i] * s[i];
            floats<T>(cos[j + R / 64], c), floats<T>(sin[j + R / 64], s);
#pragma unroll
            for (int i = 0; i < 8; i++) second[i] = second[i] * c[i] + other[i] * s[i];
            row[j + R / 64] = packed<T>(second);
        }
        row[j] = packed<T>(first);
    }
}

template <int T, int D, int R, int G, int NORM, int WARPS, int CLUSTER, int PAGE, int KV>
__global__ void __launch_bounds__(WARPS * 32, WARPS == 8 ? 1 : 16 / WARPS)
attend(const u16* qkv, u16* k_cache, u16* v_cache, const int* positions, const int* table, const u16* cos_table, const u16* sin_table,
       const void* q_norm, const void* k_norm, const float* sinks, u16* y, float4* partial, u32* arrived, const unsigned char* k_scales,
       const unsigned char* v_scales, int S, int HKV, int window, int least, float scale, float eps) {
    using C = Held<KV, T, D>;
    constexpr int CH = D / 32, VH = D / 64, ROW = D + 4;  // 16-byte pieces of a K row and of a V row a lane has; padded sums
    constexpr int ITEMS = G * D / 4, MINE = ITEMS / CLUSTER;  // float4 of y, and those this block adds up at the end
    constexpr int STAGES = KV == 4 ? 4 : KV == 8 ? 3 : 2, PIECES = 2 * CH + 4 * VH;  // tiles in flight a warp; 16-byte pieces a lane has of a tile
    constexpr int PARTIAL = ITEMS + (G + 1) / 2;              // float4 a block leaves in global memory: sums, maximum and total
    constexpr float NONE = -1e30f;                            // the maximum of no scores: finite, so that differences stay numbers
    extern __shared__ float4 shared[];                        // [warp][stage][piece][lane] 16 bytes
    __shared__ float4 parts[WARPS * G * ROW / 4];             // [warp][query][dim]
    __shared__ float tops[WARPS * G];
    __shared__ float totals[WARPS * G];
    __shared__ float4 inbox[CLUSTER * MINE];  // [from block][item]
    __shared__ float2 inbox_sums[CLUSTER * MINE];
    __shared__ u32 turn[1];

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int rank = blockIdx.x, b = blockIdx.y / HKV, h = blockIdx.y % HKV;
    next_grid_launch();
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");  // who pushes must know that all run
    const int pos = positions[b], n = pos + 1, seen_from = n > window ? n - window : 0;
    const int first = PAGE || KV ? seen_from & ~15 : seen_from;
    const int tiles = (n - first + 15) / 16, last = tiles - 1;
    const int blocks = CLUSTER > 1 ? CLUSTER : tiles < 2 * least ? 1 : smaller(tiles / least, gridDim.x);
    if (CLUSTER == 1 && rank >= blocks) return;
    const size_t head = PAGE ? (size_t)h * PAGE * D : (size_t)blockIdx.y * S * D;
    const u16 *k_head = k_cache + head + 8 * t, *v_head = v_cache + head + 8 * g;
    auto page_of = [&](int tile) {  // of a tile's slots; block 0 after the last of them
        if constexpr (PAGE == 0) return 0;
        else return tile < tiles ? table[(size_t)b * S + (first + tile * 16) / PAGE] : 0;
    };
    auto place = [&](int page, int slot) {  // in values, from the head's first
        if constexpr (PAGE == 0) return (size_t)slot * D;
        else return ((size_t)page * HKV * PAGE + (slot & (PAGE - 1))) * D;
    };
    auto v_slot = [&](int i) { return 2 * t + (i & 1) + 8 * (i >> 1); };
    // A tile on its way: every lane fetches its own pieces to places of its own, so no other thread need be waited for.
    const u32 ring = shared_address(shared) + (KV ? warp * STAGES * C::STAGE : warp * STAGES * PIECES * 512 + lane * 16);
    auto fetch = [&](u32 to, const u16* from, bool there) { copy_async_or_zero(to, there ? from : k_cache, there ? 16 : 0); };
    auto copy = [&](int stage, int tile, int page) {
        if constexpr (KV != 0) {
            const unsigned char *k_codes = (const unsigned char*)k_cache, *v_codes = (const unsigned char*)v_cache;
            const u32 to = ring + stage * C::STAGE;
            auto row = [&](int slot) {  // in slots, from the cache's first
                if constexpr (PAGE == 0) return (size_t)blockIdx.y * S + slot;
                else return ((size_t)page * HKV + h) * PAGE + (slot & (PAGE - 1));
            };
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int slot = first + tile * 16 + g + 8 * i;
#pragma unroll
                for (int j = 0; j < C::K_PIECES; j++) {
                    const u32 at = to + ((i * C::K_PIECES + j) * 32 + lane) * C::K_BYTES;
                    copy_or_zero<C::K_BYTES>(at, k_codes + (slot < n ? row(slot) * C::ROW + C::k_piece(t, j) : 0), slot < n);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int slot = first + tile * 16 + v_slot(i);
                const u32 at = to + C::K_AT + (i * 32 + lane) * C::V_BYTES;
                copy_or_zero<C::V_BYTES>(at, v_codes + (slot < n ? row(slot) * C::ROW + C::V_BYTES * g : 0), slot < n);
            }
            const int which = lane / (4 * C::SCALE), slot = first + tile * 16 + lane % (4 * C::SCALE) * 4 / C::SCALE;
            if (which < 2)  // 16 scales of keys, then those of values: slots past the last may be others', and are not looked at
                copy_or_zero<4>(to + C::K_AT + C::V_AT + 4 * lane, (which ? v_scales : k_scales) + (slot < n ? row(slot) * C::SCALE : 0), slot < n);
            copy_commit();
            return;
        }
        const u32 to = ring + stage * PIECES * 512;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int slot = first + tile * 16 + g + 8 * i;
#pragma unroll
            for (int j = 0; j < CH; j++) fetch(to + (i * CH + j) * 512, k_head + place(page, slot) + 32 * j, slot < pos);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int slot = first + tile * 16 + v_slot(i);
#pragma unroll
            for (int j = 0; j < VH; j++) fetch(to + (2 * CH + i * VH + j) * 512, v_head + place(page, slot) + 64 * j, slot < pos);
        }
        copy_commit();
    };
    const int ROUND = WARPS * blocks;
    const int mine = warp * blocks + rank;  // this warp's first tile
    auto copy_first = [&](bool newest) {  // of codes, the tile with the newest slot is there once the previous kernel has ended
#pragma unroll
        for (int u = 0; u < STAGES; u++)
            if (KV == 0 || mine + u * ROUND >= last == newest) copy(u, mine + u * ROUND, page_of(mine + u * ROUND));
    };
    copy_first(false);
    int page = page_of(mine + STAGES * ROUND);  // of the tile to be copied next
    uint4 cos[R / 32], sin[R / 32];
#pragma unroll
    for (int j = 0; j < (KV ? 0 : R / 32); j++) {
        cos[j] = load16(cos_table + (size_t)pos * R + 8 * t + 32 * j);
        sin[j] = load16(sin_table + (size_t)pos * R + 8 * t + 32 * j);
    }
    if constexpr (NORM != 0 && KV == 0) {  // into L1, for `prepare`
        load16((const u16*)q_norm + NORM * 8 * lane % (NORM * D));
        load16((const u16*)k_norm + NORM * 8 * lane % (NORM * D));
    }
    previous_grid_wait();

    bool owner = false;
    uint4 q[CH], new_k[CH], new_v[VH];
    u32 q_codes[2 * C::K_WORDS * (KV == 4 ? 2 : 1)];  // operands of q k^T, two a step
    float q_sum = 0.f, rest = 0.f;                    // of query g; of p * low
    if constexpr (KV != 0) {
        copy_first(true);
        const u16* row = qkv + ((size_t)blockIdx.y * G + smaller(g, G - 1)) * D;
#pragma unroll
        for (int m = 0; m < C::K_WORDS; m++) {
            u32 x[4];
            const u16* at = row + C::k_dim(t, m);
            asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(at) : "memory");
            if constexpr (KV == 4) asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(x[2]), "=r"(x[3]) : "l"(at + 4) : "memory");
#pragma unroll
            for (int i = 0; i < (KV == 4 ? 4 : 2); i++) {
                const float2 two = to_floats<T>(x[i]);
                q_sum += two.x + two.y;
            }
#pragma unroll
            for (int s = 0; s < (KV == 4 ? 2 : 1); s++) {
                const int at = 2 * (m * (KV == 4 ? 2 : 1) + s);
                C::query(x, s, q_codes[at], q_codes[at + 1]);
            }
        }
        q_sum += __shfl_xor_sync(0xffffffffu, q_sum, 1);
        q_sum += __shfl_xor_sync(0xffffffffu, q_sum, 2);
    } else {
        const u16* token = qkv + (size_t)b * (G + 2) * HKV * D;
        owner = last % ROUND == mine;  // this warp's last tile is the one with the new token
#pragma unroll
        for (int j = 0; j < CH; j++) q[j] = load16(token + (size_t)(h * G + smaller(g, G - 1)) * D + 8 * t + 32 * j);
        if (owner) {
#pragma unroll
            for (int j = 0; j < CH; j++) new_k[j] = load16(token + (size_t)(HKV * G + h) * D + 8 * t + 32 * j);
#pragma unroll
            for (int j = 0; j < VH; j++) new_v[j] = load16(token + (size_t)(HKV * G + HKV + h) * D + 8 * g + 64 * j);
        }
        prepare<T, D, R, NORM>(q, cos, sin, q_norm, eps, t);
        if (owner) {
            prepare<T, D, R, NORM>(new_k, cos, sin, k_norm, eps, t);
            const size_t here = head + place(page_of(last), pos);
            if (g == 0)
#pragma unroll
                for (int j = 0; j < CH; j++) *(uint4*)(k_cache + here + 8 * t + 32 * j) = new_k[j];
            if (t == 0)
#pragma unroll
                for (int j = 0; j < VH; j++) *(uint4*)(v_cache + here + 8 * g + 64 * j) = new_v[j];
        }
    }

    float top = NONE, total = 0.f, acc[VH][4][4] = {};  // [..][j][c]: query 2 t + c % 2, dim 8 g + 2 j + c / 2, plus 64 h
    if (sinks != nullptr && rank == 0 && warp == 0 && g < G)  // one score more, without a value
        top = sinks[h * G + g] * 1.44269504f, total = t == 0 ? 1.f : 0.f;
    int stage = 0;
    for (int tile = mine; tile < tiles; tile += ROUND) {
        const int start = first + tile * 16;
        const u32 from = ring + stage * (KV ? C::STAGE : PIECES * 512);
        copy_wait<STAGES - 1>();
        uint4 k[2][CH], v[4][VH];
        float v_step[2][2], v_low[2][2];
        float score[2][4] = {};
        if constexpr (KV != 0) {
            __syncwarp();  // scales are fetched for other lanes, too
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 w[C::K_WORDS];
#pragma unroll
                for (int j = 0; j < C::K_PIECES; j++)
                    read_words<C::K_BYTES>(w + j * C::K_BYTES / 4, from + ((i * C::K_PIECES + j) * 32 + lane) * C::K_BYTES);
#pragma unroll
                for (int m = 0; m < C::K_WORDS; m++)
#pragma unroll
                    for (int s = 0; s < (KV == 4 ? 2 : 1); s++) {
                        const int at = 2 * (m * (KV == 4 ? 2 : 1) + s);
                        const u32 a[4] = {q_codes[at], 0, q_codes[at + 1], 0};
                        u32 b0, b1;
                        C::key(w[m], s, b0, b1);
                        mma<T>(score[i], a, b0, b1, score[i][0], score[i][1], 0.f, 0.f);
                    }
                float step[2], low[2];
                C::scales(from + C::K_AT + C::V_AT, 2 * t + 8 * i, step, low);
                C::scales(from + C::K_AT + C::V_AT + 16 * C::SCALE, 2 * t + 8 * i, v_step[i], v_low[i]);
#pragma unroll
                for (int c = 0; c < 2; c++)
                    score[i][c] = score[i][c] * C::FACTOR * step[c] + q_sum * (low[c] - C::MORE * step[c]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < CH; j++) {
                    k[i][j] = read16(from + (i * CH + j) * 512);
                    if (start + g + 8 * i == pos) k[i][j] = new_k[j];
                }
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < CH; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const u32 a[4] = {word(q[j], 2 * half), 0, word(q[j], 2 * half + 1), 0};
                        mma<T>(score[i], a, word(k[i][j], 2 * half), word(k[i][j], 2 * half + 1), score[i][0], score[i][1], 0.f, 0.f);
                    }
        }
        float higher = top;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int slot = start + 8 * i + 2 * t + c;
                score[i][c] = slot <= pos && ((PAGE == 0 && KV == 0) || slot >= seen_from) ? score[i][c] * scale : 2.f * NONE;
                higher = score[i][c] > higher ? score[i][c] : higher;
            }
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, higher, d);
            higher = other > higher ? other : higher;
        }
        const float fade = exp2_of(top - higher);
        top = higher, total *= fade;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) score[i][c] = exp2_of(score[i][c] - top), total += score[i][c];
        if constexpr (KV != 0) {
            rest *= fade;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    rest += score[i][c] * v_low[i][c] * C::UNIT;
                    score[i][c] *= v_step[i][c] * C::UNIT;
                }
        }
        const u32 p0 = from_floats<T>(score[0][0], score[0][1]), p1 = from_floats<T>(score[1][0], score[1][1]);
        const float fade0 = __shfl_sync(0xffffffffu, fade, 8 * t), fade1 = __shfl_sync(0xffffffffu, fade, 8 * t + 4);
        if constexpr (KV != 0) {
            if constexpr (C::MORE != 0.f) {
                const float2 one = to_floats<T>(p0), two = to_floats<T>(p1);
                rest -= C::MORE * (one.x + one.y + two.x + two.y);
            }
            u32 w[4][C::V_WORDS];
#pragma unroll
            for (int i = 0; i < 4; i++) read_words<C::V_BYTES>(w[i], from + C::K_AT + (i * 32 + lane) * C::V_BYTES);
#pragma unroll
            for (int m = 0; m < D / 16; m++) {  // two dims of a lane each
                u32 a[4];
                const int at = KV == 4 ? m / 4 : m / 2, byte = KV == 4 ? m % 4 : 2 * (m % 2);
                C::values(w[0][at], w[1][at], byte, a[0], a[1]);
                C::values(w[2][at], w[3][at], byte, a[2], a[3]);
                float(&sum)[4] = acc[m / 4][m % 4];
                mma<T>(sum, a, p0, p1, sum[0] * fade0, sum[1] * fade1, sum[2] * fade0, sum[3] * fade1);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < VH; j++) {
                    v[i][j] = read16(from + (2 * CH + i * VH + j) * 512);
                    if (start + v_slot(i) == pos) v[i][j] = new_v[j];
                }
#pragma unroll
            for (int i = 0; i < VH; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const u32 a[4] = {halves(word(v[0][i], j), word(v[1][i], j), 0), halves(word(v[0][i], j), word(v[1][i], j), 1),
                                      halves(word(v[2][i], j), word(v[3][i], j), 0), halves(word(v[2][i], j), word(v[3][i], j), 1)};
                    float(&sum)[4] = acc[i][j];
                    mma<T>(sum, a, p0, p1, sum[0] * fade0, sum[1] * fade1, sum[2] * fade0, sum[3] * fade1);
                }
        }
        copy(stage, tile + STAGES * ROUND, page);
        page = page_of(tile + (STAGES + 1) * ROUND);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if constexpr (KV != 0) {
        rest += __shfl_xor_sync(0xffffffffu, rest, 1);
        rest += __shfl_xor_sync(0xffffffffu, rest, 2);
        const float rests[2] = {__shfl_sync(0xffffffffu, rest, 8 * t), __shfl_sync(0xffffffffu, rest, 8 * t + 4)};
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[m / 4][m % 4][c] = acc[m / 4][m % 4][c] * (C::FACTOR / C::UNIT) + rests[c & 1] * (1.f / C::UNIT);
    }

#pragma unroll
    for (int c = 0; c < 2; c++)
        if (2 * t + c < G)
#pragma unroll
            for (int i = 0; i < VH; i++)
#pragma unroll
                for (int j = 0; j < 4; j += 2)
                    parts[((warp * G + 2 * t + c) * ROW + (KV ? D / 8 * g + 8 * i : 64 * i + 8 * g) + 2 * j) / 4] =
                        make_float4(acc[i][j][c], acc[i][j][2 + c], acc[i][j + 1][c], acc[i][j + 1][2 + c]);
    if (g < G && t == 0) tops[warp * G + g] = top, totals[warp * G + g] = total;
    __syncthreads();
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    constexpr int ALL = KV == 4 ? (ITEMS + 31) / 32 * 32 : ITEMS;  // turning takes whole warps: some do the last item again
    auto store = [&](int item, float4 sum, float whole) {
        if constexpr (KV == 4) sum = turned<D>(sum, lane);
        if (item >= ITEMS) return;
        const float inverse = 1.f / whole;
        u32* to = (u32*)(y + (size_t)blockIdx.y * G * D + 4 * item);
        to[0] = from_floats<T>(sum.x * inverse, sum.y * inverse);
        to[1] = from_floats<T>(sum.z * inverse, sum.w * inverse);
    };
    for (int item = threadIdx.x; item < ALL; item += WARPS * 32) {
        const int query = smaller(item, ITEMS - 1) / (D / 4), place = item % (D / 4);
        float most = tops[query], whole = 0.f;
#pragma unroll
        for (int w = 1; w < WARPS; w++) most = tops[w * G + query] > most ? tops[w * G + query] : most;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float share = exp2_of(tops[w * G + query] - most);
            const float4 one = parts[(w * G + query) * ROW / 4 + place];
            whole += totals[w * G + query] * share;
            sum.x += one.x * share, sum.y += one.y * share, sum.z += one.z * share, sum.w += one.w * share;
        }
        if constexpr (CLUSTER == 1) {
            if (blocks == 1) {
                store(item, sum, whole);
            } else if (item < ITEMS) {
                float4* own = partial + ((size_t)blockIdx.y * gridDim.x + rank) * PARTIAL;
                own[item] = sum;
                if (place == 0) ((float2*)(own + ITEMS))[query] = make_float2(most, whole);
            }
        } else {
            const int there = rank * MINE + item % MINE;
            u32 at, at_sums;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(inbox + there)), "r"(item / MINE));
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at_sums) : "r"(shared_address(inbox_sums + there)), "r"(item / MINE));
            asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(at_sums), "f"(most), "f"(whole) : "memory");
        }
    }
    if constexpr (CLUSTER == 1) {
        if (blocks == 1) return;
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 before;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrived + blockIdx.y), "r"(1) : "memory");
            turn[0] = before;
        }
        __syncthreads();
        if (turn[0] + 1 != blocks) return;
        const float4* first_part = partial + (size_t)blockIdx.y * gridDim.x * PARTIAL;
        for (int item = threadIdx.x; item < ALL; item += WARPS * 32) {
            const int there = smaller(item, ITEMS - 1);
            const float2* of_query = (const float2*)(first_part + ITEMS) + there / (D / 4);
            float most = NONE, whole = 0.f;
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
            for (int from = 0; from < blocks; from += 8) {  // eight parts asked for at once: one trip to memory
                float2 its[8];
                float4 one[8];
#pragma unroll
                for (int u = 0; u < 8; u++) {
                    const int r = smaller(from + u, blocks - 1);
                    its[u] = of_query[r * PARTIAL * 2], one[u] = first_part[r * PARTIAL + there];
                }
                float higher = most;
#pragma unroll
                for (int u = 0; u < 8; u++) higher = its[u].x > higher ? its[u].x : higher;
                const float fade = exp2_of(most - higher);
                most = higher, whole *= fade;
                sum.x *= fade, sum.y *= fade, sum.z *= fade, sum.w *= fade;
#pragma unroll
                for (int u = 0; u < 8; u++) {
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
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
        for (int item = threadIdx.x; item < MINE; item += WARPS * 32) {
            float most = inbox_sums[item].x, whole = 0.f;
#pragma unroll
            for (int r = 1; r < CLUSTER; r++) most = inbox_sums[r * MINE + item].x > most ? inbox_sums[r * MINE + item].x : most;
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int r = 0; r < CLUSTER; r++) {
                const float share = exp2_of(inbox_sums[r * MINE + item].x - most);
                const float4 one = inbox[r * MINE + item];
                whole += inbox_sums[r * MINE + item].y * share;
                sum.x += one.x * share, sum.y += one.y * share, sum.z += one.z * share, sum.w += one.w * share;
            }
            store(rank * MINE + item, sum, whole);
        }
    }
}
