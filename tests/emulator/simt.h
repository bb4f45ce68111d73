// A GPU for one block (or cluster) at a time, for device code compiled as host C++: enough of CUDA and PTX for our kernels.
//
// Threads  fibers on one host thread, switched only where they wait for each other: __syncthreads, __syncwarp, warp
//          collectives, cluster barriers. `order` picks which of the runnable ones comes next (1: the next, -1: the one
//          before).
// Memory   shared memory starts as NaN; every access by address is checked for its bounds and alignment. What cp.async
//          writes is NaN from its issue until a wait_group covers it, so a missing wait shows; so does a slot that is
//          overwritten too early.
// Checks   lanes of a warp meet in different collectives, threads that wait forever, misaligned or outside addresses: an
//          error text instead of a number.
// PTX      simt.py turns `asm("opcode operands" : ...)` into simt::opcode(operands), so the text of the device code counts.
#pragma once
#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define threadIdx (simt::self->thread)
#define blockIdx (simt::self->block->index)
#define gridDim (simt::grid)

struct uint3 { unsigned x, y, z; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace simt {
using u16 = uint16_t;
using u32 = uint32_t;
constexpr int STATIC = 41984, RANK = 24;  // bytes for __shared__ variables; the bit of a block's rank in cluster addresses

struct Copy { u32 to; const char* from; int bytes, take; };
struct Named { int arrived = 0, round = 0; };  // a barrier of bar.sync
struct Wgmma { void (*run)(void*, const u32*, uint64_t, int); void* d; const u32* a; uint64_t b; int add; };
struct Store { const void* map; int inner, row; u32 from; };  // a tensor store
struct Barrier { int expected, missing, bytes = 0; u32 phase = 0; std::vector<Copy> copies; };  // an mbarrier
struct Fiber;
struct Warp { int arrived = 0; const char* what = nullptr; void* mine[32]; Fiber* lanes[32]; };
struct Block {
    uint3 index;
    int used = 0, dynamic = 0, alive = 0, at_barrier = 0;
    std::map<u32, Barrier> barriers;  // by shared address
    std::map<int, Named> named;
    std::vector<std::pair<int, int>> variables;  // of __shared__: number in the source, offset
    std::vector<float4> bytes;
    std::vector<Warp> warps;
    char* memory() { return (char*)bytes.data(); }
};
struct Fiber {
    uint3 thread;
    Block* block;
    int lane;
    bool started = false, done = false;
    char waits = 0;  // 0 runnable, 'w' for its warp, 'b' for its block, 'c' for its cluster
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    std::vector<std::vector<Wgmma>> products;
    std::vector<Wgmma> issued;
    std::vector<std::vector<Store>> stored;
    std::vector<Store> stores;
    jmp_buf at;
    ucontext_t context;
};
inline Fiber* self;
inline uint3 grid;
inline std::vector<Fiber> fibers;
inline std::vector<Block> blocks;
inline jmp_buf home;
inline std::string error;
inline int order = 1, alive, at_cluster_barrier;
inline void (*entry)(void* const*);
inline void* const* arguments;

[[noreturn]] inline void fail(const std::string& text) {
    error = text + " (thread " + std::to_string(self->thread.x) + " of block " + std::to_string(self->block->index.x) + "," +
            std::to_string(self->block->index.y) + ")";
    _longjmp(home, 1);
}

// ------------------------------------------------------------------------------------------------------ scheduling
inline void release(char kind, Block* block) {
    for (Fiber& f : fibers)
        if (f.waits == kind && (!block || f.block == block)) f.waits = 0;
}
inline void check_barriers(Block* block) {
    if (block->at_barrier && block->at_barrier == block->alive) block->at_barrier = 0, release('b', block);
    if (at_cluster_barrier && at_cluster_barrier == alive) at_cluster_barrier = 0, release('c', nullptr);
}
[[noreturn]] inline void resume_next() {
    const int n = (int)fibers.size();
    int at = (int)(self - fibers.data());
    for (int i = 0; i < n; i++) {
        at = (at + order + n) % n;
        Fiber& f = fibers[at];
        if (f.done || f.waits) continue;
        self = &f;
        if (f.started) _longjmp(f.at, 1);
        f.started = true;
        setcontext(&f.context);
    }
    if (alive) {
        const char* what = "a barrier";
        for (Warp& w : self->block->warps)
            if (w.arrived) what = w.what;
        fail(std::string("deadlock: threads wait for others that never come, at ") + what);
    }
    _longjmp(home, 2);
}
__attribute__((noinline)) inline void wait() {
    if (!_setjmp(self->at)) resume_next();
}
inline void start() {
    entry(arguments);
    if (!self->stores.empty() || !self->stored.empty()) fail("a thread ends before its tensor stores");
    self->done = true;
    alive--, self->block->alive--;
    check_barriers(self->block);
    resume_next();
}
inline void block_barrier() {
    self->waits = 'b', self->block->at_barrier++;
    check_barriers(self->block);
    if (self->waits) wait();
}
inline void yield() {
    if (!_setjmp(self->at)) resume_next();
}
inline void bar_sync(int id, int threads) {
    Named& b = self->block->named[id];
    const int round = b.round;
    if (++b.arrived == threads) {
        b.arrived = 0, b.round++;
        return;
    }
    for (int spins = 0; b.round == round; yield())
        if (spins++ > 100000) fail("deadlock: threads wait at bar.sync " + std::to_string(id));
}
inline void cluster_barrier() {
    self->waits = 'c', at_cluster_barrier++;
    check_barriers(self->block);
    if (self->waits) wait();
}
// All 32 lanes bring a P; the last to come runs all(P* of each lane).
template <class P, class F>
inline void collective(const char* what, P& mine, F&& all) {
    Warp& w = self->block->warps[self->thread.x / 32];
    if (w.arrived && w.what != what && strcmp(w.what, what))
        fail(std::string("lanes of a warp meet in ") + w.what + " and " + what);
    w.what = what, w.mine[self->lane] = &mine;
    if (++w.arrived < 32) {
        self->waits = 'w';
        wait();
        return;
    }
    P* lanes[32];
    for (int l = 0; l < 32; l++) lanes[l] = (P*)w.mine[l];
    all(lanes);
    w.arrived = 0;
    for (Fiber* f : w.lanes) f->waits = 0;
}

// ---------------------------------------------------------------------------------------------------------- memory
template <class T>
inline T& variable(int number) {  // a __shared__ variable
    Block& b = *self->block;
    for (auto& [n, at] : b.variables)
        if (n == number) return *(T*)(b.memory() + at);
    const int at = (b.used + 15) / 16 * 16;
    b.used = at + (int)sizeof(T);
    if (b.used > STATIC) fail("too much static shared memory");
    b.variables.push_back({number, at});
    return *(T*)(b.memory() + at);
}
inline float4* dynamic_shared() { return (float4*)(self->block->memory() + STATIC); }
inline char* shared(Block& b, u32 address, int bytes) {
    if (address % bytes)
        fail("misaligned shared address " + std::to_string(address) + " of " + std::to_string(bytes) + " bytes");
    const bool fits = address >= (u32)STATIC ? address + bytes <= (u32)(STATIC + b.dynamic) : address + bytes <= (u32)b.used;
    if (!fits)
        fail("shared address " + std::to_string(address) + " is outside: " + std::to_string(b.dynamic) + " bytes are there");
    return b.memory() + address;
}
inline char* shared(u32 address, int bytes) { return shared(*self->block, address, bytes); }

inline void issue(u32 to, const void* from, int bytes, int take) {
    if ((uintptr_t)from % bytes) fail("misaligned global address of cp.async");
    memset(shared(to, bytes), 0xff, bytes);
    self->open.push_back({to, (const char*)from, bytes, take});
}
inline void cp_async_ca_shared_global(u32 to, const void* from, int bytes) { issue(to, from, bytes, bytes); }
inline void cp_async_ca_shared_global(u32 to, const void* from, int bytes, int take) { issue(to, from, bytes, take); }
inline void cp_async_cg_shared_global_L2__256B(u32 to, const void* from, int bytes) { issue(to, from, bytes, bytes); }
inline void cp_async_commit_group() { self->groups.push_back(std::move(self->open)), self->open.clear(); }
inline void cp_async_wait_group(int pending) {
    auto& groups = self->groups;
    while ((int)groups.size() > pending) {
        for (const Copy& c : groups.front()) {
            char* to = shared(c.to, c.bytes);
            memcpy(to, c.from, c.take), memset(to + c.take, 0, c.bytes - c.take);
        }
        groups.erase(groups.begin());
    }
}
// mbarriers and bulk copies: what a copy brings is NaN from its issue until some thread waits for it.
inline Barrier& barrier(u32 at) {
    auto found = self->block->barriers.find(at);
    if (found == self->block->barriers.end()) fail("no mbarrier was initialised at " + std::to_string(at));
    return found->second;
}
inline void mbarrier_init_shared__cta_b64(u32 at, int arrivals) {
    shared(at, 8);
    self->block->barriers[at] = Barrier{arrivals, arrivals};
}
inline void fence_mbarrier_init_release_cluster() {}
inline void arrive(Barrier& b) {
    if (b.missing == 0) fail("one arrival too many at an mbarrier");
    b.missing--;
}
inline void mbarrier_arrive_expect_tx_shared__cta_b64(u32 at, int bytes) { barrier(at).bytes += bytes, arrive(barrier(at)); }
inline void mbarrier_arrive_shared__cta_b64(u32 at) { arrive(barrier(at)); }
inline Barrier& barrier_of_cluster(u32 at) {
    if ((at >> RANK) >= blocks.size()) fail("no such block in the cluster");
    auto found = blocks[at >> RANK].barriers.find(at & ((1u << RANK) - 1));
    if (found == blocks[at >> RANK].barriers.end()) fail("no mbarrier was initialised there");
    return found->second;
}
inline void mbarrier_arrive_shared__cluster_b64(u32 at) { arrive(barrier_of_cluster(at)); }  // of another block
inline void mbarrier_wait(u32 at, u32 parity) {
    for (int spins = 0;; spins++) {
        Barrier& b = barrier(at);
        if ((b.phase & 1) != parity) return;
        for (const Copy& c : b.copies) {
            char* to = shared(*self->block, c.to, 16);
            memcpy(to, c.from, c.take), memset(to + c.take, 0, c.bytes - c.take), b.bytes -= c.bytes;
        }
        b.copies.clear();
        if (b.missing == 0 && b.bytes == 0) {
            b.phase++, b.missing = b.expected;
            return;
        }
        if (spins > 10000) fail("deadlock: an mbarrier waits for arrivals or bytes that never come");
        yield();
    }
}
// A tensor map as simt.py makes it; boxes arrive 16 bytes at a time, zeros outside, 128-byte swizzled where it says so.
struct TensorMap { const char* address; uint64_t width, rows, pitch, box_width, box_rows, swizzle, mark; };  // bytes
inline void cp_async_bulk_tensor_2d_shared__cluster_global_tile_mbarrier__complete_tx__bytes(u32 to, const void* map, int inner,
                                                                                             int row, u32 at) {
    TensorMap t;
    memcpy(&t, map, sizeof t);
    if (t.mark >> 8 != 0x51317) fail("not a tensor map");
    if (to % (t.swizzle ? 1024 : 128)) fail("misaligned tensor copy");
    const uint64_t first = (uint64_t)inner * (t.mark & 255);  // the element's bytes
    if (first % 16) fail("a tensor copy from an address that is no multiple of 16");
    for (u32 r = 0; r < t.box_rows; r++)
        for (u32 c = 0; c < t.box_width; c += 16) {
            u32 place = to + r * t.box_width + c;
            if (t.swizzle) place ^= (place >> 7 & 7) << 4;
            const uint64_t y = row + r, x = first + c;
            const int take = y < t.rows && x < t.width ? (int)std::min<uint64_t>(16, t.width - x) : 0;
            memset(shared(place, 16), 0xff, 16);
            barrier(at).copies.push_back({place, t.address + y * t.pitch + x, 16, take});
        }
}
inline void cp_async_bulk_tensor_2d_shared__cluster_global_tile_mbarrier__complete_tx__bytes_L2__cache_hint(
    u32 to, const void* map, int inner, int row, u32 at, uint64_t) {
    cp_async_bulk_tensor_2d_shared__cluster_global_tile_mbarrier__complete_tx__bytes(to, map, inner, row, at);
}
inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(u32 to, const void* from, int bytes, u32 at) {
    if ((uintptr_t)from % 16 || bytes % 16 || bytes <= 0) fail("misaligned bulk copy");
    shared(to + bytes - 16, 16), memset(shared(to, 16), 0xff, bytes);
    barrier(at).copies.push_back({to, (const char*)from, bytes, bytes});
}
inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(u32 to, const void* from,
                                                                                             int bytes, u32 at, uint64_t) {
    cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(to, from, bytes, at);
}
// Tensor stores read shared memory as early as they may (order 1: at their issue) or as late (-1: at the wait_group that covers
// them), and write global memory then: nothing outside of the tensor.
inline void run_store(const Store& s) {
    TensorMap t;
    memcpy(&t, s.map, sizeof t);
    if (t.mark >> 8 != 0x51317) fail("not a tensor map");
    if (s.from % (t.swizzle ? 1024 : 128)) fail("misaligned tensor copy");
    const uint64_t first = (uint64_t)s.inner * (t.mark & 255);
    if (first % 16) fail("a tensor copy to an address that is no multiple of 16");
    for (u32 r = 0; r < t.box_rows; r++)
        for (u32 c = 0; c < t.box_width; c += 16) {
            u32 place = s.from + r * t.box_width + c;
            if (t.swizzle) place ^= (place >> 7 & 7) << 4;
            const uint64_t y = (uint64_t)s.row + r, x = first + c;
            const char* from = shared(place, 16);
            if (y < t.rows && x < t.width)
                memcpy((char*)t.address + y * t.pitch + x, from, std::min<uint64_t>(16, t.width - x));
        }
}
inline void cp_async_bulk_tensor_2d_global_shared__cta_tile_bulk_group(const void* map, int inner, int row, u32 from) {
    if (order == 1) run_store({map, inner, row, from});
    else self->stores.push_back({map, inner, row, from});
}
inline void cp_async_bulk_commit_group() { self->stored.push_back(std::move(self->stores)), self->stores.clear(); }
inline void cp_async_bulk_wait_group(int pending) {
    auto& groups = self->stored;
    while ((int)groups.size() > pending) {
        for (const Store& s : groups.front()) run_store(s);
        groups.erase(groups.begin());
    }
}
inline void cp_async_bulk_wait_group_read(int pending) { cp_async_bulk_wait_group(pending); }
inline void cp_async_bulk_prefetch_L2_global(const void* from, int bytes) {
    if ((uintptr_t)from % 16 || bytes % 16 || bytes <= 0) fail("misaligned prefetch");
}
inline void createpolicy_fractional_L2__evict_first_b64(unsigned long long& policy, double) { policy = 0; }
inline void st_shared_u32(u32 at, u32 v) { memcpy(shared(at, 4), &v, 4); }
inline void st_shared_v2_u32(u32 at, u32 a, u32 b) {
    const u32 v[2] = {a, b};
    memcpy(shared(at, 8), v, 8);
}
inline void st_shared_v4_u32(u32 at, u32 a, u32 b, u32 c, u32 d) {
    const u32 v[4] = {a, b, c, d};
    memcpy(shared(at, 16), v, 16);
}
template <class T>
inline void ld_shared_u32(T& v, u32 at) { memcpy(&v, shared(at, 4), 4); }
inline void ld_shared_u16(unsigned short& v, u32 at) { memcpy(&v, shared(at, 2), 2); }
inline void ld_shared_f32(float& v, u32 at) { memcpy(&v, shared(at, 4), 4); }
inline void ld_shared_v2_f32(float& a, float& b, u32 at) {
    const float* p = (const float*)shared(at, 8);
    a = p[0], b = p[1];
}
inline void ld_shared_v4_f32(float& a, float& b, float& c, float& d, u32 at) {
    const float* p = (const float*)shared(at, 16);
    a = p[0], b = p[1], c = p[2], d = p[3];
}
inline void ld_shared_v2_u32(u32& a, u32& b, u32 at) {
    const u32* p = (const u32*)shared(at, 8);
    a = p[0], b = p[1];
}
inline void ld_shared_v4_u32(u32& a, u32& b, u32& c, u32& d, u32 at) {
    const u32* p = (const u32*)shared(at, 16);
    a = p[0], b = p[1], c = p[2], d = p[3];
}
inline void ld_global_nc_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* at) {
    if ((uintptr_t)at % 16) fail("misaligned global address of a 16-byte load");
    const u32* p = (const u32*)at;
    a = p[0], b = p[1], c = p[2], d = p[3];
}
inline void ld_global_cs_nc_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* at) {
    ld_global_nc_v4_u32(a, b, c, d, at);
}
inline void ld_global_cs_nc_v2_u32(u32& a, u32& b, const void* at) {
    if ((uintptr_t)at % 8) fail("misaligned global address of an 8-byte load");
    a = ((const u32*)at)[0], b = ((const u32*)at)[1];
}
inline void ld_global_nc_u32(u32& v, const void* at) {
    if ((uintptr_t)at % 4) fail("misaligned global address of a 4-byte load");
    v = *(const u32*)at;
}
inline void ld_global_nc_L1__no_allocate_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* at) {
    ld_global_nc_v4_u32(a, b, c, d, at);
}
inline void ld_global_nc_v2_u32(u32& a, u32& b, const void* at) {
    if ((uintptr_t)at % 8) fail("misaligned global address of an 8-byte load");
    const u32* p = (const u32*)at;
    a = p[0], b = p[1];
}
inline void ld_global_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* at) { ld_global_nc_v4_u32(a, b, c, d, at); }
inline void ld_global_v2_u32(u32& a, u32& b, const void* at) { ld_global_nc_v2_u32(a, b, at); }
inline void ld_global_cg_f32(float& v, const void* at) { v = *(const float*)at; }
inline void ld_global_cg_u32(u32& v, const u16* p) { memcpy(&v, p, 4); }
inline void ld_global_cg_v2_u32(u32& a, u32& b, const u16* p) {
    if ((uintptr_t)p % 8) fail("misaligned global address of an 8-byte load");
    memcpy(&a, p, 4), memcpy(&b, p + 2, 4);
}
inline void ld_global_cg_u64(unsigned long long& v, const void* at) { v = *(const unsigned long long*)at; }
inline void ld_global_nc_u16(unsigned short& v, const void* at) { v = *(const unsigned short*)at; }
inline void ld_global_cg_u16(unsigned short& v, const void* at) { v = *(const unsigned short*)at; }
inline void ld_global_cg_v4_u32(u32& a, u32& b, u32& c, u32& d, const u16* p) {
    if ((uintptr_t)p % 16) fail("misaligned load of 16 bytes");
    memcpy(&a, p, 4), memcpy(&b, p + 2, 4), memcpy(&c, p + 4, 4), memcpy(&d, p + 6, 4);
}
inline void ld_global_cg_v4_f32(float& a, float& b, float& c, float& d, const void* at) {
    if ((uintptr_t)at % 16) fail("misaligned global address of a 16-byte load");
    const float* p = (const float*)at;
    a = p[0], b = p[1], c = p[2], d = p[3];
}
inline void fence_acq_rel_gpu() {}
inline void st_relaxed_gpu_global_u32(void* to, u32 v) { *(u32*)to = v; }
inline void atom_acq_rel_gpu_global_add_u32(u32& before, void* at, u32 v) { before = *(u32*)at, *(u32*)at += v; }
inline void ld_acquire_gpu_global_u32(u32& v, const void* at) {  // blocks run one after another: what is not there never comes
    if (!(v = *(const u32*)at)) fail("a block waits for one of higher index");
}
inline void mapa_shared__cluster_u32(u32& there, u32 at, u32 rank) { there = at | rank << RANK; }
inline void ld_shared__cluster_f32(float& v, u32 at) {
    if ((at >> RANK) >= blocks.size()) fail("no such block in the cluster");
    memcpy(&v, shared(blocks[at >> RANK], at & ((1u << RANK) - 1), 4), 4);
}
inline char* of_cluster(u32 at, int bytes) {
    if ((at >> RANK) >= blocks.size()) fail("no such block in the cluster");
    return shared(blocks[at >> RANK], at & ((1u << RANK) - 1), bytes);
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_v4_f32(u32 to, float a, float b, float c, float d, u32 at) {
    *(float4*)of_cluster(to, 16) = {a, b, c, d}, barrier_of_cluster(at).bytes -= 16;
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_v2_f32(u32 to, float a, float b, u32 at) {
    *(float2*)of_cluster(to, 8) = {a, b}, barrier_of_cluster(at).bytes -= 8;
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_f32(u32 to, float v, u32 at) {
    *(float*)of_cluster(to, 4) = v, barrier_of_cluster(at).bytes -= 4;
}
inline void barrier_cluster_arrive_release_aligned() { cluster_barrier(); }
inline void barrier_cluster_arrive_aligned() { cluster_barrier(); }
inline void barrier_cluster_arrive_relaxed_aligned() { cluster_barrier(); }
inline void barrier_cluster_wait_acquire_aligned() {}
inline void barrier_cluster_wait_aligned() {}
inline void griddepcontrol_wait() {}
inline void fence_proxy_async_shared__cta() {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
inline void griddepcontrol_launch_dependents() {}
[[noreturn]] inline void unsupported(const char* text) { fail(std::string("not emulated: ") + text); }

// ------------------------------------------------------------------------------------------------------ arithmetic
// The nearest number with `mantissa` bits and exponents from `least` (even on ties), as bits.
inline u16 rounded(double v, int mantissa, int least, int bias) {
    u16 sign = std::signbit(v) ? 0x8000 : 0;
    v = std::fabs(v);
    const int top = 2 * bias + 1;
    if (std::isnan(v)) return sign | (u16)(top << mantissa) | 1;
    int e = v == 0 ? least : std::ilogb(v);
    if (e < least) e = least;
    const double scaled = std::nearbyint(std::ldexp(v, mantissa - e));  // up to 2^(mantissa + 1)
    if (std::isinf(v) || std::ldexp(scaled, e - mantissa) >= std::ldexp(1., bias + 1)) return sign | (u16)(top << mantissa);
    const int units = (int)scaled;  // a carry into the exponent is what the encoding wants
    return sign | (u16)(units < (1 << mantissa) ? units : ((e + bias - 1) << mantissa) + units);
}
inline u16 to_f16(double v) { return rounded(v, 10, -14, 15); }
inline u16 to_bf16(double v) { return rounded(v, 7, -126, 127); }
inline float bf16(u16 v) {
    const u32 bits = (u32)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline float f16(u16 v) {
    static const std::vector<float> table = [] {
        std::vector<float> t(65536);
        for (int i = 0; i < 65536; i++) {
            const int e = i >> 10 & 31, m = i & 1023;
            const double size = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
            t[i] = (float)(i & 0x8000 ? -size : size);
        }
        return t;
    }();
    return table[v];
}
inline float e4m3(unsigned char v) {
    const int e = v >> 3 & 15, m = v & 7;
    const double size = e == 15 && m == 7 ? NAN : e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
    return (float)(v & 128 ? -size : size);
}
inline unsigned char to_e4m3(float v) {  // the nearest, even on ties, saturating
    if (std::isnan(v)) return 127;
    const unsigned char sign = std::signbit(v) ? 128 : 0;
    const double size = std::fabs((double)v);
    int e = size == 0 ? -6 : std::ilogb(size);
    if (e < -6) e = -6;
    const int units = size >= 448 ? 1000 : (int)std::nearbyint(std::ldexp(size, 3 - e));
    const int code = size >= 448 ? 126 : units < 8 ? units : ((e + 6) << 3) + units;
    return sign | (unsigned char)(code > 126 ? 126 : code);
}
inline void cvt_rn_satfinite_e4m3x2_f32(u16& d, float hi, float lo) { d = (u16)(to_e4m3(hi) << 8 | to_e4m3(lo)); }
inline void cvt_rn_f16x2_e4m3x2(u32& d, u16 v) { d = (u32)to_f16(e4m3(v >> 8)) << 16 | to_f16(e4m3((unsigned char)v)); }
inline void fma_rn_f16x2(u32& d, u32 a, u32 b, u32 c) {
    auto one = [&](int s) { return (u32)to_f16((double)f16(a >> s) * f16(b >> s) + f16(c >> s)) << s; };
    d = one(0) | one(16);
}
inline void fma_rn_bf16x2(u32& d, u32 a, u32 b, u32 c) {
    auto one = [&](int s) { return (u32)to_bf16((double)bf16(a >> s) * bf16(b >> s) + bf16(c >> s)) << s; };
    d = one(0) | one(16);
}
template <class N>
inline u32 larger2(u32 a, u32 b, N number) {
    auto one = [&](int s) {
        const u16 x = (u16)(a >> s), y = (u16)(b >> s);
        return (u32)(std::isnan(number(x)) || std::isnan(number(y)) ? 0x7fff : number(x) > number(y) ? x : y) << s;
    };
    return one(0) | one(16);
}
inline void max_NaN_f16x2(u32& d, u32 a, u32 b) { d = larger2(a, b, f16); }
inline void max_NaN_bf16x2(u32& d, u32 a, u32 b) { d = larger2(a, b, bf16); }
inline void abs_f16x2(u32& d, u32 v) { d = v & 0x7fff7fff; }
inline void abs_bf16x2(u32& d, u32 v) { d = v & 0x7fff7fff; }
inline void lop3_b32(u32& d, u32 a, u32 b, u32 c, u32 table) {
    d = 0;
    for (int i = 0; i < 32; i++) d |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
}
inline void add_rn_f16x2(u32& d, u32 a, u32 b) { fma_rn_f16x2(d, a, 0x3c003c00u, b); }
inline void cvt_rn_f16x2_f32(u32& d, float hi, float lo) { d = (u32)to_f16(hi) << 16 | to_f16(lo); }
inline void cvt_rn_bf16x2_f32(u32& d, float hi, float lo) { d = (u32)to_bf16(hi) << 16 | to_bf16(lo); }
inline void mov_b32(u16& lo, u16& hi, u32 v) { lo = (u16)v, hi = (u16)(v >> 16); }
inline void mov_b32(u32& v, u16 lo, u16 hi) { v = (u32)hi << 16 | lo; }
inline void cvt_f32_f16(float& f, u16 v) { f = f16(v); }
inline void ex2_approx_ftz_f32(float& e, float v) { e = std::exp2(v); }
inline void rcp_approx_ftz_f32(float& e, float v) { e = 1.f / v; }
inline void rsqrt_approx_f32(float& r, float v) { r = 1 / std::sqrt(v); }
inline void prmt_b32(u32& d, u32 a, u32 b, u32 which) {  // a selector's top bit: the byte's sign, eight times
    const uint64_t both = (uint64_t)b << 32 | a;
    d = 0;
    for (int i = 0; i < 4; i++) {
        const u32 byte = (u32)(both >> 8 * (which >> 4 * i & 7) & 255);
        d |= (which >> 4 * i & 8 ? byte & 128 ? 255u : 0u : byte) << 8 * i;
    }
}
inline void dp4a_u32_s32(int& d, u32 a, u32 b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(a >> 8 * i & 255) * (int)(int8_t)(b >> 8 * i);
    d = c;
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 row) {
    struct Mine { u32* out[4]; const u32* row; } mine{{&a, &b, &c, &d}, (const u32*)shared(row, 16)};
    collective("ldmatrix", mine, [](Mine** lane) {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) *lane[l]->out[i] = lane[8 * i + l / 4]->row[l % 4];
    });
}
inline void redux_sync_max_u32(u32& most, u32 v, u32) {
    struct Mine { u32* out; u32 v; } mine{&most, v};
    collective("redux", mine, [](Mine** lane) {
        u32 most = 0;
        for (int l = 0; l < 32; l++) most = std::max(most, lane[l]->v);
        for (int l = 0; l < 32; l++) *lane[l]->out = most;
    });
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(u32& d, u32 a) {
    struct Mine { u32* d; u32 a; } mine{&d, a};
    collective("movmatrix", mine, [](Mine** lane) {
        for (int l = 0; l < 32; l++) {
            u32 v = 0;
            for (int h = 0; h < 2; h++) v |= (lane[(2 * (l % 4) + h) * 4 + l / 8]->a >> 16 * (l / 4 % 2) & 0xffff) << 16 * h;
            *lane[l]->d = v;
        }
    });
}
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 at, u32 a, u32 b, u32 c, u32 d) {
    struct Mine { u32 at, v[4]; } mine{at, {a, b, c, d}};
    collective("stmatrix", mine, [](Mine** lane) {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) ((u32*)shared(lane[8 * i + l / 4]->at, 16))[l % 4] = lane[l]->v[i];
    });
}
inline void stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(u32 at, u32 a, u32 b) {
    struct Mine { u32 at, v[2]; } mine{at, {a, b}};
    collective("stmatrix", mine, [](Mine** lane) {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 2; i++)
                for (int h = 0; h < 2; h++)  // element (row l / 4, column 2 * (l % 4) + h) of matrix i, stored transposed
                    ((u16*)shared(lane[8 * i + 2 * (l % 4) + h]->at, 16))[l / 4] = (u16)(lane[l]->v[i] >> 16 * h);
    });
}
template <float (*number)(u16)>
inline void mma16816(float* const (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]) {
    struct Mine { float* const* d; const u32* a; const u32* b; const float* c; } mine{d, a, b, c};
    collective("mma", mine, [](Mine** lane) {
        double A[16][16], B[8][16];
        for (int l = 0; l < 32; l++)
            for (int h = 0; h < 2; h++) {  // the two halves of a register
                const int k = 2 * (l % 4) + h, s = 16 * h;
                for (int i = 0; i < 4; i++) A[l / 4 + 8 * (i % 2)][k + 8 * (i / 2)] = number((u16)(lane[l]->a[i] >> s));
                for (int i = 0; i < 2; i++) B[l / 4][k + 8 * i] = number((u16)(lane[l]->b[i] >> s));
            }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                const double *row = A[l / 4 + 8 * (i / 2)], *column = B[2 * (l % 4) + i % 2];
                double sum = lane[l]->c[i];
                for (int k = 0; k < 16; k++) sum += row[k] * column[k];
                *lane[l]->d[i] = (float)sum;
            }
    });
}
#define MMA(name, number)                                                                                                  \
    inline void name(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, \
                     float c1, float c2, float c3) {                                                                       \
        mma16816<number>({&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});                              \
    }
MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, f16)
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, bf16)
#undef MMA
// 16 x 256 bits by 256 x 8: counts of ones of the AND.
inline void mma_sync_aligned_m16n8k256_row_col_s32_b1_b1_s32_and_popc(u32& d0, u32& d1, u32& d2, u32& d3, u32 a0, u32 a1,
                                                                      u32 a2, u32 a3, u32 b0, u32 b1, int c0, int c1, int c2,
                                                                      int c3) {
    struct Mine {
        u32* d[4];
        u32 a[4], b[2];
        int c[4];
    } mine{{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
    collective("mma of bits", mine, [](Mine** lane) {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                int count = lane[l]->c[i];
                for (int q = 0; q < 4; q++)      // lanes of a row, of a column: bits 32 q .. 32 q + 31
                    for (int w = 0; w < 2; w++)  // and 128 further on
                        count += __builtin_popcount(lane[l / 4 * 4 + q]->a[i / 2 + 2 * w] &
                                                    lane[(2 * (l % 4) + i % 2) * 4 + q]->b[w]);
                *lane[l]->d[i] = (u32)count;
            }
    });
}
// 16 x 32 unsigned bytes by 32 x 8 signed ones.
inline void mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(int& d0, int& d1, int& d2, int& d3, u32 a0, u32 a1, u32 a2, u32 a3,
                                                            u32 b0, u32 b1, int c0, int c1, int c2, int c3) {
    struct Mine {
        int* d[4];
        u32 a[4], b[2];
        int c[4];
    } mine{{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
    collective("mma of bytes", mine, [](Mine** lane) {
        int A[16][32], B[8][32];
        for (int l = 0; l < 32; l++)
            for (int e = 0; e < 4; e++) {
                const int k = 4 * (l % 4) + e, s = 8 * e;
                for (int i = 0; i < 4; i++) A[l / 4 + 8 * (i % 2)][k + 16 * (i / 2)] = lane[l]->a[i] >> s & 255;
                for (int i = 0; i < 2; i++) B[l / 4][k + 16 * i] = (signed char)(lane[l]->b[i] >> s);
            }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                int sum = lane[l]->c[i];
                for (int k = 0; k < 32; k++) sum += A[l / 4 + 8 * (i / 2)][k] * B[2 * (l % 4) + i % 2][k];
                *lane[l]->d[i] = sum;
            }
    });
}

// wgmma with A in registers and B (NB rows of 16 k, 128-byte swizzled) in shared memory. It reads both, and writes d, as early
// as it may (order 1: at its issue) or as late (-1: at the wait_group that covers it).
// TURNED: rows of B in memory are its k, its columns lie side by side in panels of 64.
template <float (*number)(u16), int NB, bool TURNED = false>
inline void wgmma(void* d, const u32* a, uint64_t b, int add) {
    struct Mine { float* d; const u32* a; uint64_t b; int add; } mine{(float*)d, a, b, add};
    collective("wgmma", mine, [](Mine** lane) {
        if (lane[0]->b >> 32 != (1u << 30 | 64)) fail("not the wgmma descriptor of 128-byte swizzled panels");
        const u32 panel = (u32)(lane[0]->b >> 16 & 0x3fff) << 4;
        static double A[16][16], B[NB][16];
        const u32 start = (u32)(lane[0]->b & 0x3fff) << 4;
        for (int l = 0; l < 32; l++)
            for (int h = 0; h < 2; h++)
                for (int i = 0; i < 4; i++)
                    A[l / 4 + 8 * (i % 2)][2 * (l % 4) + h + 8 * (i / 2)] = number((u16)(lane[l]->a[i] >> 16 * h));
        for (int n = 0; n < NB; n++)
            for (int k = 0; k < 16; k++) {
                u32 at = TURNED ? start + n / 64 * panel + k * 128 + n % 64 * 2 : start + n / 8 * 1024 + n % 8 * 128 + 2 * k;
                at ^= (at >> 7 & 7) << 4;
                B[n][k] = number(*(u16*)shared(at, 2));
            }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < NB / 2; i++) {
                const double *row = A[l / 4 + 8 * (i / 2 % 2)], *column = B[i / 4 * 8 + 2 * (l % 4) + i % 2];
                double sum = lane[l]->add ? (double)lane[l]->d[i] : 0;
                for (int k = 0; k < 16; k++) sum += row[k] * column[k];
                lane[l]->d[i] = (float)sum;
            }
    });
}
template <float (*number)(u16), int NB>
inline void wgmma_turned(void* d, const u32* a, uint64_t b, int add) {
    wgmma<number, NB, true>(d, a, b, add);
}
// The byte at k of a row of a 128-byte swizzled tile in shared memory that a wgmma descriptor names.
inline unsigned char tile_byte(uint64_t tile, int row, int k) {
    if (tile >> 32 != (1u << 30 | 64)) fail("not the wgmma descriptor of 128-byte swizzled panels");
    u32 at = ((u32)(tile & 0x3fff) << 4) + row / 8 * 1024 + row % 8 * 128 + k;
    at ^= (at >> 7 & 7) << 4;
    return *(unsigned char*)shared(at, 1);
}
// The same of bytes, 32 k: e4m3 by e4m3 into float, or u8 by s8 into int. SHARED: `a` is not registers but A's descriptor.
template <class D, int NB, bool SHARED = false>
inline void wgmma8(void* d, const u32* a, uint64_t b, int add) {
    struct Mine { D* d; const u32* a; uint64_t b; int add; } mine{(D*)d, a, b, add};
    collective("wgmma", mine, [](Mine** lane) {
        constexpr bool INT = std::is_same<D, int>::value;
        static double A[16][32], B[NB][32];
        const int warp = (int)self->thread.x / 32 % 4;
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 4; e++) {
                    const int row = l / 4 + 8 * (i % 2), k = 4 * (l % 4) + e + 16 * (i / 2);
                    const unsigned char byte =
                        SHARED ? tile_byte((uint64_t)lane[0]->a, warp * 16 + row, k) : (unsigned char)(lane[l]->a[i] >> 8 * e);
                    A[row][k] = INT ? byte : e4m3(byte);
                }
        for (int n = 0; n < NB; n++)
            for (int k = 0; k < 32; k++) {
                const unsigned char byte = tile_byte(lane[0]->b, n, k);
                B[n][k] = INT ? (signed char)byte : e4m3(byte);
            }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < NB / 2; i++) {
                const double *row = A[l / 4 + 8 * (i / 2 % 2)], *column = B[i / 4 * 8 + 2 * (l % 4) + i % 2];
                double sum = lane[l]->add ? (double)lane[l]->d[i] : 0;
                for (int k = 0; k < 32; k++) sum += row[k] * column[k];
                lane[l]->d[i] = (D)sum;
            }
    });
}
inline void prefetch_tensormap(const void*) {}
inline void issue_wgmma(Wgmma w) {
    if (order == 1) w.run(w.d, w.a, w.b, w.add);
    else self->issued.push_back(w);
}
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { self->products.push_back(std::move(self->issued)), self->issued.clear(); }
inline void wgmma_wait_group_sync_aligned(int pending) {
    auto& groups = self->products;
    while ((int)groups.size() > pending) {
        for (const Wgmma& w : groups.front()) w.run(w.d, w.a, w.b, w.add);
        groups.erase(groups.begin());
    }
}

