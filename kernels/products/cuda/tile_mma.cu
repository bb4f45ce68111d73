// y[M,N] = x[M,K] @ dequantize(W)^T + bias for small M: W is the A operand of mma.sync, x^T the B operand.
//
// Grid    x: ROW_TILES row tiles of 16 a block. y: blocks of `block_rows` rows of x. Blocks do not persist: several share an
//         SM, and the last ones of a launch leave room for the first of the next, which are there early and load their weights.
// Block   WARPS warps take the steps (BLOCK_K k, of all ROW_TILES tiles) in turn and add up through shared memory at the end.
// Warp    weights, scales and zeros go from global memory into registers: the first step's before anything else, and in front
//         of the wait for the kernel before; the next step's when this one's have come (STEPS_IN_FLIGHT 2) or after each step
//         (1). x goes through the warp's own ring of STEPS_IN_FLIGHT steps in shared memory and ldmatrix.
// FORM    EXACT (fp16): a code in the low mantissa bits is the subnormal number code * 2^(p - 24); one half2 fma makes it (code
//         - zero) / 1024, whose error is 2^-14 of a code. MAGIC: the magic numbers of tile.cuh go into the mma, and a constant
//         A fragment yields what they add and sum(x): fewer instructions where ROW_TILES is large, more registers. bf16 has no
//         such numbers, so there the first way is closed, and no magic holds its 8-bit codes (BYTES): their bits as they are are
//         code * 2^-133, exact times 2^127; 2^6 goes on the sums. INT8_PLANES: codes as bytes, split_int8.cuh, M_TILES one or
//         two rows of x (a power of two), which a warp turns into bytes a step at a time: half the instructions of EXACT.
//         E2M1, BOOK: values from a table, book.cuh, as they are; `zeros` then points to the tables, or their factors, in fp32:
//         one for every table_rows rows of W. With SCALES_E4M3 or SCALES_E8M0 scales are bytes. BOOK_PLANES (4 bits) is
//         INT8_PLANES of such values.
// FOLD    what the product does for its neighbours in a decode step, fold.cuh; 0: nothing.
// Limits  K a multiple of 8; GROUP a multiple of 16, or 0: one group.
// Launch  weights do not depend on the kernel before, x does. Every sum has a fixed order: equal bits on every run.
// Source  own; the fragment-ordered layout is Marlin's idea, y^T = W x^T Machete's.
#include "split_int8.cuh"
#include "fold.cuh"

enum { MAGIC = 0, EXACT = 1, INT8_PLANES = 2 };

// 16, 8 and 4 bytes of this lane, read once (weights) or by neighbours too (scales, zeros). `cs`: first to leave both caches; with
// more of a line asked for than the load takes (L2::256B) products of 33 MB and less took 2 to 4% longer.
__device__ __forceinline__ void load16_once(u32& a, u32& b, u32& c, u32& d, const u32* p) {
    asm volatile("ld.global.cs.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(p));
}
__device__ __forceinline__ void load8_once(u32& a, u32& b, const u32* p) {
    asm volatile("ld.global.cs.nc.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "l"(p));
}
__device__ __forceinline__ u32 load4(const u16* p) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
template <int FORM>
__device__ __forceinline__ u32 load_scales(const u16* scales, size_t at) {  // of two rows, `at` in units of two
    if constexpr (!of_bytes(FORM)) return load4(scales + at * 2);
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(scales + at));
    return v;
}
template <int FORM, int T>
__device__ __forceinline__ float2 scales_of(u32 v) {
    if constexpr (of_bytes(FORM)) return byte_scales<FORM>(v);
    else return to_floats<T>(v);
}
template <int WHICH>  // 0x1010: the low half of v twice, 0x3232: the high one
__device__ __forceinline__ u32 twice(u32 v) {
    u32 d;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(d) : "r"(v), "n"(WHICH));
    return d;
}
template <int BITS>  // a lane's words of a chunk; at: the chunk's start and 16 bytes for each lane
__device__ __forceinline__ void load_chunk(u32 (&w)[Tile<BITS>::REGS], const u32* at, int lane) {
    load16_once(w[0], w[1], w[2], w[3], at);
    if constexpr (BITS == 8) load16_once(w[4], w[5], w[6], w[7], at + 128);
    if constexpr (BITS == 3) load8_once(w[4], w[5], at + 128 - 2 * lane);
}

