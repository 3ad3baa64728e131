// `dpa::batch_norm_act`: relu(batch_norm(input) * weight + bias + residual) in training, the ReLU optional.
//
// Statistics are of the batch; `batch_norm_act_forward` returns them too, for running ones. The output has the order of
// the input, contiguous or a channels-last image (ops/common/strides.h), and so has the input's gradient. weight and
// bias may be float32 beside 16-bit activations, so that training casts no parameters.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// The output, and each channel's mean and biased variance in the dtype of accumulation.
using BatchNormOutputs = std::tuple<Tensor, Tensor, Tensor>;
/// Gradients of input, weight, bias and residual; undefined where the mask is false.
using BatchNormGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using BatchNormMask = std::array<bool, 4>;

void check_batch_norm_act(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                          const OptionalTensor& residual);
/// The check of the backward beyond that of the forward's arguments.
void check_batch_norm_act_backward(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& var);

/// Through the dispatcher.
inline constexpr Op<"batch_norm_act",
                    Tensor(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                           const OptionalTensor& residual, bool relu)>
    batch_norm_act;
inline constexpr Op<"batch_norm_act_forward",
                    BatchNormOutputs(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                     double eps, const OptionalTensor& residual, bool relu)>
    batch_norm_act_forward;
inline constexpr Op<"batch_norm_act_backward",
                    BatchNormGradients(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& var,
                                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                       const OptionalTensor& residual, bool relu, BatchNormMask output_mask)>
    batch_norm_act_backward;

/// The ops in ATen ops, checked, differentiable to any order: the backward takes its statistics from the input.
BatchNormOutputs batch_norm_act_forward_formula(const Tensor& input, const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps, const OptionalTensor& residual,
                                                bool relu);
BatchNormGradients batch_norm_act_backward_formula(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                   const Tensor& var, const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps,
                                                   const OptionalTensor& residual, bool relu,
                                                   BatchNormMask output_mask);

/// The same as kernels: empty images too are in the order of the input.
BatchNormOutputs batch_norm_act_by_aten(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                        double eps, const OptionalTensor& residual, bool relu);
BatchNormGradients batch_norm_act_backward_by_aten(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                   const Tensor& var, const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps,
                                                   const OptionalTensor& residual, bool relu,
                                                   BatchNormMask output_mask);

}  // namespace dpa
