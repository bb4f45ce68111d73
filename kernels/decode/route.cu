// The experts of each token and their weights: product by the router, softmax, the likeliest top_k, in one launch.
//
// Grid    (8, tokens in eights): a cluster of 8 blocks for eight tokens.
// Block   TILES row tiles of 16 experts, or, where there are fewer than eight tiles, a PARTS-th of k. Its 16 warps take 32 k in
//         turn: the router is the A operand of mma, eight tokens are the columns of B. A lane reads 16 bytes of a row, which
//         are its pairs of two mma; the order of k inside a product is free.
// Sum     warps meet in shared memory, and each sum goes to the block that is its token's (meet.cuh).
// Beyond  a softmax (BEYOND 1): logits in fp32, softmax or sigmoid, a bias for the choice, factors; the next best takes two
//         `redux`, as a score is 32 bits. 2: x has a norm and a scale of its own: x * scale is split into two halves, which
//         keep 22 bits, the sum of x's squares travels as one more logit, and the norm becomes a factor of the sums.
// Pick    a warp a token. A logit in 16 bits, mapped so that integers are ordered as they are, and the expert behind it are one
//         number, so the next best is one `redux`. Equal logits: the lowest expert.
// Early   the router's weights are on the multiprocessors before the previous kernel has ended.
//         Its last AWAY steps wait in shared memory, where registers do not hold all: a lane copies what it reads itself.
// Limits  H a multiple of 8; what a block has of the router in its registers and its shared memory.
// Source  own
#include "exp2.cuh"
#include "fold.cuh"
#include "meet.cuh"

constexpr int CLUSTER = 8, WARPS = 16, TOKENS = 8;

__device__ __forceinline__ u32 most_of_warp(u32 v) {
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(v));
    return most;
}
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

struct Facts {  // of BEYOND
    const void *choice, *each, *scale;  // (E), (E), (H), or null
    int wide, sigmoid;                  // wide: 1, 2, 4: of the three those in fp32
    float eps, root, sum_eps, factor;   // root: times scale
};
template <int T>
__device__ __forceinline__ float value_at(const void* values, int i, bool wide) {
    u16 v;
    u32 w;
    if (wide) {
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(w) : "l"((const u32*)values + i));
        return __uint_as_float(w);
    }
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"((const u16*)values + i));
    return to_floats<T>(v).x;
}
// Eight halves times eight factors, each product as the sum of two halves; adds the squares of the halves to `square`.
template <int T>
__device__ __forceinline__ void split(const uint4& v, const float* factors, uint4& high, uint4& low, float& square) {
    const u32 four[4] = {v.x, v.y, v.z, v.w};
    u32 h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 f = to_floats<T>(four[i]);
        square += f.x * f.x + f.y * f.y;
        const float a = f.x * factors[2 * i], b = f.y * factors[2 * i + 1];
        h[i] = from_floats<T>(a, b);
        const float2 rounded = to_floats<T>(h[i]);
        l[i] = from_floats<T>(a - rounded.x, b - rounded.y);
    }
    high = make_uint4(h[0], h[1], h[2], h[3]), low = make_uint4(l[0], l[1], l[2], l[3]);
}
__device__ __forceinline__ u32 ordered(float v) {  // integers in the order of fp32 numbers, above 0
    const u32 bits = __float_as_uint(v), key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return key ? key : 1;
}

// The token's experts by facts beyond a softmax, by one warp; lane k gets the k-th, its score and its factor.
template <int T, int MINE>
__device__ __forceinline__ void choose(const float (&logit)[MINE], const float (&choice)[MINE], const float (&each)[MINE],
                                       const Facts& f, int E, int top_k, int lane, int& id, float& chosen,
                                       float& of_expert) {
    float score[MINE], top = __uint_as_float(0xff800000u), total = 0.f;
    u32 key[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++)
        if (lane + 32 * i < E) top = logit[i] > top ? logit[i] : top;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, top, d);
        top = other > top ? other : top;
    }
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        score[i] = f.sigmoid ? 1.f / (1.f + exp2_of(-1.44269504f * logit[i])) : exp2_of((logit[i] - top) * 1.44269504f);
        if (lane + 32 * i < E) total += score[i];
    }
    const float divisor = f.sigmoid ? 1.f : sum_of_warp(total);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        score[i] /= divisor;
        key[i] = lane + 32 * i < E ? ordered(score[i] + choice[i]) : 0;
    }
    id = 0, chosen = 0.f, of_expert = 1.f;
