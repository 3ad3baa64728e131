// AVX2 with FMA: 16 registers of 8.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

#ifdef DPA_X86
// Headers above are compiled for every machine, what follows for this one alone.
#pragma GCC target("avx2,fma")
#define DPA_LEVEL avx2
#define DPA_LANES 8
#define DPA_SUMS 8
#define DPA_PANELS 1

#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::avx2 {
const Kernels kKernels = {DPA_PANELS, Weights::kBFloat16, gemm, epilogue, dense, nullptr, narrow, dot, kImageKernels};
}  // namespace dpa::kernels::cpu::avx2
#endif
