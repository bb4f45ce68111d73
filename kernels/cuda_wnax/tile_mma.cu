// y[M,N] = x[M,K] @ dequantize(W)^T + bias for small M: W is the A operand of mma.sync, x^T the B operand.
//
// Grid    x: as many blocks as the GPU holds at once (times SPLIT), each with an equal share of the units; a unit is NT
//         row tiles of 16. y: blocks of `block_rows` rows of x.
// Block   the steps (STEP k of a unit) of all its units are one list, cut into WARPS equal runs: a warp streams through its
//         run, STAGES steps ahead by cp.async into its own ring, and stops for nobody. (Loads into registers cannot be that
//         far ahead: a warp has six scoreboards, and waiting for one load waits for all that share its scoreboard.) A unit
//         that one warp finishes goes straight to y; the ends of runs meet in shared memory at the end.
// Cluster SPLIT blocks share their units and split K; one sum over distributed shared memory at the very end.
// Warp    raw codes go into the mma; per flush of FG fragments the fp32 sums are scaled by the group's scale, and sum(x),
//         which a constant A fragment yields, by scale * zero.
// x       travels with the weights, a step at a time, through L1: a block meets all of x again with every unit. Fetched
//         whole at the start instead, it delayed the first product by 1 to 3 us. Rows of a step are 16 bytes longer than a
//         multiple of 128, so ldmatrix meets no bank conflict.
// Limits  K a multiple of 8; GROUP a multiple of 16, or 0: one group.
// Launch  weights do not depend on the kernel before, x does: with programmatic dependent launch the first weights are on
//         their way while that kernel drains. Every sum has a fixed order: equal bits on every run.
// Source  own; the fragment-ordered layout is Marlin's idea, y^T = W x^T Machete's.
#include "tile.cuh"

