// y = x W^T + bias for a few rows of x, as in a decode step. W is the A operand of mma.sync, x^T its B operand.
//
// Shapes  x (M, K) and y (M, N) in fp16 or bf16. W: N x K codes in the `tile` layout, with a scale and a zero per row and GROUP
//         k.
// Grid    x: ROW_TILES row tiles of 16 per block. y: blocks of `block_rows` rows of x. Blocks do not persist: several share an
//         SM, and the last blocks of a launch leave room for the first ones of the next launch, which load their weights early.
// Block   WARPS warps take the steps (BLOCK_K of K, of all ROW_TILES tiles) in turn and add up through shared memory at the
//         end.
// Warp    Weights, scales and zeros go from global memory into registers: those of the first step before anything else and
//         before the wait for the previous kernel; those of the next step when this step's have arrived (STEPS_IN_FLIGHT 2) or
//         after the step (1). x goes through the warp's own ring of STEPS_IN_FLIGHT steps in shared memory, and ldmatrix.
// FORM    EXACT (fp16): a code in the low mantissa bits is the subnormal number code * 2^(p - 24); one half2 fma makes it (code
//         - zero) / 1024, whose error is 2^-14 of a code. MAGIC: the magic numbers of tile.cuh go into the mma, and a constant
//         A fragment yields what they add, and sum(x). That is fewer instructions where ROW_TILES is large, and more registers.
//         bf16 has no subnormal numbers of that kind, so it never takes EXACT; and no magic holds its 8-bit codes (BYTES):
//         their bits as they are are code * 2^-133, exact times 2^127, and 2^6 is applied to the sums. INT8_PLANES: codes as
//         bytes (split_int8.cuh), M_TILES one or two rows of x (a power of two), which a warp turns into bytes a step at a
//         time: half the instructions of EXACT. BOOK_PLANES (4 bits) is INT8_PLANES of values from a table. E2M1, BOOK: values
//         from a table as they are (book.cuh). `zeros` then points to the tables, or to their factors, in fp32: one for every
//         table_rows rows of W. With SCALES_E4M3 or SCALES_E8M0, scales are bytes.
// FOLD    what the product does for its neighbours in a decode step (fold.cuh); 0: nothing.
// Limits  K a multiple of 8; GROUP a multiple of 16, or 0: one group.
// Launch  Weights do not depend on the previous kernel, x does. Every sum has a fixed order: equal bits on every run.
// Source  own; the fragment-ordered layout is Marlin's idea, y^T = W x^T is Machete's.
#include "split_int8.cuh"
#include "fold.cuh"

enum { MAGIC = 0, EXACT = 1, INT8_PLANES = 2 };

// 16, 8 and 4 bytes of this lane: weights, which are read once, and scales or zeros, which neighbours read too. `cs` makes a
// line the first to leave both caches. Asking for more of a line than the load takes (L2::256B) made products of up to 33 MB 2
// to 4% slower.
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

struct MmaArguments {  // of a launch
    const u32* words;
    const u16 *scales, *zeros, *bias, *x;
    int N, K, chunks, groups, table_rows;
};

// A thread of the kernel: its place in the block, and the phases that the kernel runs through. The phases get arrays of
// registers as arguments: as fields, they would lie in memory until the compiler has unrolled all loops over them.
template <int BITS, int T, int GROUP, bool ZEROS, int FORM, int WARPS, int ROW_TILES, int BLOCK_K, int STEPS_IN_FLIGHT,
          int M_TILES, int X_COPIES, int FOLD>
struct MmaThread : MmaArguments {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    static constexpr bool TABLE = of_table(FORM), BOOKED = (FORM & 15) == BOOK;
    static constexpr bool PLANES = FORM == INT8_PLANES || (FORM & 15) == BOOK_PLANES;
    static constexpr bool BYTES = FORM == MAGIC && C::WIDE;
    static constexpr bool SCALED = scaled_halves<FORM, T>();  // values times scales are exact as halves
    using S = HalfScales<SCALED ? FORM : int(E2M1), T>;
    using D = Int8Planes<BITS, T, PLANES ? GROUP : 0, PLANES ? M_TILES : 1, BLOCK_K, PLANES ? FORM : 0>;

