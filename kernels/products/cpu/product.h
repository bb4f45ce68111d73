// y = x @ dequantize(W)^T over the layout `cpu` (packers/layouts/cpu.py), in whole numbers: x becomes integers of D digits
// of 8 bits a block, dot products of codes and digits are exact in 32 bits, scales and zeros meet them once a block in fp32.
// Sums of a row do not depend on M, on the number of threads or on who computes them: equal bits always.
//
// A translation unit per instruction set defines `Isa` and includes this; all is in an unnamed namespace, so that the linker
// cannot give one unit the code of another.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "dense.h"
#include "few.h"
#include "many.h"
#include "pairs.h"
#include "round.h"
#include "table.h"

namespace {

template <int BITS, int D>
struct Product {
    static constexpr int BYTES = Isa::pairs(BITS, D, 1) ? 2 : D;  // of a value of x
    const Args& a;
    int8_t* quads;
    float* meta;

    Rounded block(int m0) const {
        size_t n = (size_t)a.blocks * m0;
        const int MB = rows_at(a.M, m0);
        return {quads + (size_t)a.chunks * CHUNK * BYTES * m0, meta + 2 * n, meta + 2 * n + (size_t)a.blocks * MB, MB};
    }

    void round(int m, int b, float row_largest) const {
        const int m0 = m / MOST * MOST;
        const Rounded x = block(m0);
        if (Isa::pairs(BITS, D, x.MB)) round_block<BITS, D, Isa::pairs(BITS, D, MOST)>(a, m, b, m - m0, row_largest, x);
        else round_block<BITS, D, false>(a, m, b, m - m0, row_largest, x);
    }

    // Part i of all: of two digits a block, of one digit a row, whose blocks share a scale.
    void round_part(long i) const {
        if (D == 2) return round(i / a.blocks, i % a.blocks, 0);
        const float most = largest_of_row(a, i);
        for (int b = 0; b < a.blocks; b++) round(i, b, most);
    }

    // The rows m .. m + MB of x, which begin with row m0 of all.
    template <int MB>
    void few_rows(int t0, int t1, int m0, int m, const Rounded& x) const {
        alignas(64) float out[MB][ROWS];
        for (int t = t0; t < t1; t++) {
            if (MB <= 2 && a.meta == BF16) few<BITS, MB, BYTES, MB <= 2>(a, t, x, m, out);
            else few<BITS, MB, BYTES, false>(a, t, x, m, out);
            write_rows<ROWS>(a, t * ROWS, m0 + m, MB, out);
        }
    }

    void more_rows(int t0, int t1, int m0, const Rounded& x) const {
        int m = 0;
        for (; x.MB - m >= 8; m += 8) few_rows<8>(t0, t1, m0, m, x);
        if (x.MB - m >= 4) few_rows<4>(t0, t1, m0, m, x), m += 4;
        if (x.MB - m == 3) few_rows<3>(t0, t1, m0, m, x);
        if (x.MB - m == 2) few_rows<2>(t0, t1, m0, m, x);
        if (x.MB - m == 1) few_rows<1>(t0, t1, m0, m, x);
    }

    void many_rows(int t0, int t1, int m0, const Rounded& x) const {
        if constexpr (Isa::LANES == ROWS) {
            more_rows(t0, t1, m0, x);
        } else if constexpr (Isa::pairs(BITS, D, MOST)) {
            alignas(64) float out[MOST][ROWS];
            for (int t = t0; t < t1; t++) {
                many_pairs<BITS, Isa>(a, t, x, out);
                write_rows<ROWS>(a, t * ROWS, m0, x.MB, out);
            }
        } else {
            alignas(64) float out[MOST][Isa::LANES];
            for (int n0 = t0 * ROWS; n0 < t1 * ROWS; n0 += Isa::LANES) {
                many<BITS, D>(a, n0, x, out);
                if (n0 < a.N) write_rows<Isa::LANES>(a, n0, m0, x.MB, out);
            }
        }
    }

    void tiles(int t0, int t1) const {
        for (int m0 = 0; m0 < a.M; m0 += MOST) {
            const Rounded x = block(m0);
            if (x.MB == 1) few_rows<1>(t0, t1, m0, 0, x);
            else if (x.MB == 2) few_rows<2>(t0, t1, m0, 0, x);
            else many_rows(t0, t1, m0, x);
        }
    }

    static void run(const Args& a) {
        size_t bytes = (size_t)a.M * a.chunks * CHUNK * BYTES, metas = (size_t)a.M * a.blocks * 2 * sizeof(float);
        char* memory = (char*)malloc(bytes + metas);
        Product product{a, (int8_t*)memory + metas, (float*)memory};
        const int tiles = (a.N + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(a.threads)
        {
#pragma omp for schedule(static)
            for (long i = 0; i < (long)a.M * (D == 2 ? a.blocks : 1); i++) product.round_part(i);
#pragma omp for schedule(dynamic, 1)
            for (int t = 0; t < tiles; t += TILES) product.tiles(t, t + TILES < tiles ? t + TILES : tiles);
        }
        free(memory);
    }
};

template <int D>
void widths(const Args& a) {
    switch (a.bits) {
        case 8: return Product<8, D>::run(a);
        case 4: return Product<4, D>::run(a);
        case 3: return Product<3, D>::run(a);
        case 2: return Product<2, D>::run(a);
        default: return Product<1, D>::run(a);
    }
}

// Steps of a weight of 16 or 32 bits by fp32 multiply-adds.
template <int T>
struct Widened {
    using Word = std::conditional_t<T == FP32, float, uint16_t>;
    using X = float;
    using W = Isa::F;
    using F = Isa::F;
    static constexpr int STEP = Isa::LANES, ROWS = Isa::LANES == 8 ? 2 : 4;  // of x: AVX2 has half the registers
    static F zero() { return Isa::zero(); }
    static W weights(const void* p) { return Isa::meta(p, T, 0); }
    static F dot(F sum, W w, const X* x) { return Isa::plus_product(sum, w, Isa::meta(x, FP32, 0)); }
    static float total(F v) { return Isa::total(v); }
    static float value(X x) { return x; }
};

inline void dense(const Args& a) {
    if (Isa::bf16_dense(a)) return;
    const size_t n = (size_t)a.M * a.K;
    float* x = (float*)malloc(sizeof(float) * n);
    for (int m = 0; m < a.M; m++) widen(x + (size_t)m * a.K, a.x, a.dtype, (size_t)m * a.K, a.K);
    a.meta == BF16   ? dense_rows<Widened<BF16>>(a, x)
    : a.meta == FP16 ? dense_rows<Widened<FP16>>(a, x)
                     : dense_rows<Widened<FP32>>(a, x);
    free(x);
}

inline void product(const Args& a) {
    if (a.bits >= 16) return dense(a);
    if (a.table) return table_widths(a);
    a.digits == 2 ? widths<2>(a) : widths<1>(a);
}

}  // namespace
