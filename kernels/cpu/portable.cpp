// The level of every machine: vectors of 4, which the compiler maps to SSE2 or NEON.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

#define DPA_LEVEL portable
#define DPA_LANES 4
#define DPA_SUMS 8
#define DPA_PANELS 1

#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::portable {
const Kernels kKernels = {DPA_PANELS, Weights::kBFloat16, gemm, epilogue, dense, nullptr, narrow, dot, kImageKernels};
}  // namespace dpa::kernels::cpu::portable
