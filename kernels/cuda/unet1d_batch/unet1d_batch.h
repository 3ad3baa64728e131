// What `dpa::unet1d_batch` launches beside the convolutions of kernels/cuda/conv1d: their first inputs. Rows are of 16
// bits or float32, (count, width), zeros behind the last channel.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/dtype.h"

namespace dpa::kernels::unet1d_batch {

/// The network's input as rows: the sample, the sinusoid of every timestep, and FiLM's parameters where their parts are
/// known, film[b] = film_step + film_cond[b].
struct Inputs {
  DType dtype;         // of the rows
  DType sample_dtype;  // float32 or `dtype`
  const void* sample;  // (batch * length, action_dim)
  int64_t rows;        // batch * length
  int action_dim, action_width;
  const void* timesteps;
  bool integers;  // int64 timesteps, else float32
  int64_t times;  // how many rows of sinusoids: batch, or 1 for all samples
  int step_dim, step_width;
  void *sample_rows, *sinusoids;
  int64_t film_batch;                 // rows of film, or 0
  int film_rows;                      // elements of such a row, a multiple of 8
  const void *film_step, *film_cond;  // of `dtype`, aligned to 16 bytes
  void* film;
};
cudaError_t prepare(const Inputs& inputs, cudaStream_t stream);

/// out[b] = mish(cat(first[b], second[b])): `first` of the rows' dtype, one row or one a sample; `second`, of float32
/// or the rows' dtype, may be null.
struct Condition {
  DType dtype, second_dtype;
  int64_t batch;
  const void* first;
  int64_t first_rows;
  int first_channels;
  const void* second;
  int second_channels;
  void* out;
  int width;
};
cudaError_t condition(const Condition& condition, cudaStream_t stream);

/// out[r, a] = sum over c of x[r, c] weight[a, c] + bias[a]: the network's last layer, for which a tile of a GEMM
/// would be all but empty. The channels are a multiple of 8, the rows of x and of the packed weight aligned to 16
/// bytes.
constexpr int kMaxActions = 32;
struct Actions {
  DType dtype, bias_dtype;
  const void *x, *weight, *bias;
  void* out;
  int64_t rows;
  int channels, actions;
  bool float_out;  // out is float32, else of `dtype`
};
cudaError_t to_actions(const Actions& actions, cudaStream_t stream);

}  // namespace dpa::kernels::unet1d_batch
