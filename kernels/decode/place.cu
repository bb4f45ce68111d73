// Keys and values of one token a sequence into a cache in few bits (decode/kv.py), and its queries for attend.cu (place_cuda.py).
//
// Grid    (heads in fours, sequences): D / 4 lanes a head, four dims each: a warp of 128 dims, half a warp of 64; queries first,
//         then keys, then values, as they lie in qkv.
// Work    q/k norm and RoPE in fp32, rounded once as in 16 bits; for 4 bits Hadamard's turn; then TRIES scales, of which the one
//         with the least squared error stays (`kv.encode`): a lane has its codes of the best so far, a head's sums go by shuffles.
// Early   position, angles and weights of norms are fetched before the previous kernel has ended, and attend.cu may start, as in
//         attend.cu: without it the chain of programmatic launches broke twice a layer (Triton's `place`: 5.4 us in fp8, 7.1 in 4 bits).
// Limits  as attend.cu's: fp16 or bf16, D of 64 or 128, R a multiple of 64.
#include "codes.cuh"

constexpr float LARGEST = 448.f;  // of e4m3
constexpr int LEVELS = 15;        // of 4 bits, less one

// The bits of e4m3 nearest to x of at most 448, ties to even; and what they stand for.
__device__ __forceinline__ u32 to_e4m3(float x) {
    const u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    const u32 normal = ((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120u << 3);
    const u32 small = __float_as_uint(__uint_as_float(size) + 16384.f) - 0x46800000u;  // multiples of 2^-9, as fp32 rounds them there
    return (size < 0x3c800000u ? small : normal) | (bits >> 24 & 0x80u);
}
__device__ __forceinline__ float of_e4m3(u32 code) {
    return __uint_as_float((code & 0x7fu) << 20 | (code & 0x80u) << 24) * __uint_as_float(247u << 23);  // 2^120: the exponents' difference
}
__device__ __forceinline__ float as_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return __uint_as_float(bits + 0x7fffu + (bits >> 16 & 1) & 0xffff0000u);
}
template <int LANES, class F>  // over the lanes of a head
__device__ __forceinline__ float all(float v, F of) {
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) v = of(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}

