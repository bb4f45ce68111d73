// Device side of the `tile` layout (packers/layouts/tile.py has the byte order): loading chunks, codes to halves, mma.
//
// A code becomes a half without arithmetic: `(word >> shift) & mask | exponent` is the number 2^e * (1 + code * 2^(p - m)),
// m mantissa bits, p the code's place in them; with e = m - p that is exactly magic + code, magic = 2^(m - p). The four
// registers of a fragment share shift, p and magic. What magic adds to a product is magic * sum(x), the same for every
// weight row, so one extra mma per fragment (A = -magic) takes it off the accumulators of all row tiles (tile_mma), or one
// half2 subtraction per register does (tile_wgmma, which rounds the scaled weight once anyway).
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

enum { FP16 = 0, BF16 = 1 };  // template argument T: type of x, y, scales, zeros, bias

template <int BITS>
struct Tile {
    static constexpr int CHUNK = BITS == 1 ? 256 : BITS <= 3 ? 128 : 64;  // k of one lane load
    static constexpr int FRAGS = CHUNK / 16;
    static constexpr int REGS = BITS * CHUNK / 64;  // 32-bit words a lane holds of a chunk
    static constexpr int WORDS = 32 * REGS;
};

constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int groups_of_step(int group, int step) {  // that a step of so many k may meet; group 0: a row is one
    return group == 0 || group % step == 0 ? 1 : step % group == 0 ? step / group : (step - 1) / group + 2;
}

// ---------------------------------------------------------------------------------------------------- memory
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

template <int BYTES>  // 4, 8 or 16 bytes of this lane, kept in L1 for other warps
__device__ __forceinline__ void copy_async(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES));
}
__device__ __forceinline__ void copy_async_or_zero(u32 shared, const void* global, int bytes) {  // 16 bytes, or 16 zeros
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}
__device__ __forceinline__ void copy16_streaming(u32 shared, const void* global) {  // read once: keep it out of L1
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 read4(u32 shared) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ u32 read2(u32 shared) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared) : "memory");
    return v;
}

// A lane's words of a chunk, as they lie in global memory: 512 bytes [lane][4], then the rest of 8 and 3 bits.
template <int BITS>
__device__ __forceinline__ void copy_chunk(u32 shared, const u32* chunk, int lane) {
    copy16_streaming(shared + 16 * lane, chunk + 4 * lane);
    if constexpr (BITS == 8) copy16_streaming(shared + 512 + 16 * lane, chunk + 128 + 4 * lane);
    if constexpr (BITS == 3) copy_async<8>(shared + 512 + 8 * lane, chunk + 128 + 2 * lane);
}
template <int BITS>  // shared: of the chunk and 16 bytes for each lane
__device__ __forceinline__ void read_chunk(u32 shared, int lane, u32 (&w)[Tile<BITS>::REGS]) {
#pragma unroll
    for (int i = 0; i < Tile<BITS>::REGS / 4; i++)
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[4 * i]), "=r"(w[4 * i + 1]), "=r"(w[4 * i + 2]), "=r"(w[4 * i + 3])
                     : "r"(shared + i * 512)
                     : "memory");
    if constexpr (BITS == 3)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[4]), "=r"(w[5]) : "r"(shared + 512 - lane * 8) : "memory");
}

// mbarriers and bulk copies (sm_90): a thread announces the bytes, the copy engine counts them in, anyone waits.
__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void load_matrix4(u32 (&b)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(shared) : "memory");
}

// ------------------------------------------------------------------------------------ programmatic dependent launch
__device__ __forceinline__ void previous_grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void next_grid_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ------------------------------------------------------------------------------------------------- two halves
__device__ __forceinline__ u32 pick(u32 a, u32 b, u32 mask) {  // a where mask is set, else b: one LOP3, which C++ makes two of
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}

template <int T>
struct Half {
    static constexpr int MANTISSA = T == FP16 ? 10 : 7;
    static constexpr u32 ONE = T == FP16 ? 0x3c003c00u : 0x3f803f80u;
    static constexpr u32 power(int e) {  // 2^e, twice
        return (T == FP16 ? (u32)(15 + e) << 10 : (u32)(127 + e) << 7) * 0x10001u;
    }
};

template <int T>
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    if constexpr (T == FP16) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

template <int T>
__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 d;
    if constexpr (T == FP16) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else return fma2<T>(a, Half<T>::ONE, b);  // bf16 has no add of its own before sm_90
    return d;
}

template <int T>
__device__ __forceinline__ float2 to_floats(u32 v) {
    float2 f;
    if constexpr (T == FP16) {
        asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
            : "=f"(f.x), "=f"(f.y)
            : "r"(v));
    } else {
        f.x = __uint_as_float(v << 16), f.y = __uint_as_float(v & 0xffff0000u);
    }
    return f;
}

