// y[M,N] = x[M,K] @ dequantize(W)^T + bias for small M: W is the A operand of mma.sync, x^T the B operand.
//
// Grid    x: (row tiles / NT) * SPLIT, y: ceil(M / (8*MT)). A block owns NT tiles of 16 rows of W and 8*MT rows of x.
// Block   WARPS warps split K chunk by chunk; SPLIT blocks of one cluster take contiguous parts of K.
// Warp    weights go straight from global memory to registers, STAGES chunks ahead. Raw codes go into the mma; per flush
//         of FG fragments the fp32 partial sums are scaled by the group's scale, and sum(x), which a constant A fragment
//         yields, by scale * zero.
// x       in shared memory: all of it where it fits, else two panels of `panel` chunks in turn. Rows are 16 bytes longer
//         than a multiple of 128, so ldmatrix meets no bank conflict. On sm_90 one bulk copy a row fetches a panel
//         (copying 16 bytes a thread cost more instructions than the matrix work: 85 of 210 a chunk).
// Sums    across warps through shared memory, across the cluster through distributed shared memory, in a fixed order.
// Limits  K a multiple of the chunk (the launcher pads x otherwise); GROUP a multiple of 16, or 0: one group.
// Launch  weights do not depend on the kernel before, x does: with programmatic dependent launch the first STAGES chunks
//         of weights are on their way while that kernel drains.
// Source  own; the fragment-ordered layout is Marlin's idea, y^T = W x^T Machete's.
#include "tile.cuh"

