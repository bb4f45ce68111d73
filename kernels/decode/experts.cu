// Mixture layers while decoding: only the chosen experts' packed weights (layout `tile`) are read; ids stay on the device.
//
//   UP    h[s, i] = act(gate_i . x, up_i . x) for slot s = token * top_k + place, gate and up rows i and I + i of its expert;
//         of experts without a gate (ALONE) h[s, i] = act(up_i . x)
//   DOWN  y[token, n] = sum over the token's slots of weight[s] * (down_n . h[s]), in the order of the slots
//   Where there is a bias (E, rows), each product has its row's added.
//   SHARED: an expert that every token takes, of weights and a width of its own, by blocks of UP and warps of DOWN in addition:
//   h_shared = act(gate . x, up . x) or act(up . x) like the others', times sigmoid(opening . x) where there is an opening;
//   down . h_shared is added to y.
//
// FORM    0: no zeros, 1: zeros; E2M1, BOOK, SCALES_*: values from a table (book.cuh), `zeros` then fp32 tables or factors, one
//         for table_rows rows of all experts' (0: one for all)
// Grid    x: tiles of 16 rows of the output, y: slots (UP) or tokens (DOWN)
// Block   products of 16 rows (gate and up, or up; or the top_k experts of a token) times KS parts of K, one warp for each. A
//         warp loads AHEAD chunks at once, straight into registers; many small blocks on an SM hide each other's latency. All
//         8 columns of an mma hold the same x: the tensor cores idle anyway, and decoding costs 5 instructions a fragment.
//         Scales and zeros are loaded with the words, into shared memory: loaded where they are needed they would cost a trip
//         to memory for each chunk.
// Early   DOWN asks for its words and routing weights while UP still computes; UP lets it start only once it has seen the ids
//         itself. A shared expert's weights are asked for before the router has ended.
// Fit     BLOCKS on a multiprocessor: of UP three, so that the 384 of Qwen3-30B-A3B's eight experts are one wave; of DOWN two
//         where the grid has more than there are multiprocessors, with AHEAD 6, which leaves 64 registers, or blocks of half as
//         many warps (experts.py); else one: two would share one and leave others idle (A3B, one token: 6.7 us a layer instead
//         of 4.4). ONCE: a warp's chunks are no more than AHEAD.
// Sums    fp32, warps in a fixed order in shared memory; nothing is rounded between the products, gate, up and weights
// Limits  K a multiple of 8; for UP, I of 16; GROUP a multiple of 16, or 0: one group
// Source  own
#include "fold.cuh"
#include "book.cuh"

enum { UP_SILU = 0, UP_GELU_TANH = 1, DOWN = 2, UP_CLAMPED = 3, ALONE = 4 };  // from ALONE on: no gate, see `alone`

template <int MODE> __device__ __forceinline__ float alone(float up) {
    const float positive = up < 0.f ? 0.f : up;  // a comparison, not fmaxf: NaN stays
    if constexpr (MODE == ALONE + 4) return positive * positive;
    else if constexpr (MODE == ALONE + 3) return positive;
    else if constexpr (MODE == ALONE + 2) return 0.5f * up * (1.f + erff(0.7071067811865476f * up));
    else return activation(MODE == ALONE, up);
}

