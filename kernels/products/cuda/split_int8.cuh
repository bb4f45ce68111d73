// Products of codes as bytes by 8-bit tensor cores: tile_mma's FORM INT8_PLANES, up to 4 bits, one row of x or two.
//
// x       In a span of k (a group, or 128, 64 or 32 of one) x = x' * unit: x' an integer, unit a power of two, so that the
//         span's largest x' fills 14 bits. Rounded there: by at most 2^-14 of that largest |x|, and no fp16 number within 1/8
//         of it is rounded at all. x' = 256 * high + low, two signed bytes: two columns of B for each row of x and span.
// mma     16 x 32 bytes by 32 x 8 bytes. A: `word & mask` are four codes times 2^p, p the place of the codes in their bytes;
//         nothing is shifted: sums of the highest place, taken first, are doubled on the way to the next. A word's bytes
//         2 e + h are fragment (place + PLACES * h), k = 16 * fragment + 2 * quad + e: x is stored in that order.
// rounds  Eight columns are four pairs: 4 / ROWS spans that share a flush; a lane has one pair, so one scale and zero and one
//         fp32 sum of each row of W. Columns of other spans are zero for a chunk: they are cleared once and never written.
// tables  Four codes of a word's half (four fragments, one k of a pair) are the selectors of two `prmt`, each among eight bytes
//         below 128: a selector's top bit makes `prmt` repeat a byte's sign, 0, so the half that a code is not of adds nothing.
//         Two planes, the high and the low 7 bits of 14: 15 instructions for eight codes. (e2m1 in one plane was slower than as
//         halves: tables.md.)
// zeros   sum(x') of a span is known as x is stored, so sum(code * x') - zero * sum(x') cancels as it should.
// Cost    16 x 128 weights: 16 LOP3, 4 mma, 3 doublings and, shared by four groups, 5 instructions of scales; x: 33 for 128 k.
// Spans   that hold inf or nan, and sums past fp32, end as no finite number; such a y is computed once more, one by one.
#pragma once
#include "book.cuh"

__device__ __forceinline__ u32 load4_written(const u16* p) {  // as load2 of fold.cuh: not by way of L1
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }
template <int T>
__device__ __forceinline__ u32 larger2(u32 a, u32 b) {  // of two halves each; NaN if one is
    u32 d;
    if constexpr (T == FP16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
template <int T>
__device__ __forceinline__ u32 absolute2(u32 v) {  // of two halves: the AND is a modifier of what takes it
    u32 d;
    if constexpr (T == FP16) asm("abs.f16x2 %0, %1;" : "=r"(d) : "r"(v));
    else asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(v));
    return d;
}
__device__ __forceinline__ void mma_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int c0, int c1, int c2, int c3) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}

// x' comes as the last bits of fma(x, a power of two, SPLIT_ROUND): it fills SPLIT_HEAD + 1 bits, and 1.5 * 2^23 leaves no room
// for a fraction. 128 makes the second byte the high byte; the first is the low one + 128.
constexpr int SPLIT_HEAD = 13;  // unit is 2^-SPLIT_HEAD of the largest |x|'s power of two
constexpr float SPLIT_ROUND = 12582912.f + 128;
constexpr u32 SPLIT_ZERO = 0x4b400080u;  // the bits of SPLIT_ROUND
// of four x', [e]: e-th of a pair
__device__ __forceinline__ void split_int8(const u32 (&one)[2], const u32 (&other)[2], u32& low, u32& high) {
    const u32 even = __byte_perm(one[0], other[0], 0x5140), odd = __byte_perm(one[1], other[1], 0x5140);
    low = __byte_perm(even, odd, 0x5410) ^ 0x80808080u, high = __byte_perm(even, odd, 0x7632);
}

// Register j of a chunk of 3-bit codes as fields of four bits: codes of even places, or of odd ones. Their third bits lie
// beside the low two.
__device__ __forceinline__ u32 fields_of_four(const u32 (&w)[Tile<3>::REGS], int j, int odd) {
    const u32 h = w[4 + j / 2];
    return odd ? pick(h >> j % 2, w[j] >> 2, 0x44444444u) : pick(h << (2 - j % 2), w[j], 0x44444444u);
}

