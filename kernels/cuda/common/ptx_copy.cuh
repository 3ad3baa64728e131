// PTX (ptx.cuh): barriers in shared memory, and copies from global to shared memory that run beside the thread.
#pragma once
#include <cuda.h>

#include "kernels/cuda/common/ptx.cuh"

namespace dpa::kernels::ptx {

// A barrier of `count` arrivals. One thread calls it; the block's barrier is due before it is used.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t count) {
  barrier_init(shared_address(barrier), count);
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces `bytes` that bulk copies will write.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase with that parity. Any number of threads may call it.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra ready;\nbra "
      "wait;\nready:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\nwait:\nmbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra ready;\nbra "
      "wait;\nready:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Copies 16 bytes from global to shared memory, past L1; they are there when this thread has waited.
__device__ __forceinline__ void copy_async_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}
// The same, and L2 reads the line of 128 bytes.
__device__ __forceinline__ void copy_async_line_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}
// 8 bytes, through L1.
__device__ __forceinline__ void copy_async_8(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(destination), "l"(source) : "memory");
}
// 16 bytes, or zeros where not `there`: by the number of bytes to read, or by a predicate.
__device__ __forceinline__ void copy_async_16_or_zeros(uint32_t destination, const void* source, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_16_if(uint32_t destination, const void* source, bool there) {
  asm volatile(
      "{\n.reg .pred ignore;\nsetp.eq.s32 ignore, %2, 0;\ncp.async.cg.shared.global.L2::128B [%0], [%1], 16, "
      "ignore;\n}" ::"r"(destination),
      "l"(source), "r"(static_cast<int>(there))
      : "memory");
}
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies in groups: ends one; waits until at most kPending of this thread's groups are under way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A cache policy: lines read under it are the first to leave L2.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A part of the lines is to be the last to leave, the others the first.
__device__ __forceinline__ uint64_t evict_first_but_policy(float part) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, %1;" : "=l"(policy) : "f"(part));
  return policy;
}

// All of them are the last to leave.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` (a multiple of 16, both ends aligned to 16) into shared memory; the barrier counts them. One thread
// calls it.
__device__ __forceinline__ void copy_bulk(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copy_bulk(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// One thread copies the box at (x, y, z) of a tensor; what lies outside the tensor arrives as zeros. The barrier counts
// the bytes of the whole box.
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, int x, int y, int z,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
// The same of a tensor of four dimensions.
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, int x, int y, int z, int w,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5}], [%6];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}
// The pixels of a tensor (n, y, x, channels) under a tap: of those that a filter walks over from (x, y, n) on, moved by
// (dx, dy), the channels from `channel` on.
__device__ __forceinline__ void tma_load_im2col(uint32_t destination, const CUtensorMap* map, int channel, int x, int y,
                                                int n, int dx, int dy, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5}], "
      "[%6], {%7, %8};" ::"r"(destination),
      "l"(map), "r"(channel), "r"(x), "r"(y), "r"(n), "r"(barrier), "h"(static_cast<uint16_t>(dx)),
      "h"(static_cast<uint16_t>(dy))
      : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace dpa::kernels::ptx
