// `dpa::conv1d` and its backward in ATen ops: what forward-mode AD and second derivatives differentiate, and what runs
// wherever the GEMMs do not.
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "ops/common/strides.h"
#include "ops/conv1d/conv1d.h"

namespace dpa {
namespace {

/// On CUDA a channels-last tensor goes as an image of height 1, for which cuDNN has kernels in that order.
bool as_image(const Tensor& input) { return input.is_cuda() && is_channels_last(input); }

/// PyTorch's strided convolutions in bfloat16 on CPUs that have instructions for it leave those elements of the
/// weight's gradient unwritten whose taps meet nothing but padding; in float32 they do not.
at::ScalarType arithmetic(const Tensor& input, int64_t stride) {
  const auto type = input.scalar_type();
  return input.is_cpu() && type == at::kBFloat16 && stride > 1 ? at::kFloat : type;
}

Tensor image(const Tensor& tensor) { return tensor.unsqueeze(2); }
/// Channels-last, without a memory format, which vmap does not take.
Tensor image_weight(const Tensor& weight) { return image(weight.transpose(1, 2).contiguous().transpose(1, 2)); }

}  // namespace

Tensor conv1d_formula(const Tensor& input, const Tensor& weight_, const OptionalTensor& bias_, int64_t stride,
                      int64_t padding, bool transposed) {
  const auto type = input.scalar_type(), wide = arithmetic(input, stride);
  const auto weight = weight_.to(type).to(wide);
  const auto bias = bias_.has_value() ? OptionalTensor(bias_->to(type).to(wide)) : std::nullopt;
  if (as_image(input))
    return at::convolution(image(input), image_weight(weight), bias, {1, stride}, {0, padding}, {1, 1}, transposed,
                           {0, 0}, 1)
        .squeeze(2);
  return at::convolution(input.to(wide), weight, bias, {stride}, {padding}, {1}, transposed, {0}, 1).to(type);
}

Conv1dGradients conv1d_backward_formula(const Tensor& grad, const Tensor& input, const Tensor& weight_,
                                        const OptionalTensor& bias, int64_t stride, int64_t padding, bool transposed,
                                        Conv1dMask mask) {
  const auto type = input.scalar_type(), wide = arithmetic(input, stride);
  const auto weight = weight_.to(type).to(wide);
  const c10::SymInt channels = weight.sym_size(transposed ? 1 : 0);
  Tensor grad_input, grad_weight, grad_bias;
  if (as_image(input)) {
    std::tie(grad_input, grad_weight, grad_bias) =
        at::convolution_backward_symint(image(grad), image(input), image_weight(weight), c10::SymIntArrayRef(channels),
                                        {1, stride}, {0, padding}, {1, 1}, transposed, {0, 0}, 1, mask);
    if (mask[0]) grad_input = grad_input.squeeze(2);
    if (mask[1]) grad_weight = grad_weight.squeeze(2);
  } else {
    std::tie(grad_input, grad_weight, grad_bias) =
        at::convolution_backward_symint(grad.to(wide), input.to(wide), weight, c10::SymIntArrayRef(channels), {stride},
                                        {padding}, {1}, transposed, {0}, 1, mask);
    if (mask[0]) grad_input = grad_input.to(type);
  }
  if (mask[1]) grad_weight = grad_weight.to(weight_.scalar_type());
  if (mask[2] && bias.has_value()) grad_bias = grad_bias.to(bias->scalar_type());
  // Some of PyTorch's convolutions give more than the mask says.
  return {mask[0] ? grad_input : Tensor(), mask[1] ? grad_weight : Tensor(), mask[2] ? grad_bias : Tensor()};
}

}  // namespace dpa
