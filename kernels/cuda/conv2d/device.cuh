// The instructions that the image encoder's kernels are made of: those of the loop in phases, and a few of their own. A
// test compiles the kernels for the host with its own version (DPA_EMULATE), so the kernels contain no PTX.
#pragma once
#include "kernels/cuda/unet1d/phases_device.cuh"

#ifndef DPA_EMULATE
#include "kernels/cuda/common/launch.cuh"
#define DPA_UNIFORM __grid_constant__
namespace dpa::kernels::unet1d::device {

// Copies 16 bytes, or zeros where not `valid`: `from` is not read then.
DPA_DEVICE void copy_16_or_zeros(uint32_t to, const void* from, bool valid) {
  asm volatile(
      "{\n.reg .pred ignore;\nsetp.eq.s32 ignore, %2, 0;\ncp.async.cg.shared.global.L2::128B [%0], [%1], 16, "
      "ignore;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}
// A barrier of the first or any other `threads` threads that name the id: whole warps.
DPA_DEVICE void sync_named(int id, int threads) { ptx::sync_threads(id, threads); }
DPA_DEVICE float shuffle_from(float x, int lane) { return __shfl_sync(~0u, x, lane); }
// Data that other blocks wrote in this launch: from L2.
DPA_DEVICE uint4 load_16(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
DPA_DEVICE void store_16(void* p, const uint4& v) { *static_cast<uint4*>(p) = v; }
DPA_DEVICE uint32_t add_word(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
DPA_DEVICE uint32_t acquire_word(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
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

// Arithmetic on stored values: the type that the tensor cores take, and numbers a word.
struct Bf16 {
  using Math = BFloat16;
  static constexpr int kElements = 8;  // of a piece of 16 bytes
};
struct Fp16 {
  using Math = Half;
  static constexpr int kElements = 8;
};
struct Tf32 {
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
