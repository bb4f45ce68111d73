// y = x @ dequantize(W)^T over the layout `cpu` (packers/layouts/cpu.py), in whole numbers: x becomes integers of D digits
// of 8 bits a block, dot products of codes and digits are exact in 32 bits, scales and zeros meet them once a block in fp32.
// Sums of a row do not depend on M, on the number of threads or on who computes them: equal bits always.
//
// A translation unit per instruction set defines `Isa` and includes this; all is in an unnamed namespace, so that the linker
// cannot give one unit the code of another.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "args.h"
#include "dense.h"

namespace {

constexpr int ROWS = 16;   // of a tile: neighbouring words belong to neighbouring rows
constexpr int CHUNK = 32;  // k of `bits` words a row; always 8 quads
constexpr int QUADS = 8;   // of 4 codes in the 4 bytes of a lane

// ---- activations ----

typedef int8_t Bytes __attribute__((vector_size(CHUNK)));

// Byte j of the shuffled chunk is byte b of quad q, and that is code k of the chunk: what `codes` below makes of the words.
constexpr int code_of(int bits, int j) {
    int plane = bits == 3 ? 2 : bits, per_word = 32 / plane, per_byte = 8 / plane;
    int q = j / 4, b = j % 4, word = q / per_byte, i = q % per_byte;
    return per_word * word + per_byte * b + i;
}

template <int BITS, size_t... J>
inline Bytes in_quads(Bytes v, std::index_sequence<J...>) {
    return __builtin_shufflevector(v, v, code_of(BITS, J)...);
}

// Activations of MB rows as the kernel reads them: quads[chunk][q][m][d] of 4 digits; scale and sum[block][m].
struct Rounded {
    int8_t* quads;
    float *scale, *sum;
};

// One block of one row. Two digits: x ~ scale * (128 h + l), scale a power of two, |128 h + l| < 2^14, so that a bf16 or
// fp16 within 2^-6 or 2^-3 of the block's largest is exact and any other is off by at most 2^-14 of that.
// One digit: x ~ scale * h, the row's scale = max / 127 as `activations.int8_rows` has it. Anything infinite or no number
// makes the whole block so.
template <int BITS, int D>
inline void round_block(const Args& a, int row, int block, int m, int MB, const Rounded& out) {
    const int n = a.block, k0 = block * n;
    alignas(64) float x[128];
    alignas(64) int8_t digit[D][128];
    int have = a.K - k0 < n ? a.K - k0 : n;
    for (int i = 0; i < have; i++) x[i] = read(a.x, a.dtype, (size_t)row * a.K + k0 + i);
    for (int i = have; i < n; i++) x[i] = 0;
    uint32_t top = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], 4);
        u &= 0x7fffffff;
        top = u > top ? u : top;
    }
    float amax, scale = 0, inverse = 0;
    memcpy(&amax, &top, 4);
    if (top >= 0x7f800000) {
        scale = NAN;
    } else if (amax > 1e-30f && D == 2) {
        uint32_t e = (top & 0x7f800000), s = e - (13u << 23), r = (254u << 23) - s;
        memcpy(&scale, &s, 4);
        memcpy(&inverse, &r, 4);
    } else if (D == 1) {
        scale = a.most[row] / 127, inverse = 127 / a.most[row];
    }
    const float most = D == 2 ? 16383.f : 127.f;
    int total = 0;
    for (int i = 0; i < n; i++) {
        float f = x[i] * inverse;
        f = f > most ? most : f < -most ? -most : f;
        int v = top < 0x7f800000 ? (int)__builtin_rintf(f) : 0;
        total += v;
        if (D == 2) digit[0][i] = (int8_t)(v / 128), digit[D - 1][i] = (int8_t)(v % 128);
        else digit[0][i] = (int8_t)v;
    }
    for (int c = 0; c < n / CHUNK; c++)
        for (int d = 0; d < D; d++) {
            Bytes v;
            memcpy(&v, digit[d] + c * CHUNK, CHUNK);
            v = in_quads<BITS>(v, std::make_index_sequence<CHUNK>());
            int8_t* to = out.quads + (((size_t)(k0 / CHUNK + c) * QUADS * MB + m) * D + d) * 4;
            for (int q = 0; q < QUADS; q++) memcpy(to + (size_t)q * MB * D * 4, (const int8_t*)&v + 4 * q, 4);
        }
    out.scale[block * MB + m] = scale;
    out.sum[block * MB + m] = (float)total;
}