template <int BITS, int T, int GROUP, bool ZEROS, int FORM, int WARPS, int ROW_TILES, int BLOCK_K, int STEPS_IN_FLIGHT,
          int M_TILES, int X_COPIES, int BLOCKS_PER_SM, int LATE, int FOLD = 0>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
tile_mma(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
         const u16* __restrict__ bias, const u16* __restrict__ x, u16* __restrict__ y, int M, int N, int K, int chunks,
         int groups, int block_rows, int table_rows, const Folded folded) {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    constexpr int CHUNKS = BLOCK_K / L::CHUNK, FRAGS = BLOCK_K / 16;
    constexpr bool SCALED = scaled_halves<FORM, T>();
    constexpr int FG = gcd(gcd(GROUP && !SCALED ? GROUP / 16 : FRAGS, FRAGS), 8);  // fragments between two flushes: all of one group
    constexpr int FLUSHES = FRAGS / FG;
    constexpr bool TABLE = of_table(FORM), BOOKED = (FORM & 15) == BOOK;
    constexpr bool PLANES = FORM == INT8_PLANES || (FORM & 15) == BOOK_PLANES;
    using D = Int8Planes<BITS, T, PLANES ? GROUP : 0, PLANES ? M_TILES : 1, BLOCK_K, PLANES ? FORM : 0>;
    constexpr int GROUPS = GROUP == 0 || GROUP % BLOCK_K == 0 ? 1 : BLOCK_K / gcd(GROUP, BLOCK_K);  // that a step meets
    constexpr int METAS = PLANES ? D::ROUNDS : GROUPS;  // scales of a lane, a step and a tile
    constexpr bool BYTES = FORM == MAGIC && C::WIDE;
    using S = HalfScales<SCALED ? FORM : int(E2M1), T>;
    constexpr int PER = FLUSHES > METAS ? FLUSHES / METAS : 1;  // flushes that share a group
    constexpr bool STRIDES = !PLANES && GROUP && BLOCK_K % (GROUP ? GROUP : 1) == 0;  // a warp's next groups lie equally far on
    constexpr int X_ROW = BLOCK_K * 2 + 16;  // bytes; not a multiple of 128, so that ldmatrix meets no bank conflict
    constexpr int SUMS = PLANES ? 2 : 4, MS = PLANES ? 1 : M_TILES;  // planes: rows of x are lanes
    constexpr int E = ROW_TILES * MS * SUMS * 32;  // fp32 sums of a warp: [t][m][register][lane]
    extern __shared__ float4 shared[];
    __shared__ float factor[M_TILES * 8];
    __shared__ u32 mask[C::PLACES];
    __shared__ u32 constant[C::PLACES + 1];
    constexpr bool WITH_BOOKS = BOOKED || (TABLE && PLANES);
    constexpr int BOOKS = WITH_BOOKS ? ROW_TILES : 1;
    __shared__ float unit[ROW_TILES];
    __shared__ uint4 books[BOOKS][2];

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2;
    const int m0 = blockIdx.y * block_rows, rows = smaller(M - m0, block_rows);
    auto tile = [&](int t) { return tile_of<FOLD, ROW_TILES>(blockIdx.x, t, N); };
    auto own_table = [&](int row) { return (const float*)zeros + (size_t)(row / table_rows) * (WITH_BOOKS ? 1 << BITS : 1); };
    const int steps = (chunks + CHUNKS - 1) / CHUNKS;
    next_grid_launch();

    // ---------------------------------------------------------------------------------------------- loads of a step
    // Addresses are a kernel parameter and 32 bits, of 16 bytes (words, x) or 4 (scales, zeros): two instructions each, and few
    // registers. Each asm keeps ptxas from working one out anew for each step.
    u32 w_at[ROW_TILES], meta_at[ROW_TILES];
#pragma unroll
    for (int t = 0; t < (PLANES ? 0 : ROW_TILES); t++) {
        w_at[t] = tile(t) * chunks * (L::WORDS / 4) + lane, meta_at[t] = tile(t) * groups * 8 + r;
        asm volatile("" : "+r"(w_at[t]), "+r"(meta_at[t]));
    }
    // INT8_PLANES: of the first tile, and the others a fixed distance away: 6 registers less at ROW_TILES = 2, so two blocks of 16 warps an SM
    constexpr int META = of_bytes(FORM) ? 8 : 16;  // u16 of a tile's group
    const size_t first_meta = (size_t)tile(0) * groups * META + META / 8 * r;
    const u32* first_w = words + ((size_t)tile(0) * chunks + warp * CHUNKS) * L::WORDS + 4 * lane;
    const u16 *first_scale = scales + first_meta, *first_zero = zeros + first_meta;
    if (PLANES) asm volatile("" : "+l"(first_scale), "+l"(first_zero));
    u32 w[STEPS_IN_FLIGHT][ROW_TILES][CHUNKS][L::REGS], scale[STEPS_IN_FLIGHT][ROW_TILES][METAS], zero[STEPS_IN_FLIGHT][ROW_TILES][METAS];
    auto load_planes_weights = [&](int u, int s) {  // and step on
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const size_t away = tile(t) - tile(0);
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (i == 0 || s * CHUNKS + i < chunks) load_chunk<BITS>(w[u][t][i], first_w + (away * chunks + i) * L::WORDS, lane);
#pragma unroll
            for (int i = 0; i < METAS; i++) {
                const int g = D::group(s * BLOCK_K, i, groups);
                scale[u][t][i] = load_scales<FORM>(first_scale + away * groups * META + g * META, 0);
                if (ZEROS) zero[u][t][i] = load4(first_zero + away * groups * 16 + g * 16);
            }
        }
        first_w += WARPS * CHUNKS * L::WORDS;
    };
    auto load_weights = [&](int u, u32 s) {
        if constexpr (PLANES) return load_planes_weights(u, s);
        asm volatile("" : "+r"(s));
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const u32* from = words + (size_t)(w_at[t] + s * (CHUNKS * L::WORDS / 4)) * 4;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (i == 0 || s * CHUNKS + i < (u32)chunks) load_chunk<BITS>(w[u][t][i], from + i * L::WORDS, lane);
#pragma unroll
            for (int i = 0; i < METAS; i++) {
                u32 g = 0;  // past the last group: the last one
                if (STRIDES) g = i == 0 ? s * METAS : smaller(s * METAS + i, groups - 1);
                else if (GROUP) g = smaller((s * BLOCK_K + i * (BLOCK_K / METAS)) / (u32)(GROUP ? GROUP : 1), groups - 1);
                scale[u][t][i] = load_scales<FORM>(scales, meta_at[t] + g * 8);
                if (ZEROS) zero[u][t][i] = load4(zeros + (size_t)(meta_at[t] + g * 8) * 2);
            }
        }
    };
    if (warp < steps) load_weights(0, warp);
    const bool both = STEPS_IN_FLIGHT > 1 && blockIdx.x >= LATE;  // two blocks an SM ran before: the previous kernel has ended, x is ready
    if (both && warp + WARPS < steps) load_weights(STEPS_IN_FLIGHT - 1, warp + WARPS);

    // x: lanes take AT_ONCE rows, 16 bytes each, at once, so that a lane's copies of a row are a fixed distance apart
    constexpr int GRANULES = BLOCK_K / 8, SLOT_ROWS = PLANES ? 1 : X_COPIES * 32 / GRANULES, SLOT = SLOT_ROWS * X_ROW;
    constexpr int AT_ONCE = SLOT_ROWS < 4 ? SLOT_ROWS : 4, POINTERS = SLOT_ROWS / AT_ONCE, ALONG = X_COPIES / POINTERS;
    const int x_k = lane % (32 / AT_ONCE) * 8, x_row = lane / (32 / AT_ONCE);
    const u32 ring = shared_address(shared) + warp * STEPS_IN_FLIGHT * SLOT;
    u32 x_to = ring + x_row * X_ROW + x_k * 2;
    if (!PLANES) asm volatile("" : "+r"(x_to));  // else ptxas makes it anew for each step
    u32 x_from[POINTERS];  // rows past the last repeat it: those columns are never stored
