// Products of more rows of x by multiply-adds of pairs of 16-bit integers (AVX2): a block's codes of one tile are decoded
// once, into the first-level cache, and R rows of x multiply them with the tile's sums in registers all along the block.
// Bytes would take as many multiply-adds, one a digit of x, and sums of 16 bits that are to be emptied every chunk.
#pragma once
#include <cstdint>

#include "codes.h"

namespace {

constexpr int PAIRS = CHUNK / 2;  // of a chunk

// Rows m .. m + R of x, all of block b: into out[m][row].
template <int R, class Isa>
inline void rows_of_block(const typename Isa::I* codes, const typename Isa::F* scale, const typename Isa::F* zero, int chunks,
                          int b, int m, const Rounded& x, float (*out)[ROWS]) {
    using I = typename Isa::I;
    using F = typename Isa::F;
    constexpr int W = ROWS / Isa::LANES;
    I sum[R][W];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) sum[r][w] = Isa::none();
    for (int c = 0; c < chunks; c++, codes += PAIRS * W) {
        const int8_t* pairs = x.quads + ((size_t)(b * chunks + c) * x.MB + m) * 2 * CHUNK;
#pragma GCC unroll 16
        for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const I pair = Isa::quad(pairs + (r * PAIRS + p) * 4);
#pragma GCC unroll 4
                for (int w = 0; w < W; w++) sum[r][w] = Isa::template dot<8>(sum[r][w], codes[p * W + w], pair);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const int i = b * x.MB + m + r;
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            float* y = out[m + r] + w * Isa::LANES;
            F f = Isa::minus_product(Isa::to_float(sum[r][w]), zero[w], Isa::all(x.sum[i]));
            Isa::store(y, Isa::plus_product(Isa::meta(y, FP32, 0), f, Isa::times(scale[w], Isa::all(x.scale[i]))));
        }
    }
}

// y of one tile: out[m][row].
template <int BITS, class Isa>
void many_pairs(const Args& a, int tile, const Rounded& x, float (*out)[ROWS]) {
    using I = typename Isa::I;
    constexpr int W = ROWS / Isa::LANES, R = 4;
    const int chunks = a.block / CHUNK;
    const int32_t* words = a.words + (size_t)tile * a.chunks * BITS * ROWS;
    size_t meta = (size_t)tile * a.groups * ROWS;
    I codes_of[128 / 2 * W];
    typename Isa::F scale[W], zero[W];
    for (int m = 0; m < x.MB; m++)
        for (int n = 0; n < ROWS; n++) out[m][n] = 0;
    for (int b = 0, left = 0; b < a.blocks; b++, left -= a.block) {
        if (left <= 0) {
            for (int w = 0; w < W; w++) {
                scale[w] = Isa::meta(a.scales, a.meta, meta + w * Isa::LANES);
                zero[w] = a.zeros ? Isa::meta(a.zeros, a.meta, meta + w * Isa::LANES) : Isa::all(a.mid);
            }
            left = a.group, meta += ROWS;
        }
        for (int c = 0; c < chunks; c++, words += BITS * ROWS) {
            for (int line = 0; line < BITS; line++) __builtin_prefetch(words + line * ROWS + AHEAD / 4);
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++)
#pragma GCC unroll 4
                for (int w = 0; w < W; w++) {
                    const I quad = codes<BITS, 1>(words + w * Isa::LANES, q);
#pragma GCC unroll 2
                    for (int d = 0; d < 2; d++) codes_of[(c * PAIRS + d * QUADS + q) * W + w] = Isa::half(quad, d);
                }
        }
        int m = 0;
        for (; m + R <= x.MB; m += R) rows_of_block<R, Isa>(codes_of, scale, zero, chunks, b, m, x, out);
        if (x.MB - m == 3) rows_of_block<3, Isa>(codes_of, scale, zero, chunks, b, m, x, out);
        if (x.MB - m == 2) rows_of_block<2, Isa>(codes_of, scale, zero, chunks, b, m, x, out);
        if (x.MB - m == 1) rows_of_block<1, Isa>(codes_of, scale, zero, chunks, b, m, x, out);
    }
}

}  // namespace
