// AVX-512, and bfloat16 weights in the tiles of AMX.
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
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#define DPA_LEVEL amx
#define DPA_LANES 16
#define DPA_SUMS 16
#define DPA_PANELS 4
#define DPA_TILES

#include "kernels/cpu/avx512_dot.h"
#include "kernels/cpu/conv2d.h"
#include "kernels/cpu/dense.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/gemm.h"

namespace dpa::kernels::cpu::amx {
const Kernels kKernels = {DPA_PANELS,   Weights::kBFloat16Tiles, gemm, epilogue, dense, pairs, narrow, dot,
                          kImageKernels};
}  // namespace dpa::kernels::cpu::amx
#endif
