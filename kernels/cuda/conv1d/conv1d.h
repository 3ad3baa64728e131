// One-dimensional convolutions over tensors in (batch, time, channels) order, as three products on Hopper's tensor
// cores.
//
// A convolution joins a narrow and a wide tensor (as long as each other where the stride is 1) by a weight (d0, d1,
// taps):
//   gather           narrow[b, t, i] = sum over j, k of  weight[i, j, k] wide[b, stride t + k - padding, j]
//   scatter          wide[b, u, j]   = sum over i, k, t with u = stride t + k - padding of  weight[i, j, k] narrow[b,
//   t, i] weight_gradient  weight[i, j, k] = sum over b, t of  narrow[b, t, i] wide[b, stride t + k - padding, j]
// A Conv1d gathers forward and scatters its gradient back; a ConvTranspose1d, whose weight is (in, out, taps) too, the
// other way round. Both have the same weight gradient.
//
// Products read 16-bit tensors, rows of channels padded with zeros to a multiple of 8, and packed weights
// (taps, d0, d1 padded to a multiple of 8); they write rows that are not padded. Sums are float32, in an order that the
// sizes alone determine.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/plans/conv1d/shape.h"

namespace dpa::kernels::conv1d {

// Whether the current device and this build have the instructions.
bool supported();

// Packed weights. `settled`: between the kernel that wrote them and the product lies another kernel of the stream that
// lets its successor start only after its own wait for its predecessor (kernels/cuda/common/launch.cuh), as all kernels of
// this folder do. The product then reads them before its predecessor's end.
struct Weights {
  const void* packed;
  bool settled;
};

// What is added to a product before it is rounded; either may be null.
struct Addends {
  const void* bias;      // (channels of the output), in `bias_dtype`
  DType bias_dtype;      // float32 or the dtype of the tensors
  const void* residual;  // of the output's shape and dtype
};

// A normalisation by groups of `group` channels, Mish and FiLM behind a gather (kernels/cuda/group_norm_mish).
struct Normalisation {
  int group;
  double eps;
  DType parameter_dtype;      // of weight and bias: float32 or the dtype of the tensors
  const void *weight, *bias;  // (channels)
  const void *scale, *shift;  // (batch, channels), rows the strides apart; may be null
  int64_t scale_stride, shift_stride;
  const void* residual;  // of the output's shape; may be null
  void* out;             // of the output's shape
};

// The wide tensor's rows; or those of two tensors, side by side: the first's channels are a multiple of 64.
struct Wide {
  const void* rows;
  const void* more = nullptr;
  int64_t channels = 0;  // of the first of two
};

// Sizes are such that `serves` (plan.h) accepts them; pointers are aligned to 16 bytes. Errors are the launch's own.
// In a captured graph products go before what other branches have waiting.
cudaError_t gather(const Conv1d& conv, const void* wide, const Weights& weights, const Addends& addends, void* narrow,
                   cudaStream_t stream);
cudaError_t scatter(const Conv1d& conv, const void* narrow, const Weights& weights, const Addends& addends, void* wide,
                    cudaStream_t stream);
// A gather of stride 1, and what a normalisation makes of it. `narrow`, which the normalisation's backward reads, may
// be null; `addends` has no residual. Where `normalises` says that the device's tiles hold whole groups.
bool normalises(const Conv1d& conv, int group);
// Beside it, in the same launch: a convolution of one tap of the same input to as many channels, without a
// normalisation. Where `takes_side` says that the device has a multiprocessor for each block.
struct Side {
  Weights weights;
  Addends addends;
  void* out;  // null for none
};
bool takes_side(const Conv1d& conv);
cudaError_t gather_normalised(const Conv1d& conv, const Wide& wide, const Weights& weights, const Addends& addends,
                              void* narrow, const Normalisation& normalisation, const Side& side, cudaStream_t stream);
// `gradient` is (d0, d1, taps) in `gradient_dtype`, float32 or the dtype of the tensors. The narrow tensor may be some
// channels of one whose rows are `narrow_pitch` elements apart, a multiple of 8, from a multiple of 8 on.
cudaError_t weight_gradient(const Conv1d& conv, const void* narrow, const void* wide, void* gradient,
                            DType gradient_dtype, cudaStream_t stream, int64_t narrow_pitch = 0);

// sums[c] = sum over `count` rows of rows[r, c], `width` elements apart, in `sums_dtype`, float32 or `dtype`: the
// bias's gradient. Aligned to 16 bytes, the width a multiple of 8; the order of the sums depends on the sizes alone.
cudaError_t column_sums(DType dtype, const void* rows, int64_t count, int64_t channels, int64_t width, void* sums,
                        DType sums_dtype, cudaStream_t stream);

// Weights (d0, d1, taps), of `source_dtype` float32 or `dtype`, to (taps, d0, padded d1) of `dtype`, in one launch.
// They may be the first d1 of more columns.
struct Packing {
  const void* weight;
  void* packed;
  int64_t d0, d1;
  int taps;
  int64_t width = 0;  // of a packed row, where it is more than padded(d1)
  int64_t of = 0;     // columns of the weight, where they are more than d1
};
constexpr int kMaxPackings = 48;
struct Packings {
  Packing each[kMaxPackings];
  int count;
  const int* wanted = nullptr;  // on the device, one a weight: which to pack; null for all
};
cudaError_t pack_weights(DType source_dtype, DType dtype, const Packings& packings, cudaStream_t stream);
// Whether weights have changed, as far as kLooks elements of each tell: wanted[w] says whether one of them differs from
// what `seen`, (count, kLooks), holds from the last time.
cudaError_t look_for_changes(DType source_dtype, const Packings& packings, uint32_t* seen, int* wanted,
                             cudaStream_t stream);
// `rows` rows of `channels` 16-bit elements to rows of padded(channels).
cudaError_t pad_rows(const void* rows, int64_t count, int64_t channels, void* out, cudaStream_t stream);

}  // namespace dpa::kernels::conv1d