constexpr int groups_met(int group, int chunk, int count) {  // by so many chunks from any on; group 0: a row is one
    return group == 0 ? 1 : chunk % group == 0 ? count * chunk / group : (count * chunk - 1) / group + 2;
}
struct Beside {  // the shared expert; of UP: of width / 16 tiles of gate (if any), then of up; of DOWN: of `parts` warps
    const u32* words;
    const u16 *scales, *zeros, *opening;  // opening, of UP: (K), or null
    u16* h;                               // (tokens, width)
    int width, chunks, groups, parts;     // parts, of UP: rows of blocks in the grid, before those of slots
};
template <int BITS, int T, int GROUP, int FORM, int MODE, int AHEAD, int ONCE, int BLOCKS, int SHARED = 0>
__global__ void __launch_bounds__(MODE != DOWN ? 256 : SHARED ? 640 : 512, BLOCKS)
experts(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
        const u16* __restrict__ bias, const long long* ids, const float* weights, const u16* x, u16* y, int width, int K,
        int chunks, int groups, int tiles, int top_k, int KS, int table_rows, const Beside s) {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    constexpr int FRAGS = L::FRAGS, FG = gcd(GROUP ? GROUP / 16 : FRAGS, FRAGS);  // fragments of a chunk, and of one flush
    constexpr int PRODUCTS = MODE >= ALONE ? 1 : 2;  // of UP
    constexpr bool UP = MODE != DOWN, ZEROS = FORM == 1, TABLE = of_table(FORM), BOOKED = (FORM & 15) == BOOK;
    constexpr bool SCALED = scaled_halves<FORM, T>();
    using S = HalfScales<SCALED ? FORM : int(E2M1), T>;
    constexpr int BOOKS = BOOKED ? 16 : 1;
    // groups that AHEAD chunks may meet; bytes of one's scales for 16 rows; of all scales, and with zeros
    constexpr int GROUPS = groups_met(GROUP, L::CHUNK, AHEAD), ROWS = of_bytes(FORM) ? 16 : 32, SCALES = GROUPS * ROWS,
                  METAS = SCALES * (ZEROS ? 2 : 1);
    extern __shared__ float4 shared[];  // of each warp: scales and zeros of AHEAD chunks, and x of its part of K
    __shared__ float sums_at[(SHARED ? 20 : 16) * 16];
    __shared__ float opened[8];  // of each part of K
    __shared__ u64 out[2];       // where the block's y go, and how many: registers are short
    __shared__ u32 mask[C::PLACES];
    __shared__ uint4 books[BOOKS][2];  // of each warp

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2;
    const bool beside = SHARED && (UP ? (int)blockIdx.y < s.parts : warp >= top_k * KS);  // the shared expert's
    int sub = warp / KS, part = warp % KS;
    u32 own_n = 0, own_row = 0;
    if (SHARED) own_n = blockIdx.x * 16, own_row = UP && !beside ? blockIdx.y - s.parts : blockIdx.y;
    auto n0 = [&] { return SHARED ? own_n : blockIdx.x * 16; };  // of the output
    auto row = [&] { return SHARED ? own_row : blockIdx.y; };
    char* own = (char*)shared;  // this product's shared memory
    if (beside && UP) {
        const int rows = (s.width + 16 * gridDim.x - 1) / (16 * gridDim.x);  // of blocks, for a token
        own_row = blockIdx.y / rows, own_n += blockIdx.y % rows * gridDim.x * 16, width = s.width;
        if ((int)own_n >= width) return;
    } else if (beside) {
        own += top_k * KS * (METAS + (chunks + KS - 1) / KS * L::CHUNK * 2);
        sub = 0, part = warp - top_k * KS, KS = s.parts, K = s.width, chunks = s.chunks, groups = s.groups;
    }
    if (beside) words = s.words, scales = s.scales, zeros = s.zeros;
    const bool opens = beside && UP && s.opening;
    if (!UP) next_grid_launch();
    if (threadIdx.x == 0) C::Masks::store(mask);
    if (SHARED && threadIdx.x == 0)
        out[0] = (u64)((UP && beside ? s.h : y) + (size_t)own_row * width + own_n), out[1] = width - own_n;
    const int each = (chunks + KS - 1) / KS, begin = smaller(part * each, chunks), end = smaller(begin + each, chunks);
    __syncthreads();
    typename C::Masks masks;
    masks.load(mask);
    if (UP && !beside) previous_grid_wait(), next_grid_launch();  // in this order: DOWN starts when the ids are known

    const int slot = UP ? row() : row() * top_k + sub;
    const int row_tile = (SHARED ? own_n / 16 : blockIdx.x) + (UP ? sub * (width / 16) : 0);
    u64 expert;
    if (beside) expert = 0;
    else asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(expert) : "l"(ids + slot) : "memory");
    float weight = 1.f;  // of DOWN's product: asked for here, because a trip to L2 at the end would add its latency
    if constexpr (!UP)
        if (!beside) weight = load_float(weights + slot);
    const size_t tile = expert * tiles + row_tile;
    const u32* w_at = words + (tile * chunks + begin) * L::WORDS;
    // of this product, among all experts' rows
    const size_t first_row = expert * (UP ? PRODUCTS * width : width) + (UP ? sub * width : 0);
    float unit = 1.f;
    if (lane % 4 == 0) {  // its sums begin as the bias, in shared memory: registers are short
#pragma unroll
        for (int o = 0; o < 16; o += 8) {
            const int n = n0() + r + o;
            sums_at[warp * 16 + r + o] = bias && part == 0 && n < width ? to_floats<T>(bias[first_row + n]).x : 0.f;
        }
    }
    if constexpr (TABLE) {
        const size_t at = table_rows ? (first_row + n0()) / table_rows : 0;
        const float* tables = (const float*)zeros;
        if constexpr (BOOKED)
            unit = make_book<BITS, T>(tables + (at << BITS), (unsigned char*)books[warp], lane), __syncwarp();
        else unit = (tables ? tables[at] : 1.f) * (SCALED ? __uint_as_float((127 + S::SHIFT) << 23) : E2M1_UNIT<T>);
    }
    const u16* x_from = x + (size_t)(UP ? slot / top_k : slot) * K;
    if (beside) x_from = (UP ? x : s.h) + (size_t)own_row * K;
    // the warp's; then its x, and of the opening
    char* const metas = own + (beside && !UP ? part : warp) * (METAS + each * L::CHUNK * (opens ? 4 : 2));
    char* const mine = metas + METAS;
    const u32 x_at = shared_address(mine) + (lane >> 3) * 16;
    const char* metas_mine = metas + 2 * r * (ROWS / 16);  // of rows 2 r and 2 r + 1, r and r + 8 of a fragment
    constexpr int BY = GROUP ? GROUP : 1 << 30;
    auto group_of = [&](int k) { return (int)((u32)k / BY); };
    auto scale_of = [&](int g) {
        if constexpr (of_bytes(FORM)) return byte_scales<FORM>(*(const u16*)(metas_mine + g * ROWS));
        else return to_floats<T>(*(const u32*)(metas_mine + g * ROWS));
    };

    u32 w[AHEAD][L::REGS];
    auto load = [&](int c) {
        const int first = group_of(c * L::CHUNK), there = (groups - first) * ROWS;
#pragma unroll
        for (int i = 16 * lane; i < METAS; i += 512) {  // of groups past the last: zeros
            const int at = i < SCALES ? i : i - SCALES;
            const char* from = (const char*)(i < SCALES ? scales : zeros) + (tile * groups + first) * ROWS + at;
            copy_async_or_zero(shared_address(metas + i), from, at < there ? 16 : 0);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (c + a < end) {
                const u32* from = w_at + (size_t)(c + a - begin) * L::WORDS;
#pragma unroll
                for (int i = 0; i < L::REGS / 4; i++)
                    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(w[a][4 * i]), "=r"(w[a][4 * i + 1]), "=r"(w[a][4 * i + 2]), "=r"(w[a][4 * i + 3])
                                 : "l"(from + i * 128 + lane * 4));
                if constexpr (BITS == 3)
                    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];"
                                 : "=r"(w[a][4]), "=r"(w[a][5])
                                 : "l"(from + 128 + lane * 2));
            }
    };
    load(begin);
    if (opens && sub == 0)
        for (int i = lane * 8; i < (end - begin) * L::CHUNK; i += 256) {
            const int k = begin * L::CHUNK + i;
            copy_async_or_zero(shared_address(mine + 2 * (each * L::CHUNK + i)), s.opening + k, k < K ? 16 : 0);
        }
    if (!UP || beside) previous_grid_wait();
    if (UP && beside) next_grid_launch();
