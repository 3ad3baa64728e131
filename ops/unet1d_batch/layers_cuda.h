// The layers of `dpa::unet1d_batch` on packed weights, a launch or two each (kernels/cuda/conv1d), between them
// activations of 16 bits, or of float32 as pairs of float16 numbers.
#pragma once
#include <ATen/ops/empty.h>

#include "kernels/cuda/common/clusters.h"
#include "kernels/cuda/unet1d_batch/unet1d_batch.h"
#include "ops/common/cuda.h"
#include "ops/conv1d/conv1d.h"
#include "ops/conv1d/gemm.h"
#include "ops/group_norm_mish/channels_last.h"
#include "ops/group_norm_mish/group_norm_mish.h"
#include "ops/unet1d_batch/unet1d_batch.h"

namespace dpa::unet1d_batch {

namespace rows = kernels::unet1d_batch;

constexpr double kEps = 1e-5;  // of the GroupNorms

/// Between layers, (B, C, T) in channels-last order. In float32 also as GEMMs read it, in planes of halves, where
/// whoever made it has written those; `values` may be undefined then.
struct Activation {
  Tensor values, halves;
};

/// The network's layers on packed weights. Activations are made here and read by what follows on one stream.
class Layers {
 public:
  Layers(const BatchPlan& plan, at::TensorList parameters, const Tensor& packed)
      : plan_(plan), parameters_(parameters), packed_(packed), stream_(c10::cuda::getCurrentCUDAStream()) {
    dtype_ = kernel_dtype(packed.scalar_type()), halves_ = dtype_ == kernels::DType::kFloat32;
    parameter_dtype_ = kernel_dtype(parameters[0].scalar_type());
  }