#pragma unroll 1
    for (int k = 0; k < top_k; k++) {
        u32 best = 0, last = 0;
        float own = 0.f, factor = 0.f;
#pragma unroll
        for (int i = 0; i < MINE; i++) best = key[i] > best ? key[i] : best;
        best = most_of_warp(best);
#pragma unroll
        for (int i = MINE - 1; i >= 0; i--)
            if (key[i] == best) last = 0xffff - (lane + 32 * i);
        const int e = 0xffff - most_of_warp(last);
#pragma unroll
        for (int i = 0; i < MINE; i++)
            if (e == lane + 32 * i) own = score[i], factor = each[i], key[i] = 0;
        own = __shfl_sync(0xffffffffu, own, e & 31), factor = __shfl_sync(0xffffffffu, factor, e & 31);
        if (lane == k) id = e, chosen = own, of_expert = factor;
    }
}

// The phases of the kernel. A lane's experts e are lane + 32 i.
template <int T, int TILES, int PARTS, int STEPS, int AWAY>
struct Phases {
    // experts of a block, of all, of a lane
    static constexpr int ROWS = TILES * 16, MOST = ROWS * CLUSTER / PARTS, MINE = (MOST + 31) / 32;
    static constexpr int HELD = STEPS - AWAY;  // steps in registers
    using Router = uint4[TILES][HELD][2];

    // The block's part of the router, rows from `first` on. k_of(step): the first of a lane's eight k.
    template <class KOf>
    static __device__ __forceinline__ void load_router(const u16* router, int first, int E, int H, int r, KOf k_of, Router& w) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int s = 0; s < HELD; s++)
#pragma unroll
                for (int i = 0; i < 2; i++) {  // experts past the last repeat it: those sums are not read
                    const u16* from = router + (size_t)smaller(first + 16 * t + r + 8 * i, E - 1) * H + k_of(s);
                    w[t][s][i] = make_uint4(0, 0, 0, 0);
                    if (k_of(s) < H)
                        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                                     : "=r"(w[t][s][i].x), "=r"(w[t][s][i].y), "=r"(w[t][s][i].z), "=r"(w[t][s][i].w)
                                     : "l"(from));
                }
    }
    // Where this lane's 16 bytes of a tile, step and half lie in shared memory.
    static __device__ __forceinline__ int away_at(int t, int s, int i) {
        return ((t * AWAY + s - HELD) * 2 + i) * WARPS * 32 + threadIdx.x;
    }
    template <class KOf>
    static __device__ __forceinline__ void copy_router(const u16* router, int first, int E, int H, int r, KOf k_of, uint4* to) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int s = HELD; s < STEPS; s++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    copy_async_or_zero(shared_address(to + away_at(t, s, i)),
                                       router + (size_t)smaller(first + 16 * t + r + 8 * i, E - 1) * H + k_of(s),
                                       k_of(s) < H ? 16 : 0);
        copy_commit();
    }
    static __device__ __forceinline__ void load_bias(const u16* bias, int E, int lane, u16 (&to)[MINE]) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            to[i] = 0;
            if (bias != nullptr && lane + 32 * i < E)
                asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(to[i]) : "l"(bias + lane + 32 * i));
        }
    }
    // The first warp's, which picks: what is added for the choice, and factors.
    static __device__ __forceinline__ void load_facts(const Facts& f, int E, int warp, int lane, float (&choice)[MINE],
                                                      float (&each)[MINE]) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int e = lane + 32 * i;
            choice[i] = 0.f, each[i] = 1.f;
            if (warp != 0 || e >= E) continue;
            if (f.choice) choice[i] = value_at<T>(f.choice, e, f.wide & 1);
            if (f.each) each[i] = value_at<T>(f.each, e, f.wide & 2);
        }
    }
    // The scale of x at this block's k, into shared memory; a warp reads what it wrote.
    static __device__ __forceinline__ void load_scale(const Facts& f, int H, int part, int warp, int lane, float* to) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int k = ((s * PARTS + part) * WARPS + warp) * 32 + lane;
            to[(s * WARPS + warp) * 32 + lane] = f.scale == nullptr ? 1.f
                                                 : k < H            ? value_at<T>(f.scale, k, f.wide & 4) * f.root
                                                                    : 0.f;
        }
        __syncwarp();
    }
    // Logits of the block's token: sums of the parts of k, times `factor`.
    static __device__ __forceinline__ void read_logits(const float (&parts)[PARTS][MOST], const u16 (&bias)[MINE], float factor,
                                                       int E, int lane, float (&logit)[MINE]) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            logit[i] = 0.f;
            if (lane + 32 * i >= E) continue;
