// Causal attention of many tokens in e4m3 on Hopper: prompt.cu's plan with 8-bit operands, over copies of keys and values.
//
// Maths   q, k, v and p are rounded to e4m3: q with a scale per token, k and v with one per 128 slots of a key head; that of v
//         is a power of two. q and k are multiplied by a Hadamard matrix first, which leaves q k as it is and evens out their
//         dims. Let lv be the exponent of v's scale: p = 2^(score + lv - top + SHIFT), so tiles of any scale of v add up in one
//         sum; sums of p stay in fp32. top is within 2^LIMIT of the largest score + lv so far: p is at most
//         2^(LIMIT + SHIFT) = 256, and the largest e4m3 is 448.
// Codes   prompt_codes copies a unit, 128 slots of a sequence and a key head, into two tiles of 16 KB in the order of wgmma's B
//         operand, 128-byte swizzled: keys (slot, dim), values (dim, slot). For y += p V, wgmma wants 8-bit values along slots.
//         A lane's p, in the registers of S, are its A operand if slots stand in this order: byte 16 h + 4 t + j of each 32 is
//         slot 16 h + 8 (j / 2) + 2 t + j % 2. Slots past the sequence's end are zeros.
// Units   those of a sequence follow one another; `bases` has the first unit of each tile of tokens.
// Grid    prompt_codes (per * tiles of tokens, key heads): the tiles of a sequence share its units; where each sequence has a
//         cache of its own: (per units * sequences, key heads). attend_prompt8: the same as attend_prompt.
// Limits  fp16, bf16, D = 128, no windows, no sinks. PAGED: blocks of whole 64 slots.
// Source  own; FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608) transposes values in the attention kernel.
#include "tile.cuh"
#include "hopper.cuh"
#include "wgmma8.cuh"
#include "prompt.cuh"

constexpr int D = 128, TILE_BYTES = BLOCK_N * D, UNIT_BYTES = 2 * TILE_BYTES;
constexpr float LIMIT = 2.f, SHIFT = 6.f, MOST = 448.f;
constexpr float LEAST = 1e-18f;  // of a largest value: 2^-lv and sums of it stay in fp32

struct __align__(16) Scales { float k, lv, inverse, unused; };  // of a unit's keys; log2 of its values', 2^-lv

__device__ __forceinline__ u32 four_codes(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)low | (u32)high << 16;
}
// Sums and differences of pairs of values: a level of a Hadamard transform whose dims i and i + STEP are one thread's.
template <int STEP, int COUNT>
__device__ __forceinline__ void mix(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (!(i & STEP)) {
            const float a = x[i], b = x[i + STEP];
            x[i] = a + b, x[i + STEP] = a - b;
        }
}
template <int COUNT>  // the same between this lane and the one whose number differs in bit STEP
__device__ __forceinline__ void mix_lanes(int step, float (&x)[COUNT]) {
    const float sign = threadIdx.x & step ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = fmaf(x[i], sign, __shfl_xor_sync(0xffffffffu, x[i], step));
}

__device__ __forceinline__ u32 swizzled(int row, int byte) { return row * 128 + ((byte >> 4 ^ row & 7) << 4) + (byte & 15); }

__device__ __forceinline__ void bulk_load(u32 shared, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The codes of a unit by a block of 256 threads.
template <int T>
struct Coder {
    static constexpr int ROUNDS = BLOCK_N * D / 8 / 256;
    using Values = float[8];  // thread i holds dims 8 (i % 16) .. + 7 of slots i / 16 + 16 n

    template <class Row>
    static __device__ __forceinline__ void load(const u16* cache, Row row_of, int there, Values (&x)[ROUNDS]) {
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            const int slot = threadIdx.x / 16 + 16 * n;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (slot < there) v = *(const uint4*)(cache + row_of(slot) * D + threadIdx.x % 16 * 8);
            const u32 halves[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 f = to_floats<T>(halves[i]);
                x[n][2 * i] = f.x, x[n][2 * i + 1] = f.y;
            }
        }
    }
    static __device__ __forceinline__ void turn(Values (&x)[ROUNDS]) {
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            mix<1>(x[n]), mix<2>(x[n]), mix<4>(x[n]);
#pragma unroll
            for (int d = 1; d < 16; d *= 2) mix_lanes(d, x[n]);
        }
    }
    static __device__ __forceinline__ float largest(const Values (&x)[ROUNDS], float* maxima) {
        float most = 0.f;
#pragma unroll
        for (int n = 0; n < ROUNDS; n++)
#pragma unroll
            for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(x[n][i]));
