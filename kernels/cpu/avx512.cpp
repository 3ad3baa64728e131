// AVX-512 (F, BW, DQ, VL): 32 registers of 16.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

#ifdef DPA_X86
// Headers above are compiled for every machine, what follows for this one alone.
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#define DPA_LEVEL avx512
#define DPA_LANES 16
#define DPA_SUMS 16
#define DPA_PANELS 4

#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::avx512 {
const Kernels kKernels = {DPA_PANELS, Weights::kBFloat16, gemm, epilogue, dense, nullptr, narrow, dot, kImageKernels};
}  // namespace dpa::kernels::cpu::avx512
#endif
