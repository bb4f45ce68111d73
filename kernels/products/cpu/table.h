// Products of codes that stand for values of a table. Both the table and x become whole numbers, of 15 bits with their sign:
// those of 16 k are multiplied and added exactly in 32 bits, and scales meet their sums in fp32. What is added in which order
// does not depend on M or on threads.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "codes.h"
#include "dense.h"
#include "round.h"

namespace {

// of a chunk: k of one sum, 16 * 2^13 * 2^14 at most, and the least group. All widths have it in 4 quads
constexpr int HALF = 16;

// A table as whole numbers below 2^13 of a unit, a power of two: e2m1 and iq4_nl exactly, others within 2^-13 of their largest.
struct Entries {
    alignas(16) int8_t low[16], high[16];  // bytes, by code
    float unit;

    Entries(const float* table, int levels) {
        float most = 0;
        int e = 0;
        for (int i = 0; i < levels; i++) most = std::fabs(table[i]) > most ? std::fabs(table[i]) : most;
        std::frexp(most, &e);
        unit = std::ldexp(1.f, e - 13);
        for (int i = 0; i < 16; i++) {
            int v = i < levels ? (int)__builtin_rintf(table[i] / unit) : 0;
            low[i] = (int8_t)v, high[i] = (int8_t)(v >> 8);
        }
    }
};

// Rows of x: values[chunk][m] of CHUNK, in the order of quads; scale[chunk][m].
struct Whole {
    int16_t* values;
    float* scale;
    int MB;
};

// Where `looked_up` finds the table's values of a quad: in words, for few rows of x,
template <int BITS>
struct InWords {
    const int32_t* words;
    Isa::I low, high;

    InWords(const Args& a, int n0, const Entries& e)
        : words(a.words + (size_t)(n0 / ROWS) * a.chunks * BITS * ROWS + n0 % ROWS),
          low(Isa::bytes(e.low)),
          high(Isa::bytes(e.high)) {}

    Isa::Entries of(int c, int q, int w) const {
        const int32_t* p = words + (size_t)c * BITS * ROWS;
        if (q % (QUADS / 2) == 0 && w == 0)
            for (int line = q ? BITS / 2 : 0; line < (q ? BITS : BITS / 2); line++)
                __builtin_prefetch(p + line * ROWS + AHEAD / 4);
        return Isa::look_up(codes<BITS, 1>(p + w * Isa::LANES, q), low, high);
    }
};

// or looked up before, once for all rows.
struct Found {
    const Isa::Entries* found;

    Isa::Entries of(int c, int q, int) const {
        const Isa::Entries& e = found[(size_t)c * QUADS + q];
        // g++ copies the whole by halves of registers, which then wait for each other (8 times as long)
        return {e.first, e.second};
    }
};

// y of W registers of neighbouring rows of one tile and the rows m .. m + R of x: out[row of x][row].
template <int R, int W, class From>
inline void looked_up(const Args& a, int n0, const From& from, const Whole& x, int m, float (*out)[W * Isa::LANES]) {
    using F = Isa::F;
    size_t meta = (size_t)(n0 / ROWS) * a.groups * ROWS + n0 % ROWS;
    F acc[W][R], scale[W] = {};
#pragma GCC unroll 16
    for (int i = 0; i < W * R; i++) acc[i / R][i % R] = Isa::zero();
    for (int c = 0, left = 0, groups = a.groups; c < a.chunks; c++) {
        const int16_t* values = x.values + ((size_t)c * x.MB + m) * CHUNK;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++, left -= HALF) {
            if (left <= 0 && groups > 0) {
                for (int w = 0; w < W; w++) scale[w] = Isa::meta(a.scales, a.scale, meta + w * Isa::LANES);
                left = a.group, groups--, meta += ROWS;
            }
            Isa::Sums sum[W][R];
#pragma GCC unroll 16
            for (int i = 0; i < W * R; i++) sum[i / R][i % R] = Isa::no_sums();
#pragma GCC unroll 4
            for (int q = half * QUADS / 2; q < (half + 1) * QUADS / 2; q++)
#pragma GCC unroll 4
                for (int w = 0; w < W; w++) {
                    const Isa::Entries v = from.of(c, q, w);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) sum[w][r] = Isa::plus(sum[w][r], v, values + r * CHUNK + q * 4);
                }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int w = 0; w < W; w++) {
                    const F by = Isa::times(scale[w], Isa::all(x.scale[c * x.MB + m + r]));
                    acc[w][r] = Isa::plus_product(acc[w][r], Isa::to_float(Isa::total(sum[w][r])), by);
                }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) Isa::store(out[r] + w * Isa::LANES, acc[w][r]);
}