#pragma unroll
        for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
        if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = most;
        __syncthreads();
        most = LEAST;
#pragma unroll
        for (int i = 0; i < 8; i++) most = fmaxf(most, maxima[i]);
        return most;
    }
    static __device__ __forceinline__ u64 eight_codes(const Values& x, float by) {
        return (u64)four_codes(x[0] * by, x[1] * by, x[2] * by, x[3] * by) |
               (u64)four_codes(x[4] * by, x[5] * by, x[6] * by, x[7] * by) << 32;
    }
    static __device__ __forceinline__ void store_keys(const Values (&x)[ROUNDS], float by, unsigned char* to) {
#pragma unroll
        for (int n = 0; n < ROUNDS; n++)
            *(u64*)(to + swizzled(threadIdx.x / 16 + 16 * n, threadIdx.x % 16 * 8)) = eight_codes(x[n], by);
    }
    static __device__ __forceinline__ void store_values(const Values (&x)[ROUNDS], float by, unsigned char* turned,
                                                        unsigned char* to) {
#pragma unroll
        for (int n = 0; n < ROUNDS; n++)
            *(u64*)(turned + (threadIdx.x / 16 + 16 * n) * D + threadIdx.x % 16 * 8) = eight_codes(x[n], by);
        __syncthreads();
        for (int i = threadIdx.x; i < D * 8; i += 256) {
            const int dim = i % D, chunk = i / D;  // 16 bytes: slots of 32 chunk / 2, half chunk % 2
            u32 out[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                out[t] = 0;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    out[t] |= (u32)turned[(16 * chunk + 8 * (j / 2) + 2 * t + j % 2) * D + dim] << 8 * j;
            }
            *(uint4*)(to + swizzled(dim, 16 * chunk)) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
};

template <int T, int PAGE>
__global__ void __launch_bounds__(256, 2)
prompt_codes(const u16* k, const u16* v, const int* rows, const int* positions, const int* table, const int* tiles,
             unsigned char* codes, Scales* scales, int* bases, int end, int S, int width, int HKV, int per) {
    using C = Coder<T>;
    __shared__ uint4 turned[TILE_BYTES / 16];
    __shared__ float maxima[2][8];
    __shared__ int sequence[4];  // its end, the units before it, its tiles, those before this one
    const int head = blockIdx.y, mine = blockIdx.x / per, share = blockIdx.x % per;  // mine: tile, or sequence
    int unit = share, step = per, count = per, base = mine * per;
    if constexpr (PAGE != 0) {
        const int first = tiles[2 * mine], last = tiles[2 * mine + 1], n = gridDim.x / per;
        if (first >= last) return;
        const int row = rows[first];
        if (threadIdx.x < 32) {
            int found[4] = {0, 0, 0, 0};
            for (int j = threadIdx.x; j < n; j += 32) {
                const int begin = tiles[2 * j], stop = tiles[2 * j + 1];
                if (begin >= stop) continue;
                const int its = rows[begin], next = j + 1 < n ? tiles[2 * j + 2] : 0;
                const bool more = j + 1 < n && next < tiles[2 * j + 3] && rows[next] == its;
                const int its_end = positions[stop - 1] + 1;
                if (its == row) found[0] = its_end > found[0] ? its_end : found[0], found[2] += 1, found[3] += j < mine;
                else if (j < mine && !more) found[1] += (its_end + BLOCK_N - 1) / BLOCK_N;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int d = 16; d; d /= 2) {
                    const int other = __shfl_xor_sync(0xffffffffu, found[i], d);
                    found[i] = i ? found[i] + other : other > found[i] ? other : found[i];
                }
                if (threadIdx.x == 0) sequence[i] = found[i];
            }
            if (threadIdx.x == 0 && head == 0 && share == 0) bases[mine] = found[1];
        }
        __syncthreads();
        end = sequence[0], count = (end + BLOCK_N - 1) / BLOCK_N, base = sequence[1];
        unit = sequence[3] * per + share, step = sequence[2] * per;
        table += (size_t)row * width;
    }
    for (; unit < count; unit += step) {
        const int slot = unit * BLOCK_N;
        auto row_of = [&](int i) {
            if constexpr (PAGE == 0) return ((size_t)mine * HKV + head) * S + slot + i;
            else return ((size_t)table[(slot + i) / (PAGE ? PAGE : 1)] * HKV + head) * PAGE + (slot + i) % (PAGE ? PAGE : 1);
        };
        typename C::Values x[C::ROUNDS];
        const size_t at = (size_t)(base + unit) * HKV + head;
        unsigned char* const to = codes + at * UNIT_BYTES;
        C::load(k, row_of, end - slot, x);
        C::turn(x);
        const float most_k = C::largest(x, maxima[0]);
        C::store_keys(x, MOST / most_k, to);
        C::load(v, row_of, end - slot, x);
        const float most_v = C::largest(x, maxima[1]);
        // the power of two from which values are at most MOST
        const int exponent = (int)(__float_as_uint(most_v * (1.f / MOST)) >> 23) - 127 + 1;
        if (threadIdx.x == 0) {
            Scales s = {most_k / (MOST * D), (float)exponent, __uint_as_float((u32)(127 - exponent) << 23), 0.f};
            scales[at] = s;
        }
        C::store_values(x, __uint_as_float((u32)(127 - exponent) << 23), (unsigned char*)turned, to + TILE_BYTES);
        __syncthreads();
    }
}