template <int BITS, int T, int GROUP, bool ZEROS, int WARPS, int NT, int STAGES, int MT, int SPLIT, int RESIDENT>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT)
tile_mma(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
         const u16* __restrict__ bias, const u16* __restrict__ x, u16* __restrict__ y, int M, int N, int K, int groups, int panel) {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    // fragments between two flushes: all of one group; x of a flush is held in registers, so at most 8 / MT of them
    constexpr int FG = gcd(gcd(GROUP ? GROUP / 16 : L::FRAGS, L::FRAGS), MT == 1 ? 8 : MT == 2 ? 4 : 2);
    constexpr int FLUSHES = L::FRAGS / FG;
    constexpr int METAS = GROUP == 0 || GROUP % L::CHUNK == 0 ? 1 : L::CHUNK / gcd(GROUP, L::CHUNK);  // groups a chunk meets
    constexpr bool AHEAD = METAS <= 4;  // scales travel with the weights; finer groups fetch them at the flush
    constexpr int PER = FLUSHES / METAS ? FLUSHES / METAS : 1;  // flushes that share a group
    extern __shared__ float4 shared[];
    __shared__ u64 full[2];
    __shared__ uint4 constant[C::PLACES];  // constant A fragments: rows 0-7 yield -magic * x, rows 8-15 x
    __shared__ u32 mask[C::PLACES];

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2;
    const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, t0 = (SPLIT > 1 ? blockIdx.x / SPLIT : blockIdx.x) * NT;
    const int m0 = blockIdx.y * 8 * MT, rows = smaller(M - m0, 8 * MT);
    const int chunks = K / L::CHUNK, part = (chunks + SPLIT - 1) / SPLIT;
    const int begin = SPLIT > 1 ? smaller(rank * part, chunks) : 0, end = SPLIT > 1 ? smaller(begin + part, chunks) : chunks;
    const int panels = (part + panel - 1) / panel;
    const u32 row_bytes = panel * L::CHUNK * 2 + 16, panel_bytes = rows * row_bytes;
    const u32 ring = shared_address(shared);
    const u16* x_block = x + (size_t)m0 * K;

    // ------------------------------------------------------------------------------------------------ weights
    u32 w[STAGES][NT][L::REGS];
    u32 s[STAGES][NT][AHEAD ? METAS : 1], z[STAGES][NT][AHEAD ? METAS : 1];
    const u32* w_tile = words + ((size_t)t0 * chunks + begin + warp) * L::WORDS + 4 * lane;
    const u16* s_tile = scales + (size_t)t0 * groups * 16 + 2 * r;
    const u16* z_tile = ZEROS ? zeros + (size_t)t0 * groups * 16 + 2 * r : s_tile;
    asm volatile("" : "+l"(w_tile), "+l"(s_tile), "+l"(z_tile));  // else they are recomputed at every use
    const u32 tile_words = chunks * L::WORDS;
    auto meta = [&](const u16* tile, int t, int k0) {
        const int g = GROUP == 0 ? 0 : smaller((u32)k0 / (GROUP ? GROUP : 1), groups - 1);
        return load4(tile + (u32)(t * groups + g) * 16);
    };
    auto load_weights = [&](int u, int c) {
#pragma unroll
        for (int t = 0; t < NT; t++) {
            load_chunk<BITS>(w_tile + t * tile_words, lane, w[u][t]);
            if constexpr (AHEAD) {
#pragma unroll
                for (int i = 0; i < METAS; i++) {
                    s[u][t][i] = meta(s_tile, t, c * L::CHUNK + i * (L::CHUNK / METAS));
                    if (ZEROS) z[u][t][i] = meta(z_tile, t, c * L::CHUNK + i * (L::CHUNK / METAS));
                }
            }
        }
        w_tile += WARPS * L::WORDS;
    };

    // ------------------------------------------------------------------------------------------------------ x
    auto load_panel = [&](int p) {
        const int first = begin + p * panel, count = smaller(panel, end - first);
        const u32 to = ring + (p & 1) * panel_bytes;
        const u16* from = x_block + (size_t)first * L::CHUNK;
#if __CUDA_ARCH__ >= 900
        if (warp == 0 && count > 0) {
            const u32 bytes = count * L::CHUNK * 2;
            if (lane == 0) barrier_expect(shared_address(&full[p & 1]), rows * bytes);
            __syncwarp();
            if (lane < rows) bulk_copy(to + lane * row_bytes, from + (size_t)lane * K, bytes, shared_address(&full[p & 1]));
        }
#else
        for (int row = warp; row < rows; row += WARPS)
            for (int g = lane; g < count * (L::CHUNK / 8); g += 32) copy16_async(to + row * row_bytes + g * 16, from + (size_t)row * K + g * 8, 16);
        copy_commit();
#endif
    };
    auto wait_panel = [&](int p) {
#if __CUDA_ARCH__ >= 900
        if (begin + p * panel < end) barrier_wait(shared_address(&full[p & 1]), (p >> 1) & 1);
#else
        copy_wait<1>();
        __syncthreads();
#endif
    };
    u32 x_at[MT];  // ldmatrix: this lane's row (rows past the last repeat it: those columns are never stored)
#pragma unroll
    for (int m = 0; m < MT; m++) {
        x_at[m] = ring + smaller(m * 8 + (lane & 7), rows - 1) * row_bytes + (lane >> 3) * 16 + warp * L::CHUNK * 2;
        asm volatile("" : "+r"(x_at[m]));
    }
    typename C::Masks masks;
    auto load_constant = [&](u32 (&a)[4], int place) {
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(constant + place)));
    };

    // ------------------------------------------------------------------------------------------------ start
    int c = begin + warp;