template <int T>
__device__ __forceinline__ u32 from_floats(float lo, float hi) {
    u32 d;
    if constexpr (T == FP16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

// ------------------------------------------------------------------------------------------- codes to halves
template <int BITS, int T>
struct Codes {
    static constexpr int MANTISSA = Half<T>::MANTISSA;
    static constexpr bool WIDE = BITS > MANTISSA;  // 8-bit codes do not fit bf16's mantissa: magic is taken off at once
    static constexpr int FIELD = BITS == 3 ? 2 : BITS;  // bits of a code in the low plane
    // codes that one shift serves; a 3-bit code needs a third mantissa bit above its two
    static constexpr int SPAN = WIDE ? 8 : (MANTISSA - (BITS - FIELD)) / FIELD * FIELD;

    static constexpr int place(int f) { return f * FIELD % 16; }  // 8 bits: two fragments a word, four a chunk
    static constexpr int shift(int f) { return place(f) / SPAN * SPAN; }
    static constexpr int p(int f) { return place(f) - shift(f); }
    static constexpr u32 magic(int f) { return WIDE ? 0u : Half<T>::power(MANTISSA - p(f)); }
    static constexpr u32 minus_magic(int place) { return WIDE ? 0u : Half<T>::power(MANTISSA - place * FIELD) | 0x80008000u; }

    static constexpr int PLACES = SPAN / FIELD;  // distinct p, and so distinct masks
    static constexpr u32 mask(int place) { return WIDE ? 0x007f007fu : ((1u << BITS) - 1) * 0x10001u << (place * FIELD); }
    // The masks, from shared memory into registers. LOP3 takes one immediate: with mask and magic both known, ptxas moves
    // one of them into a register before every single LOP3, half as many instructions again; a loaded value it must keep.
    struct Masks {
        u32 at[PLACES];
        static __device__ __forceinline__ void store(u32* shared) {  // by one thread, a barrier before `load`
#pragma unroll
            for (int i = 0; i < PLACES; i++) shared[i] = mask(i);
        }
        __device__ __forceinline__ void load(const u32* shared) {
#pragma unroll
            for (int i = 0; i < PLACES; i++)
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(at[i]) : "r"(shared_address(shared + i)));
        }
    };

    // Register j of fragment f of 8-bit codes, each in the low byte of a half over a byte of `beside`.
    static __device__ __forceinline__ u32 bytes(const u32 (&w)[Tile<BITS>::REGS], int f, int j, u32 beside) {
        return __byte_perm(w[BITS == 8 ? (f >> 1) * 4 + j : 0], beside, f & 1 ? 0x4341 : 0x4240);
    }

    // 8-bit codes as they are: the bits of a code are the number code * 2^-24 (bf16: 2^-133, most of them subnormal), and
    // (code - zero) * scale is one fma with scale * 2^24 where that is a number: of scales under 2^-8 (bf16: 2^-6).
    static __device__ __forceinline__ u32 bare(const u32 (&w)[Tile<BITS>::REGS], int f, int j) {
        return bytes(w, f, j, 0);
    }
    static __device__ __forceinline__ bool small(u32 half) {
        return (half & 0x7fff) < (Half<T>::power(T == FP16 ? -8 : -6) & 0x7fff);
    }
    static __device__ __forceinline__ u32 scale_of_bare(u32 halves) {
        const u32 half_way = fma2<T>(halves, Half<T>::power(T == FP16 ? 12 : 66), 0x80008000u);
        return fma2<T>(half_way, Half<T>::power(T == FP16 ? 12 : 67), 0x80008000u);
    }

    // Fragment f of the chunk in w: a[j] = two halves magic(f) + code; BARE (fp16): code * 2^(p(f) - 24), subnormal numbers.
    template <bool BARE = false>
    static __device__ __forceinline__ void fragment(const u32 (&w)[Tile<BITS>::REGS], int f, const Masks& masks, u32 (&a)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (BITS == 8 && !WIDE && !BARE) {  // bytes of two codes beside two of 0x64: 1024 + code, twice
                a[j] = bytes(w, f, j, 0x64646464u);
                continue;
            }
            u32 v = w[BITS == 8 ? (f >> 1) * 4 + j : j] >> shift(f);
            if constexpr (BITS == 3) {  // the third bit lies at 2*f + j % 2 and belongs at p + 2; every other f shares the LOP3
                const u32 h = w[4 + (j >> 1)];
                const int right = shift(f) + (j & 1) - 2;
                v = pick(right >= 0 ? h >> (right & 31) : h << (-right & 31), v, p(f) % 4 ? 0x11111111u : 0x44444444u);
            }
            if constexpr (WIDE) {  // 128 + low seven bits, then -128 unless the eighth is set: 0x80 * 0x186 = -128 in bf16
                const u32 low = (v & masks.at[0]) | Half<T>::power(7);
                a[j] = add2<T>(low, (~v & 0x00800080u) * 0x186u);
            } else {
                a[j] = BARE ? v & mask(p(f) / FIELD) : (v & masks.at[p(f) / FIELD]) | magic(f);
            }
        }
    }
};

template <int T>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
    if constexpr (T == FP16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// The zero of a scheme that stores none: packers/scheme.py `mid`.
template <int BITS>
__device__ __forceinline__ constexpr float mid() {
    return BITS == 1 ? 0.5f : (float)(1 << (BITS - 1));
}