template <int T, int D, int R, int NORM, int KV, int TRIES>  // NORM: weights of the dtype (1), in fp32 (2), or none
__global__ void __launch_bounds__(D)
place(const u16* qkv, unsigned char* k_codes, unsigned char* v_codes, unsigned char* k_scales, unsigned char* v_scales, const int* positions,
      const int* table, const u16* cos_table, const u16* sin_table, const void* q_norm, const void* k_norm, u16* q, int HQ, int HKV, int S,
      int width, float eps, float shorter) {
    constexpr int LANES = D / 4, HALF = R / 8;  // of a head; lanes between the two dims of a pair
    auto sum = [](float a, float b) { return a + b; };
    auto least = [](float a, float b) { return a < b ? a : b; };
    next_grid_launch();
    const int lane = threadIdx.x % LANES, b = blockIdx.y, pos = positions[b], heads = HQ + 2 * HKV;
    const int wanted = blockIdx.x * 4 + threadIdx.x / LANES, head = smaller(wanted, heads - 1);  // past the last: that again, unwritten
    const bool is_q = head < HQ, is_v = head >= HQ + HKV, turns = !is_v && 4 * lane < R;
    auto four = [](const u16* from) {
        u32 v[2];
        asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(from) : "memory");
        const float2 low = to_floats<T>(v[0]), high = to_floats<T>(v[1]);
        return make_float4(low.x, low.y, high.x, high.y);
    };
    const size_t angle = (size_t)pos * R + smaller(4 * lane, R - 4);
    const float4 cos = four(cos_table + angle), sin = four(sin_table + angle);
    float4 weight = make_float4(1.f, 1.f, 1.f, 1.f);
    if constexpr (NORM != 0) {
        const void* norm = is_q ? q_norm : k_norm;
        if (NORM == 1) weight = four((const u16*)norm + 4 * lane);
        else weight = ((const float4*)norm)[lane];
    }
    const int page = table != nullptr ? table[(size_t)b * width + pos / S] : b;
    const size_t slot = ((size_t)page * HKV + (head - HQ) % HKV) * S + (table != nullptr ? pos % S : pos);  // of keys and values
    previous_grid_wait();

    float4 x = four(qkv + ((size_t)b * heads + head) * D + 4 * lane);
    if constexpr (NORM != 0) {
        const float mean = all<LANES>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w, sum) * (1.f / D) + eps;
        float inverse;
        asm("rsqrt.approx.f32 %0, %1;" : "=f"(inverse) : "f"(mean));
        if (!is_v) x.x *= inverse * weight.x, x.y *= inverse * weight.y, x.z *= inverse * weight.z, x.w *= inverse * weight.w;
    }
    const float sign = lane < HALF ? -1.f : 1.f;
    auto turned_by = [&](float v, float c, float s) {
        const float other = __shfl_xor_sync(0xffffffffu, v, HALF);
        return turns ? v * c + sign * other * s : v;
    };
    x = make_float4(turned_by(x.x, cos.x, sin.x), turned_by(x.y, cos.y, sin.y), turned_by(x.z, cos.z, sin.z), turned_by(x.w, cos.w, sin.w));
    const float2 low = to_floats<T>(from_floats<T>(x.x, x.y)), high = to_floats<T>(from_floats<T>(x.z, x.w));
    x = make_float4(low.x, low.y, high.x, high.y);
    if constexpr (KV == 4) x = turned<D>(x, lane);
    if (is_q && wanted < heads) {
        u32* to = (u32*)(q + ((size_t)b * HQ + head) * D + 4 * lane);
        to[0] = from_floats<T>(x.x, x.y), to[1] = from_floats<T>(x.z, x.w);
    }

    const float v[4] = {x.x, x.y, x.z, x.w};
    const float top = -all<LANES>(least(least(-v[0], -v[1]), least(-v[2], -v[3])), least);
    const float bottom = all<LANES>(least(least(v[0], v[1]), least(v[2], v[3])), least);
    const int first = (int)((__float_as_uint((top > -bottom ? top : -bottom) / LARGEST) + 0xfffffu) >> 20) - Held<8, T, D>::FIRST;
    u32 best = 0, scales = 0;  // codes of this lane, a byte (or four bits) each; the head's, as they lie in memory
    float best_error = __uint_as_float(0x7f800000u);
#pragma unroll
    for (int i = 0; i < TRIES; i++) {
        u32 codes = 0, its;
        float error = 0.f;
        if constexpr (KV == 8) {
            its = smaller(first + i > 0 ? first + i : 0, 255);
            const float step = __uint_as_float((its + Held<8, T, D>::FIRST) << 20), by = 1.f / step;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float large = v[j] * by, some = large > LARGEST ? LARGEST : large < -LARGEST ? -LARGEST : large;
                const u32 code = to_e4m3(some);
                const float off = of_e4m3(code) * step - v[j];
                codes |= code << 8 * j, error += off * off;
            }
        } else {
            const float reach = (top - bottom) * 0.5f * (1.f - shorter * i);
            const float step = as_bf16(reach * (2.f / LEVELS)), base = as_bf16((bottom + top) * 0.5f - reach), by = step > 0.f ? 1.f / step : 0.f;
            its = __float_as_uint(step) >> 16 | __float_as_uint(base);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float large = (v[j] - base) * by, some = large < 0.f ? 0.f : large > LEVELS ? LEVELS : large;
                const u32 code = __float_as_uint(some + 8388608.f) & 15;  // 2^23: rounds to a whole number, ties to even
                const float off = code * step + base - v[j];
                codes |= code << 4 * j, error += off * off;
            }
        }
        error = all<LANES>(error, sum);
        if (error < best_error) best = codes, scales = its, best_error = error;
    }
    if (is_q || wanted >= heads) return;
    unsigned char *to = is_v ? v_codes : k_codes, *beside = is_v ? v_scales : k_scales;
    if constexpr (KV == 8) ((u32*)to)[slot * LANES + lane] = best;
    else ((u16*)to)[slot * LANES + lane] = (u16)best;
    if (lane == 0) {
        if constexpr (KV == 8) beside[slot] = (unsigned char)scales;
        else ((u32*)beside)[slot] = scales;
    }
}
