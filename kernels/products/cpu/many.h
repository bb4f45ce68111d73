// Products of more rows of x: the codes of a chunk are decoded once, into eight registers, and multiplied with R rows at a
// time. Each digit of each row has an accumulator: a dot product waits for the one before it in its accumulator, 4 to 5 cycles.
#pragma once
#include <cstdint>

#include "codes.h"

namespace {

struct Place {  // of one register of rows of the weight, in one chunk
    const int32_t* words;
    Isa::F scale, zero;
    int block;          // of x
    bool begins, ends;  // it
};

// One chunk with the rows m .. m + R of x: into whole[m] within a block, into out[m] at its end.
template <int BITS, int D, int R>
inline void rows_of_chunk(const Isa::I (&v)[QUADS], const Place& at, const int8_t* quads, int m, const Rounded& x,
                          Isa::I* whole, float (*out)[Isa::LANES]) {
    using I = Isa::I;
    using F = Isa::F;
    I sum[R], part[R * D];
    const int8_t* digits = quads + (size_t)m * D * CHUNK;
#pragma GCC unroll 16
    for (int i = 0; i < R * D; i++) part[i] = Isa::begin<BITS>(Isa::none());
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; q++)
#pragma GCC unroll 16
        for (int i = 0; i < R * D; i++) part[i] = Isa::dot_at<BITS>(part[i], v[q], digits + i * CHUNK + q * 4);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        sum[r] = Isa::end<BITS>(Isa::none(), part[r * D]);
        if (D == 2) sum[r] = Isa::add(Isa::left(sum[r], 7), Isa::end<BITS>(Isa::none(), part[r * D + D - 1]));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        if (!at.begins) sum[r] = Isa::add(sum[r], whole[m + r]);
        if (!at.ends) {
            whole[m + r] = sum[r];
            continue;
        }
        const int i = at.block * x.MB + m + r;
        F f = Isa::minus_product(Isa::to_float(sum[r]), at.zero, Isa::all(x.sum[i]));
        F acc = Isa::plus_product(Isa::meta(out[m + r], FP32, 0), f, Isa::times(at.scale, Isa::all(x.scale[i])));
        Isa::store(out[m + r], acc);
    }
}

// y of one register of rows of the weight from n0 on: out[m][row].
template <int BITS, int D>
void many(const Args& a, int n0, const Rounded& x, float (*out)[Isa::LANES]) {
    constexpr int R = Isa::TOGETHER;
    const int tile = n0 / ROWS, lane = n0 % ROWS, chunks = a.block / CHUNK;
    const int32_t* words = a.words + (size_t)tile * a.chunks * BITS * ROWS + lane;
    size_t meta = (size_t)tile * a.groups * ROWS + lane;
    Isa::I whole[MOST];
    for (int m = 0; m < x.MB; m++) Isa::store(out[m], Isa::zero());
    Place at{};
    for (int b = 0, left = 0; b < a.blocks; b++, left -= a.block) {
        if (left <= 0) {
            at.scale = Isa::meta(a.scales, a.meta, meta);
            at.zero = a.zeros ? Isa::meta(a.zeros, a.meta, meta) : Isa::all(a.mid);
            if (BITS == 8 && Isa::OFFSET) at.zero = Isa::minus(at.zero, Isa::all(Isa::OFFSET));
            left = a.group, meta += ROWS;
        }
        at.block = b;
        for (int c = 0; c < chunks; c++, words += BITS * ROWS) {
            at.begins = c == 0, at.ends = c == chunks - 1;
            const int8_t* quads = x.quads + (size_t)(b * chunks + c) * x.MB * D * CHUNK;
            for (int line = 0; lane == 0 && line < BITS; line++) __builtin_prefetch(words + line * ROWS + AHEAD / 4);
            Isa::I v[QUADS];
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++) v[q] = codes<BITS, 1>(words, q);
            int m = 0;
            for (; m + R <= x.MB; m += R) rows_of_chunk<BITS, D, R>(v, at, quads, m, x, whole, out);
            if (R > 4 && x.MB - m >= 4) rows_of_chunk<BITS, D, 4>(v, at, quads, m, x, whole, out), m += 4;
            if (R > 3 && x.MB - m == 3) rows_of_chunk<BITS, D, 3>(v, at, quads, m, x, whole, out);
            if (R > 2 && x.MB - m == 2) rows_of_chunk<BITS, D, 2>(v, at, quads, m, x, whole, out);
            if (x.MB - m == 1) rows_of_chunk<BITS, D, 1>(v, at, quads, m, x, whole, out);
        }
    }
}

}  // namespace
