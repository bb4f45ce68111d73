// Products of one or two rows of x, which memory bounds: a tile's sums stay in registers, weights are prefetched. Where one
// register holds a tile's row sums, of up to eight rows of x: their sums, too, stay in registers all along K.
#pragma once
#include <cstdint>

#include "codes.h"

namespace {

// y of one tile for the rows m0 .. m0 + MB of x, out[m][row]; its W registers of rows share what is read of x. BF: scales and
// zeros are bf16, known outside of the loop (5 to 10% faster with groups of 32).
template <int BITS, int MB, int D, bool BF>
__attribute__((noinline)) void few(const Args& a, int tile, const Rounded& x, int m0, float (*out)[ROWS]) {
    using I = Isa::I;
    using F = Isa::F;
    constexpr int W = ROWS / Isa::LANES;
    // chains of dependent dot products
    constexpr int U = Isa::AT_ONCE || W * MB * D >= 8 ? 1 : W * MB * D >= 4 || BITS >= 4 ? 2 : 4;
    constexpr bool HALVES = Isa::pairs(BITS, D, MB);  // of codes and of x, in the place of digits of x
    constexpr int P = HALVES ? 1 : D, S = Isa::JOINED ? 1 : D;  // sums of a chunk and of a block, for each row of x
    constexpr int PARTS = U * W * MB * P, SUMS = U * W * MB * S;
    constexpr auto at = [](int u, int w, int m) { return (u * W + w) * MB + m; };
    const int chunks = a.block / CHUNK, dtype = BF ? BF16 : a.meta;
    const int32_t* words = a.words + (size_t)tile * a.chunks * BITS * ROWS;
    size_t meta = (size_t)tile * a.groups * ROWS;
    F acc[W][MB];
#pragma GCC unroll 4
    for (int w = 0; w < W; w++)
#pragma GCC unroll 8
        for (int m = 0; m < MB; m++) acc[w][m] = Isa::zero();
    const int8_t* xq = x.quads + m0 * D * CHUNK;
    for (int b = 0, left = a.group; b < a.blocks; b++) {
        I sum[SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) sum[i] = Isa::none();
        for (int c = 0; c < chunks; c++) {
            I part[PARTS];
#pragma GCC unroll 16
            for (int i = 0; i < PARTS; i++) part[i] = Isa::begin<BITS>(sum[i * S / P]);
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++) {
                for (int line = q * BITS / QUADS; line < (q + 1) * BITS / QUADS; line++)
                    __builtin_prefetch(words + line * ROWS + AHEAD / 4);
                I v[W];
#pragma GCC unroll 4
                for (int w = 0; w < W; w++) v[w] = codes<BITS, U>(words + w * Isa::LANES, q);
#pragma GCC unroll 8
                for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
                    for (int d = 0; d < D; d++) {
                        const int8_t* digits = xq + (m * D + d) * CHUNK + q * 4;
                        if constexpr (W == 1) {
                            I& to = part[at(q % U, 0, m) * P + d];
                            to = Isa::dot_at<BITS>(to, v[0], digits);
                        } else {
                            I quad = Isa::quad(digits);
#pragma GCC unroll 4
                            for (int w = 0; w < W; w++) {
                                I& to = part[at(q % U, w, m) * P + d % P];
                                to = Isa::dot<BITS>(to, HALVES ? Isa::half(v[w], d) : v[w], quad);
                            }
                        }
                    }
            }
#pragma GCC unroll 16
            for (int i = 0; i < PARTS; i++)
                sum[i * S / P] = Isa::end<BITS>(sum[i * S / P], part[i], P == 2 && i % P == 0 ? 7 : 0);
            words += BITS * ROWS;
            xq += x.MB * D * CHUNK;
        }
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            F scale = Isa::meta(a.scales, dtype, meta + w * Isa::LANES);
            F zero = a.zeros ? Isa::meta(a.zeros, dtype, meta + w * Isa::LANES) : Isa::all(a.mid);
            if (BITS == 8 && Isa::OFFSET) zero = Isa::minus(zero, Isa::all(Isa::OFFSET));
#pragma GCC unroll 8
            for (int m = 0; m < MB; m++) {
                I v = sum[at(0, w, m) * S], low = sum[at(0, w, m) * S + S - 1];
#pragma GCC unroll 4
                for (int u = 1; u < U; u++) {
                    v = Isa::add(v, Isa::down(sum[at(u, w, m) * S], scaled(BITS, U, u)));
                    low = Isa::add(low, Isa::down(sum[at(u, w, m) * S + S - 1], scaled(BITS, U, u)));
                }
                if (S == 2) v = Isa::add(Isa::left(v, 7), low);
                F f = Isa::minus_product(Isa::to_float(v), zero, Isa::all(x.sum[b * x.MB + m0 + m]));
                acc[w][m] = Isa::plus_product(acc[w][m], f, Isa::times(scale, Isa::all(x.scale[b * x.MB + m0 + m])));
            }
        }
        if ((left -= a.block) <= 0) left = a.group, meta += ROWS;
    }
#pragma GCC unroll 4
    for (int w = 0; w < W; w++)
#pragma GCC unroll 8
        for (int m = 0; m < MB; m++) Isa::store(out[m] + w * Isa::LANES, acc[w][m]);
}

}  // namespace