// ---------------------------------------------------------------------------------------------------------- launch
template <class A>
inline A value(const void* at) {  // parameters lie packed, wherever their type would like to
    A v;
    memcpy((void*)&v, at, sizeof v);
    return v;
}
template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void* const* values, std::index_sequence<I...>) {
    kernel(value<A>(values[I])...);
}
template <class... A>
inline void call(void (*kernel)(A...), void* const* values) {
    call(kernel, values, std::index_sequence_for<A...>());
}
// Runs every block; nullptr, or what went wrong.
inline const char* launch(void (*kernel)(void* const*), void* const* values, int grid_x, int grid_y, int threads, int smem,
                          int cluster, int which_order) {
    constexpr size_t STACK = 128 << 10;
    static std::vector<char> stacks;
    grid = {(unsigned)grid_x, (unsigned)grid_y, 1};
    entry = kernel, arguments = values, order = which_order;
    if (threads % 32 || grid_x % cluster) return "a block is whole warps, a grid whole clusters";
    if (stacks.size() < STACK * threads * cluster) stacks.resize(STACK * threads * cluster);
    for (int i = 0; i < grid_x * grid_y; i += cluster) {
        fibers.assign(threads * cluster, {}), blocks.assign(cluster, {});
        alive = threads * cluster, at_cluster_barrier = 0;
        for (int k = 0; k < cluster; k++) {
            Block& b = blocks[k];
            b.index = {(unsigned)((i + k) % grid_x), (unsigned)((i + k) / grid_x), 0};
            b.dynamic = smem, b.alive = threads;
            b.bytes.resize((STATIC + smem + 15) / 16);
            memset(b.memory(), 0xff, STATIC + smem);
            b.warps.resize(threads / 32);
            for (int t = 0; t < threads; t++) {
                Fiber& f = fibers[k * threads + t];
                f.thread = {(unsigned)t, 0, 0}, f.block = &b, f.lane = t % 32;
                b.warps[t / 32].lanes[t % 32] = &f;
                getcontext(&f.context);
                f.context.uc_stack = {stacks.data() + STACK * (k * threads + t), 0, STACK};
                f.context.uc_link = nullptr;
                makecontext(&f.context, start, 0);
            }
        }
        self = &fibers.back();
        if (const int how = _setjmp(home)) {
            if (how == 1) return error.c_str();
            continue;
        }
        resume_next();
    }
    return nullptr;
}
}  // namespace simt

