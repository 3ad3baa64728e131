// AVX-512 with arithmetic on float16, in which the U-Net's bfloat16 weights are multiplied.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.h"

#ifdef DPA_X86
#ifndef __clang__
// GCC 12 takes the registers that its own intrinsics leave undefined for forgotten ones.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
// Headers above are compiled for every machine, what follows for this one alone.
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512fp16")
#define DPA_LEVEL avx512_fp16
#define DPA_LANES 16
#define DPA_SUMS 16
#define DPA_PANELS 4
#define DPA_FLOAT16

#include "kernels/cpu/avx512_dot.h"
#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::avx512_fp16 {
const Kernels kKernels = {DPA_PANELS,   Weights::kBFloat16AsFloat16, gemm, epilogue, dense, pairs, narrow, dot,
                          kImageKernels};
}  // namespace dpa::kernels::cpu::avx512_fp16
#endif