    // ---- a step of K
    static constexpr int CHUNKS = BLOCK_K / L::CHUNK, FRAGS = BLOCK_K / 16;
    // fragments between two flushes of sums, all of one group
    static constexpr int FG = gcd(gcd(GROUP && !SCALED ? GROUP / 16 : FRAGS, FRAGS), 8), FLUSHES = FRAGS / FG;
    static constexpr int GROUPS = GROUP == 0 || GROUP % BLOCK_K == 0 ? 1 : BLOCK_K / gcd(GROUP, BLOCK_K);  // that a step meets
    static constexpr int METAS = PLANES ? D::ROUNDS : GROUPS;          // scales of a lane, a step and a tile
    static constexpr int PER = FLUSHES > METAS ? FLUSHES / METAS : 1;  // flushes that share a group
    static constexpr int META = of_bytes(FORM) ? 8 : 16;               // u16 of a tile's group of scales
    // whether a warp's groups are equally far apart
    static constexpr bool STRIDES = !PLANES && GROUP && BLOCK_K % (GROUP ? GROUP : 1) == 0;

    // ---- x in shared memory. Lanes copy AT_ONCE rows at once, 16 bytes each, so that a lane's copies of a row are a fixed
    // distance apart.
    static constexpr int X_ROW = BLOCK_K * 2 + 16;  // bytes; not a multiple of 128, so that ldmatrix meets no bank conflict
    static constexpr int GRANULES = BLOCK_K / 8, SLOT_ROWS = PLANES ? 1 : X_COPIES * 32 / GRANULES, SLOT = SLOT_ROWS * X_ROW;
    static constexpr int AT_ONCE = SLOT_ROWS < 4 ? SLOT_ROWS : 4, POINTERS = SLOT_ROWS / AT_ONCE, ALONG = X_COPIES / POINTERS;
    static constexpr int X_BYTES = WARPS * (PLANES ? D::BYTES : STEPS_IN_FLIGHT * SLOT);

    // ---- fp32 sums of a warp: [row tile][m][register][lane]. Of planes, rows of x are lanes.
    static constexpr int SUMS = PLANES ? 2 : 4, MS = PLANES ? 1 : M_TILES, E = ROW_TILES * MS * SUMS * 32;
    static constexpr int OUT = FOLD & GATED ? ROW_TILES * 8 : ROW_TILES * 16;  // columns of y that a block stores

    // ---- values from a table, one for each row tile of the block
    static constexpr bool WITH_BOOKS = BOOKED || (TABLE && PLANES);
    static constexpr int BOOKS = WITH_BOOKS ? ROW_TILES : 1;
    using Books = uint4[BOOKS][2];

    struct Addresses {  // of row tiles, in units of 16 bytes (words) and 4 bytes (scales, zeros)
        u32 words[ROW_TILES], metas[ROW_TILES];
    };
    struct Weights {  // of the steps in flight
        u32 words[STEPS_IN_FLIGHT][ROW_TILES][CHUNKS][L::REGS];
        u32 scale[STEPS_IN_FLIGHT][ROW_TILES][METAS], zero[STEPS_IN_FLIGHT][ROW_TILES][METAS];
    };
    struct Magic {  // MAGIC: masks, and halves of the constant A fragment: rows 0-7 yield -magic * x, rows 8-15 x
        typename C::Masks masks;
        u32 minus[C::PLACES], one;
    };
    using Sums = float[ROW_TILES][MS][SUMS];
    using StepSums = float[ROW_TILES][M_TILES][4];  // between two flushes

    int warp, lane, r, m0, rows, steps;  // r: row of W in a row tile
    const u32* first_words;  // PLANES: of the first row tile. The others are a fixed distance away: 6 registers less at
    const u16 *first_scale, *first_zero;  // ROW_TILES = 2, so that two blocks of 16 warps fit an SM
    u32 ring, x_to;                       // addresses of this warp's ring of x, and of this lane's first copy
    int x_k, x_row;                       // where that copy is in a step of x

    __device__ __forceinline__ MmaThread(const MmaArguments& launch, int M, int block_rows) : MmaArguments(launch) {
        warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2;
        m0 = blockIdx.y * block_rows, rows = smaller(M - m0, block_rows);
        steps = (chunks + CHUNKS - 1) / CHUNKS;
    }
    __device__ __forceinline__ int tile(int t) const { return tile_of<FOLD, ROW_TILES>(blockIdx.x, t, N); }
    __device__ __forceinline__ const float* table_of(int row) const {
        return (const float*)zeros + (size_t)(row / table_rows) * (WITH_BOOKS ? 1 << BITS : 1);
    }