#pragma unroll
    for (int i = 0; i < (PLANES ? 0 : POINTERS); i++) {
        x_from[i] = (m0 + smaller(x_row + i * AT_ONCE, rows - 1)) * (K / 8) + x_k / 8;
        asm volatile("" : "+r"(x_from[i]));
    }
    auto load_x = [&](int u, u32 s) {
        asm volatile("" : "+r"(s));
#pragma unroll
        for (int i = 0; i < POINTERS; i++) {
            const u16* from = x + (size_t)(x_from[i] + s * (BLOCK_K / 8)) * 8;
#pragma unroll
            for (int j = 0; j < ALONG; j++) {
                const u32 to = x_to + u * SLOT + i * AT_ONCE * X_ROW + j * (BLOCK_K / ALONG) * 2;
                const bool inside = (int)s * BLOCK_K + x_k + j * (BLOCK_K / ALONG) < K;  // past K: zeros, and nothing is read
                copy_async_or_zero(to, from + j * (BLOCK_K / ALONG), inside ? 16 : 0);
            }
        }
    };

    typename C::Masks masks;
    u32 minus[C::PLACES], one = 0;  // halves of the constant A fragment: rows 0-7 yield -magic * x, rows 8-15 x
    if constexpr (FORM == MAGIC) {
        if (threadIdx.x == 0) {
            C::Masks::store(mask);
#pragma unroll
            for (int i = 0; i < C::PLACES; i++) constant[i] = C::minus_magic(i);
            constant[C::PLACES] = BYTES ? Half<T>::power(-6) : Half<T>::ONE;
        }
        __syncthreads();
        masks.load(mask);
#pragma unroll
        for (int i = 0; i < C::PLACES; i++) minus[i] = read4(shared_address(constant + i));
        one = read4(shared_address(constant + C::PLACES));
    }
    if constexpr (TABLE) {
        for (int t = warp; t < ROW_TILES; t += WARPS) {
            const int row = smaller(tile(t) * 16, N - 1);
            const float* own = own_table(row);
            float by;
            if constexpr (BOOKED) by = make_book<BITS, T>(own, (unsigned char*)books[t], lane);
            else if constexpr (WITH_BOOKS) by = make_planes(own, (unsigned char*)books[t], lane);
            else by = (zeros ? *own : 1.f) * (SCALED ? __uint_as_float((127 + S::SHIFT) << 23) : E2M1_UNIT<T>);
            if (lane == 0) unit[t] = by;
        }
        __syncthreads();
    }
    u32 x_at[M_TILES];  // ldmatrix: this lane's row
