// PTX (ptx.cuh): a cluster's barrier, and the shared memory of its other blocks.
#pragma once
#include "kernels/cuda/common/ptx.cuh"

namespace dpa::kernels::ptx {

// The address, in the cluster's shared window, of what block `rank` has at `address`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Every thread of every block of the cluster calls it; what was written to shared memory before is visible after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The two halves of that barrier. A relaxed arrival orders no memory. (cuda::ptx and cooperative groups have the forms
// that are not .aligned.)
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Every thread of the cluster has come here, with reads behind it whose values it has used; what it wrote may not be
// visible. An arrival that releases would wait for the thread's stores to global memory too.
__device__ __forceinline__ void cluster_meet() { cluster_arrive_relaxed(), cluster_wait(); }
// Arrives at a barrier of any block of the cluster. It says that what this thread's block barrier has collected has
// been read or written in shared memory, before which no cache stands; for anything else it promises nothing. An
// arrival that did would wait for the thread's stores to global memory.
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}
// Where `address` of one's own shared memory lies in that of block `rank` of the cluster, as a generic address.
__device__ __forceinline__ uint64_t peer_address(uint32_t address, uint32_t rank) {
  uint64_t there;
  asm("{\n.reg .u64 here;\ncvt.u64.u32 here, %1;\ncvta.shared.u64 here, here;\nmapa.u64 %0, here, %2;\n}"
      : "=l"(there)
      : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ float4 load_peer(uint64_t there) {
  float4 value;
  asm volatile("ld.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(there));
  return value;
}
__device__ __forceinline__ float load_peer_word(uint64_t there) {
  float value;
  asm volatile("ld.f32 %0, [%1];" : "=f"(value) : "l"(there));
  return value;
}

// Copies shared memory to a place in the cluster, whose barrier there counts the bytes. Addresses and bytes are multiples
// of 16.
__device__ __forceinline__ void copy_to_cluster(uint32_t cluster_address, uint32_t from, uint32_t bytes,
                                                uint32_t cluster_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_address),
               "r"(from), "r"(bytes), "r"(cluster_barrier)
               : "memory");
}

// Stores into any block of the cluster; that block's barrier counts the bytes.
__device__ __forceinline__ void send_cluster_4(uint32_t cluster_address, uint32_t v, uint32_t cluster_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(cluster_address),
               "r"(v), "r"(cluster_barrier)
               : "memory");
}
__device__ __forceinline__ void send_cluster_8(uint32_t cluster_address, uint2 v, uint32_t cluster_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1,%2}, [%3];" ::"r"(cluster_address),
      "r"(v.x), "r"(v.y), "r"(cluster_barrier)
      : "memory");
}
__device__ __forceinline__ void send_cluster_16(uint32_t cluster_address, uint4 v, uint32_t cluster_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                   cluster_address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(cluster_barrier)
               : "memory");
}

}  // namespace dpa::kernels::ptx
