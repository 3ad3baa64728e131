// CUDA launcher of `dpa::sinusoidal_embedding`.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

struct SinusoidalEmbedding {
  enum class Timesteps { kInt64, kFloat32, kFloat64 };  // angles are float64 of the last, else float32
  const void* timesteps;                                // (count)
  Timesteps type;
  int64_t count, dim;
  double log_step;  // from one frequency's logarithm to the next
  void* out;        // (count, dim), sines and then cosines
  DType out_type;
};

cudaError_t sinusoidal_embedding(const SinusoidalEmbedding& args, cudaStream_t stream);

}  // namespace dpa::kernels