    // ------------------------------------------------------------------------------------------------- weights of a step
    // Addresses are a kernel parameter and 32 bits: two instructions each, and few registers. Each asm keeps ptxas from
    // computing one anew in each step.
    __device__ __forceinline__ void point_to_weights(Addresses& at) {
#pragma unroll
        for (int t = 0; t < (PLANES ? 0 : ROW_TILES); t++) {
            at.words[t] = tile(t) * chunks * (L::WORDS / 4) + lane, at.metas[t] = tile(t) * groups * 8 + r;
            asm volatile("" : "+r"(at.words[t]), "+r"(at.metas[t]));
        }
        const size_t first_meta = (size_t)tile(0) * groups * META + META / 8 * r;
        first_words = words + ((size_t)tile(0) * chunks + warp * CHUNKS) * L::WORDS + 4 * lane;
        first_scale = scales + first_meta, first_zero = zeros + first_meta;
        if (PLANES) asm volatile("" : "+l"(first_scale), "+l"(first_zero));
    }
    __device__ __forceinline__ void load_planes_weights(Weights& to, int u, int s) {  // and step on
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const size_t away = tile(t) - tile(0);
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (i == 0 || s * CHUNKS + i < chunks)
                    load_chunk<BITS>(to.words[u][t][i], first_words + (away * chunks + i) * L::WORDS, lane);
#pragma unroll
            for (int i = 0; i < METAS; i++) {
                const int g = D::group(s * BLOCK_K, i, groups);
                to.scale[u][t][i] = load_scales<FORM>(first_scale + away * groups * META + g * META, 0);
                if (ZEROS) to.zero[u][t][i] = load4(first_zero + away * groups * 16 + g * 16);
            }
        }
        first_words += WARPS * CHUNKS * L::WORDS;
    }
    __device__ __forceinline__ void load_weights(Weights& to, const Addresses& at, int u, u32 s) {
        if constexpr (PLANES) return load_planes_weights(to, u, s);
        asm volatile("" : "+r"(s));
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const u32* from = words + (size_t)(at.words[t] + s * (CHUNKS * L::WORDS / 4)) * 4;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (i == 0 || s * CHUNKS + i < (u32)chunks) load_chunk<BITS>(to.words[u][t][i], from + i * L::WORDS, lane);
#pragma unroll
            for (int i = 0; i < METAS; i++) {
                u32 g = 0;  // past the last group: the last one
                if (STRIDES) g = i == 0 ? s * METAS : smaller(s * METAS + i, groups - 1);
                else if (GROUP) g = smaller((s * BLOCK_K + i * (BLOCK_K / METAS)) / (u32)(GROUP ? GROUP : 1), groups - 1);
                to.scale[u][t][i] = load_scales<FORM>(scales, at.metas[t] + g * 8);
                if (ZEROS) to.zero[u][t][i] = load4(zeros + (size_t)(at.metas[t] + g * 8) * 2);
            }
        }
    }

    // STEPS_IN_FLIGHT 2: the next step's weights are asked for once this step's have arrived, and before the wait for x, so
    // that memory is never idle. Loads into registers share a scoreboard, so a wait is for all of them: the step number is made
    // to depend on a word that has arrived, by adding a zero that the compiler cannot know. both: the first two steps' weights
    // are in flight.
    __device__ __forceinline__ void load_next(Weights& weights, const Addresses& at, int u, int now, bool both) {
        const u32 nothing = (u32)K >> 31;
        const int next = now + WARPS + weights.words[u][ROW_TILES - 1][CHUNKS - 1][L::REGS - 1] * nothing;
        if (STEPS_IN_FLIGHT > 1 && next < steps && !(both && now == warp))
            load_weights(weights, at, (u + 1) % STEPS_IN_FLIGHT, next);
    }

    // ------------------------------------------------------------------------------------------------- x of a step
    __device__ __forceinline__ void point_to_x(u32 shared, u32 (&from)[POINTERS]) {  // rows past the last repeat it: not stored
        x_k = lane % (32 / AT_ONCE) * 8, x_row = lane / (32 / AT_ONCE);
        ring = shared + warp * STEPS_IN_FLIGHT * SLOT;
        x_to = ring + x_row * X_ROW + x_k * 2;
        if (!PLANES) asm volatile("" : "+r"(x_to));  // else ptxas computes it anew in each step
#pragma unroll
        for (int i = 0; i < (PLANES ? 0 : POINTERS); i++) {
            from[i] = (m0 + smaller(x_row + i * AT_ONCE, rows - 1)) * (K / 8) + x_k / 8;
            asm volatile("" : "+r"(from[i]));
        }
    }
    __device__ __forceinline__ void load_x(const u32 (&x_from)[POINTERS], int u, u32 s) const {
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
    }

    // ------------------------------------------------------------------------------------------------- before the first step
    // By way of shared memory, for the reason that tile.cuh gives at Masks.
    __device__ __forceinline__ void make_magic(u32* mask, u32* constant, Magic& magic) const {
        if (threadIdx.x == 0) {
            C::Masks::store(mask);
#pragma unroll
            for (int i = 0; i < C::PLACES; i++) constant[i] = C::minus_magic(i);
            constant[C::PLACES] = BYTES ? Half<T>::power(-6) : Half<T>::ONE;
        }
        __syncthreads();
        magic.masks.load(mask);
#pragma unroll
        for (int i = 0; i < C::PLACES; i++) magic.minus[i] = read4(shared_address(constant + i));
        magic.one = read4(shared_address(constant + C::PLACES));
    }
    __device__ __forceinline__ void read_tables(float* unit, Books& books) const {
        for (int t = warp; t < ROW_TILES; t += WARPS) {
            const int row = smaller(tile(t) * 16, N - 1);
            const float* table = table_of(row);
            float by;
            if constexpr (BOOKED) by = make_book<BITS, T>(table, (unsigned char*)books[t], lane);
            else if constexpr (WITH_BOOKS) by = make_planes(table, (unsigned char*)books[t], lane);
            else by = (zeros ? *table : 1.f) * (SCALED ? __uint_as_float((127 + S::SHIFT) << 23) : E2M1_UNIT<T>);
            if (lane == 0) unit[t] = by;
        }
        __syncthreads();
    }

    // ------------------------------------------------------------------------------------------------- a step: planes
    __device__ __forceinline__ void multiply_planes(const D& planes, const Weights& weights, const Books& books, int u, int s,
                                                    Sums& acc) const {
        copy_wait<0>();
        __syncwarp();
        planes.store();
        __syncwarp();
        if (s + WARPS < steps) planes.fetch((s + WARPS) * BLOCK_K, rows);
#pragma unroll
        for (int i = 0; i < D::ROUNDS; i++) {
            float2 v[ROW_TILES];
            planes.products(weights.words[u], i, books, v);
            const float2 unit = planes.unit(i);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                const float2 a = scales_of<FORM, T>(weights.scale[u][t][i]);
                float2 z = TABLE ? make_float2(8192.f, 8192.f) : make_float2(mid<BITS>(), mid<BITS>());
                if (ZEROS) z = to_floats<T>(weights.zero[u][t][i]);
                acc[t][0][0] = __fmaf_rn(a.x * unit.x, __fmaf_rn(-z.x, unit.y, v[t].x), acc[t][0][0]);
                acc[t][0][1] = __fmaf_rn(a.y * unit.x, __fmaf_rn(-z.y, unit.y, v[t].y), acc[t][0][1]);
            }
        }
    }

    // ------------------------------------------------------------------------------------------------- a step: halves
    // Step u of those in flight: FG fragments at a time, whose sums are then scaled and added to acc.
    __device__ __forceinline__ void multiply(const Weights& weights, const Magic& magic, const Books& books,
                                             const u32 (&x_at)[M_TILES], int u, Sums& acc) const {
        u32 looked_up[BOOKS][4][4];  // of four fragments: [fragment][j]
#pragma unroll
        for (int i = 0; i < FLUSHES; i++) {
            if (i) __syncwarp();  // keeps ptxas from hoisting the loads of all flushes to the top
            u32 minus_zero[ROW_TILES][2];
#pragma unroll
            for (int t = 0; t < (FORM == EXACT ? ROW_TILES : 0); t++) exact_zero(weights.zero[u][t][i / PER], minus_zero[t]);
            StepSums sum;
            float x_sums[M_TILES][4];  // MAGIC: 0, 1: -sum(magic * x) of the lane's two columns; 2, 3: sum(x)
            u32 b[M_TILES][4];
#pragma unroll
            for (int f = 0; f < FG; f++) {
                const int at = i * FG + f, half = at % 2 * 2, place = C::p(at % L::FRAGS);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    if (f == 0 || half == 0) load_matrix4(b[m], x_at[m] + u * SLOT + (at >> 1) * 64);
                    if constexpr (FORM == MAGIC) {
                        const u32 a[4] = {magic.minus[place / C::FIELD], magic.one, magic.minus[place / C::FIELD], magic.one};
                        float (&d)[4] = x_sums[m];
                        if (f == 0) mma<T>(d, a, b[m][half], b[m][half + 1], 0.f, 0.f, 0.f, 0.f);
                        else mma<T>(d, a, b[m][half], b[m][half + 1], d[0], d[1], d[2], d[3]);
                    }
                }
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++) {
                    u32 a[4];
                    unpack(weights, magic, books, looked_up, minus_zero[t], u, t, at, a);
#pragma unroll
                    for (int m = 0; m < M_TILES; m++) {
                        float (&d)[4] = *(float (*)[4])(SCALED ? acc[t][m] : sum[t][m]);
                        if (f == 0 && !SCALED) mma<T>(d, a, b[m][half], b[m][half + 1], 0.f, 0.f, 0.f, 0.f);
                        else mma<T>(d, a, b[m][half], b[m][half + 1], d[0], d[1], d[2], d[3]);
                    }
                }
            }
            if constexpr (!SCALED) flush(weights, sum, x_sums, u, i, acc);
        }
    }

    static __device__ __forceinline__ void exact_zero(u32 zero, u32 (&minus_zero)[2]) {  // EXACT: -zero / 1024 of two rows
        minus_zero[0] = minus_zero[1] = from_floats<T>(-mid<BITS>() / 1024, -mid<BITS>() / 1024);
        if constexpr (ZEROS) {
            const u32 both = fma2<T>(zero, Half<T>::power(-10) | 0x80008000u, 0u);
            minus_zero[0] = twice<0x1010>(both), minus_zero[1] = twice<0x3232>(both);
        }
    }

    // A operand: fragment `at` of step u and row tile t.
    __device__ __forceinline__ void unpack(const Weights& weights, const Magic& magic, const Books& books,
                                           u32 (&looked_up)[BOOKS][4][4], const u32 (&minus_zero)[2], int u, int t, int at,
                                           u32 (&a)[4]) const {
        const u32 (&from)[L::REGS] = weights.words[u][t][at / L::FRAGS];
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
            const u32 both = S::of(weights.scale[u][t][at / (FRAGS / METAS)]);  // a group's fragments share it
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = S::of_row(small_e2m1<T>(from[j], fragment), both, j % 2);
        } else if constexpr (TABLE) {
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = e2m1<T>(from[j], fragment);
        } else if constexpr (BYTES) {
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = fma2<T>(C::bare(from, fragment, j), Half<T>::power(127), 0x80008000u);
        } else {
            C::template fragment<FORM == EXACT>(from, fragment, magic.masks, a);
        }
