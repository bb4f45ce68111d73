// Rows of x[M,K] fp16 or bf16 as 16-bit integers in two signed bytes, a power of two for each row and 128 k: x of the products
// that take codes as bytes (split_int8.cuh tells how), made once and not by every warp of them.
//
// Maths   x = x' * unit, unit a power of two by which the span's largest |x'| fills 14 bits; x' = 256 * high + low
// Shapes  planes (2 * M, steps * 128) bytes, rows 2 * m high and 2 * m + 1 low, zeros past K · units (steps, stride) of (unit,
//         sum(x')); of a span with inf or nan unit is nan
// Order   that of the codes in a word of the tile layout: of each 128 k the i-th 32 bytes: byte 16*h + 4*quad + b is
//         k = 16*f + 8*h + 2*quad + b / 2, with f = i + b % 2 * 4, by 4 bits (chunks of 64 k) f = i / 2 * 4 + i % 2 + b % 2 * 2
// PLACE   by 1 and 2 bits: codes of odd i come times 2^PLACE, so that half of them need no shift. Then planes are of 2 x' where
//         i is even and of 2 x' / 2^PLACE where it is odd, unit is half as large and sum(2 x') is of these roundings. An x' of
//         2^14 - 64 or more, whose double two signed bytes do not hold, takes the next unit.
// Units   of row 4 * i + q lie at q * stride / 4 + i: those of a lane of wgmma's side by side.
// Launch  x: 128 threads for 2048 k of a row, 16 each. y: rows.
// Source  own.
#include "fold.cuh"
#include "split_int8.cuh"

template <int T, int BITS>
__global__ void __launch_bounds__(128)
int8_planes(const u16* __restrict__ x, uint4* __restrict__ planes, float2* __restrict__ units, int K, int steps, int stride) {
    constexpr int PLACE = BITS < 3 ? BITS : 0, HEAD = SPLIT_HEAD + (PLACE > 0);  // one more for the double
    const int row = blockIdx.y, at = blockIdx.x * 128 + threadIdx.x, step = at / 8, i = at % 8 / 2, h = at % 2;
    next_grid_launch();
    previous_grid_wait();
    const u16* const from = x + (size_t)row * K;
    u32 v[2][4], top = 0;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const int f = BITS == 4 ? i / 2 * 4 + i % 2 + b * 2 : i + b * 4, k = step * 128 + 16 * f + 8 * h;
        const uint4 eight = k < K ? load16_written(from + k) : make_uint4(0, 0, 0, 0);
        v[b][0] = eight.x, v[b][1] = eight.y, v[b][2] = eight.z, v[b][3] = eight.w;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) top = larger2<T>(top, absolute2<T>(v[j / 4][j % 4]));
    top = larger(top & 0xffffu, top >> 16);
#pragma unroll
    for (int d = 1; d < 8; d *= 2) top = larger(top, __shfl_xor_sync(0xffffffffu, top, d));
    const u32 e = larger((__float_as_uint(to_floats<T>(top).x) + (PLACE ? 0x10000 : 0)) >> 23, HEAD + 2);
    const float up = __uint_as_float((254 + HEAD - i % 2 * PLACE - e) << 23);
    u32 sum = 0, low[4], high[4];
#pragma unroll
    for (int quad = 0; quad < 4; quad++) {
        const float2 a = to_floats<T>(v[0][quad]), b = to_floats<T>(v[1][quad]);
        const u32 one[2] = {__float_as_uint(__fmaf_rn(a.x, up, SPLIT_ROUND)), __float_as_uint(__fmaf_rn(a.y, up, SPLIT_ROUND))};
        const u32 other[2] = {__float_as_uint(__fmaf_rn(b.x, up, SPLIT_ROUND)),
                              __float_as_uint(__fmaf_rn(b.y, up, SPLIT_ROUND))};
        sum += one[0] + other[0] + one[1] + other[1];
        split_int8(one, other, low[quad], high[quad]);
    }
    sum = (sum - 16 * SPLIT_ZERO) << i % 2 * PLACE;
#pragma unroll
    for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (step >= steps) return;
    uint4* const to = planes + (size_t)row * 2 * steps * 8 + at;
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    to[steps * 8] = make_uint4(low[0], low[1], low[2], low[3]);
    const int place = row % 4 * (stride / 4) + row / 4;
    if (at % 8 == 0)
        units[(size_t)step * stride + place] =
            make_float2(__uint_as_float(e >= 255 ? 0x7fffffffu : (e - HEAD) << 23), (float)(int)sum);
}
