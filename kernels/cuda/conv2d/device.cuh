// The instructions that the image encoder's kernels are made of: those of the loop in phases, and a few of their own. A
// test compiles the kernels for the host with its own version (DPA_EMULATE), so the kernels contain no PTX.
#pragma once
#include "kernels/common/dtype.h"
#include "kernels/cuda/unet1d/phases_device.cuh"

#ifndef DPA_EMULATE
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#define DPA_UNIFORM __grid_constant__
namespace dpa::kernels::unet1d::device {

using ptx::copy_async_16_if, ptx::load_acquire_word;
// Data that other blocks wrote in this launch: from L2.
DPA_DEVICE uint4 load_16(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
DPA_DEVICE void store_16(void* p, const uint4& v) { *static_cast<uint4*>(p) = v; }
DPA_DEVICE uint32_t add_word(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
DPA_DEVICE void fence() { __threadfence(); }
DPA_DEVICE float exponential(float x) { return expf(x); }
DPA_DEVICE float inverse_root_exact(float x) { return 1.0f / sqrtf(x); }
DPA_DEVICE void dependency_sync() { grid_dependency_sync(); }
DPA_DEVICE void dependency_trigger() { trigger_dependent_launch(); }

}  // namespace dpa::kernels::unet1d::device
#else
#define DPA_UNIFORM
#endif

namespace dpa::kernels::conv2d::device {
using namespace unet1d::device;
}
#ifdef DPA_EMULATE
#include "test/kernels/conv2d_emulator.h"
#else
namespace dpa::kernels::conv2d::device {
// Hopper's. Code for other architectures has them without a body: no launch reaches it there.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DPA_HOPPER(...) __VA_ARGS__
#else
#define DPA_HOPPER(...)
#endif
DPA_DEVICE void barrier_init([[maybe_unused]] uint32_t barrier, [[maybe_unused]] int count) {
  DPA_HOPPER(kernels::ptx::barrier_init(barrier, count));
}
// After barrier_init, in the thread that copies: bulk copies see the barrier.
DPA_DEVICE void barrier_init_fence() {
  DPA_HOPPER(cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
             cuda::ptx::fence_proxy_async(cuda::ptx::space_shared));
}
DPA_DEVICE void barrier_expect([[maybe_unused]] uint32_t barrier, [[maybe_unused]] uint32_t bytes) {
  DPA_HOPPER(kernels::ptx::barrier_expect(barrier, bytes));
}
DPA_DEVICE void barrier_wait([[maybe_unused]] uint32_t barrier, [[maybe_unused]] uint32_t parity) {
  DPA_HOPPER(kernels::ptx::barrier_wait(barrier, parity));
}
// A multiple of 16 bytes, which the barrier counts. One thread calls it.
DPA_DEVICE void copy_bulk([[maybe_unused]] uint32_t to, [[maybe_unused]] const void* from,
                          [[maybe_unused]] uint32_t bytes, [[maybe_unused]] uint32_t barrier) {
  DPA_HOPPER(kernels::ptx::copy_bulk(to, from, bytes, barrier));
}
// Shared memory that this thread has read or written goes to a bulk copy behind the next barrier of the block.
DPA_DEVICE void fence_async() { DPA_HOPPER(cuda::ptx::fence_proxy_async(cuda::ptx::space_shared)); }
DPA_DEVICE void wgmma_fence() { DPA_HOPPER(kernels::wgmma::fence()); }
DPA_DEVICE void wgmma_commit() { DPA_HOPPER(kernels::wgmma::commit()); }
template <int kPending>
DPA_DEVICE void wgmma_wait() {
  DPA_HOPPER(kernels::wgmma::wait<kPending>());
}
// B in core matrices of 8 columns x 16 bytes of K: bytes to the next 16 of K, and to the next 8 columns.
DPA_DEVICE uint64_t wgmma_operand(uint32_t address, uint32_t along_k, uint32_t along_columns) {
  return kernels::wgmma::swizzled(address, along_k, along_columns, kernels::wgmma::Swizzle::kNone);
}
// A, as a box of an input map lies: rows of 128 bytes, swizzled.
using InputMap = CUtensorMap;
DPA_DEVICE uint64_t wgmma_box(uint32_t address) {
  return kernels::wgmma::swizzled(address, 16, 1024, kernels::wgmma::Swizzle::k128);
}
// d += a b, both in shared memory.
template <int kColumns, class Type>
DPA_DEVICE void wgmma_boxes([[maybe_unused]] Type, [[maybe_unused]] float (&d)[kColumns / 2],
                            [[maybe_unused]] uint64_t a, [[maybe_unused]] uint64_t b) {
  DPA_HOPPER(kernels::wgmma::mma_ss<Type, kColumns, 0, 0>(d, a, b, 1));
}
// Of the pixels under the tap (kw, kh), for as many outputs as a box has, the first one's first tap at (x, y) of image n, 128
// bytes of channels; zeros beyond an edge. One thread calls it; the barrier counts the bytes of the whole box.
DPA_DEVICE void load_box([[maybe_unused]] uint32_t to, [[maybe_unused]] const InputMap* map,
                         [[maybe_unused]] int channel, [[maybe_unused]] int x, [[maybe_unused]] int y,
                         [[maybe_unused]] int n, [[maybe_unused]] int kw, [[maybe_unused]] int kh,
                         [[maybe_unused]] uint32_t barrier) {
  DPA_HOPPER(kernels::ptx::tma_load_im2col(to, map, channel, x, y, n, kw, kh, barrier));
}
template <int kRegisters>
DPA_DEVICE void registers_decrease() {
  DPA_HOPPER(kernels::ptx::registers_decrease<kRegisters>());
}
template <int kRegisters>
DPA_DEVICE void registers_increase() {
  DPA_HOPPER(kernels::ptx::registers_increase<kRegisters>());
}
DPA_DEVICE void prefetch_map([[maybe_unused]] const InputMap* map) {
  DPA_HOPPER(kernels::ptx::prefetch_tensor_map(map));
}
DPA_DEVICE void barrier_arrive([[maybe_unused]] uint32_t barrier) { DPA_HOPPER(kernels::ptx::barrier_arrive(barrier)); }
// d += a b for the rows of the four warps of a warpgroup, 32 bytes of K; a as mma.sync takes it.
template <int kColumns, class Type>
DPA_DEVICE void wgmma([[maybe_unused]] Type, [[maybe_unused]] float (&d)[kColumns / 2], [[maybe_unused]] const uint4& a,
                      [[maybe_unused]] uint64_t b) {
  DPA_HOPPER(kernels::wgmma::mma_rs<Type, kColumns>(d, a, b));
}
#undef DPA_HOPPER
}  // namespace dpa::kernels::conv2d::device
#endif

namespace dpa::kernels::conv2d::device {

// Arithmetic on stored values: the type that the tensor cores take, and numbers a word.
struct Bf16 {
  static constexpr DType kType = DType::kBFloat16;
  using Math = BFloat16;
  static constexpr int kElements = 8;  // of a piece of 16 bytes
};
struct Fp16 {
  static constexpr DType kType = DType::kFloat16;
  using Math = Half;
  static constexpr int kElements = 8;
};
struct Tf32 {
  static constexpr DType kType = DType::kFloat32;
  using Math = float;
  static constexpr int kElements = 4;
};

// A piece as floats, and back.
template <class T>
DPA_DEVICE void widen(const uint4& v, float (&x)[T::kElements]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (T::kElements == 4) {
      x[i] = as_float(words[i]);
    } else {
      const float2 pair = unpack(typename T::Math{}, words[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}
template <class T>
DPA_DEVICE uint4 narrow(const float (&x)[T::kElements]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (T::kElements == 4)
      words[i] = bits(x[i]);
    else
      words[i] = pack(typename T::Math{}, x[2 * i], x[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace dpa::kernels::conv2d::device