template <int BITS, int T, int GROUP, bool ZEROS, int WARPS, int NT, int STAGES, int MT, int SPLIT, int RESIDENT>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT)
tile_mma(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
         const u16* __restrict__ bias, const u16* __restrict__ x, u16* __restrict__ y, int M, int N, int K, int chunks,
         int groups, int units, int block_rows) {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    constexpr int STEP = L::CHUNK < 128 ? 128 : L::CHUNK, CHUNKS = STEP / L::CHUNK, FRAGS = STEP / 16;
    // fragments between two flushes: all of one group; x of a flush is held in registers, so at most 8 / MT of them
    constexpr int FG = gcd(gcd(GROUP ? GROUP / 16 : FRAGS, FRAGS), MT == 1 ? 8 : MT == 2 ? 4 : 2);
    constexpr int FLUSHES = FRAGS / FG;
    constexpr int METAS = GROUP == 0 || GROUP % STEP == 0 ? 1 : STEP / gcd(GROUP, STEP);  // groups a step meets
    constexpr int PER = FLUSHES > METAS ? FLUSHES / METAS : 1;                            // flushes that share a group
    constexpr int KINDS = ZEROS ? 2 : 1;
    constexpr int META_AT = CHUNKS * L::WORDS * 4, SLOT = META_AT + METAS * KINDS * 32;  // bytes of a tile's step
    constexpr int X_ROW = STEP * 2 + 16;
    constexpr int E = NT * MT * 128;  // fp32 sums of a unit: [t][m][register][lane]
    extern __shared__ float4 shared[];
    __shared__ uint4 constant[C::PLACES];  // constant A fragments: rows 0-7 yield -magic * x, rows 8-15 x
    __shared__ u32 mask[C::PLACES];

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2;
    const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, team = blockIdx.x / SPLIT, teams = gridDim.x / SPLIT;
    const int m0 = blockIdx.y * block_rows, rows = smaller(M - m0, block_rows);
    const int steps = (chunks + CHUNKS - 1) / CHUNKS, share = (steps + SPLIT - 1) / SPLIT;
    const int begin = smaller(rank * share, steps), part = smaller(share, steps - begin);  // this block's steps of a row
    const int more = units % teams, unit0 = units / teams * team + smaller(team, more), my_units = units / teams + (team < more);
    const int all = my_units * part;
    auto run_start = [&](int w) { return (int)((u32)(w * all) / WARPS); };
    const int q0 = run_start(warp), q1 = run_start(warp + 1);
    const int first_unit = part ? (u32)q0 / (u32)part : 0;
    const int slot_bytes = NT * SLOT + block_rows * X_ROW;
    const u32 ring = shared_address(shared) + warp * STAGES * slot_bytes;
    float* sums_at = (float*)((char*)shared + WARPS * STAGES * slot_bytes);  // [WARPS][2][E]: the ends of runs
    float* total_at = sums_at + WARPS * 2 * E;                               // [my_units][E], where SPLIT > 1

    // ------------------------------------------------------------------------------------------- copies of a step
    const int tile_words = chunks * L::WORDS;
    int next_w = part ? q0 - first_unit * part : 0, next_x = next_w;  // steps of the row that the copies take next
    const u32* w_tile = words + (size_t)(unit0 + first_unit) * NT * tile_words + (begin + next_w) * CHUNKS * L::WORDS;
    // scales and zeros: 32 bytes for each tile, group and kind, two lanes each
    const int entry = lane >> 1;
    const u16* meta_tile = (ZEROS && entry % KINDS ? zeros : scales) + (size_t)(unit0 + first_unit) * NT * groups * 16 + lane % 2 * 8;
    constexpr int GRANULES = STEP / 8, ROWS_AT_ONCE = 32 / GRANULES;  // of x: 16 bytes each; rows that a warp copies at once
    const int x_k = lane % GRANULES * 8, x_row = lane / GRANULES;
    const u16* x_lane = x + (size_t)(m0 + x_row) * K + x_k;
    asm volatile("" : "+l"(w_tile), "+l"(meta_tile), "+l"(x_lane));  // else they are recomputed at every use
    auto copy_weights = [&](int u) {
        const u32 slot = ring + u * slot_bytes;
        const int c = (begin + next_w) * CHUNKS;
#pragma unroll
        for (int t = 0; t < NT; t++) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (i == 0 || c + i < chunks) copy_chunk<BITS>(slot + t * SLOT + i * L::WORDS * 4, w_tile + t * tile_words + i * L::WORDS, lane);
#pragma unroll
            for (int i = 0; i < METAS * KINDS; i += 16)
                if (entry + i < METAS * KINDS) {
                    const int k0 = c * L::CHUNK + (entry + i) / KINDS * (STEP / METAS);
                    const int g = GROUP == 0 ? 0 : smaller((u32)k0 / (GROUP ? GROUP : 1), groups - 1);
                    copy_async<16>(slot + t * SLOT + META_AT + (entry + i) * 32 + lane % 2 * 16, meta_tile + (t * groups + g) * 16);
                }
        }
        w_tile += CHUNKS * L::WORDS;
        if (++next_w == part) {
            next_w = 0;
            w_tile += (NT * chunks - part * CHUNKS) * L::WORDS;
            meta_tile += NT * groups * 16;
        }
    };
    auto copy_x = [&](int u) {
        const u32 to = ring + u * slot_bytes + NT * SLOT + x_row * X_ROW + x_k * 2;
        const int k = (begin + next_x) * STEP;
        const int bytes = k + x_k < K ? 16 : 0;  // past K: zeros
        const u16* from = bytes ? x_lane + k : x;
#pragma unroll
        for (int i = 0; i < MT * 8 / ROWS_AT_ONCE; i++) {
            if (i * ROWS_AT_ONCE >= rows) break;
            if (x_row + i * ROWS_AT_ONCE < rows) copy_async_or_zero(to + i * ROWS_AT_ONCE * X_ROW, bytes ? from + (size_t)(i * ROWS_AT_ONCE) * K : x, bytes);
        }
        if (++next_x == part) next_x = 0;
    };

    if (threadIdx.x == 0) {
        C::Masks::store(mask);
#pragma unroll
        for (int i = 0; i < C::PLACES; i++) constant[i] = make_uint4(C::minus_magic(i), Half<T>::ONE, C::minus_magic(i), Half<T>::ONE);
    }
    constexpr int EARLY = (STAGES + 1) / 2;  // copies complete in order: what is asked for before x delays the first x
