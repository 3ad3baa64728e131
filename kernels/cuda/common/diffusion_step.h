// What the launchers of `denoise` and `scheduler_step` take. All tensors are contiguous and of one dtype, except the
// table, which is in the dtype of the arithmetic (float32 for 16-bit tensors).
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels {

struct DiffusionStep {
  DType dtype;
  const void* model_output;
  const void* sample;
  const void* noise;     // null: no noise is added
  const void* table;     // (rows, columns)
  const int64_t* index;  // (batch): a row of the table for each row of the sample
  void* out;             // NaN where the index is outside the table
  int64_t batch;         // rows of the sample that have an index of their own; 1 when one index serves all
  int64_t inner;         // elements of the sample a row
  int64_t rows;
  double clip;
};

/// Gradients; null where one is not wanted.
struct DiffusionStepBackward {
  DiffusionStep forward;  // `out` is not used
  const void* grad;
  void* grad_model_output;
  void* grad_sample;
  void* grad_noise;
  void* grad_table;  // in the dtype of the table; every element is written
};

}  // namespace dpa::kernels
