// The instructions that the phase kernel is made of, for compute capability 8.0 and later. A test compiles the kernel
// for the host with its own version of this file (DPA_EMULATE), so the kernel itself contains no PTX.
#pragma once
#ifdef DPA_EMULATE
#include "test/kernels/phases_emulator.h"
#else
#include <cstdint>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/ptx_cluster.cuh"
#include "kernels/cuda/common/ptx_copy.cuh"
#include "kernels/cuda/common/two_halves.cuh"

#define DPA_DEVICE __device__ __forceinline__
#define DPA_OUTLINE __device__ __noinline__ inline
namespace dpa::kernels::unet1d::device {

extern __shared__ __align__(1024) uint8_t shared_memory[];
DPA_DEVICE uint8_t* shared() { return shared_memory; }
DPA_DEVICE int thread() { return threadIdx.x; }
DPA_DEVICE int block() { return blockIdx.x; }
DPA_DEVICE int blocks() { return gridDim.x; }
DPA_DEVICE void sync_block() { __syncthreads(); }
DPA_DEVICE void sync_warp() { __syncwarp(); }
DPA_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DPA_DEVICE float shuffle_first(float x) { return __shfl_sync(~0u, x, 0); }
DPA_DEVICE uint32_t high_product(uint32_t a, uint32_t b) { return __umulhi(a, b); }
DPA_DEVICE uint32_t bits(float x) { return __float_as_uint(x); }
DPA_DEVICE float as_float(uint32_t x) { return __uint_as_float(x); }
DPA_DEVICE float quotient(float a, float b) { return __fdividef(a, b); }
// To one unit in the last place or so, without the branches of a division: 1 < b, both finite.
DPA_DEVICE float quotient_exact(float a, float b) {
  const float inverse = __fdividef(1.0f, b), q = a * inverse;
  return __fmaf_rn(__fmaf_rn(-q, b, a), inverse, q);
}
DPA_DEVICE float exponential_fast(float x) { return __expf(x); }
DPA_DEVICE float inverse_root(float x) { return rsqrtf(x); }
// Bytes of x, or zeros (selectors from 4), by the four selectors.
template <uint32_t kSelectors>
DPA_DEVICE uint32_t spread_bytes(uint32_t x) {
  return __byte_perm(x, 0, kSelectors);
}
// The bytes that the selectors spread over two halves, e4m3, as float16 times 1 / kWidenedE4m3. Where the chip does not
// convert: in the upper half of 16 bits, its exponent a bit lower, e4m3 is a float16, the number times 2^-8.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr float kWidenedE4m3 = 1.0f;
template <uint32_t kSelectors>
DPA_DEVICE uint32_t widen_e4m3(uint32_t x) {
  uint32_t made;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(made)
      : "r"(kSelectors == 0x1404 ? x : x >> 16));
  return made;
}
#else
constexpr float kWidenedE4m3 = 256.0f;
template <uint32_t kSelectors>
DPA_DEVICE uint32_t widen_e4m3(uint32_t x) {
  const uint32_t w = spread_bytes<kSelectors>(x);
  return (w & 0x80008000u) | ((w & 0x7f007f00u) >> 1);
}
#endif
// a | (b ^ c), as an instruction that the compiler does not take apart.
DPA_DEVICE uint32_t or_xor(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xf6;" : "=r"(made) : "r"(a), "r"(b), "r"(c));
  return made;
}
DPA_DEVICE long long clock_now() { return clock64(); }
DPA_DEVICE void pause() { __nanosleep(20); }

using ptx::copy_async_8, ptx::copy_async_line_16, ptx::copy_async_commit, ptx::copy_async_wait;
using ptx::held, ptx::load_constant, ptx::shared_address, ptx::sync_threads, ptx::arrive_threads;
using ptx::load_matrix_x4, ptx::load_matrix_x4_transposed, ptx::to_tf32;
using ptx::load_message_16, ptx::load_message_8, ptx::load_message_word;
using ptx::load_shared, ptx::load_shared_16, ptx::load_shared_8, ptx::load_shared_word;
using ptx::store_message_16, ptx::store_message_8, ptx::store_message_word;

// A value of the type says which one: the host's version has types of its own.
using Half = __half;
using BFloat16 = __nv_bfloat16;
template <class T>
DPA_DEVICE void mma(T, float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  ptx::mma<T>(c, a, b0, b1);
}
using kernels::split_pair;
// Two numbers in a word, the first in the low half.
template <class T>
DPA_DEVICE uint32_t pack(T, float low, float high) {
  return pack_pair<T>(low, high);
}
template <class T>
DPA_DEVICE float2 unpack(T, uint32_t v) {
  return unpack_pair<T>(v);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Blocks of a cluster: where a peer's shared memory begins, stores there that its barrier counts, and barriers.
DPA_DEVICE uint32_t peer_window(int rank) {
  return ptx::cluster_address(shared_address(shared_memory), rank) - shared_address(shared_memory);
}
DPA_DEVICE uint64_t* block_barriers() {
  __shared__ uint64_t barriers[2];
  return barriers;
}
// Barriers of one arrival each. One thread calls it; the cluster's barrier is due before a peer uses them.
DPA_DEVICE void barrier_init(uint64_t* barriers, int count) {
  for (int i = 0; i < count; i++) cuda::ptx::mbarrier_init(barriers + i, 1);
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
}
using ptx::barrier_expect, ptx::barrier_wait, ptx::cluster_sync, ptx::send_cluster_4, ptx::send_cluster_8;
#endif

}  // namespace dpa::kernels::unet1d::device
#endif
