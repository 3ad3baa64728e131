// AVX-512 with its dot products of pairs of bfloat16.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

#ifdef DPA_X86
#include <immintrin.h>
// Headers above are compiled for every machine, what follows for this one alone.
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define DPA_LEVEL avx512_bf16
#define DPA_LANES 16
#define DPA_SUMS 16
#define DPA_PANELS 4

#include "kernels/cpu/avx512_dot.h"
#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::avx512_bf16 {
const Kernels kKernels = {DPA_PANELS, Weights::kBFloat16Dot, gemm, epilogue, dense, pairs, narrow, dot, kImageKernels};
}  // namespace dpa::kernels::cpu::avx512_bf16
#endif