#pragma unroll
            for (int p = 0; p < PARTS; p++) logit[i] += parts[p][lane + 32 * i];
            logit[i] = logit[i] * factor + to_floats<T>(bias[i]).x;
        }
    }
    // Logits of a softmax in 16 bits, and the keys that order them and name their experts; the largest key.
    static __device__ __forceinline__ u32 read_keys(const float (&parts)[PARTS][MOST], const u16 (&bias)[MINE], int E, int lane,
                                                    float (&logit)[MINE], u32 (&key)[MINE]) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int e = lane + 32 * i;
            key[i] = 0, logit[i] = 0.f;
            if (e >= E) continue;
#pragma unroll
            for (int p = 0; p < PARTS; p++) logit[i] += parts[p][e];
            logit[i] += to_floats<T>(bias[i]).x;
            const u32 half = from_floats<T>(logit[i], 0.f) & 0xffff;
            key[i] = (half >> 15 ? ~half & 0xffff : half | 0x8000) << 16 | (0xffff - e), logit[i] = to_floats<T>(half).x;
            best = key[i] > best ? key[i] : best;
        }
        return best;
    }
    static __device__ __forceinline__ u32 pick_keys(u32 (&key)[MINE], int top_k, int lane) {  // lane k gets the k-th
        u32 mine = 0;
#pragma unroll 1
        for (int k = 0; k < top_k; k++) {
            u32 best = 0;
#pragma unroll
            for (int i = 0; i < MINE; i++) best = key[i] > best ? key[i] : best;
            best = most_of_warp(best);
            if (lane == k) mine = best;
#pragma unroll
            for (int i = 0; i < MINE; i++) key[i] = key[i] == best ? 0 : key[i];
        }
        return mine;
    }
};