// 16 floats as the numbers 8192 + 8191 / (the largest of them) times each: a plane of high and one of low 7 bits, by a whole
// warp; the largest over 8191.
__device__ __forceinline__ float make_planes(const float* values, unsigned char* planes, int lane) {
    const float value = values[lane & 15];
    float most = fabsf(value);
#pragma unroll
    for (int d = 8; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    most = fmaxf(most, 1e-30f);
    const int number = (int)rintf(value * (8191.f / most)) + 8192;
    if (lane < 16) planes[lane] = (unsigned char)(number >> 7), planes[16 + lane] = (unsigned char)(number & 127);
    return most * (1.f / 8191.f);
}

// sum(x * (code - zero) * scale) of one row of x and row `r` of a row tile, one by one: what fp32 makes of inf and nan. own:
// the table, if there is one.
template <int BITS, int T, int GROUP, int FORM>
__device__ float plainly(const u32* tile, const u16* scales, const u16* zeros, const float* own, const u16* x, int r, int K) {
    using L = Tile<BITS>;
    float sum = 0.f;
    for (int k = 0; k < K; k++) {
        const int f = k % L::CHUNK / 16, j = r / 8 + k % 16 / 8 * 2, lane = r % 8 * 4 + k % 8 / 2, e = k % 2;
        const int meta = (GROUP ? k / (GROUP ? GROUP : 1) : 0) * 16 + r % 8 * 2 + r / 8;
        const u32* chunk = tile + (size_t)(k / L::CHUNK) * L::WORDS;
        u32 code = chunk[lane * 4 + j] >> (16 * e + f * (BITS == 3 ? 2 : BITS)) & (BITS == 3 ? 3 : (1 << BITS) - 1);
        if (BITS == 3) code |= (chunk[128 + lane * 2 + j / 2] >> (16 * e + 2 * f + j % 2) & 1) << 2;
        float value, scale;
        if constexpr ((FORM & 15) == BOOK_PLANES) value = own[code];
        else value = (float)code - (zeros ? to_floats<T>(zeros[meta]).x : mid<BITS>());
        if constexpr (of_bytes(FORM)) scale = byte_scales<FORM>(((const unsigned char*)scales)[meta]).x;
        else scale = to_floats<T>(scales[meta]).x;
        const u32 both = load4_written(x + k / 2 * 2);
        sum += to_floats<T>(k % 2 ? both >> 16 : both).x * (value * scale);
    }
    return sum;
}

template <int BITS, int T, int GROUP, int ROWS, int BLOCK_K, int FORM = 0>
struct Int8Planes {
    using L = Tile<BITS>;
    static constexpr bool TABLE = of_table(FORM);
    static constexpr int PARTS = TABLE ? 2 : 1;  // planes of a code
    static constexpr int SPAN = gcd(GROUP ? GROUP : 128, 128), SPANS = BLOCK_K / SPAN;  // of a step
    static constexpr int CHUNKS = BLOCK_K / L::CHUNK, PLACES = L::FRAGS / 2;  // PLACES: mma of a chunk
    // spans, chunks of a round
    static constexpr int EACH = 4 / ROWS, ROUNDS = (SPANS + EACH - 1) / EACH, PER = CHUNKS / ROUNDS;
    static constexpr bool SPLIT = SPAN < L::CHUNK;  // the two fragments of a byte pair lie in two spans
    static constexpr int ROW = 288;  // bytes: B of an mma, [lane][register], and 32 against bank conflicts of stores
    static constexpr int UNITS = CHUNKS * PLACES * ROW, X = UNITS + (ROWS * SPANS + 2) / 2 * 16, BYTES = X + ROWS * BLOCK_K * 2;
    static constexpr int FIELD = BITS == 3 ? 4 : BITS, SHIFT = TABLE ? 0 : 8 - FIELD;  // sums come times 2^SHIFT
    static constexpr int BESIDE = SPAN == 32 ? 2 : 4;  // TABLE: fragments of a span whose codes are one register's bytes
    static_assert(CHUNKS % ROUNDS == 0 && SPAN >= 32, "a chunk's spans are of one round");

    // A warp's part of shared memory: [chunk][place][lane][register], (unit, sum) of [row][span] and zeros, x of a step. A lane
    // turns 16 k at once, or 8 where that takes all lanes: TABLE of BESIDE fragments, else SPLIT of one, else of two, so that
    // it has whole words of B. EVERY: tasks of a row
    static constexpr int VALUES = ROWS * BLOCK_K <= 256 && !(TABLE && BESIDE == 4) ? 8 : 16, EVERY = BLOCK_K / VALUES;
    static constexpr int TASKS = ROWS * EVERY, AT_ONCE = (TASKS + 31) / 32;
    static constexpr int QUADS = VALUES / 4 / BESIDE;  // TABLE: of a task
    // pairs of k that lie together
    static constexpr int PAIRS = TABLE ? QUADS : SPLIT ? 2 : VALUES / 8, LOADS = VALUES / 2 / PAIRS;
    static constexpr int APART = TABLE ? 16 : SPLIT ? 4 : 16 * PLACES;
    static constexpr int offset(int load) { return 8 * (load % 2) + APART * (load / 2); }  // in k
    const u16* from;
    int K;
    u32 b_at, sums_at, x_at, read_at[AT_ONCE], write_at[AT_ONCE], unit_at[AT_ONCE];  // of this lane

    // x: (rows, K). The memory is cleared: a barrier of the warp must follow. ptxas is kept from making the addresses anew for
    // each step (40 of 195 instructions).
    __device__ __forceinline__ Int8Planes(bool here, u32 at, const u16* x, int K) : from(x), K(K) {
        if (!here) return;
        const int lane = threadIdx.x & 31, span = lane % 4 % EACH;
        for (int i = lane * 16; i < X; i += 512) store4(at + i, {0, 0, 0, 0});
        b_at = at + lane * 8, x_at = at + X + lane * 16;
        sums_at = at + UNITS + (span < SPANS ? lane % 4 / EACH * SPANS + span : ROWS * SPANS) * 8;
        asm volatile("" : "+r"(b_at), "+r"(sums_at), "+r"(x_at));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int task = 32 * i + lane, mine = task % EVERY, row = ROWS == 1 ? 0 : smaller(task / EVERY, ROWS - 1);
            const int fragments = mine * VALUES / 16, chunk = mine * VALUES / L::CHUNK, span = mine * VALUES / SPAN;
            const int place = SPLIT ? fragments % PLACES : mine * VALUES % L::CHUNK / 32;
            const int part = SPLIT ? mine * VALUES % 16 / 8 : mine * VALUES % 32 / VALUES * PAIRS;  // SPLIT: half; else quad
            int k = SPLIT ? fragments * 16 + part * 4 : chunk * L::CHUNK + 16 * place + part * 2;
            write_at[i] = at + (chunk * PLACES + place) * ROW + (row * EACH + span % EACH) * 64 + part * (SPLIT ? 16 : 8);
            if constexpr (TABLE) {
                const int tasks = 16 * BESIDE / VALUES, quad = mine % tasks * QUADS;
                k = mine / tasks * 16 * BESIDE + quad * 2;
                write_at[i] = at + chunk * PLACES * ROW + (row * EACH + span % EACH) * 64 + quad * 8;
            }
            read_at[i] = at + X + (row * BLOCK_K + k) * 2;
            unit_at[i] = at + UNITS + (row * SPANS + span) * 8;
            asm volatile("" : "+r"(read_at[i]), "+r"(write_at[i]), "+r"(unit_at[i]));
        }
    }

    // Ask for x of the step at k0, zeros past K, the last row again past `rows`.
    __device__ __forceinline__ void fetch(int k0, int rows) const {
        constexpr int GRANULES = BLOCK_K / 8;  // of 16 bytes
#pragma unroll
        for (int first = 0; first < ROWS * GRANULES; first += 32) {
            const int n = first + (threadIdx.x & 31), k = k0 + n % GRANULES * 8, row = smaller(n / GRANULES, rows - 1);
            if (ROWS * GRANULES % 32 == 0 || n < ROWS * GRANULES)
                copy_async_or_zero(x_at + first * 16, from + (k < K ? (ROWS == 1 ? 0 : row * K) + k : 0), k < K ? 16 : 0);
        }
        copy_commit();
    }

    // The x that was asked for into planes, by a warp; a barrier of it before and after.
    __device__ __forceinline__ void store() const {
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int task = 32 * n + (threadIdx.x & 31), mine = task % EVERY;
            u32 v[LOADS][PAIRS], top = 0;  // load: 2 * (SPLIT: quads, else fragment) + register of B
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const u32 at = read_at[n] + 2 * offset(i);
                if constexpr (PAIRS == 2) load2(v[i][0], v[i][1], at);
                else v[i][0] = read4(at);
            }
#pragma unroll
            for (int i = 0; i < LOADS * PAIRS; i++) top = larger2<T>(top, absolute2<T>(v[i / PAIRS][i % PAIRS]));
            top = larger(top & 0xffffu, top >> 16);
#pragma unroll
            for (int d = 1; d < SPAN / VALUES; d *= 2) top = larger(top, __shfl_xor_sync(0xffffffffu, top, d));
            const u32 e = larger(__float_as_uint(to_floats<T>(top).x) >> 23, SPLIT_HEAD + 2);
            const float up = __uint_as_float((254 + SPLIT_HEAD - e) << 23);
            u32 t[LOADS][PAIRS][2], sum = 0;  // and [element]: SPLIT_ZERO + x'
#pragma unroll
            for (int i = 0; i < LOADS * PAIRS; i++) {
                const float2 two = to_floats<T>(v[i / PAIRS][i % PAIRS]);
                u32(&to)[2] = t[i / PAIRS][i % PAIRS];
                to[0] = __float_as_uint(__fmaf_rn(two.x, up, SPLIT_ROUND)),
                to[1] = __float_as_uint(__fmaf_rn(two.y, up, SPLIT_ROUND));
                sum += to[0] + to[1];
            }
            sum -= VALUES * SPLIT_ZERO;
#pragma unroll
            for (int d = 1; d < SPAN / VALUES; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
            if (TASKS % 32 && task >= TASKS) continue;
            if (mine % (SPAN / VALUES) == 0) {  // nan where an x is not a finite number
                const u32 unit = e == 255 ? 0x7fffffffu : (e - SPLIT_HEAD) << 23,
                          total = __float_as_uint((float)(int)sum * (1 << SHIFT));
                store2(unit_at[n], unit, total);
            }
            if constexpr (TABLE) {
                const int f = mine * VALUES / (16 * BESIDE) * BESIDE % 4;  // of the chunk
                const u32 here = BESIDE == 4 ? 0xffffffffu : 0xffffu << 8 * f;
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    u32 low[4], high[4];
#pragma unroll
                    for (int i = 0; i < 2 * QUADS; i++) {  // (quad, register of B)
                        const int q = i / 2, r = i % 2;
                        if constexpr (BESIDE == 4) {
                            const u32 even[2] = {t[r][0][e], t[4 % LOADS + r][0][e]},
                                      odd[2] = {t[2 % LOADS + r][0][e], t[6 % LOADS + r][0][e]};
                            split_int8(even, odd, low[i], high[i]);
                        } else {
                            low[i] = (__byte_perm(t[r][q][e], t[2 + r][q][e], 0x4040) ^ 0x80808080u) & here;
                            high[i] = __byte_perm(t[r][q][e], t[2 + r][q][e], 0x5151) & here;
                        }
                    }
                    const u32 to = write_at[n] + e * ROW;
                    if constexpr (QUADS > 1) store4(to, high), store4(to + 32, low);
                    else store2(to, high[0], high[1]), store2(to + 32, low[0], low[1]);
                }
            } else if constexpr (SPLIT) {
                const u32 here = mine * VALUES / 16 / PLACES % 2 ? 0xff00ff00u : 0x00ff00ffu;
#pragma unroll
                for (int a = 0; a < LOADS / 2; a++) {
                    u32 low[4], high[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const u32(&two)[2] = t[2 * a + i % 2][i / 2];
                        low[i] = (__byte_perm(two[0], two[1], 0x4400) ^ 0x80808080u) & here;
                        high[i] = __byte_perm(two[0], two[1], 0x5511) & here;
                    }
                    store4(write_at[n] + 16 * a, high), store4(write_at[n] + 16 * a + 32, low);
                }
            } else {
                u32 low[4], high[4];
#pragma unroll
                for (int i = 0; i < 2 * PAIRS; i++) split_int8(t[i % 2][i / 2], t[2 + i % 2][i / 2], low[i], high[i]);
                if constexpr (PAIRS == 2) store4(write_at[n], high), store4(write_at[n] + 32, low);
                else store2(write_at[n], high[0], high[1]), store2(write_at[n] + 32, low[0], low[1]);
            }
        }
    }
    static __device__ __forceinline__ void load2(u32& a, u32& b, u32 from) {
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
    }
    static __device__ __forceinline__ uint4 read16(u32 from) {
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(from)
                     : "memory");
        return v;
    }
    static __device__ __forceinline__ void store2(u32 to, u32 a, u32 b) {
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(a), "r"(b) : "memory");
    }
    static __device__ __forceinline__ void store4(u32 to, const u32 (&v)[4]) {
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    }

    // The group of this lane's span of a round of the step at k0.
    static __device__ __forceinline__ int group(int k0, int round, int groups) {
        const int k = k0 + (round * EACH + (threadIdx.x & 3) % EACH) * SPAN;
        return GROUP ? smaller((u32)k / (u32)(GROUP ? GROUP : 1), groups - 1) : 0;
    }

    // (unit, 2^SHIFT * sum(x')) of this lane's span of a round; zeros where there is none.
    __device__ __forceinline__ float2 unit(int round) const {
        u32 unit, sum;
        load2(unit, sum, sums_at + round * EACH * 8);
        return make_float2(__uint_as_float(unit), __uint_as_float(sum));
    }

    // 2^SHIFT * sum(code * x') of this lane's span of a round, of rows r and r + 8 of each tile; books: TABLE's bytes of each
    // tile.
    template <int ROW_TILES>
    __device__ __forceinline__ void products(const u32 (&w)[ROW_TILES][CHUNKS][L::REGS], int round, const uint4 (*books)[2],
                                             float2 (&sums)[ROW_TILES]) const {
        int d[ROW_TILES][PARTS][4];
        uint4 own[ROW_TILES][PARTS];  // read anew for each round: kept, they cost 8 registers a tile, which spilled
#pragma unroll
        for (int t = 0; t < (TABLE ? ROW_TILES : 0); t++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) own[t][part] = read16(shared_address(&books[t][part]));
#pragma unroll
        for (int place = 0; place < PLACES; place++)
#pragma unroll
            for (int i = 0; i < PER; i++) {
                const int chunk = round * PER + i;
                u32 b0, b1;
                load2(b0, b1, b_at + (chunk * PLACES + place) * ROW);
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        u32 a[4];
                        if constexpr (!TABLE) operand(w[t][chunk], place, a);
                        else look_up(w[t][chunk], place, own[t][part], a);
                        int(&sum)[4] = d[t][part];
                        if (place == 0 && i == 0) {
                            mma_bytes(sum, a, b0, b1, 0, 0, 0, 0);
                            continue;
                        }
                        const int up = !TABLE && i == 0 && (BITS != 3 || place == 2) ? 1 << FIELD : 1;
                        mma_bytes(sum, a, b0, b1, sum[0] * up, sum[1] * up, sum[2] * up, sum[3] * up);
                    }
            }
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            sums[t] = both_rows(d[t][0]);
            if constexpr (PARTS == 2) {
                const float2 low = both_rows(d[t][1]);
                sums[t] = make_float2(__fmaf_rn(128.f, sums[t].x, low.x), __fmaf_rn(128.f, sums[t].y, low.y));
            }
        }
    }
    static __device__ __forceinline__ float2 both_rows(const int (&d)[4]) {
        return make_float2((float)(256 * d[0] + d[1]), (float)(256 * d[2] + d[3]));
    }
    static __device__ __forceinline__ void operand(const u32 (&w)[L::REGS], int place, u32 (&a)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (BITS == 3) {
                a[j] = fields_of_four(w, j, place % 2) & 0x07070707u << place / 2 * 4;
            } else {
                a[j] = w[j] & ((1u << BITS) - 1) * 0x01010101u << place * BITS;
            }
        }
    }
    // The bytes of the codes in half `place` of a word: of each fragment of a chunk one.
    static __device__ __forceinline__ void look_up(const u32 (&w)[L::REGS], int place, const uint4& bytes, u32 (&a)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 codes = w[j] >> 16 * place, others = (w[j] ^ 0x88888888u) >> 16 * place;
            a[j] = prmt(bytes.x, bytes.y, codes) + prmt(bytes.z, bytes.w, others);
        }
    }
    static __device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selectors) {  // __byte_perm takes a selector's top bit off
        u32 d;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selectors));
        return d;
    }
};