template <int BITS>
struct TableProduct {
    const Args& a;
    int16_t* values;
    float* scales;

    Whole rows(int m0) const {
        const size_t before = (size_t)a.chunks * m0;
        return {values + before * CHUNK, scales + before, rows_at(a.M, m0)};
    }

    void round(long i) const {  // row i / chunks, chunk i % chunks
        const int row = i / a.chunks, c = i % a.chunks, m0 = row / MOST * MOST;
        const Whole x = rows(m0);
        const size_t at = (size_t)c * x.MB + row - m0;
        alignas(64) int v[CHUNK];
        x.scale[at] = whole_numbers<2>(a, row, c * CHUNK, CHUNK, 0, v);
        for (int j = 0; j < CHUNK; j++) x.values[at * CHUNK + j] = (int16_t)v[code_of(BITS, j)];
    }

    template <int R, int W, class From>
    int some_rows(int n0, int m0, int m, const Whole& x, const From& from, float unit) const {
        alignas(64) float out[R][W * Isa::LANES];
        looked_up<R, W>(a, n0, from, x, m, out);
        write_rows<W * Isa::LANES>(a, n0, m0 + m, R, out, unit);
        return R;
    }

    // Tile t; `found`: QUADS a chunk.
    void tile(int t, Isa::Entries* found) const {
        constexpr int SOME = Isa::TOGETHER > 4 ? Isa::TOGETHER : 4;
        const int n0 = t * ROWS, which = n0 / (a.N / a.tables);
        const Entries entries(a.table + (size_t)which * a.apart, 1 << BITS);
        const float unit = entries.unit * (a.factor ? a.factor[which] : 1) * (a.scale == E4M3 ? 256 : 1);
        if (a.M == 1) some_rows<1, ROWS / Isa::LANES>(n0, 0, 0, rows(0), InWords<BITS>(a, n0, entries), unit);
        for (int n = n0; a.M > 1 && n < n0 + ROWS && n < a.N; n += Isa::LANES) {
            const InWords<BITS> words(a, n, entries);
            if (a.M == 2) some_rows<2, 1>(n, 0, 0, rows(0), words, unit);
            for (int c = 0; a.M > 2 && c < a.chunks; c++)
#pragma GCC unroll 8
                for (int q = 0; q < QUADS; q++) found[(size_t)c * QUADS + q] = words.of(c, q, 0);
            for (int m0 = 0; a.M > 2 && m0 < a.M; m0 += MOST) {
                const Whole x = rows(m0);
                int m = 0;
                while (m + SOME <= x.MB) m += some_rows<SOME, 1>(n, m0, m, x, Found{found}, unit);
                if (SOME > 4 && m + 4 <= x.MB) m += some_rows<4, 1>(n, m0, m, x, Found{found}, unit);
                if (m + 2 <= x.MB) m += some_rows<2, 1>(n, m0, m, x, Found{found}, unit);
                if (m < x.MB) some_rows<1, 1>(n, m0, m, x, Found{found}, unit);
            }
        }
    }

    static void run(const Args& a) {
        const size_t blocks = (size_t)a.M * a.chunks;
        char* memory = (char*)malloc(blocks * (CHUNK * sizeof(int16_t) + sizeof(float)));
        const TableProduct product{a, (int16_t*)memory, (float*)(memory + blocks * CHUNK * sizeof(int16_t))};
        const int tiles = (a.N + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(a.threads)
        {
#pragma omp for schedule(static)
            for (long i = 0; i < (long)blocks; i++) product.round(i);
            const size_t size = sizeof(Isa::Entries), quads = a.M > 2 ? (size_t)a.chunks * QUADS : 1;
            auto* found = (Isa::Entries*)std::aligned_alloc(64, (quads * size + 63) / 64 * 64);
#pragma omp for schedule(dynamic, TILES)
            for (int t = 0; t < tiles; t++) product.tile(t, found);
            free(found);
        }
        free(memory);
    }
};

inline void table_widths(const Args& a) {
    switch (a.bits) {
        case 4: return TableProduct<4>::run(a);
        case 3: return TableProduct<3>::run(a);
        default: return TableProduct<2>::run(a);
    }
}

}  // namespace