#pragma unroll
        for (int j = 0; j < (FORM == EXACT ? 4 : 0); j++)
            a[j] = fma2<T>(a[j], Half<T>::power(14 - C::p(fragment)), minus_zero[j % 2]);
    }

    // The sums of flush i of step u, scaled, less what zeros and magic numbers add.
    static __device__ __forceinline__ void flush(const Weights& weights, const StepSums& sum, const float (&x_sums)[M_TILES][4],
                                                 int u, int i, Sums& acc) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const float2 s = scales_of<FORM, T>(weights.scale[u][t][i / PER]);
            float2 z = make_float2(mid<BITS>(), mid<BITS>());
            if (ZEROS && FORM == MAGIC) z = to_floats<T>(weights.zero[u][t][i / PER]);
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float v = sum[t][m][j];
                    if (BYTES) v = __fmaf_rn(j < 2 ? -z.x : -z.y, x_sums[m][2 + j % 2], v);
                    else if (FORM == MAGIC) v += __fmaf_rn(j < 2 ? -z.x : -z.y, x_sums[m][2 + j % 2], x_sums[m][j % 2]);
                    acc[t][m][j] = __fmaf_rn(j < 2 ? s.x : s.y, v, acc[t][m][j]);
                }
        }
    }

    // ------------------------------------------------------------------------------------------------- sum over the warps
    __device__ __forceinline__ void leave_sums(float* sums, const Sums& acc) const {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int m = 0; m < MS; m++)
