// Activations as integers of D digits of 8 bits, in blocks of 32 to 128 k that share a scale, in the order in which words
// hold their codes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "args.h"
#include "dense.h"

namespace {

constexpr int ROWS = 16;   // of a tile: neighbouring words belong to neighbouring rows
constexpr int CHUNK = 32;  // k of `bits` words a row; always 8 quads
constexpr int QUADS = 8;   // of 4 codes in the 4 bytes of a lane
constexpr int MOST = 16;   // rows of x multiplied together: their digits, 64 KB of K = 2048, stay in the second-level cache

constexpr int TILES = 4;  // that share one block of rows of x while it is in the cache

// Rows of x that are multiplied together from m0 on.
inline int rows_at(int M, int m0) { return M - m0 < MOST ? M - m0 : MOST; }

typedef int8_t Bytes __attribute__((vector_size(CHUNK)));

// Byte j of the shuffled chunk is byte b of quad q, and that is code k of the chunk: what `codes` below makes of the words.
constexpr int code_of(int bits, int j) {
    int plane = bits == 3 ? 2 : bits, per_word = 32 / plane, per_byte = 8 / plane;
    int q = j / 4, b = j % 4, word = q / per_byte, i = q % per_byte;
    return per_word * word + per_byte * b + i;
}

template <int BITS, size_t... J>
inline Bytes in_quads(Bytes v, std::index_sequence<J...>) {
    return SHUFFLED(Bytes, v, v, code_of(BITS, J)...);
}

// Low and high bytes in quads become the 16-bit integers of even bytes, and those of odd ones.
template <size_t... J>
inline void pair_up(Bytes& low, Bytes& high, std::index_sequence<J...>) {
    Bytes even = SHUFFLED(Bytes, low, high, (J / 2 * 2 + J % 2 * CHUNK)...);
    high = SHUFFLED(Bytes, low, high, (J / 2 * 2 + 1 + J % 2 * CHUNK)...);
    low = even;
}

// Activations of MB rows as kernels read them: quads[chunk][m][d][q] of 4 digits, or where `pairs` of two 16-bit integers, the
// even (d = 0) and the odd codes' of the quad; scale and sum[block][m].
struct Rounded {
    int8_t* quads;
    float *scale, *sum;
    int MB;
};

constexpr int LONGEST = 128;     // max. k of a block
constexpr float LEAST = 1e-30f;  // as packers/fp8.py has it: a row of zeros is rounded as if this were its largest

// The bits of the largest |x| of n values; of infinity or no number, where any is that, 0x7f800000 and above.
inline uint32_t largest_bits(const float* x, int n) {
    uint32_t top = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], 4);
        u &= 0x7fffffff;
        top = u > top ? u : top;
    }
    return top;
}

// The largest |x| of a row, no less than LEAST.
inline float largest_of_row(const Args& a, int row) {
    alignas(64) float x[LONGEST];
    uint32_t top = 0;
    for (int k0 = 0; k0 < a.K; k0 += LONGEST) {
        const int n = a.K - k0 < LONGEST ? a.K - k0 : LONGEST;
        widen(x, a.x, a.dtype, (size_t)row * a.K + k0, n);
        const uint32_t here = largest_bits(x, n);
        top = here > top ? here : top;
    }
    float most;
    memcpy(&most, &top, 4);
    return most < LEAST ? LEAST : most;
}

// The n values of one row from k0 on as whole numbers v, zeros beyond K; what they are multiples of. Two digits: a power of
// two, |v| < 2^14, so that a bf16 or fp16 within 2^-6 or 2^-3 of the largest is exact and any other is off by at most 2^-14 of
// that. One digit: the row's largest / 127, as `activations.int8_rows` has it. Where anything is infinite or no number it is
// NaN.
template <int D>
inline float whole_numbers(const Args& a, int row, int k0, int n, float row_largest, int* v) {
    alignas(64) float x[LONGEST];
    int have = a.K - k0 < n ? a.K - k0 : n;
    widen(x, a.x, a.dtype, (size_t)row * a.K + k0, have);
    for (int i = have; i < n; i++) x[i] = 0;
    const uint32_t top = largest_bits(x, n);
    float amax, scale = 0, inverse = 0;
    memcpy(&amax, &top, 4);
    if (top >= 0x7f800000) {
        scale = NAN;
    } else if (amax > 1e-30f && D == 2) {
        uint32_t e = (top & 0x7f800000), s = e - (13u << 23), r = (254u << 23) - s;
        memcpy(&scale, &s, 4);
        memcpy(&inverse, &r, 4);
    } else if (D == 1) {
        scale = row_largest / 127, inverse = 127 / row_largest;
    }
    const float most = D == 2 ? 16383.f : 127.f;
    for (int i = 0; i < n; i++) {
        float f = x[i] * inverse;
        f = f > most ? most : f < -most ? -most : f;
        v[i] = top < 0x7f800000 ? (int)__builtin_rintf(f) : 0;
    }
    return scale;
}

// One block of one row: x ~ scale * (128 h + l) of two digits, scale * h of one, whose scale follows from `row_largest`.
template <int BITS, int D, bool PAIRS>
inline void round_block(const Args& a, int row, int block, int m, float row_largest, const Rounded& out) {
    const int n = a.block, k0 = block * n;
    constexpr int BYTES = PAIRS ? 2 : D;
    alignas(64) int v[LONGEST];
    alignas(64) int8_t digit[BYTES][LONGEST];
    const float scale = whole_numbers<D>(a, row, k0, n, row_largest, v);
    int total = 0;
    for (int i = 0; i < n; i++) {
        total += v[i];
        if (PAIRS) digit[0][i] = (int8_t)v[i], digit[BYTES - 1][i] = (int8_t)(v[i] >> 8);
        else if (D == 2) digit[0][i] = (int8_t)(v[i] / 128), digit[BYTES - 1][i] = (int8_t)(v[i] % 128);
        else digit[0][i] = (int8_t)v[i];
    }
    for (int c = 0; c < n / CHUNK; c++) {
        Bytes quads[BYTES];
        for (int d = 0; d < BYTES; d++) {
            memcpy(&quads[d], digit[d] + c * CHUNK, CHUNK);
            quads[d] = in_quads<BITS>(quads[d], std::make_index_sequence<CHUNK>());
        }
        if (PAIRS) pair_up(quads[0], quads[BYTES - 1], std::make_index_sequence<CHUNK>());
        memcpy(out.quads + ((size_t)(k0 / CHUNK + c) * out.MB + m) * BYTES * CHUNK, quads, sizeof(quads));
    }
    out.scale[block * out.MB + m] = scale;
    out.sum[block * out.MB + m] = (float)total;
}

}  // namespace
