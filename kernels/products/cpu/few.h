// Products of one or two rows of x, which wait for the memory: every row's sums in registers, weights asked for ahead.
#pragma once
#include <cstdint>

#include "codes.h"

namespace {

// y of W registers of neighbouring rows, out[m][row], which share what is read of x: rows from n0 on, of one tile or of
// neighbours.
template <int BITS, int MB, int D, int W>
inline void few(const Args& a, int n0, const Rounded& x, float (*out)[W * Isa::LANES]) {
    using I = Isa::I;
    using F = Isa::F;
    constexpr int U = Isa::AT_ONCE || W * MB * D >= 8 ? 1 : W * MB * D >= 4 || BITS >= 4 ? 2 : 4;  // chains of dependent dot products
    constexpr int SUMS = U * W * MB * D;
    constexpr auto at = [](int u, int w, int m, int d) { return ((u * W + w) * MB + m) * D + d; };
    const int chunks = a.block / CHUNK;
    const size_t stride = (size_t)a.chunks * BITS * ROWS;  // of a tile
    // What follows on the last of a tile's words, W registers at a time: the tile after the ones that are read here.
    const size_t skip = W * Isa::LANES > ROWS ? stride * (W * Isa::LANES / ROWS - 1) : 0;
    const int last = a.chunks - AHEAD / (BITS * ROWS * 4);  // chunks from here on ask for words of the tiles that follow
    const int32_t* p[W];
    size_t meta[W];
    F acc[W][MB];
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) {
        int n = n0 + w * Isa::LANES, tile = n / ROWS, lane = n % ROWS;
        p[w] = a.words + stride * tile + lane;
        meta[w] = (size_t)tile * a.groups * ROWS + lane;
#pragma GCC unroll 8
        for (int m = 0; m < MB; m++) acc[w][m] = Isa::zero();
    }
    const int8_t* xq = x.quads;
    for (int b = 0, left = a.group; b < a.blocks; b++) {
        const size_t ahead = AHEAD / 4 + (b * chunks >= last ? skip : 0);
        I sum[SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) sum[i] = Isa::none();
        for (int c = 0; c < chunks; c++) {
            I part[SUMS];  // of the chunk
#pragma GCC unroll 16
            for (int i = 0; i < SUMS; i++) part[i] = Isa::begin<BITS>(sum[i]);
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++) {
                I v[W];
#pragma GCC unroll 4
                for (int w = 0; w < W; w++) {
                    for (int line = q * BITS / QUADS; line < (q + 1) * BITS / QUADS; line++)
                        if ((n0 + w * Isa::LANES) % ROWS == 0) __builtin_prefetch(p[w] + line * ROWS + ahead);
                    v[w] = codes<BITS, U>(p[w], q);
                }
#pragma GCC unroll 8
                for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
                    for (int d = 0; d < D; d++) {
                        const int8_t* digits = xq + (m * D + d) * CHUNK + q * 4;
                        if constexpr (W == 1) {
                            part[at(q % U, 0, m, d)] = Isa::dot_at<BITS>(part[at(q % U, 0, m, d)], v[0], digits);
                        } else {
                            I quad = Isa::quad(digits);
#pragma GCC unroll 4
                            for (int w = 0; w < W; w++) part[at(q % U, w, m, d)] = Isa::dot<BITS>(part[at(q % U, w, m, d)], v[w], quad);
                        }
                    }
            }
#pragma GCC unroll 16
            for (int i = 0; i < SUMS; i++) sum[i] = Isa::end<BITS>(sum[i], part[i]);
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) p[w] += BITS * ROWS;
            xq += MB * D * CHUNK;
        }
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            F scale = Isa::meta(a.scales, a.meta, meta[w]);
            F zero = a.zeros ? Isa::meta(a.zeros, a.meta, meta[w]) : Isa::all(a.mid);
            if (BITS == 8 && Isa::OFFSET) zero = Isa::minus(zero, Isa::all(Isa::OFFSET));
#pragma GCC unroll 8
            for (int m = 0; m < MB; m++) {
                I v = sum[at(0, w, m, 0)], low = sum[at(0, w, m, D - 1)];
#pragma GCC unroll 4
                for (int u = 1; u < U; u++) {
                    v = Isa::add(v, Isa::down(sum[at(u, w, m, 0)], scaled(BITS, U, u)));
                    low = Isa::add(low, Isa::down(sum[at(u, w, m, D - 1)], scaled(BITS, U, u)));
                }
                if (D == 2) v = Isa::add(Isa::left(v, 7), low);
                F f = Isa::minus_product(Isa::to_float(v), zero, Isa::all(x.sum[b * MB + m]));
                acc[w][m] = Isa::plus_product(acc[w][m], f, Isa::times(scale, Isa::all(x.scale[b * MB + m])));
            }
        }
        if ((left -= a.block) <= 0) {
            left = a.group;
            for (int w = 0; w < W; w++) meta[w] += ROWS;
        }
    }
#pragma GCC unroll 4
    for (int w = 0; w < W; w++)
#pragma GCC unroll 8
        for (int m = 0; m < MB; m++) Isa::store(out[m] + w * Isa::LANES, acc[w][m]);
}

}  // namespace