#pragma unroll
    for (int u = 0; u < EARLY; u++)
        if (q0 + u < q1) copy_weights(u);
    previous_grid_wait();
#pragma unroll
    for (int u = 0; u < STAGES; u++) {
        if (u >= EARLY && q0 + u < q1) copy_weights(u);
        if (q0 + u < q1) copy_x(u);
        copy_commit();
    }
    __syncthreads();
    next_grid_launch();

    // ------------------------------------------------------------------------------------------------- one step
    u32 x_at[MT];  // ldmatrix: this lane's row (rows past the last repeat it: those columns are never stored)
#pragma unroll
    for (int m = 0; m < MT; m++) {
        x_at[m] = ring + NT * SLOT + smaller(m * 8 + (lane & 7), rows - 1) * X_ROW + (lane >> 3) * 16;
        asm volatile("" : "+r"(x_at[m]));
    }
    typename C::Masks masks;
    masks.load(mask);
    auto load_constant = [&](u32 (&a)[4], int place) {
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(constant + place)));
    };
    constexpr bool KEEP = C::PLACES <= 2 && RESIDENT * WARPS <= 16;  // registers to spare; else one load a use
    u32 kept[KEEP ? C::PLACES : 1][4];
#pragma unroll
    for (int i = 0; i < (KEEP ? C::PLACES : 0); i++) load_constant(kept[i], i);

    float acc[NT][MT][4] = {};
    auto compute = [&](int u) {
        const u32 slot = ring + u * slot_bytes;
        u32 w[NT][CHUNKS][L::REGS];
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) read_chunk<BITS>(slot + t * SLOT + i * L::WORDS * 4, lane, w[t][i]);
#pragma unroll
        for (int i = 0; i < FLUSHES; i++) {
            if (i) __syncwarp();  // keeps ptxas from hoisting the loads of all flushes to the top: 255 registers and spills
            u32 b[FG][MT][2];
            float sums[MT][4];  // 0, 1: -sum(magic * x) of the lane's two columns; 2, 3: sum(x)
#pragma unroll
            for (int f = 0; f < FG; f++) {
                const int at = i * FG + f, place = C::p(at % L::FRAGS) / C::FIELD;
                u32 a[4];
                if constexpr (!KEEP) load_constant(a, place);
                else a[0] = kept[place][0], a[1] = kept[place][1], a[2] = kept[place][2], a[3] = kept[place][3];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    if (FG == 1 || f % 2 == 0) {
                        u32 four[4];
                        load_matrix4(four, x_at[m] + u * slot_bytes + (at >> 1) * 64);
                        b[f][m][0] = four[FG == 1 ? at % 2 * 2 : 0], b[f][m][1] = four[FG == 1 ? at % 2 * 2 + 1 : 1];
                        if (FG > 1) b[f + (FG > 1)][m][0] = four[2], b[f + (FG > 1)][m][1] = four[3];
                    }
                    if (f == 0) mma<T>(sums[m], a, b[f][m][0], b[f][m][1], 0.f, 0.f, 0.f, 0.f);
                    else mma<T>(sums[m], a, b[f][m][0], b[f][m][1], sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
                }
            }
#pragma unroll
            for (int t = 0; t < NT; t++) {
                float sum[MT][4];
#pragma unroll
                for (int f = 0; f < FG; f++) {
                    const int at = i * FG + f;
                    u32 a[4];
                    C::fragment(w[t][at / L::FRAGS], at % L::FRAGS, masks, a);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        if (f == 0) mma<T>(sum[m], a, b[f][m][0], b[f][m][1], sums[m][0], sums[m][1], sums[m][0], sums[m][1]);
                        else mma<T>(sum[m], a, b[f][m][0], b[f][m][1], sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
                    }
                }
                const u32 meta = slot + t * SLOT + META_AT + (i / PER) * KINDS * 32 + 4 * r;
                const float2 scale = to_floats<T>(read4(meta));
                float2 zero = make_float2(mid<BITS>(), mid<BITS>());
                if (ZEROS) zero = to_floats<T>(read4(meta + 32));
                const float minus_x = -zero.x * scale.x, minus_y = -zero.y * scale.y;
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float with_scale = __fmaf_rn(j < 2 ? scale.x : scale.y, sum[m][j], acc[t][m][j]);
                        acc[t][m][j] = __fmaf_rn(j < 2 ? minus_x : minus_y, sums[m][2 + j % 2], with_scale);
                    }
                }
            }
        }
    };

    // ---------------------------------------------------------------------------------------------- ends of units
    // Sum number e of unit j (place [t][m][register][lane] of E) is final: to y.
    auto store = [&](int j, int e, float v) {
        const int l = e & 31, i = (e >> 5) & 3, m = (e >> 7) % MT, t = (e >> 7) / MT;
        const int row = m * 8 + 2 * (l & 3) + (i & 1), column = ((unit0 + j) * NT + t) * 16 + (l >> 2) + 8 * (i >> 1);
        if (row >= rows || column >= N) return;
        if (bias) v += to_floats<T>(bias[column]).x;
        y[(size_t)(m0 + row) * N + column] = (u16)from_floats<T>(v, 0.f);
    };
    auto finish = [&](int j) {  // the sums of a run's part of unit j: straight to y where the run holds all of it
        const bool whole = j * part >= q0 && (j + 1) * part <= q1;
        float* to = SPLIT > 1 && whole ? total_at + j * E : sums_at + (warp * 2 + (j != first_unit)) * E;
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) to[((t * MT + m) * 4 + i) * 32 + lane] = acc[t][m][i], acc[t][m][i] = 0.f;
        if (SPLIT == 1 && whole)
