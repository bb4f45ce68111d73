// How blocks of a cluster pass sums to each other: st.async writes into another block's shared memory and counts the bytes in
// at an mbarrier there. Nothing is fenced: the release and acquire of barrier.cluster are a MEMBAR of the whole GPU and an
// emptied first-level cache, 900 cycles where a step's kernel has 5,000.
//
//   open     by one thread: how many bytes the block will receive. Then `join` by all threads, and `joined` before the first
//            push: all blocks run.
//   push     to the place of an address of this block in the block `rank`, whose mbarrier is at the same place as this one's
//   barrier_wait(barrier, 0)   by every block that receives something, before it ends: everything has arrived
#pragma once
#include "hopper.cuh"

__device__ __forceinline__ void open(u32 barrier, int bytes) {
    barrier_init(barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(barrier, bytes);
}
__device__ __forceinline__ void join() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void joined() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ void push(int rank, u32 barrier, u32 to, float4 v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(in_block(to, rank)),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(in_block(barrier, rank))
        : "memory");
}
__device__ __forceinline__ void push(int rank, u32 barrier, u32 to, float2 v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(in_block(to, rank)),
                 "f"(v.x), "f"(v.y), "r"(in_block(barrier, rank))
                 : "memory");
}
__device__ __forceinline__ void push(int rank, u32 barrier, u32 to, float v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(in_block(to, rank)), "f"(v),
                 "r"(in_block(barrier, rank)) : "memory");
}