#pragma unroll
    for (int u = 0; u < STAGES; u++)
        if (c + u * WARPS < end) load_weights(u, c + u * WARPS);
    if (threadIdx.x == 0) {
        C::Masks::store(mask);
#pragma unroll
        for (int i = 0; i < C::PLACES; i++) constant[i] = make_uint4(C::minus_magic(i), Half<T>::ONE, C::minus_magic(i), Half<T>::ONE);
#if __CUDA_ARCH__ >= 900
        barrier_init(shared_address(&full[0]), 1), barrier_init(shared_address(&full[1]), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    masks.load(mask);
    constexpr bool KEEP = C::PLACES <= 2 && RESIDENT * WARPS <= 16;  // registers to spare; else one load a use
    u32 kept[KEEP ? C::PLACES : 1][4];
#pragma unroll
    for (int i = 0; i < (KEEP ? C::PLACES : 0); i++) load_constant(kept[i], i);
    previous_grid_wait();
    load_panel(0);
    load_panel(1);
    next_grid_launch();
    // ------------------------------------------------------------------------------------------------ one chunk
    float acc[NT][MT][4] = {};
    auto compute = [&](int u, int c, u32 x_offset) {
#pragma unroll
        for (int i = 0; i < FLUSHES; i++) {
            if (i) __syncwarp();  // keeps ptxas from hoisting the loads of all flushes to the top: 255 registers and spills
            u32 b[FG][MT][2];
            float sums[MT][4];  // 0, 1: -sum(magic * x) of the lane's two columns; 2, 3: sum(x)
#pragma unroll
            for (int f = 0; f < FG; f++) {
                const int at = i * FG + f, place = C::p(at) / C::FIELD;
                u32 a[4];
                if constexpr (!KEEP) load_constant(a, place);
                else a[0] = kept[place][0], a[1] = kept[place][1], a[2] = kept[place][2], a[3] = kept[place][3];
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    if (FG == 1 || f % 2 == 0) {
                        u32 four[4];
                        load_matrix4(four, x_at[m] + x_offset + (at >> 1) * 64);
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
                    u32 a[4];
                    C::fragment(w[u][t], i * FG + f, masks, a);
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        if (f == 0) mma<T>(sum[m], a, b[f][m][0], b[f][m][1], sums[m][0], sums[m][1], sums[m][0], sums[m][1]);
                        else mma<T>(sum[m], a, b[f][m][0], b[f][m][1], sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
                    }
                }
                const int k0 = c * L::CHUNK + i * FG * 16;
                const float2 scale = to_floats<T>(AHEAD ? s[u][t][AHEAD ? i / PER : 0] : meta(s_tile, t, k0));
                float2 at_zero = make_float2(mid<BITS>(), mid<BITS>());
                if (ZEROS) at_zero = to_floats<T>(AHEAD ? z[u][t][AHEAD ? i / PER : 0] : meta(z_tile, t, k0));
                const float minus_x = -at_zero.x * scale.x, minus_y = -at_zero.y * scale.y;
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

    for (int p = 0; p < panels; p++) {
        wait_panel(p);
        u32 x_offset = (p & 1) * panel_bytes;
        for (int i = warp; i < panel && c < end; i += STAGES * WARPS) {
#pragma unroll
            for (int u = 0; u < STAGES; u++) {
                if (c < end) {
                    compute(u, c, x_offset);
                    if (c + STAGES * WARPS < end) load_weights(u, c + STAGES * WARPS);
                }
                c += WARPS, x_offset += WARPS * L::CHUNK * 2;
            }
        }
        if (p + 1 < panels) {
            __syncthreads();  // everyone has read this panel: its place takes the one after next
            load_panel(p + 2);
        }
    }

    // ------------------------------------------------------------- partial sums of the warps: red[warp][t][m][register][lane]
    constexpr int E = NT * MT * 128;
    float* red = (float*)shared;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) red[warp * E + ((t * MT + m) * 4 + i) * 32 + lane] = acc[t][m][i];
    __syncthreads();
    // output (m, n) of the block, n fastest: its place in a warp's partial sums
    auto place = [&](int m, int n) {
        const int i = ((n >> 3) & 1) * 2 + (m & 1), l = (n & 7) * 4 + ((m & 7) >> 1);
        return (((n >> 4) * MT + (m >> 3)) * 4 + i) * 32 + l;
    };
    auto store = [&](int m, int n, float v) {
        const int column = t0 * 16 + n;
        if (column >= N) return;
        if (bias) v += to_floats<T>(bias[column]).x;
        y[(size_t)(m0 + m) * N + column] = (u16)from_floats<T>(v, 0.f);
    };
    const int outputs = rows * NT * 16;
    for (int e = threadIdx.x; e < outputs; e += WARPS * 32) {
        const int m = e / (NT * 16), n = e % (NT * 16), at = place(m, n);
        float v = 0.f;
#pragma unroll
        for (int k = 0; k < WARPS; k++) v += red[k * E + at];
        if constexpr (SPLIT == 1) store(m, n, v);
        else red[at] = v;
    }
    if constexpr (SPLIT > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
        for (int e = rank * WARPS * 32 + threadIdx.x; e < outputs; e += SPLIT * WARPS * 32) {
            const int m = e / (NT * 16), n = e % (NT * 16);
            const u32 here = shared_address(red + place(m, n));
            float v = 0.f;
#pragma unroll
            for (int k = 0; k < SPLIT; k++) {
                u32 there;
                float part_sum;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(k));
                asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part_sum) : "r"(there) : "memory");
                v += part_sum;
            }
            store(m, n, v);
        }
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    }
}