#pragma unroll 1
            for (int e = lane; e < E; e += 32) store(j, e, to[e]);
    };

    int j = first_unit, c = part ? q0 - first_unit * part : 0;
    for (int q = q0; q < q1; q += STAGES) {
#pragma unroll
        for (int u = 0; u < STAGES; u++) {
            if (q + u < q1) {
                copy_wait<STAGES - 1>();
                __syncwarp();
                compute(u);
                __syncwarp();  // everyone has read this slot
                if (q + u + STAGES < q1) copy_weights(u), copy_x(u);
                copy_commit();
                if (++c == part || q + u + 1 == q1) finish(j), j++, c = 0;
            }
        }
    }

    // Units that several runs share: one warp each, in the order of the runs. Integer divisions are what costs here (in 64
    // bits, and by all threads for every unit, this loop took 7 of 36 us at 28672 x 4096).
    __syncthreads();
    for (int j = warp; j < my_units; j += WARPS) {
        const int w0 = all ? (int)(((u32)(j * part + 1) * WARPS - 1) / (u32)all) : 0;
        float v[E / 32] = {};
        int w1 = w0;
        for (int k = w0; k < WARPS && run_start(k) < (j + 1) * part; k++) {
            w1 = k;
            if (run_start(k) < run_start(k + 1)) {
                const float* from = sums_at + (k * 2 + (run_start(k) < j * part)) * E + lane;
#pragma unroll
                for (int i = 0; i < E / 32; i++) v[i] += from[i * 32];
            }
        }
        if (w0 == w1 && all) continue;  // one run held it all
#pragma unroll
        for (int i = 0; i < E / 32; i++) {
            if constexpr (SPLIT == 1) store(j, i * 32 + lane, v[i]);
            else total_at[j * E + i * 32 + lane] = v[i];
        }
    }
    if constexpr (SPLIT > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
        for (int e = rank * WARPS * 32 + threadIdx.x; e < my_units * E; e += SPLIT * WARPS * 32) {
            float v = 0.f;
#pragma unroll
            for (int k = 0; k < SPLIT; k++) {
                u32 there;
                float one;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(total_at + e)), "r"(k));
                asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(one) : "r"(there) : "memory");
                v += one;
            }
            store(e / E, e % E, v);
        }
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }
}