// The phases of attend_prompt8 that work on registers of a thread.
template <int T>
struct Prompt8 : Tokens<T, D> {
    using Queries = u32[D / 32][4];
    using typename Tokens<T, D>::Scores;
    using typename Tokens<T, D>::Sums;
    using typename Tokens<T, D>::Pair;
    using Weights = u32[BLOCK_N / 32][4];  // p, rounded

    // The lane's codes of two rows of q, and their scales times `scale`.
    static __device__ __forceinline__ void load_queries(const u16* row, const u16* row_8, int t, float scale, Queries& q,
                                                        Pair& of_q) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float x[D / 4];  // 4 n + e: dim 16 n + 4 t + e
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                const u64 v = *(const u64*)((c ? row_8 : row) + 16 * n + 4 * t);
                const float2 low = to_floats<T>((u32)v), high = to_floats<T>((u32)(v >> 32));
                x[4 * n] = low.x, x[4 * n + 1] = low.y, x[4 * n + 2] = high.x, x[4 * n + 3] = high.y;
            }
            mix<1>(x), mix<2>(x), mix<4>(x), mix<8>(x), mix<16>(x);
            mix_lanes(1, x), mix_lanes(2, x);
            float most = LEAST;
#pragma unroll
            for (int i = 0; i < D / 4; i++) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
            for (int d = 1; d < 4; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
            of_q[c] = most / MOST * scale;
            const float by = MOST / most;
#pragma unroll
            for (int n = 0; n < D / 16; n++)
                q[n / 2][n % 2 * 2 + c] = four_codes(x[4 * n] * by, x[4 * n + 1] * by, x[4 * n + 2] * by, x[4 * n + 3] * by);
        }
    }

    // S = q K^T of a tile, and y += p V: on their way when these return.
    static __device__ __forceinline__ void start_scores(u64 keys, Queries& q, Scores& s) {
        products_fence();
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            if (k == 0) Wgmma8<false, BLOCK_N>::first(s, q[k], keys);
            else Wgmma8<false, BLOCK_N>::run(s, q[k], keys + 2 * k, 1);
        }
        products_commit();
    }
    static __device__ __forceinline__ void start_values(u64 values, Weights& p, Sums& acc) {
        products_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_N / 32; k++) Wgmma8<false, D>::run(acc, p[k], values + 2 * k, 1);
        products_commit();
    }

    static __device__ __forceinline__ void round_off(const Scores& s, Weights& p) {  // see Codes
#pragma unroll
        for (int k = 0; k < BLOCK_N / 32; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = 16 * k + 8 * (i / 2) + 2 * (i % 2);
                p[k][i] = four_codes(s[at], s[at + 1], s[at + 4], s[at + 5]);
            }
    }

    // The largest score + lv of each token; whether one is too far above its top. by: what scores are to be multiplied by.
    static __device__ __forceinline__ bool largest(const Scores& s, const Pair& by, float lv, const Pair& top, Pair& most) {
        most[0] = s[0], most[1] = s[2];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
        bool past = false;
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int d = 1; d < 4; d *= 2) most[c] = fmaxf(most[c], __shfl_xor_sync(0xffffffffu, most[c], d));
            most[c] = most[c] * by[c] + lv, past = past || most[c] - top[c] > LIMIT;
        }
        return past;
    }

    static __device__ __forceinline__ void exponentials(const Pair& by, const Scales& of, const Pair& top, Scores& s,
                                                        Pair& total) {
        const Pair more = {of.lv + SHIFT - top[0], of.lv + SHIFT - top[1]};
        Pair sum = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) s[i] = exp2_of(s[i] * by[i / 2 % 2] + more[i / 2 % 2]), sum[i / 2 % 2] += s[i];
