// One-dimensional convolutions over tensors in (batch, time, channels) order, as implicit GEMMs on tensor cores: by
// wgmma on Hopper, by warp-level MMAs (mma.h) on other GPUs from compute capability 8.0 on, for the weight gradients that
// the tiles of wgmma do not take, and for small convolutions of float32 (`in_full`).
//
// A convolution maps x to y by a weight (d0, d1, taps); y is as long as x, or half as long where the stride is 2:
//   fprop   y[b, t, i]      = sum over j, k of     weight[i, j, k] x[b, stride t + k - padding, j]
//   dgrad   x[b, u, j]      = sum over i, k, t of  weight[i, j, k] y[b, t, i]     with u = stride t + k - padding
//   wgrad   weight[i, j, k] = sum over b, t of     y[b, t, i] x[b, stride t + k - padding, j]
// fprop and dgrad are the forward and the data gradient of a Conv1d. For a ConvTranspose1d, whose weight is (in, out,
// taps) too, they change roles. wgrad is the weight gradient of both.
//
// Operands are 16-bit tensors, rows of channels padded with zeros to a multiple of 8, and packed weights (taps, d0, d1
// padded to a multiple of 8). Results have rows that are not padded. Accumulators are float32, added in an order that
// the sizes alone determine.
//
// Operands in float32 are rounded to tf32 or, `in_full`, come as two such numbers, and dgrad takes weights that are packed (taps, d1, d0 padded); weights of few
// elements come as two planes of tf32 numbers (weight_parts): (2, taps, ...). Or operands are
// pairs of float16 numbers (Conv1d::halves, math/two_halves.h): planes of high halves, then of low ones, of rows
// (2, batch, time, channels padded) and packed weights (2, taps, d0, d1 padded); addends and results are float32. Or, of
// Conv1d::in_place, weights of float32 are read as they lie in the parameter, (d0, d1, taps).
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/plans/conv1d/shape.h"

namespace dpa::kernels::conv1d {

// Whether the current device and this build have the instructions: any of them, or wgmma.
bool supported();
bool has_wgmma();
// Whether they take these sizes; and whether dgrad and wgrad, too, take an x of two tensors of so many channels.
bool takes(const Conv1d& conv);
bool backward_takes_two(int64_t first, int64_t more);

// Whether it is faster, and possible, that fprop and dgrad read a weight as it lies in the parameter (Conv1d::in_place),
// contiguous, from a multiple of 16 bytes on.
bool takes_in_place(const Conv1d& conv);

// Packed weights, or the parameter's (Conv1d::in_place). `prefetchable`: they are safe to prefetch before the grid dependency resolves, because between the
// kernel that wrote them and the convolution lies another kernel of the stream that triggers its dependent launch only
// after its own grid dependency synchronisation (kernels/cuda/common/launch.cuh), as all kernels of this folder do.
struct Weights {
  const void* packed;
  bool prefetchable;
};

// The rows of x; or those of two tensors side by side (Conv1d::first_channels).
struct Rows {
  const void* rows;
  const void* more = nullptr;
};
struct OutputRows {
  void* rows;
  void* more = nullptr;
};

// What the epilogue adds before it rounds; either may be null.
struct Addends {
  const void* bias;  // (channels of the output), in `bias_dtype`
  DType bias_dtype;  // float32 or the dtype of the tensors
  Rows residual;     // of the output's shape and dtype
};

// A normalisation by groups of `group` channels, Mish and FiLM after fprop (kernels/cuda/group_norm_mish).
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

// Sizes are such that `takes` accepts them; pointers are aligned to 16 bytes. Errors are the launch's own.
// In a captured graph they go before what other branches have waiting.
// A `workspace` has as many bytes as the function of that name says, and is read and written by the stream's kernels
// alone; `group`: of the normalisation after fprop, or 0.
int64_t fprop_workspace(const Conv1d& conv, int group);
int64_t dgrad_workspace(const Conv1d& conv);
cudaError_t fprop(const Conv1d& conv, const Rows& x, const Weights& weights, const Addends& addends, void* y,
                  void* workspace, cudaStream_t stream);
cudaError_t dgrad(const Conv1d& conv, const void* y, const Weights& weights, const Addends& addends,
                  const OutputRows& x, void* workspace, cudaStream_t stream);
// fprop of stride 1, and what a normalisation makes of it. `y`, which the normalisation's backward reads, may
// be null; `addends` has no residual. Where `normalises` says that the device's tiles hold whole groups.
bool normalises(const Conv1d& conv, int group);
// In the same launch, a shortcut: a convolution of one tap of the same input to as many channels, without a
// normalisation. Where `takes_shortcut` says that the device has a multiprocessor for each block.
struct Shortcut {
  Weights weights;
  Addends addends;
  void* out;  // null for none
};
bool takes_shortcut(const Conv1d& conv, int group);
cudaError_t fprop_normalised(const Conv1d& conv, const Rows& x, const Weights& weights, const Addends& addends, void* y,
                             const Normalisation& normalisation, const Shortcut& shortcut, void* workspace,
                             cudaStream_t stream);
// `gradient` is (d0, d1, taps) in `gradient_dtype`, float32 or the dtype of the tensors.
int64_t wgrad_workspace(const Conv1d& conv);
cudaError_t wgrad(const Conv1d& conv, const void* y, const Rows& x, void* gradient, DType gradient_dtype,
                  void* workspace, cudaStream_t stream);

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
  int parts = 1;      // of float32: two tf32 numbers, the second one's planes behind those of the first (weight_parts)
};
constexpr int kMaxPackings = 48;
struct Packings {
  Packing each[kMaxPackings];
  int count;
  const int* wanted = nullptr;  // on the device, one a weight: which to pack; null for all
};
cudaError_t pack_weights(DType source_dtype, DType dtype, const Packings& packings, cudaStream_t stream);
// Float32 weights of all their columns to (taps, d1, padded d0) of float32.
cudaError_t pack_weights_transposed(const Packings& packings, cudaStream_t stream);
// Change detection: wanted[w] says whether one of the ComparedElements (plans/conv1d/changes.h) of a weight differs
// from what `seen`, (count, ComparedElements::kMost), holds from the last call.
cudaError_t detect_changes(DType source_dtype, const Packings& packings, uint32_t* seen, int* wanted,
                           cudaStream_t stream);
// `count` rows of `channels` elements of 16 bits, or of float32, to rows of padded(channels).
cudaError_t pad_rows(const void* rows, int64_t count, int64_t channels, void* out, cudaStream_t stream,
                     DType dtype = DType::kFloat16);
// Rows of float32 to two planes of halves, (2, count, padded(channels)), and weights to theirs, which begin at `high`
// and `low`: `count` rows of `width` elements, packed in float32.
cudaError_t split_rows(const void* rows, int64_t count, int64_t channels, void* out, cudaStream_t stream);
cudaError_t split_weights(const void* packed, int64_t count, int64_t width, void* high, void* low, cudaStream_t stream);
// The same of two tensors' rows, one beside the other, or of their Mish.
cudaError_t join_rows(DType dtype, const void* rows, int64_t channels, const void* more, int64_t more_channels,
                      int64_t count, void* out, cudaStream_t stream, bool mish = false);
// grad[i] *= mish'(x[i]), of 16 bits. In a captured graph it goes before what other branches have waiting.
cudaError_t times_mish_slope(DType dtype, const void* x, int64_t count, void* grad, cudaStream_t stream);

}  // namespace dpa::kernels::conv1d