#pragma unroll
    for (int m = 0; m < M_TILES; m++) x_at[m] = ring + smaller(m * 8 + (lane & 7), SLOT_ROWS - 1) * X_ROW + (lane >> 3) * 16;
    const D planes(PLANES, shared_address(shared) + warp * D::BYTES, x + (size_t)m0 * K, K);
    previous_grid_wait();
    constexpr int OUT = FOLD & GATED ? ROW_TILES * 8 : ROW_TILES * 16;
    const int x_bytes = WARPS * (PLANES ? D::BYTES : STEPS_IN_FLIGHT * SLOT);
    const u32 squares = shared_address(shared) + (x_bytes > WARPS * E * 4 ? x_bytes : WARPS * E * 4);
    const Early first = early<FOLD, OUT, WARPS>(folded, squares, m0, rows, blockIdx.x * OUT, N, K);
#pragma unroll
    for (int u = 0; u < (PLANES ? 0 : STEPS_IN_FLIGHT); u++) {
        if (warp + u * WARPS < steps) load_x(u, warp + u * WARPS);
        copy_commit();
    }
    if (PLANES && warp < steps) planes.fetch(warp * BLOCK_K, rows);

    // ------------------------------------------------------------------------------------------------- one step
    const u32 nothing = (u32)K >> 31;  // 0, which the compiler cannot know
    float acc[ROW_TILES][MS][SUMS] = {};
    // STEPS_IN_FLIGHT 2: the next step's weights are asked for once this step's are there, and before x is waited for, so that memory is
    // never idle: loads into registers share a scoreboard, a wait is for all of them. So the sum needs one that has come.
    auto load_next = [&](int u, int now) {
        const int next = now + WARPS + w[u][ROW_TILES - 1][CHUNKS - 1][L::REGS - 1] * nothing;
        if (STEPS_IN_FLIGHT > 1 && next < steps && !(both && now == warp)) load_weights((u + 1) % STEPS_IN_FLIGHT, next);
    };
    auto compute_planes = [&](int u, int s) {
        load_next(u, s);
        copy_wait<0>();
        __syncwarp();
        planes.store();
        __syncwarp();
        if (s + WARPS < steps) planes.fetch((s + WARPS) * BLOCK_K, rows);
#pragma unroll
        for (int i = 0; i < D::ROUNDS; i++) {
            float2 v[ROW_TILES];
            planes.products(w[u], i, books, v);
            const float2 unit = planes.unit(i);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                const float2 a = scales_of<FORM, T>(scale[u][t][i]);
                float2 z = TABLE ? make_float2(8192.f, 8192.f) : make_float2(mid<BITS>(), mid<BITS>());
                if (ZEROS) z = to_floats<T>(zero[u][t][i]);
                acc[t][0][0] = __fmaf_rn(a.x * unit.x, __fmaf_rn(-z.x, unit.y, v[t].x), acc[t][0][0]);
                acc[t][0][1] = __fmaf_rn(a.y * unit.x, __fmaf_rn(-z.y, unit.y, v[t].y), acc[t][0][1]);
            }
        }
    };
    auto compute = [&](int u) {
        u32 looked_up[BOOKS][4][4];  // of four fragments: [fragment][j]
#pragma unroll
        for (int i = 0; i < FLUSHES; i++) {
            if (i) __syncwarp();  // keeps ptxas from hoisting the loads of all flushes to the top
            u32 minus_zero[ROW_TILES][2];
#pragma unroll
            for (int t = 0; t < (FORM == EXACT ? ROW_TILES : 0); t++) {
                minus_zero[t][0] = minus_zero[t][1] = from_floats<T>(-mid<BITS>() / 1024, -mid<BITS>() / 1024);
                if constexpr (ZEROS) {
                    const u32 both = fma2<T>(zero[u][t][i / PER], Half<T>::power(-10) | 0x80008000u, 0u);
                    minus_zero[t][0] = twice<0x1010>(both), minus_zero[t][1] = twice<0x3232>(both);
                }
            }
            float sum[ROW_TILES][M_TILES][4];
            float sums[M_TILES][4];  // 0, 1: -sum(magic * x) of the lane's two columns; 2, 3: sum(x)
            u32 b[M_TILES][4];
#pragma unroll
            for (int f = 0; f < FG; f++) {
                const int at = i * FG + f, half = at % 2 * 2, place = C::p(at % L::FRAGS);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    if (f == 0 || half == 0) load_matrix4(b[m], x_at[m] + u * SLOT + (at >> 1) * 64);
                    if constexpr (FORM == MAGIC) {
                        const u32 a[4] = {minus[place / C::FIELD], one, minus[place / C::FIELD], one};
                        if (f == 0) mma<T>(sums[m], a, b[m][half], b[m][half + 1], 0.f, 0.f, 0.f, 0.f);
                        else mma<T>(sums[m], a, b[m][half], b[m][half + 1], sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
                    }
                }
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++) {
                    u32 a[4];
                    const u32(&from)[L::REGS] = w[u][t][at / L::FRAGS];
                    const int fragment = at % L::FRAGS;
                    if constexpr (BOOKED) {
                        if (fragment % 4 == 0) {
                            const uint4 book[2] = {books[t][0], books[t][1]};
#pragma unroll
                            for (int j = 0; j < 4; j++) {
                                u32 four[4];
                                Book<BITS>::look_up(from, fragment / 4, j, book, four);
#pragma unroll
                                for (int k = 0; k < 4; k++) looked_up[t][k][j] = four[k];
                            }
                        }
#pragma unroll
                        for (int j = 0; j < 4; j++) a[j] = looked_up[t][fragment % 4][j];
                    } else if constexpr (SCALED) {
                        const u32 both = S::of(scale[u][t][at / (FRAGS / METAS)]);  // a group's fragments share it
#pragma unroll
                        for (int j = 0; j < 4; j++) a[j] = S::of_row(small_e2m1<T>(from[j], fragment), both, j % 2);
                    } else if constexpr (TABLE) {
#pragma unroll
                        for (int j = 0; j < 4; j++) a[j] = e2m1<T>(from[j], fragment);
                    } else if constexpr (BYTES) {
#pragma unroll
                        for (int j = 0; j < 4; j++) a[j] = fma2<T>(C::bare(from, fragment, j), Half<T>::power(127), 0x80008000u);
                    } else {
                        C::template fragment<FORM == EXACT>(from, fragment, masks, a);
                    }
#pragma unroll
                    for (int j = 0; j < (FORM == EXACT ? 4 : 0); j++) a[j] = fma2<T>(a[j], Half<T>::power(14 - place), minus_zero[t][j % 2]);
#pragma unroll
                    for (int m = 0; m < M_TILES; m++) {
                        float(&d)[4] = *(float(*)[4])(SCALED ? acc[t][m] : sum[t][m]);
                        if (f == 0 && !SCALED) mma<T>(d, a, b[m][half], b[m][half + 1], 0.f, 0.f, 0.f, 0.f);
                        else mma<T>(d, a, b[m][half], b[m][half + 1], d[0], d[1], d[2], d[3]);
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < (SCALED ? 0 : ROW_TILES); t++) {
                const float2 s = scales_of<FORM, T>(scale[u][t][i / PER]);
                float2 z = make_float2(mid<BITS>(), mid<BITS>());
                if (ZEROS && FORM == MAGIC) z = to_floats<T>(zero[u][t][i / PER]);
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float v = sum[t][m][j];
                        if (BYTES) v = __fmaf_rn(j < 2 ? -z.x : -z.y, sums[m][2 + j % 2], v);
                        else if (FORM == MAGIC) v += __fmaf_rn(j < 2 ? -z.x : -z.y, sums[m][2 + j % 2], sums[m][j % 2]);
                        acc[t][m][j] = __fmaf_rn(j < 2 ? s.x : s.y, v, acc[t][m][j]);
                    }
            }
        }
    };
    for (int s = warp; s < steps; s += WARPS * STEPS_IN_FLIGHT) {
#pragma unroll
        for (int u = 0; u < STEPS_IN_FLIGHT; u++) {
            const int now = s + u * WARPS;
            if (now < steps) {
                const int next = now + STEPS_IN_FLIGHT * WARPS;
                if constexpr (PLANES) {
                    compute_planes(u, now);
                    if (STEPS_IN_FLIGHT == 1 && next < steps) load_weights(u, next);
                } else {
                    load_next(u, now);
                    copy_wait<STEPS_IN_FLIGHT - 1>();
                    __syncwarp();
                    compute(u);
                    __syncwarp();  // everyone has read this slot
                    if (STEPS_IN_FLIGHT == 1 && next < steps) load_weights(u, next);
                    if (next < steps) load_x(u, next);
                    copy_commit();
                }
                if ((FOLD & NORMED) && now == warp) factors<WARPS>(factor, squares, folded, first, m0, rows, K);  // while weights come
            }
        }
    }

    // ---------------------------------------------------------------------------------------- sum over the warps
    if ((FOLD & NORMED) && warp >= steps) {
        copy_commit();
        copy_wait<0>();
        __syncwarp();
        factors<WARPS>(factor, squares, folded, first, m0, rows, K);
    }
    __syncthreads();
    float* sums_at = (float*)shared;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
        for (int m = 0; m < MS; m++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) {  // lanes change places so that 32 columns of y are read without bank conflicts
                const int place = PLANES ? lane : lane ^ (i / 2 + (ROW_TILES > 1 ? t : i) % 2 * 2);
                sums_at[warp * E + ((t * MS + m) * SUMS + i) * 32 + place] = acc[t][m][i];
            }
    __syncthreads();
    store<FOLD, T, OUT>(folded, first, y, m0, rows, blockIdx.x * OUT, N, WARPS * 32, [&](u32 row, u32 c) {
        float v = 0.f;
        if constexpr (PLANES) {  // of a row's lanes
            const float* from = sums_at + (c / 16 * 2 + c % 16 / 8) * 32 + c % 8 * 4 + row * D::EACH;
#pragma unroll
            for (int k = 0; k < WARPS; k++)
#pragma unroll
                for (int i = 0; i < smaller(D::EACH, D::SPANS); i++) v += from[k * E + i];
            v *= TABLE ? unit[c / 16] : 1.f / (1 << D::SHIFT);
            if (!(v * 0.f == 0.f)) {  // inf or nan
                const size_t at = tile(c / 16), meta = at * groups * META;
                const u16 *mine = x + (size_t)(m0 + row) * K, *none = nullptr;
                const float* own = own_table(smaller((int)at * 16, N - 1));
                v = plainly<BITS, T, GROUP, FORM>(words + at * chunks * L::WORDS, scales + meta, ZEROS ? zeros + meta : none, own, mine, c % 16, K);
            }
        } else {
            const u32 at_lane = (c % 8 * 4 + row % 8 / 2) ^ (c / 8 % 2 + (ROW_TILES > 1 ? c / 16 : row) % 2 * 2), i = c % 16 / 8 * 2 + row % 2;
            const float* from = sums_at + ((c / 16 * M_TILES + row / 8) * 4 + i) * 32 + at_lane;
#pragma unroll
            for (int k = 0; k < WARPS; k++) v += from[k * E];
        }
        if (FORM == EXACT || BYTES) v *= BYTES ? 64 : 1024;
        if (TABLE && !PLANES) v *= unit[c / 16];
        if (FOLD & NORMED) v *= factor[row];
        if (bias) v += to_floats<T>(bias[tile(c / 16) * 16 + c % 16]).x;
        return v;
    });
}