#pragma unroll
        for (int c = 0; c < 2; c++) total[c] += sum[c] * of.inverse;
    }
};

template <int T, bool PAGED, int STAGES>
__global__ void __launch_bounds__(384, 1)
attend_prompt8(const unsigned char* codes, const Scales* scales, const int* bases, const int* positions, const int* tiles,
               u16* y, int tokens, int start, int HQ, int HKV, float scale) {
    using P = Prompt8<T>;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[4 * STAGES];  // of each stage: keys are there, values are; keys have been read, values have
    __shared__ Scales staged[STAGES];

    const int tile = gridDim.y - 1 - blockIdx.y, h = blockIdx.x % HQ, b = blockIdx.x / HQ;
    int first = tile * BLOCK_M, last = tokens, base = b * ((start + tokens + BLOCK_N - 1) / BLOCK_N);
    if constexpr (PAGED) {
        first = tiles[2 * tile], last = tiles[2 * tile + 1];
        if (first >= last) return;
        start = positions[first] - first, base = bases[tile];
    }
    last = smaller(last, first + BLOCK_M);
    const int head = h / (HQ / HKV), count = (start + last + BLOCK_N - 1) / BLOCK_N;

    // uniform over a warp as ptxas sees it: in a path that it thinks divergent it waits for every single wgmma
    const int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 ring = shared_address(shared), k_there = shared_address(barriers), v_there = k_there + 8 * STAGES;
    const u32 k_read = v_there + 8 * STAGES, v_read = k_read + 8 * STAGES;
    if (threadIdx.x == 0) {
        const int readers = last - first > 64 ? 8 : 4;  // warps
        for (int i = 0; i < STAGES; i++) {
            barrier_init(k_there + 8 * i, 1), barrier_init(v_there + 8 * i, 1);
            barrier_init(k_read + 8 * i, readers), barrier_init(v_read + 8 * i, readers);
        }
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {  // ------------------------------------------------------------------------------- producer
        registers_down<24>();
        if (threadIdx.x != 0) return;
        int s = 0, round = 0;
        for (int j = 0; j < count; j++) {
            const size_t at = (size_t)(base + j) * HKV + head;
            const unsigned char* const from = codes + at * UNIT_BYTES;
            barrier_wait(k_read + 8 * s, (round & 1) ^ 1);
            barrier_expect(k_there + 8 * s, TILE_BYTES + sizeof(Scales));
            bulk_load(ring + s * UNIT_BYTES, from, TILE_BYTES, k_there + 8 * s);
            bulk_load(shared_address(staged + s), scales + at, sizeof(Scales), k_there + 8 * s);
            barrier_wait(v_read + 8 * s, (round & 1) ^ 1);
            barrier_expect(v_there + 8 * s, TILE_BYTES);
            bulk_load(ring + s * UNIT_BYTES + TILE_BYTES, from + TILE_BYTES, TILE_BYTES, v_there + 8 * s);
            if (++s == STAGES) s = 0, round++;
        }
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    registers_up<240>();
    const int lowest = first + 64 * (group - 1);  // token of this warpgroup
    if (lowest >= last) return;
    const int mine = (start + smaller(lowest + 64, last) + BLOCK_N - 1) / BLOCK_N;  // tiles
    const int own = lowest + 16 * warp + g;                                      // this lane's tokens: own, own + 8
    u16* const out = y + (PAGED ? 0 : (size_t)b * tokens * HQ * D) + (size_t)h * D;
    auto row = [&](int i) { return (size_t)smaller(own + 8 * i, last - 1) * HQ * D; };
    typename P::Queries q;
    typename P::Pair of_q, by, top = {NONE, NONE}, total = {}, fade, most;
    P::load_queries(out + row(0), out + row(1), t, scale, q, of_q);

    typename P::Scores s;
    typename P::Sums acc = {};
    typename P::Weights p;
    bool moved = false;
    auto exponentials = [&](int j, const Scales& of) {  // of the scores of the j-th tile; how far acc is to fade
        if ((j + 1) * BLOCK_N - 1 > start + lowest) P::hide(j * BLOCK_N + 2 * t, start + own, 1 << 30, s);
        by[0] = of_q[0] * of.k, by[1] = of_q[1] * of.k;
        moved = !__all_sync(0xffffffffu, !P::largest(s, by, of.lv, top, most));
        if (moved) P::move_top(most, top, total, fade);
        P::exponentials(by, of, top, s, total);
    };
    // Lane 0 arrives for its warp. racecheck reports the other lanes' reads of `staged` and the copy that comes after them: it
    // does not see that the warp loads them in one instruction, before the wgmma that it has waited for here.
    auto have_read = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    };

    int stage = 0, before = 0, phase = 0, phase_before = 0;  // of the newest tile, and of the one before
    barrier_wait(k_there, 0);
    P::start_scores(swizzled_tile(ring), q, s);
    Scales of = staged[0];
    products_wait<0>();
    have_read(k_read);
    exponentials(0, of);
    P::round_off(s, p);
    for (int j = 1; j < mine; j++) {
        before = stage, phase_before = phase;
        if (++stage == STAGES) stage = 0, phase ^= 1;
        barrier_wait(k_there + 8 * stage, phase);
        P::start_scores(swizzled_tile(ring + stage * UNIT_BYTES), q, s);
        of = staged[stage];
        barrier_wait(v_there + 8 * before, phase_before);
        P::start_values(swizzled_tile(ring + before * UNIT_BYTES + TILE_BYTES), p, acc);
        products_wait<1>();
        have_read(k_read + 8 * stage);
        exponentials(j, of);
        products_wait<0>();
        have_read(v_read + 8 * before);
        if (moved)
#pragma unroll
            for (int i = 0; i < D / 2; i++) acc[i] *= fade[i / 2 % 2];
        P::round_off(s, p);
    }
    barrier_wait(v_there + 8 * stage, phase);
    P::start_values(swizzled_tile(ring + stage * UNIT_BYTES + TILE_BYTES), p, acc);
    products_wait<0>();
    P::store(out, row(0), row(1), own, last, t, acc, total);
}