// ---- one tile of 16 rows ----

template <int BITS>
inline Isa::I codes(const int32_t* p, int q) {
    if constexpr (BITS == 8) return Isa::eight(Isa::load(p + q * ROWS));
    if constexpr (BITS == 4) return Isa::masked(Isa::right(Isa::load(p + q / 2 * ROWS), q % 2 * 4), 0x0f0f0f0f);
    if constexpr (BITS == 2) return Isa::masked(Isa::right(Isa::load(p + q / 4 * ROWS), q % 4 * 2), 0x03030303);
    if constexpr (BITS == 1) return Isa::masked(Isa::right(Isa::load(p), q), 0x01010101);
    if constexpr (BITS == 3) {
        Isa::I high = Isa::load(p + 2 * ROWS);
        high = q < 2 ? Isa::left(high, 2 - q) : Isa::right(high, q - 2);
        return Isa::merged(Isa::right(Isa::load(p + q / 4 * ROWS), q % 4 * 2), high);
    }
}

// out[m][lane] of the tile's lanes from `lane` on.
template <int BITS, int MB, int D>
inline void lanes(const Args& a, int tile, int lane, const Rounded& x, float (*out)[ROWS]) {
    using I = Isa::I;
    using F = Isa::F;
    constexpr int U = MB * D >= 8 ? 1 : MB * D >= 4 ? 2 : 4;  // chains of dependent dot products: 4 cycles each
    const int chunks = a.block / CHUNK, blocks = a.blocks, per_group = a.group / a.block ? a.group / a.block : 1;
    const int32_t* p = a.words + (size_t)tile * a.chunks * BITS * ROWS + lane;
    const size_t meta = (size_t)tile * a.groups * ROWS + lane;
    const int8_t* xq = x.quads;
    F acc[MB];
    for (int m = 0; m < MB; m++) acc[m] = Isa::zero();
    for (int b = 0; b < blocks; b++) {
        I sum[U][MB][D];
        for (int u = 0; u < U; u++)
            for (int m = 0; m < MB; m++)
                for (int d = 0; d < D; d++) sum[u][m][d] = Isa::none();
        for (int c = 0; c < chunks; c++) {
            for (int w = 0; w < BITS && lane == 0; w++) __builtin_prefetch(p + w * ROWS + AHEAD / 4);
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++) {
                I v = codes<BITS>(p, q);
#pragma GCC unroll 8
                for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
                    for (int d = 0; d < D; d++) sum[q % U][m][d] = Isa::dot<BITS>(sum[q % U][m][d], v, xq + ((q * MB + m) * D + d) * 4);
            }
            p += BITS * ROWS, xq += QUADS * MB * D * 4;
        }
        size_t at = meta + (size_t)(b / per_group) * ROWS;
        F scale = Isa::meta(a.scales, a.meta, at);
        F zero = a.zeros ? Isa::meta(a.zeros, a.meta, at) : Isa::all(a.mid);
        if (BITS == 8 && Isa::OFFSET) zero = Isa::minus(zero, Isa::all(Isa::OFFSET));
#pragma GCC unroll 8
        for (int m = 0; m < MB; m++) {
            I v = sum[0][m][0], low = sum[0][m][D - 1];
            for (int u = 1; u < U; u++) v = Isa::add(v, sum[u][m][0]), low = Isa::add(low, sum[u][m][D - 1]);
            if (D == 2) v = Isa::add(Isa::left(v, 7), low);
            F f = Isa::minus_product(Isa::to_float(v), zero, Isa::all(x.sum[b * MB + m]));
            acc[m] = Isa::plus_product(acc[m], f, Isa::times(scale, Isa::all(x.scale[b * MB + m])));
        }
    }
    for (int m = 0; m < MB; m++) Isa::store(out[m] + lane, acc[m]);
}

