// CUDA as far as our kernels use it, on one CPU thread: every CUDA thread is a fiber that runs until it meets a warp or block
// barrier. Shared memory is `arena`, poisoned with NaN before each block. Asynchronous copies run at once or, when `lazy`,
// no sooner than the wait that promises them: the first finds a slot overwritten too early, the second a wait that is missing.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 800

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

struct Index { int x, y; };
struct Copy { char* to; const char* from; int bytes, zeros; };
struct Fiber {
    ucontext_t context;
    Index index;
    bool done = false;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};
struct Gate { int waiting = 0, generation = 0; };

inline std::vector<Fiber> fibers;
inline int current;
inline ucontext_t scheduler;
inline bool lazy;
inline Index blockIdx, gridDim;
alignas(1024) inline char arena[256 << 10];
inline Gate warp_gates[32], block_gate;
#define threadIdx (fibers[current].index)

inline void pass(Gate& gate, int size) {
    const int generation = gate.generation;
    if (++gate.waiting == size) gate.waiting = 0, gate.generation++;
    else while (gate.generation == generation) { const int me = current; swapcontext(&fibers[me].context, &scheduler); }
}
inline void __syncwarp() { pass(warp_gates[threadIdx.x / 32], 32); }
inline void __syncthreads() { pass(block_gate, (int)fibers.size()); }

inline void run(const Copy& c) { memcpy(c.to, c.from, c.bytes), memset(c.to + c.bytes, 0, c.zeros); }
inline void host_copy(unsigned shared, const void* global, int bytes, int size) {
    const Copy c{arena + shared, (const char*)global, bytes, size - bytes};
    if (shared % size || (size_t)global % size) fprintf(stderr, "misaligned copy of %d bytes\n", size), exit(3);
    if (shared + size > sizeof arena) fprintf(stderr, "copy past shared memory\n"), exit(3);
    if (lazy) fibers[current].open.push_back(c); else run(c);
}
inline void host_commit() { Fiber& f = fibers[current]; f.groups.push_back(f.open), f.open.clear(); }
inline void host_wait(int pending) {
    Fiber& f = fibers[current];
    for (; (int)f.groups.size() > pending; f.groups.pop_front()) for (const Copy& c : f.groups.front()) run(c);
}

inline float half_value(unsigned short h) { _Float16 v; memcpy(&v, &h, 2); return (float)v; }
inline unsigned short half_bits(float f) { const _Float16 v = (_Float16)f; unsigned short h; memcpy(&h, &v, 2); return h; }
inline unsigned short bfloat_bits(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return f != f ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
template <int T> float value(unsigned v) { return T == 0 ? half_value((unsigned short)v) : __uint_as_float(v << 16); }
template <int T> unsigned bits(float f) { return T == 0 ? half_bits(f) : bfloat_bits(f); }
inline unsigned exchange[32][32][8];  // what the lanes of a warp show each other
