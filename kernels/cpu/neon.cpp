// NEON: 32 registers of 4.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

#ifdef DPA_ARM
#define DPA_LEVEL neon
#define DPA_LANES 4
#define DPA_SUMS 16
#define DPA_PANELS 1

#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::neon {
const Kernels kKernels = {DPA_PANELS, Weights::kBFloat16, gemm, epilogue, dense, nullptr, narrow, dot, kImageKernels};
}  // namespace dpa::kernels::cpu::neon
#endif