 protected:
  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, packed_.options()); }
  const Tensor& parameter(int place) const { return parameters_[place]; }
  const void* packed(int64_t offset) const {
    return static_cast<const char*>(packed_.const_data_ptr()) + offset * packed_.element_size();
  }
  /// Rows of so many channels as the GEMMs read them: in float32, planes of halves.
  Tensor operand(const Tensor& rows, int64_t channels) const {
    if (!halves_) return rows;
    const int64_t count = rows.numel() / channels;
    auto out = at::empty({2, count, gemm::padded(channels)}, packed_.options().dtype(at::kHalf));
    C10_CUDA_CHECK(gemm::split_rows(rows.const_data_ptr(), count, channels, out.mutable_data_ptr(), stream_));
    return out;
  }
  Tensor operand(const Tensor& x) const { return operand(x, x.size(1)); }
  Tensor operand(const Activation& x) const { return x.halves.defined() ? x.halves : operand(x.values); }
  /// Packed weights are older than the kernel that prepares the inputs, which every GEMM follows.
  gemm::Weights weights(int64_t offset) const { return {packed(offset), /*prefetchable=*/true}; }

  /// Contiguous, in float32 or the dtype of the activations.
  Tensor as_input(const Tensor& given) const {
    return (given.scalar_type() == packed_.scalar_type() ? given : given.to(at::kFloat)).contiguous();
  }
  /// A convolution, or a transposed one (`dgrad`), of operands by packed weights. `more`: the further channels of two
  /// tensors side by side, or undefined.
  void multiply(bool dgrad, gemm::Conv1d conv, const Tensor& x, const Tensor& more, int64_t packed_at, const void* bias,
                kernels::DType bias_dtype, const Tensor& out) const {
    conv.halves = halves_;
    const gemm::Rows rows{x.const_data_ptr(), data_or_null(more)};
    const auto own = convolve(dgrad, conv, rows, weights(packed_at), {bias, bias_dtype, {}}, out);
  }
  void multiply(bool dgrad, const gemm::Conv1d& conv, const Tensor& x, const BatchPlan::Layer& layer,
                const Tensor& out) const {
    multiply(dgrad, conv, x, Tensor(), layer.packed, parameter(layer.bias).const_data_ptr(), parameter_dtype_, out);
  }

  /// Rows (n, channels padded) times a matrix: the rows are the times of one sample.
  Tensor dense(const Tensor& x, int64_t in, int64_t out_channels, int64_t packed_at, const void* bias,
               kernels::DType bias_dtype) const {
    const int64_t n = x.size(0);
    const gemm::Conv1d conv{dtype_, 1, n, out_channels, n, in, /*taps=*/1, /*stride=*/1, /*padding=*/0};
    auto out = empty({n, out_channels});
    multiply(/*dgrad=*/false, conv, operand(x), Tensor(), packed_at, bias, bias_dtype, out);
    return out;
  }
  Tensor dense(const Tensor& x, const BatchPlan::Layer& layer) const {
    const auto& shape = plan_.shapes[layer.weight];
    return dense(x, shape[1], shape[0], layer.packed, parameter(layer.bias).const_data_ptr(), parameter_dtype_);
  }

  /// Rows of `width`: Mish of first's row, which may be one for all, then of second's, which may be undefined.
  Tensor activate(const Tensor& first, const Tensor& second, int64_t batch, int64_t width) const {
    const int64_t channels = first.size(1) + (second.defined() ? second.size(1) : 0);
    auto out = empty({batch, width});
    C10_CUDA_CHECK(
        rows::condition({dtype_, second.defined() ? kernel_dtype(second.scalar_type()) : dtype_, batch,
                         first.const_data_ptr(), first.size(0), static_cast<int>(first.size(1)), data_or_null(second),
                         static_cast<int>(channels - first.size(1)), out.mutable_data_ptr(), static_cast<int>(width)},
                        stream_));
    return out;
  }

  int64_t packed_size(int place) const {
    const auto& shape = plan_.shapes[place];
    return shape[2] * shape[0] * gemm::padded(shape[1]);
  }
  /// `x` and `more`, which may be undefined, are operands; of the first of both so many channels.
  Tensor exact_conv(const Tensor& x, const Tensor& more, int64_t first_channels, int64_t packed_at,
                    const Tensor& weight, const Tensor& bias) const {
    const int64_t length = x.size(1) / batch_;
    const int taps = static_cast<int>(weight.size(2));
    gemm::Conv1d conv{dtype_,         batch_, length, weight.size(0), length,
                      weight.size(1), taps,   1,      taps / 2,       /*alone=*/true};
    conv.first_channels = first_channels;
    auto out = empty_in_order(batch_, weight.size(0), length, /*channels_last=*/true, packed_.options());
    multiply(/*dgrad=*/false, conv, x, more, packed_at, bias.const_data_ptr(), parameter_dtype_, out);
    return out;
  }
  enum class Wanted { kValues, kHalves, kBoth };
  /// Gives values in any case where no plan fits.
  Activation exact_norm(const Tensor& x, int64_t groups, const Tensor& weight, const Tensor& bias, const Tensor& scale,
                        const Tensor& shift, const Tensor& residual, Wanted wanted) const {
    const kernels::NormShape shape{batch_, x.size(1), x.size(2), groups};
    auto args = norm_arguments(dtype_, parameter_dtype_, shape,
                               kernels::teams(shape, /*element_size=*/4, kernels::has_clusters()), kEps, x, weight,
                               bias, scale, shift);
    if (!args.plan.fits())
      return {group_norm_mish_cuda(x, groups, weight, bias, kEps, as_optional(scale), as_optional(shift),
                                   as_optional(residual)),
              {}};
    Activation out;
    if (wanted != Wanted::kHalves)
      out.values = empty_in_order(batch_, x.size(1), x.size(2), /*channels_last=*/true, packed_.options());
    if (wanted != Wanted::kValues)
      out.halves = at::empty({2, batch_ * x.size(2), x.size(1)}, packed_.options().dtype(at::kHalf));
    args.residual = data_or_null(residual), args.out = mutable_data_or_null(out.values);
    args.halves = mutable_data_or_null(out.halves);
    C10_CUDA_CHECK(kernels::channels_last::forward(args, stream_));
    return out;
  }

  /// Halves the time by a convolution of 3 taps, or doubles it by a transposed one of 4.
  Activation resample(const Activation& x, const BatchPlan::Layer& layer, bool up) const {
    const auto& shape = plan_.shapes[layer.weight];
    const int64_t length = x.values.size(2), other = up ? 2 * length : (length - 1) / 2 + 1;
    const gemm::Conv1d conv{
        dtype_,        batch_, up ? length : other, shape[0], up ? other : length, shape[1], static_cast<int>(shape[2]),
        /*stride=*/2,
        /*padding=*/1,
        /*alone=*/true};
    auto out = empty_in_order(batch_, shape[up ? 1 : 0], other, /*channels_last=*/true, packed_.options());
    multiply(/*dgrad=*/up, conv, operand(x), layer, out);
    return {out, {}};
  }

  const BatchPlan& plan_;
  at::TensorList parameters_;
  const Tensor packed_;
  c10::cuda::CUDAStream stream_;
  kernels::DType dtype_, parameter_dtype_;
  bool halves_;
  int64_t batch_ = 0;
};

}  // namespace dpa::unet1d_batch
