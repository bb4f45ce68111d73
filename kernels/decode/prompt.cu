// Causal attention of many tokens over a cache in 16 bits on Hopper: q's keys and values by TMA, both products by wgmma.
//
// Grid    (query heads of all sequences, tiles of 128 tokens, those with the longest past first): queries of one key head run
//         side by side, so that its keys come from the second-level cache.
// Block   a producer thread and two warpgroups of 64 tokens each. The producer keeps STAGES tiles of 128 slots on their way,
//         keys and values in panels of 64 dims, 128-byte swizzled, two pieces of 64 slots each: a piece lies in one block of a
//         cache.
// Loop    queries stay in registers, as A of S = q K^T; p, S's own registers rounded, is A of y += p V, whose B lies with its
//         dims along rows (wgmma_turned.cuh). The next tile's S is computed while the last one's y is, and its exponentials are
//         taken beside that product; the other warpgroup fills what is left.
// Top     sums are of 2^(score - top), where top is within 2^LIMIT of the largest score so far: y is multiplied when it moves.
// Edges   slots past the last token's are neither fetched nor, in a tile that has some of them, multiplied as they are found:
//         their values are made zero in shared memory. Scores are masked in tiles that some token does not see whole.
// Limits  fp16, bf16, D of 64 or 128; blocks of a cache of whole 64 slots (PAGE), or a cache a sequence (PAGE 0).
// Source  own; the plan is FlashAttention 3's (Shah et al. 2024, arXiv:2407.08608), without its turns between warpgroups: on an
//         H200 they change nothing (8,192 tokens 820 us with them, 816 without).
#include "tile.cuh"
#include "exp2.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"
#include "wgmma_turned.cuh"
#include "prompt.cuh"

constexpr int PIECE = 64;
constexpr float LIMIT = 8.f;

// The phases of the kernel that work on registers of a thread.
template <int T, int D, int STAGES>
struct Prompt : Tokens<T, D> {
    static constexpr int PANELS = D / 64, STEPS = D / 16;
    static constexpr u32 PANEL = BLOCK_N * 128, HALF = PANELS * PANEL, STAGE = 2 * HALF;  // bytes; HALF: keys, or values
    using Queries = u32[STEPS][4];
    using typename Tokens<T, D>::Scores;
    using Weights = u32[BLOCK_N / 16][4];  // p, rounded
    using typename Tokens<T, D>::Sums;
    using typename Tokens<T, D>::Pair;

    static __device__ __forceinline__ void init_barriers(u32 k_there, u32 v_there, u32 k_read, u32 v_read, int readers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(k_there + 8 * i, 1), barrier_init(v_there + 8 * i, 1);
            barrier_init(k_read + 8 * i, readers), barrier_init(v_read + 8 * i, readers);
        }
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
    }

    // The product S = q K^T of a tile, and y += p V: on their way when these return.
    static __device__ __forceinline__ void start_scores(u64 keys, Queries& q, Scores& s) {
        products_fence();
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const u64 at = keys + k / 4 * (PANEL >> 4) + k % 4 * 2;
            if (k == 0) Wgmma<T, BLOCK_N>::first(s, q[k], at);
            else Wgmma<T, BLOCK_N>::run(s, q[k], at);
        }
        products_commit();
    }
    static __device__ __forceinline__ void start_values(u64 values, Weights& p, Sums& acc) {
        products_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; k++) WgmmaTurned<T, D>::run(acc, p[k], values + k * (16 * 128 >> 4));
        products_commit();
    }

    static __device__ __forceinline__ void round_off(const Scores& s, Weights& p) {  // S has its values where A has them
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) p[k][i] = from_floats<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }

    // The largest score of each token, scaled, into `most`; whether one is too far above its top.
    static __device__ __forceinline__ bool largest(const Scores& s, float scale, const Pair& top, Pair& most) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
        bool past = false;
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int d = 1; d < 4; d *= 2) most[c] = fmaxf(most[c], __shfl_xor_sync(0xffffffffu, most[c], d));
            most[c] *= scale, past = past || most[c] - top[c] > LIMIT;
        }
        return past;
    }
    // Only tops of tokens that are too far above move, though a warp decides for its 16 rows at once: rows past the last token
    // see slots that other prompts have filled, and these must not change how a token's weights are rounded.
    static __device__ __forceinline__ void stay(const Pair& top, Pair& most) {
#pragma unroll
        for (int c = 0; c < 2; c++) most[c] = most[c] - top[c] > LIMIT ? most[c] : top[c];
    }
    static __device__ __forceinline__ void exponentials(float scale, const Pair& top, Scores& s, Pair& total) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) s[i] = exp2_of(s[i] * scale - top[i / 2 % 2]), total[i / 2 % 2] += s[i];
    }

    // Values of a tile from slot `used` on become zero, in shared memory.
    static __device__ __forceinline__ void clear(unsigned char* tile, int used, int group) {
        unsigned char* const values = tile + used * 128;
        for (int i = threadIdx.x % 128; i < (BLOCK_N - used) * 8; i += 128)
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) *(uint4*)(values + panel * PANEL + 16 * i) = make_uint4(0, 0, 0, 0);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    }

};

