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

// ---- rows of the weight ----

// The codes of quad q, times 2^scaled(BITS, U, q): where the dot product takes any unsigned byte, a code that stands high in
// its byte is multiplied as it stands, and the sum of such is shifted once a block.
constexpr int scaled(int bits, int U, int q) { return Isa::ANY_BYTE && bits < 8 && bits != 3 ? q % (8 / bits) % U * bits : 0; }

template <int BITS, int U>
inline Isa::I codes(const int32_t* p, int q) {
    if constexpr (BITS == 8) return Isa::eight(Isa::load(p + q * ROWS));
    if constexpr (BITS == 3) {
        Isa::I high = Isa::load(p + 2 * ROWS);
        high = q < 2 ? Isa::left(high, 2 - q) : Isa::right(high, q - 2);
        return Isa::merged(Isa::right(Isa::load(p + q / 4 * ROWS), q % 4 * 2), high);
    }
    if constexpr (BITS < 8 && BITS != 3) {
        constexpr int per_byte = 8 / BITS;
        const int stays = scaled(BITS, U, q), mask = ((1 << BITS) - 1) * 0x01010101;
        return Isa::masked(Isa::right(Isa::load(p + q / per_byte * ROWS), q % per_byte * BITS - stays), (int)((unsigned)mask << stays));
    }
}

// y of W registers of neighbouring rows, out[m][row], which share what is read of x: rows from n0 on, of one tile or of
// neighbours.
template <int BITS, int MB, int D, int W>
inline void columns(const Args& a, int n0, const Rounded& x, float (*out)[W * Isa::LANES]) {
    using I = Isa::I;
    using F = Isa::F;
    constexpr int U = W * MB * D >= 8 ? 1 : W * MB * D >= 4 || BITS >= 4 ? 2 : 4;  // chains of dependent dot products
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
        I sum[U][W][MB][D];
#pragma GCC unroll 4
        for (int u = 0; u < U; u++)
#pragma GCC unroll 4
            for (int w = 0; w < W; w++)
#pragma GCC unroll 8
                for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
                    for (int d = 0; d < D; d++) sum[u][w][m][d] = Isa::none();
        for (int c = 0; c < chunks; c++) {
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
                        const int8_t* digits = xq + ((q * MB + m) * D + d) * 4;
                        if constexpr (W == 1) {
                            sum[q % U][0][m][d] = Isa::dot_at<BITS>(sum[q % U][0][m][d], v[0], digits);
                        } else {
                            I quad = Isa::quad(digits);
#pragma GCC unroll 4
                            for (int w = 0; w < W; w++) sum[q % U][w][m][d] = Isa::dot<BITS>(sum[q % U][w][m][d], v[w], quad);
                        }
                    }
            }
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) p[w] += BITS * ROWS;
            xq += QUADS * MB * D * 4;
        }
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            F scale = Isa::meta(a.scales, a.meta, meta[w]);
            F zero = a.zeros ? Isa::meta(a.zeros, a.meta, meta[w]) : Isa::all(a.mid);
            if (BITS == 8 && Isa::OFFSET) zero = Isa::minus(zero, Isa::all(Isa::OFFSET));
#pragma GCC unroll 8
            for (int m = 0; m < MB; m++) {
                I v = sum[0][w][m][0], low = sum[0][w][m][D - 1];
#pragma GCC unroll 4
                for (int u = 1; u < U; u++) {
                    v = Isa::add(v, Isa::down(sum[u][w][m][0], scaled(BITS, U, u)));
                    low = Isa::add(low, Isa::down(sum[u][w][m][D - 1], scaled(BITS, U, u)));
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

// y of MB rows of x from m0 on, and the rows n0 .. n1 of the weight; n0 starts a tile.
template <int BITS, int MB, int D, int W>
void strip(const Args& a, int n0, int n1, int m0, const Rounded& x) {
    constexpr int WIDE = W * Isa::LANES;
    alignas(64) float out[MB][WIDE];
    const int ms = a.M - m0 < MB ? a.M - m0 : MB;
    for (; n0 < n1; n0 += WIDE) {
        if constexpr (WIDE > ROWS) {
            if (n0 + ROWS >= n1) return strip<BITS, MB, D, ROWS / Isa::LANES>(a, n0, n1, m0, x);  // a last tile by itself
        }
        columns<BITS, MB, D, W>(a, n0, x, out);
        const int rows = a.N - n0 < WIDE ? a.N - n0 : WIDE;
        for (int m = 0; m < ms; m++)
            for (int r = 0; r < rows; r++) {
                float f = out[m][r] + (a.bias ? read(a.bias, a.meta, n0 + r) : 0.f);
                write(a.y, a.dtype, (size_t)(m0 + m) * a.N + n0 + r, f);
            }
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

    template <int MB>
    void strips(int t0, int t1, int m0) const {
        if constexpr (MB <= Isa::MOST) strip<BITS, MB, D, Isa::wide(MB * D)>(a, t0 * ROWS, t1 * ROWS, m0, block(m0));
    }

    void tiles(int t0, int t1) const {
        for (int m0 = 0; m0 < a.M; m0 += Isa::MOST) switch (rows_at(a.M, m0)) {
                case 1: strips<1>(t0, t1, m0); break;
                case 2: strips<2>(t0, t1, m0); break;
                case 4: strips<4>(t0, t1, m0); break;
                default: strips<8>(t0, t1, m0);
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
