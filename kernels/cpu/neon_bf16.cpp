// NEON with its dot products of pairs of bfloat16.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

#ifdef DPA_ARM
#include <arm_neon.h>
// Headers above are compiled for every machine, what follows for this one alone.
#pragma GCC target("arch=armv8.2-a+bf16")
#define DPA_LEVEL neon_bf16
#define DPA_LANES 4
#define DPA_SUMS 16
#define DPA_PANELS 1
/// sums + the dot products of the two halves of each word
#define DPA_DOT(sums, a, b) \
  reinterpret_cast<Floats>( \
      vbfdotq_f32(reinterpret_cast<float32x4_t>(sums), vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b)))

#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::neon_bf16 {
const Kernels kKernels = {DPA_PANELS, Weights::kBFloat16Dot, gemm, epilogue, dense, pairs, narrow, dot, kImageKernels};
}  // namespace dpa::kernels::cpu::neon_bf16
#endif