#pragma unroll
                for (int i = 0; i < SUMS; i++) {  // lanes change places so that 32 columns of y are read without bank conflicts
                    const int place = PLANES ? lane : lane ^ (i / 2 + (ROW_TILES > 1 ? t : i) % 2 * 2);
                    sums[warp * E + ((t * MS + m) * SUMS + i) * 32 + place] = acc[t][m][i];
                }
    }

    // Row `row` of the block's rows of x by row c of its rows of W, those of gate first.
    __device__ __forceinline__ float product(const float* sums, const float* unit, const float* factor, u32 row, u32 c) const {
        float v = 0.f;
        if constexpr (PLANES) {
            v = planes_sum(sums, unit, row, c);
        } else {
            const u32 at_lane = (c % 8 * 4 + row % 8 / 2) ^ (c / 8 % 2 + (ROW_TILES > 1 ? c / 16 : row) % 2 * 2);
            const u32 i = c % 16 / 8 * 2 + row % 2;
            const float* from = sums + ((c / 16 * M_TILES + row / 8) * 4 + i) * 32 + at_lane;
#pragma unroll
            for (int k = 0; k < WARPS; k++) v += from[k * E];
        }
        if (FORM == EXACT || BYTES) v *= BYTES ? 64 : 1024;
        if (TABLE && !PLANES) v *= unit[c / 16];
        if (FOLD & NORMED) v *= factor[row];
        if (bias) v += to_floats<T>(bias[tile(c / 16) * 16 + c % 16]).x;
        return v;
    }
    // PLANES: over the lanes of a row.
    __device__ __forceinline__ float planes_sum(const float* sums, const float* unit, u32 row, u32 c) const {
        float v = 0.f;
        const float* from = sums + (c / 16 * 2 + c % 16 / 8) * 32 + c % 8 * 4 + row * D::EACH;
#pragma unroll
        for (int k = 0; k < WARPS; k++)
#pragma unroll
            for (int i = 0; i < smaller(D::EACH, D::SPANS); i++) v += from[k * E + i];
        v *= TABLE ? unit[c / 16] : 1.f / (1 << D::SHIFT);
        if (!(v * 0.f == 0.f)) {  // inf or nan: computed once more, one by one
            const size_t at = tile(c / 16), meta = at * groups * META;
            const u16 *x_row = x + (size_t)(m0 + row) * K, *none = nullptr;
            const float* table = table_of(smaller((int)at * 16, N - 1));
            v = plainly<BITS, T, GROUP, FORM>(words + at * chunks * L::WORDS, scales + meta, ZEROS ? zeros + meta : none, table,
                                              x_row, c % 16, K);
        }
        return v;
    }
};