template <int T, int TILES, int PARTS, int STEPS, int BEYOND = 0, int AWAY = 0>
__global__ void __launch_bounds__(WARPS * 32, 1)
route(const u16* __restrict__ router, const u16* __restrict__ bias, const u16* x, long long* ids, float* weights, int M,
      int E, int H, int top_k, int normalise, int rounded, const Facts f) {
    using P = Phases<T, TILES, PARTS, STEPS, AWAY>;
    constexpr int ROWS = P::ROWS, MOST = P::MOST, MINE = P::MINE;
    __shared__ float sums[WARPS][ROWS * TOKENS];
    __shared__ float logits[PARTS][MOST];  // of this block's token
    __shared__ float squares[WARPS][TOKENS];  // BEYOND 2: of x, of each warp
    __shared__ float norms[PARTS];            // and of this block's token
    __shared__ float scale_at[BEYOND == 2 ? STEPS * WARPS * 32 : 1];  // of this block's k
    __shared__ u64 all_there[1];
    extern __shared__ float4 shared[];  // the router's steps that registers do not hold
    uint4* const away = (uint4*)shared;

    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, quad = lane & 3;
    const int rank = blockIdx.x, part = rank % PARTS, first = rank / PARTS * ROWS, m0 = blockIdx.y * TOKENS,
              tokens = smaller(M - m0, TOKENS);
    next_grid_launch();
    const u32 meeting = shared_address(all_there);
    if (threadIdx.x == 0) open(meeting, rank < tokens ? PARTS * (MOST + (BEYOND == 2)) * 4 : 0);
    join();
    auto k_of = [&](int step) { return ((step * PARTS + part) * WARPS + warp) * 32 + 8 * quad; };
    typename P::Router w;
    uint4 v[STEPS];
    u16 biases[MINE];
    float choice[MINE], each[MINE];
    if constexpr (AWAY > 0) P::copy_router(router, first, E, H, r, k_of, away);
    P::load_router(router, first, E, H, r, k_of, w);
    P::load_bias(bias, E, lane, biases);
    if constexpr (BEYOND != 0) P::load_facts(f, E, warp, lane, choice, each);
    if constexpr (BEYOND == 2) P::load_scale(f, H, part, warp, lane, scale_at);
    joined();
    previous_grid_wait();
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        v[s] = r < tokens && k_of(s) < H ? load16_written(x + (size_t)(m0 + r) * H + k_of(s)) : make_uint4(0, 0, 0, 0);
    uint4 rest[BEYOND == 2 ? STEPS : 1];  // what v, rounded, leaves of x times scale
    if constexpr (BEYOND == 2) {
        float square = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) split<T>(v[s], scale_at + (s * WARPS + warp) * 32 + 8 * quad, v[s], rest[s], square);
        square += __shfl_xor_sync(0xffffffffu, square, 1), square += __shfl_xor_sync(0xffffffffu, square, 2);
        if (quad == 0) squares[warp][r] = square;
    }
    if constexpr (AWAY > 0) copy_wait<0>();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float acc[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const uint4 a = s < P::HELD ? w[t][s < P::HELD ? s : 0][0] : away[P::away_at(t, s, 0)],
                        b = s < P::HELD ? w[t][s < P::HELD ? s : 0][1] : away[P::away_at(t, s, 1)];
            const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
            mma<T>(acc, low, v[s].x, v[s].y, acc[0], acc[1], acc[2], acc[3]);
            mma<T>(acc, high, v[s].z, v[s].w, acc[0], acc[1], acc[2], acc[3]);
            if constexpr (BEYOND == 2) {
                mma<T>(acc, low, rest[s].x, rest[s].y, acc[0], acc[1], acc[2], acc[3]);
                mma<T>(acc, high, rest[s].z, rest[s].w, acc[0], acc[1], acc[2], acc[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[warp][(16 * t + r + i / 2 * 8) * TOKENS + 2 * quad + i % 2] = acc[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * TOKENS; i += WARPS * 32) {
        if (i % TOKENS >= tokens) continue;
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < WARPS; k++) sum += sums[k][i];
        push(i % TOKENS, meeting, shared_address(&logits[part][first + i / TOKENS]), sum);
    }
    if (BEYOND == 2 && first == 0 && (int)threadIdx.x >= WARPS * 32 - TOKENS) {
        const int token = threadIdx.x - (WARPS * 32 - TOKENS);
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < WARPS; k++) sum += squares[k][token];
        if (token < tokens) push(token, meeting, shared_address(&norms[part]), sum);
    }
    if (warp != 0 || rank >= tokens) return;
    barrier_wait(meeting, 0);
    if constexpr (BEYOND != 0) {
        float logit[MINE], factor = 1.f, chosen, of_expert;
        if constexpr (BEYOND == 2) {
            float square = 0.f;
#pragma unroll
            for (int p = 0; p < PARTS; p++) square += norms[p];
            asm("rsqrt.approx.f32 %0, %1;" : "=f"(factor) : "f"(square / H + f.eps));
        }
        P::read_logits(logits, biases, factor, E, lane, logit);
        int id;
        choose<T>(logit, choice, each, f, E, top_k, lane, id, chosen, of_expert);
        if (normalise) chosen /= sum_of_warp(chosen) + f.sum_eps;
        chosen *= f.factor * of_expert;
        if (rounded) chosen = to_floats<T>(from_floats<T>(chosen, 0.f)).x;
        if (lane >= top_k) return;
        ids[(size_t)(m0 + rank) * top_k + lane] = id;
        weights[(size_t)(m0 + rank) * top_k + lane] = chosen;
        return;
    }

    auto number = [](u32 key) { return to_floats<T>(key >> 31 ? key >> 16 & 0x7fff : ~key >> 16).x; };
    u32 key[MINE];
    float logit[MINE], total = 0.f, chosen = 0.f;
    const float top = number(most_of_warp(P::read_keys(logits, biases, E, lane, logit, key)));
#pragma unroll
    for (int i = 0; i < MINE; i++)
        if (key[i] != 0) total += exp2_of((logit[i] - top) * 1.44269504f);
    total = sum_of_warp(total);
    const u32 mine = P::pick_keys(key, top_k, lane);
    if (lane < top_k) chosen = exp2_of((number(mine) - top) * 1.44269504f) / total;
    if (normalise) chosen /= sum_of_warp(chosen);
    if (rounded) chosen = to_floats<T>(from_floats<T>(chosen, 0.f)).x;
    if (lane >= top_k) return;
    ids[(size_t)(m0 + rank) * top_k + lane] = 0xffff - (mine & 0xffff);
    weights[(size_t)(m0 + rank) * top_k + lane] = chosen;
}