template <int BITS, int MB, int D>
void one_tile(const Args& a, int tile, int m0, const Rounded& x) {
    alignas(64) float out[MB][ROWS];
    for (int lane = 0; lane < ROWS; lane += Isa::LANES) lanes<BITS, MB, D>(a, tile, lane, x, out);
    int n0 = tile * ROWS, rows = a.N - n0 < ROWS ? a.N - n0 : ROWS, ms = a.M - m0 < MB ? a.M - m0 : MB;
    for (int m = 0; m < ms; m++)
        for (int r = 0; r < rows; r++) {
            float f = out[m][r] + (a.bias ? read(a.bias, a.meta, n0 + r) : 0.f);
            write(a.y, a.dtype, (size_t)(m0 + m) * a.N + n0 + r, f);
        }
}

// ---- all of it ----

constexpr int TILES = 4;  // that share one block of rows of x while it is in the first-level cache

// Rows of x in blocks of MB: whole ones of the largest size, then the smallest that holds the rest.
inline int rows_at(int M, int m0) {
    int left = M - m0, MB = Isa::MOST;
    while (MB > 1 && MB / 2 >= left) MB /= 2;
    return MB;
}

template <int BITS, int D>
struct Product {
    const Args& a;
    int8_t* quads;
    float* meta;

    Rounded block(int m0) const {  // all before m0 are of MOST rows
        size_t row = (size_t)a.chunks * CHUNK * D, n = (size_t)a.blocks * m0;
        return {quads + row * m0, meta + 2 * n, meta + 2 * n + (size_t)a.blocks * rows_at(a.M, m0)};
    }

    void round(long i) const {  // row i / blocks, block i % blocks
        int m = i / a.blocks, b = i % a.blocks, m0 = m / Isa::MOST * Isa::MOST;
        round_block<BITS, D>(a, m, b, m - m0, rows_at(a.M, m0), block(m0));
    }

    void tiles(int t0, int t1) const {
        for (int m0 = 0; m0 < a.M; m0 += Isa::MOST) {
            Rounded x = block(m0);
            int MB = rows_at(a.M, m0);
            for (int t = t0; t < t1; t++) {
                if (MB == 1) one_tile<BITS, 1, D>(a, t, m0, x);
                else if (MB == 2) one_tile<BITS, 2, D>(a, t, m0, x);
                else if (Isa::MOST >= 4 && MB == 4) one_tile<BITS, (Isa::MOST < 4 ? 1 : 4), D>(a, t, m0, x);
                else if (Isa::MOST >= 8) one_tile<BITS, (Isa::MOST < 8 ? 1 : 8), D>(a, t, m0, x);
            }
        }
    }

    static void run(const Args& a) {
        int padded = (a.M - 1) / Isa::MOST * Isa::MOST;
        padded += rows_at(a.M, padded);
        size_t bytes = (size_t)padded * a.chunks * CHUNK * D, metas = (size_t)padded * a.blocks * 2 * sizeof(float);
        char* memory = (char*)calloc(bytes + metas, 1);  // rows past M are zeros
        Product product{a, (int8_t*)memory + metas, (float*)memory};
        const int tiles = (a.N + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(a.threads)
        {
#pragma omp for schedule(static)
            for (long i = 0; i < (long)a.M * a.blocks; i++) product.round(i);
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

inline void product(const Args& a) {
    if (a.bits == 16) return dense(a);
    a.digits == 2 ? widths<2>(a) : widths<1>(a);
}

}  // namespace