template <int BITS, int T, int GROUP, bool ZEROS, int FORM, int WARPS, int ROW_TILES, int BLOCK_K, int STEPS_IN_FLIGHT,
          int M_TILES, int X_COPIES, int BLOCKS_PER_SM, int LATE, int FOLD = 0>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
tile_mma(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
         const u16* __restrict__ bias, const u16* __restrict__ x, u16* __restrict__ y, int M, int N, int K, int chunks,
         int groups, int block_rows, int table_rows, const Folded folded) {
    using Thread = MmaThread<BITS, T, GROUP, ZEROS, FORM, WARPS, ROW_TILES, BLOCK_K, STEPS_IN_FLIGHT, M_TILES, X_COPIES, FOLD>;
    using C = Codes<BITS, T>;
    constexpr bool PLANES = Thread::PLANES;
    extern __shared__ float4 shared[];
    __shared__ float factor[M_TILES * 8];
    __shared__ u32 mask[C::PLACES];
    __shared__ u32 constant[C::PLACES + 1];
    __shared__ float unit[ROW_TILES];
    __shared__ uint4 books[Thread::BOOKS][2];
    Thread thread({words, scales, zeros, bias, x, N, K, chunks, groups, table_rows}, M, block_rows);
    const int steps = thread.steps, m0 = thread.m0, rows = thread.rows;

    // ---- the first steps' weights
    typename Thread::Addresses at;
    typename Thread::Weights weights;
    thread.point_to_weights(at);
    if (thread.warp < steps) thread.load_weights(weights, at, 0, thread.warp);
    // two blocks per SM ran before these: the previous kernel has ended, and x is ready
    const bool both = STEPS_IN_FLIGHT > 1 && blockIdx.x >= LATE;
    if (both && thread.warp + WARPS < steps) thread.load_weights(weights, at, STEPS_IN_FLIGHT - 1, thread.warp + WARPS);

    // ---- what does not depend on the previous kernel
    u32 x_from[Thread::POINTERS];
    thread.point_to_x(shared_address(shared), x_from);
    typename Thread::Magic magic;
    magic.one = 0;
    if constexpr (FORM == MAGIC) thread.make_magic(mask, constant, magic);
    if constexpr (Thread::TABLE) thread.read_tables(unit, books);
    u32 x_at[M_TILES];  // ldmatrix: this lane's row
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int row = smaller(m * 8 + (thread.lane & 7), Thread::SLOT_ROWS - 1);
        x_at[m] = thread.ring + row * Thread::X_ROW + (thread.lane >> 3) * 16;
    }
    const typename Thread::D planes(PLANES, shared_address(shared) + thread.warp * Thread::D::BYTES, x + (size_t)m0 * K, K);

    // ---- x
    previous_grid_wait();
    next_grid_launch();  // in this order: what starts beside this product finds x ready
    constexpr int SUM_BYTES = WARPS * Thread::E * 4;
    const u32 squares = shared_address(shared) + (Thread::X_BYTES > SUM_BYTES ? Thread::X_BYTES : SUM_BYTES);
    const Early first = early<FOLD, Thread::OUT, WARPS>(folded, squares, m0, rows, blockIdx.x * Thread::OUT, N, K);
