// What a lane does with scores and sums of its two tokens in attention of prompts (prompt.cu, prompt8.cu).
#pragma once
#include "exp2.cuh"
#include "tile.cuh"

constexpr int BLOCK_M = 128, BLOCK_N = 128;  // tokens and slots of a tile
constexpr float NONE = -1e30f;               // the top of no scores: finite, so that differences stay numbers

template <int T, int D>
struct Tokens {
    using Scores = float[BLOCK_N / 2];  // S of two tokens
    using Sums = float[D / 2];          // of y
    using Pair = float[2];              // of the lane's two tokens

    // Scores of slots that a token does not see become -inf. slot, token: the lane's first of either.
    static __device__ __forceinline__ void hide(int slot, int token, int window, Scores& s) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) {
            const int at = slot + i / 4 * 8 + i % 2, its = token + 8 * (i / 2 % 2);
            if (at > its || at <= its - window) s[i] = __uint_as_float(0xff800000);
        }
    }

    // fade: what sums of before are multiplied by.
    static __device__ __forceinline__ void move_top(const Pair& most, Pair& top, Pair& total, Pair& fade) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float higher = fmaxf(most[c], top[c]);
            fade[c] = exp2_of(top[c] - higher), top[c] = higher, total[c] *= fade[c];
        }
    }

    // Tokens own and own + 8 of y, at row and row_8.
    static __device__ __forceinline__ void store(u16* out, size_t row, size_t row_8, int own, int last, int t, const Sums& acc,
                                                 Pair& total) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int d = 1; d < 4; d *= 2) total[c] += __shfl_xor_sync(0xffffffffu, total[c], d);
            total[c] = 1.f / total[c];
            if (own + 8 * c >= last) continue;
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                *(u32*)(out + (c ? row_8 : row) + 8 * i + 2 * t) =
                    from_floats<T>(acc[4 * i + 2 * c] * total[c], acc[4 * i + 2 * c + 1] * total[c]);
        }
    }
};
