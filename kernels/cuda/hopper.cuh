// Instructions that Hopper added: TMA loads, clusters, moving registers between warpgroups, stmatrix. Include tile.cuh first.
#pragma once

struct __align__(64) TensorMap { u64 opaque[16]; };

template <int REGISTERS>
__device__ __forceinline__ void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

__device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tensor_load(u32 shared, const TensorMap* map, int inner, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(shared), "l"(map), "r"(inner), "r"(row), "r"(barrier) : "memory");
}
// Of data that is not read again: it leaves L2 first. The number is what createpolicy makes of evict_first.
__device__ __forceinline__ void tensor_load_once(u32 shared, const TensorMap* map, int inner, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
        "[%4], %5;"
        ::"r"(shared), "l"(map), "r"(inner), "r"(row), "r"(barrier), "n"(0x12f0000000000000) : "memory");
}
// A box of shared memory, written by ordinary stores and fenced by each writer (shared_fence), goes to global memory; what is
// outside of the tensor does not. The thread that stores waits until all but PENDING of its groups have been read, or written.
__device__ __forceinline__ void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void tensor_store(const TensorMap* map, int inner, int row, u32 shared) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(map), "r"(inner), "r"(row), "r"(shared) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
__device__ __forceinline__ void stores_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ u32 in_block(u32 shared, int rank) {  // an address of ours in another block of the cluster
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
    return there;
}
__device__ __forceinline__ float read_cluster(u32 there) {  // what lies at such an address
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
}
template <int T>  // two 8x8 matrices of fp32 sums, rounded and transposed
__device__ __forceinline__ void store_transposed(u32 shared, const float* v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared),
                 "r"(from_floats<T>(v[0], v[1])), "r"(from_floats<T>(v[2], v[3])) : "memory");
}
__device__ __forceinline__ void barrier_arrive_remote(u32 there) {
    // without .release.cluster, which flushes L1 (900 cycles per call): this block has read what it passes on, not written it
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Descriptor of a 128-byte swizzled tile in shared memory: 8 rows of 128 bytes, 1024 bytes apart. Add 2 for each 32 bytes of k.
// PANEL: where rows of the tile are k, the bytes from 64 columns to the next 64.
template <int PANEL = 16>
__device__ __forceinline__ u64 swizzled_tile(u32 shared) {
    return (u64)((shared & 0x3ffff) >> 4) | (u64)(PANEL >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void store8(u16* to, uint4 v, int width, int column) {  // eight halves of a row of y
    if (width % 8 == 0) {
        *(uint4*)to = v;
    } else {
        const u32 four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column + i < width) to[i] = (u16)(four[i / 2] >> (i % 2 * 16));
    }
}
__device__ __forceinline__ void store8(u16* to, u32 shared, int width, int column) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared));
    store8(to, v, width, column);
}