template <int T, int D, int PAGE, int STAGES>
__global__ void __launch_bounds__(384, 1)
attend_prompt(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const int* rows,
              const int* positions, const int* table, const int* tiles, const float* sinks, u16* y, int tokens, int start,
              int S, int width, int window, int HQ, int HKV, float scale) {
    using P = Prompt<T, D, STAGES>;
    constexpr u32 PANEL = P::PANEL, HALF = P::HALF, STAGE = P::STAGE;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 barriers[4 * STAGES];  // of each stage: keys are there, values are; keys have been read, values have

    const int tile = gridDim.y - 1 - blockIdx.y, h = blockIdx.x % HQ, b = blockIdx.x / HQ;
    int first = tile * BLOCK_M, last = tokens;  // tokens of this block: [first, last), at most BLOCK_M
    if constexpr (PAGE != 0) {
        first = tiles[2 * tile], last = tiles[2 * tile + 1];
        if (first >= last) return;
        start = positions[first] - first, table += (size_t)rows[first] * width;
    }
    last = smaller(last, first + BLOCK_M);
    const int end = start + last, head = h / (HQ / HKV);
    const int least = start + first + 1 - window, begin = least > 0 ? least / BLOCK_N * BLOCK_N : 0;  // slots
    const int count = (end - begin + BLOCK_N - 1) / BLOCK_N;

    // uniform over a warp as ptxas sees it: in a path that it thinks divergent it waits for every single wgmma
    const int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 base = shared_address(shared), k_there = shared_address(barriers), v_there = k_there + 8 * STAGES;
    const u32 k_read = v_there + 8 * STAGES, v_read = k_read + 8 * STAGES;
    if (threadIdx.x == 0) {
        const int readers = last - first > 64 ? 8 : 4;  // warps
        P::init_barriers(k_there, v_there, k_read, v_read, readers);
    }
    __syncthreads();

    if (group == 0) {  // ------------------------------------------------------------------------------- producer
        registers_down<24>();
        if (threadIdx.x != 0) return;
        prefetch(&k_map), prefetch(&v_map);
        auto row_of = [&](int slot) {
            if constexpr (PAGE == 0) return (b * HKV + head) * S + slot;
            else return (table[slot / (PAGE ? PAGE : 1)] * HKV + head) * PAGE + slot % (PAGE ? PAGE : 1);
        };
        int s = 0, round = 0;
        for (int j = 0; j < count; j++) {
            const int slot = begin + j * BLOCK_N, pieces = end - slot > PIECE ? 2 : 1;
            const int at[2] = {row_of(slot), pieces > 1 ? row_of(slot + PIECE) : 0};
            auto load = [&](const TensorMap* map, u32 to, u32 there, u32 read) {
                barrier_wait(read, (round & 1) ^ 1);
                barrier_expect(there, pieces * PIECE * D * 2);
                for (int p = 0; p < pieces; p++)
#pragma unroll
                    for (int i = 0; i < P::PANELS; i++)
                        tensor_load(to + i * PANEL + p * PIECE * 128, map, i * 64, at[p], there);
            };
            load(&k_map, base + s * STAGE, k_there + 8 * s, k_read + 8 * s);
            load(&v_map, base + s * STAGE + HALF, v_there + 8 * s, v_read + 8 * s);
            if (++s == STAGES) s = 0, round++;
        }
        return;
    }

    // ------------------------------------------------------------------------------------------------- consumers
    registers_up<240>();
    const int lowest = first + 64 * (group - 1);  // token of this warpgroup
    if (lowest >= last) return;
    const int mine = (start + smaller(lowest + 64, last) - begin + BLOCK_N - 1) / BLOCK_N;  // tiles
    const int own = lowest + 16 * warp + g;                                              // this lane's tokens: own, own + 8
    u16* const out = y + (PAGE ? 0 : (size_t)b * tokens * HQ * D) + (size_t)h * D;
    auto row = [&](int i) { return (size_t)smaller(own + 8 * i, last - 1) * HQ * D; };
    typename P::Queries q;
#pragma unroll
    for (int k = 0; k < P::STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) q[k][i] = *(const u32*)(out + row(i & 1) + 16 * k + 8 * (i >> 1) + 2 * t);

    typename P::Scores s;
    typename P::Sums acc = {};
    typename P::Pair top = {NONE, NONE}, total = {}, fade;
    typename P::Weights p;
    bool moved = false;
    if (sinks != nullptr) {  // one score more, without a value
        top[0] = top[1] = sinks[h] * 1.44269504f;
        total[0] = total[1] = t == 0 ? 1.f : 0.f;
    }
    auto exponentials = [&](int slot) {  // of the scores of slots from `slot` on; how far acc is to fade
        if (slot + BLOCK_N - 1 > start + lowest || slot <= start + lowest + 63 - window)
            P::hide(slot + 2 * t, start + own, window, s);
        typename P::Pair most = {s[0], s[2]};
        const bool past = P::largest(s, scale, top, most);
        moved = !__all_sync(0xffffffffu, !past);
        if (moved) P::stay(top, most), P::move_top(most, top, total, fade);
        P::exponentials(scale, top, s, total);
    };
    auto have_read = [&](u32 barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };

    int stage = 0, before = 0, phase = 0, phase_before = 0;  // of the newest tile, and of the one before
    barrier_wait(k_there, 0);
    P::start_scores(swizzled_tile(base), q, s);
    products_wait<0>();
    have_read(k_read);
    exponentials(begin);
    P::round_off(s, p);
    for (int j = 1; j < mine; j++) {
        before = stage, phase_before = phase;
        if (++stage == STAGES) stage = 0, phase ^= 1;
        barrier_wait(k_there + 8 * stage, phase);
        P::start_scores(swizzled_tile(base + stage * STAGE), q, s);
        barrier_wait(v_there + 8 * before, phase_before);
        P::start_values(swizzled_tile<PANEL>(base + before * STAGE + HALF), p, acc);
        products_wait<1>();
        have_read(k_read + 8 * stage);
        exponentials(begin + j * BLOCK_N);
        products_wait<0>();
        have_read(v_read + 8 * before);
        if (moved)
#pragma unroll
            for (int i = 0; i < D / 2; i++) acc[i] *= fade[i / 2 % 2];
        P::round_off(s, p);
    }
    barrier_wait(v_there + 8 * stage, phase);
    const int used = end - begin - (mine - 1) * BLOCK_N;  // slots of the last tile that there are
    if (used < BLOCK_N) P::clear(shared + stage * STAGE + HALF, used, group);
    P::start_values(swizzled_tile<PANEL>(base + stage * STAGE + HALF), p, acc);
    products_wait<0>();
    P::store(out, row(0), row(1), own, last, t, acc, total);
}
