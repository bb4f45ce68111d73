// out[n, k] = (q[n,k] - zeros[n,g]) * scales[n,g] for some row tiles of a tile weight: dense rows for the library's matmul.
//
// With TABLE it is values[q[n,k]] * scales[n,g] * factor: values (T, 2^BITS) fp32, or one for all where factors (T) are given;
// T tables of table_rows rows each. SCALES: how bytes are scales (book.cuh), or 0.
// Grid    x: ceil(chunks / 8), y: row tiles. One warp a chunk of one tile; values computed in fp32, rounded once.
#include "book.cuh"

template <int BITS, int T, int GROUP, bool ZEROS, bool TABLE = false, int SCALES = 0>
__global__ void __launch_bounds__(256)
tile_dequant(const u32* __restrict__ words, const u16* __restrict__ scales, const u16* __restrict__ zeros,
             u16* __restrict__ out, const float* __restrict__ values, const float* __restrict__ factors, int tile0,
             int rows, int K, int chunks, int groups, int table_rows, int N) {
    using L = Tile<BITS>;
    using C = Codes<BITS, T>;
    __shared__ u32 mask[C::PLACES];
    if (threadIdx.x == 0) C::Masks::store(mask);
    __syncthreads();
    typename C::Masks masks;
    masks.load(mask);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = lane >> 2, quad = lane & 3;
    const int c = blockIdx.x * 8 + warp, t = tile0 + blockIdx.y;
    const int own = TABLE ? smaller(t * 16, N - 1) / table_rows : 0;
    const float* book = TABLE ? values + (factors || table_rows >= N ? 0 : own << BITS) : values;
    const float factor = TABLE && factors ? factors[own] : 1.f;
    if (c >= chunks) return;
    const u32* chunk = words + ((size_t)t * chunks + c) * L::WORDS;
    u32 w[L::REGS];
#pragma unroll
    for (int i = 0; i < L::REGS; i++)
        w[i] = i < L::REGS / 4 * 4 ? chunk[i / 4 * 128 + lane * 4 + i % 4] : chunk[128 + lane * 2 + i % 4];
#pragma unroll
    for (int f = 0; f < L::FRAGS; f++) {
        const int k0 = c * L::CHUNK + f * 16;
        const int g = GROUP == 0 ? 0 : smaller((u32)k0 / (GROUP ? GROUP : 1), groups - 1);
        const size_t at = ((size_t)t * groups + g) * 16 + 2 * r;
        float2 scale;
        if constexpr (SCALES != 0) scale = byte_scales<SCALES>(*(const u16*)((const unsigned char*)scales + at));
        else scale = to_floats<T>(*(const u32*)(scales + at));
        const float2 zero = ZEROS ? to_floats<T>(*(const u32*)(zeros + at)) : make_float2(mid<BITS>(), mid<BITS>());
        u32 a[4];
        C::fragment(w, f, masks, a);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = blockIdx.y * 16 + r + 8 * (j & 1), k = k0 + 2 * quad + 8 * (j >> 1);
            const float2 q = to_floats<T>(C::WIDE ? a[j] : add2<T>(a[j], C::magic(f) | 0x80008000u));
            const float s = j & 1 ? scale.y : scale.x, z = j & 1 ? zero.y : zero.x;
            u32 two;
            if constexpr (TABLE) two = from_floats<T>(book[(int)q.x] * (s * factor), book[(int)q.y] * (s * factor));
            else two = from_floats<T>((q.x - z) * s, (q.y - z) * s);
            if (row >= rows) continue;
            u16* to = out + (size_t)row * K + k;
            if (K % 2 == 0 && k < K) *(u32*)to = two;
            else {
                if (k < K) to[0] = (u16)two;
                if (k + 1 < K) to[1] = (u16)(two >> 16);
            }
        }
    }
}