#pragma unroll
    for (int u = 0; u < (PLANES ? 0 : STEPS_IN_FLIGHT); u++) {
        if (thread.warp + u * WARPS < steps) thread.load_x(x_from, u, thread.warp + u * WARPS);
        copy_commit();
    }
    if (PLANES && thread.warp < steps) planes.fetch(thread.warp * BLOCK_K, rows);

    // ---- the steps of this warp
    typename Thread::Sums acc = {};
    for (int s = thread.warp; s < steps; s += WARPS * STEPS_IN_FLIGHT) {
#pragma unroll
        for (int u = 0; u < STEPS_IN_FLIGHT; u++) {
            const int now = s + u * WARPS;
            if (now < steps) {
                const int next = now + STEPS_IN_FLIGHT * WARPS;
                thread.load_next(weights, at, u, now, both);
                if constexpr (PLANES) {
                    thread.multiply_planes(planes, weights, books, u, now, acc);
                    if (STEPS_IN_FLIGHT == 1 && next < steps) thread.load_weights(weights, at, u, next);
                } else {
                    copy_wait<STEPS_IN_FLIGHT - 1>();
                    __syncwarp();
                    thread.multiply(weights, magic, books, x_at, u, acc);
                    __syncwarp();  // everyone has read this slot
                    if (STEPS_IN_FLIGHT == 1 && next < steps) thread.load_weights(weights, at, u, next);
                    if (next < steps) thread.load_x(x_from, u, next);
                    copy_commit();
                }
                if ((FOLD & NORMED) && now == thread.warp)  // while weights come
                    factors<WARPS>(factor, squares, folded, first, m0, rows, K);
            }
        }
    }
    if ((FOLD & NORMED) && thread.warp >= steps) {
        copy_commit();
        copy_wait<0>();
        __syncwarp();
        factors<WARPS>(factor, squares, folded, first, m0, rows, K);
    }

    // ---- sums over the warps
    __syncthreads();
    float* sums = (float*)shared;
    thread.leave_sums(sums, acc);
    __syncthreads();
    store<FOLD, T, Thread::OUT>(folded, first, y, m0, rows, blockIdx.x * Thread::OUT, N, WARPS * 32,
                                [&](u32 row, u32 c) { return thread.product(sums, unit, factor, row, c); });
}