#pragma unroll 2
    for (int i = lane * 8; i < (end - begin) * L::CHUNK; i += 256) {  // x of these chunks; past K: zeros
        const int k = begin * L::CHUNK + i;
        copy_async_or_zero(shared_address(mine + 2 * i), x_from + k, k < K ? 16 : 0);
    }

    if (opens && sub == 0) {  // before the products: their weights are on their way, and later registers are short
        float sum = 0.f;
        copy_commit(), copy_wait<0>();
        __syncwarp();
        for (int i = lane * 8; i < (end - begin) * L::CHUNK; i += 256)
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const float2 a = to_floats<T>(*(const u32*)(mine + 2 * (i + j)));
                const float2 b = to_floats<T>(*(const u32*)(mine + 2 * (each * L::CHUNK + i + j)));
                sum += a.x * b.x + a.y * b.y;
            }
#pragma unroll
        for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (lane == 0) opened[part] = sum;
    }

    float acc0 = 0.f, acc1 = 0.f, all[4] = {};  // of rows r and r + 8; all: SCALED
    u32 looked_up[4][4];           // [j][fragment % 4]
    for (int c = begin; ONCE ? c == begin : c < end; c += AHEAD) {
        if (!ONCE && c > begin) __syncwarp(), load(c);
        copy_commit(), copy_wait<0>();
        __syncwarp();
        const int first = group_of(c * L::CHUNK);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (c + a >= end) break;
#pragma unroll
            for (int f = 0; f < FRAGS; f += FG) {
                float sum[4] = {}, total[4] = {};  // total: 0: -sum(magic * x), 2: sum(x)
                u32 b[4], both = 0;
                const int k = a * L::CHUNK + f * 16, g = L::CHUNK % BY ? group_of(c * L::CHUNK + k) - first : k / BY;
                if (SCALED) both = S::of(*(const u16*)(metas_mine + g * ROWS));
#pragma unroll
                for (int i = f; i < f + FG; i++) {
                    if (i == f || i % 2 == 0) load_matrix4(b, x_at + (c + a - begin) * L::CHUNK * 2 + (i >> 1) * 64);
                    u32 code[4];
                    if constexpr (SCALED) {
#pragma unroll
                        for (int j = 0; j < 4; j++) code[j] = S::of_row(small_e2m1<T>(w[a][j], i), both, j % 2);
                        mma<T>(all, code, b[i % 2 * 2], b[i % 2 * 2 + 1], all[0], all[1], all[2], all[3]);
                        continue;
                    } else if constexpr (TABLE) {
                        if (BOOKED && i % 4 == 0) {
                            const uint4 book[2] = {books[warp % BOOKS][0], books[warp % BOOKS][1]};
#pragma unroll
                            for (int j = 0; j < 4; j++) Book<BITS>::look_up(w[a], i / 4, j, book, looked_up[j]);
                        }
#pragma unroll
                        for (int j = 0; j < 4; j++) code[j] = BOOKED ? looked_up[j][i % 4] : e2m1<T>(w[a][j], i);
                        mma<T>(sum, code, b[i % 2 * 2], b[i % 2 * 2 + 1], sum[0], sum[1], sum[2], sum[3]);
                        continue;
                    }
                    const u32 constant[4] = {C::minus_magic(C::p(i) / C::FIELD), Half<T>::ONE,
                                             C::minus_magic(C::p(i) / C::FIELD), Half<T>::ONE};
                    C::fragment(w[a], i, masks, code);
                    mma<T>(total, constant, b[i % 2 * 2], b[i % 2 * 2 + 1], total[0], total[1], total[2], total[3]);
                    mma<T>(sum, code, b[i % 2 * 2], b[i % 2 * 2 + 1], sum[0], sum[1], sum[2], sum[3]);
                }
                if (SCALED) continue;
                const float2 scale = scale_of(g);
                float2 zero = TABLE ? make_float2(0.f, 0.f) : make_float2(mid<BITS>(), mid<BITS>());
                if (ZEROS) zero = to_floats<T>(*(const u32*)(metas_mine + SCALES + g * ROWS));
                acc0 += scale.x * (sum[0] + total[0] - zero.x * total[2]);
                acc1 += scale.y * (sum[2] + total[0] - zero.y * total[2]);
            }
        }
    }
    if (lane % 4 == 0) {
        float &first = sums_at[warp * 16 + r], &second = sums_at[warp * 16 + r + 8];
        first += (SCALED ? all[0] : acc0) * unit, second += (SCALED ? all[2] : acc1) * unit;
        if constexpr (!UP) first *= weight, second *= weight;
    }
    __syncthreads();
    const int i = threadIdx.x, n = n0() + i;
    if (i >= 16 || (SHARED ? i >= (int)out[1] : n >= width)) return;
    auto product = [&](int sub) {
        float v = 0.f;
        for (int k = 0; k < KS; k++) v += sums_at[(sub * KS + k) * 16 + i];
        return v;
    };
    float v = 0.f;
    if constexpr (UP) {
        if constexpr (MODE >= ALONE) v = alone<MODE>(product(0));
        else if constexpr (MODE == UP_CLAMPED) v = clamped_swiglu(product(0), product(1));
        else v = activation(MODE == UP_SILU, product(0)) * product(1);
        if (opens) {
            float sum = 0.f, e;
            for (int k = 0; k < KS; k++) sum += opened[k];
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * sum));
            v /= 1.f + e;
        }
    } else {
        const int warps = top_k * KS + (SHARED ? s.parts : 0);
#pragma unroll 8
        for (int k = 0; k < warps; k++) v += sums_at[k * 16 + i];
    }
    if constexpr (SHARED != 0) ((u16*)out[0])[i] = (u16)from_floats<T>(v, 0.f);
    else y[(size_t)row() * width + n] = (u16)from_floats<T>(v, 0.f);
}
