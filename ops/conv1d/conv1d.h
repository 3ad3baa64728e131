// `dpa::conv1d`: a convolution, or a transposed one, that keeps its input's order in memory.
//
// 16-bit channels-last tensors take the GEMMs of kernels/cuda/conv1d, beside float32 weights, which is training in mixed
// precision, or weights of their own dtype; so do those of float32 where PyTorch's convolutions would
// multiply in TF32, on weights that are packed anew in each direction or read in place. Everything else takes
// PyTorch's convolution, on CUDA in channels-last order where the input is.
#pragma once
#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

/// Output, and the weight as the GEMMs read it: (taps, d0, d1 padded) in the input's dtype, or no elements where
/// PyTorch's convolution ran.
using Conv1dForward = std::tuple<Tensor, Tensor>;
/// Gradients of input, weight and bias; undefined where the mask is false.
using Conv1dGradients = std::tuple<Tensor, Tensor, Tensor>;
using Conv1dMask = std::array<bool, 3>;

void check_conv1d(const char* op, const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                  int64_t padding, bool transposed);
void check_conv1d_grad(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding,
                       bool transposed);
/// `packed` is what a forward of such arguments gives.
void check_conv1d_packed(const Tensor& packed, const Tensor& input, const Tensor& weight);

/// The length that a convolution gives.
c10::SymInt conv1d_length(const c10::SymInt& length, const c10::SymInt& taps, int64_t stride, int64_t padding,
                          bool transposed);

/// Whether the GEMMs' packed weight is made: a matter of dtypes, order, device, taps and stride alone, so that the
/// Meta kernel knows it. Sizes that the GEMMs do not take fall back later.
bool conv1d_packs(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding);

/// Whether PyTorch multiplies float32 convolutions on CUDA in TF32 now: `torch.backends.cudnn`'s settings.
bool convolves_in_tf32();
/// Whether the GEMMs may do so for these tensors. Sizes that they do not take fall back later.
bool conv1d_in_tf32(const Tensor& input, const Tensor& weight, int64_t stride, int64_t padding);

/// Through the dispatcher.
inline constexpr Op<"conv1d", Tensor(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                     int64_t stride, int64_t padding, bool transposed)>
    conv1d;
inline constexpr Op<"conv1d_forward",
                    Conv1dForward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                                  int64_t padding, bool transposed)>
    conv1d_forward;
inline constexpr Op<"conv1d_backward", Conv1dGradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                       const OptionalTensor& bias, const Tensor& packed, int64_t stride,
                                                       int64_t padding, bool transposed, Conv1dMask output_mask)>
    conv1d_backward;

/// The op and its backward in ATen ops, differentiable to any order.
Tensor conv1d_formula(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t stride,
                      int64_t padding, bool transposed);
Conv1dGradients conv1d_backward_formula(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                        const OptionalTensor& bias, int64_t stride, int64_t padding, bool transposed,
                                        Conv1dMask output_mask);

}  // namespace dpa