inline void __syncthreads() { simt::block_barrier(); }
inline void __syncwarp() {
    int none = 0;
    simt::collective("__syncwarp", none, [](int**) {});
}
template <class V>
inline V __shfl_xor_sync(unsigned, V v, int distance) {
    struct Mine { V in, out; } mine{v, v};
    simt::collective("__shfl_xor_sync", mine, [=](Mine** lane) {
        for (int l = 0; l < 32; l++) lane[l]->out = lane[l ^ distance]->in;
    });
    return mine.out;
}
inline int __any_sync(unsigned, int v) {
    struct Mine { int in, out; } mine{v, 0};
    simt::collective("__any_sync", mine, [](Mine** lane) {
        int any = 0;
        for (int l = 0; l < 32; l++) any |= lane[l]->in != 0;
        for (int l = 0; l < 32; l++) lane[l]->out = any;
    });
    return mine.out;
}
template <class V>
inline V __shfl_sync(unsigned, V v, int from) {
    struct Mine { V in, out; int from; } mine{v, v, from};
    simt::collective("__shfl_sync", mine, [](Mine** lane) {
        for (int l = 0; l < 32; l++) lane[l]->out = lane[lane[l]->from % 32]->in;
    });
    return mine.out;
}
inline int __all_sync(unsigned, int mine) {
    struct Mine { int in, out; } one{mine != 0, 0};
    simt::collective("__all_sync", one, [](Mine** lane) {
        int all = 1;
        for (int l = 0; l < 32; l++) all &= lane[l]->in;
        for (int l = 0; l < 32; l++) lane[l]->out = all;
    });
    return one.out;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned v = 0;
    for (int i = 0; i < 4; i++) v |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return v;
}
inline size_t __cvta_generic_to_shared(const void* p) { return (const char*)p - simt::self->block->memory(); }
inline float __uint_as_float(unsigned v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned v;
    memcpy(&v, &f, 4);
    return v;
}
template <class V>
inline V __ldg(const V* at) { return *at; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
