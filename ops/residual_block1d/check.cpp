#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {
namespace {

constexpr const char* kOp = "residual_block1d";

void check_weight(const char* name, const Tensor& weight, const c10::SymInt& in, const Tensor& input) {
  check_parameter_type(kOp, name, weight, input);
  DPA_CHECK(weight.dim() == 3 && weight.sym_size(1) == in, kOp,
            c10::str(name, " must have shape (C_out, C_in, k) with C_in = ", in), weight.sym_sizes());
  check_convolution(kOp, name, weight);
  DPA_CHECK(weight.sym_size(2) % 2 == 1, kOp, c10::str(name, " must have an odd kernel size, so that the length stays"),
            weight.sym_size(2));
}

void check_channels(const char* name, const Tensor& parameter, const c10::SymInt& channels, const Tensor& input) {
  DPA_CHECK(parameter.defined(), kOp, c10::str(name, " must be a tensor"), "None");
  dpa::check_parameter(kOp, name, parameter, channels, "(C_out)", input);
}

}  // namespace

void check_residual_block1d(const ResidualBlock& block) {
  const Tensor& input = block[kInput];
  check_floating(kOp, "input", input);
  DPA_CHECK(input.dim() == 3, kOp, "input must have 3 dimensions (B, C_in, T)", "shape ", input.sym_sizes());
  const auto batch = input.sym_size(0), length = input.sym_size(2);
  auto in = input.sym_size(1);
  DPA_CHECK(length >= 1, kOp, "input must be long enough for one output", "length ", length);
  if (const Tensor& skip = block[kSkip]; skip.defined()) {
    DPA_CHECK(skip.dim() == 3, kOp, "skip must have 3 dimensions (B, C_skip, T)", "shape ", skip.sym_sizes());
    check_shape(kOp, "skip", skip, {batch, skip.sym_size(1), length}, "(B, C_skip, T)", "input", input);
    in = in + skip.sym_size(1);
  }
  check_weight("conv1_weight", block[kConv1Weight], in, input);
  const auto channels = block[kConv1Weight].sym_size(0);
  check_weight("conv2_weight", block[kConv2Weight], channels, input);
  DPA_CHECK(block[kConv2Weight].sym_size(0) == channels, kOp,
            c10::str("conv2_weight must have as many output channels as conv1_weight, ", channels),
            block[kConv2Weight].sym_size(0));
  DPA_CHECK(block.num_groups > 0 && channels % block.num_groups == 0, kOp,
            c10::str("num_groups must be positive and divide the ", channels, " output channels"), block.num_groups);
  DPA_CHECK(block.eps >= 0, kOp, "eps must be at least 0", block.eps);
  check_channels("conv1_bias", block[kConv1Bias], channels, input);
  check_channels("gn1_weight", block[kGn1Weight], channels, input);
  check_channels("gn1_bias", block[kGn1Bias], channels, input);
  check_channels("conv2_bias", block[kConv2Bias], channels, input);
  check_channels("gn2_weight", block[kGn2Weight], channels, input);
  check_channels("gn2_bias", block[kGn2Bias], channels, input);
  if (block[kResidualWeight].defined()) {
    check_weight("residual_weight", block[kResidualWeight], in, input);
    DPA_CHECK(block[kResidualWeight].sym_size(0) == channels && block[kResidualWeight].sym_size(2) == 1, kOp,
              c10::str("residual_weight must have shape (C_out, C_in, 1) with C_out = ", channels),
              block[kResidualWeight].sym_sizes());
  } else {
    DPA_CHECK(in == channels, kOp,
              c10::str("residual_weight must be given where the ", in, " input channels are not the output's"),
              channels);
    DPA_CHECK(!block[kResidualBias].defined(), kOp, "residual_bias must be None where residual_weight is", "a tensor");
  }
  dpa::check_parameter(kOp, "residual_bias", block.optional(kResidualBias), channels, "(C_out)", input);
  check_shape(kOp, "scale", block.optional(kScale), {batch, channels}, "(B, C_out)", "input", input);
  check_shape(kOp, "shift", block.optional(kShift), {batch, channels}, "(B, C_out)", "input", input);
}

void check_block_saved(const ResidualBlock& block, const Tensor& grad, const BlockSaved& saved) {
  constexpr const char* op = "residual_block1d_backward";
  const Tensor& input = block[kInput];
  const c10::SymInt sizes[] = {input.sym_size(0), block[kConv1Weight].sym_size(0), input.sym_size(2)};
  const auto check = [&](const char* name, const Tensor& tensor) {
    check_shape(op, name, tensor, sizes, "(B, C_out, T)", "input", input);
  };
  check("grad", grad), check("conv1", saved.conv1), check("activation", saved.activation), check("conv2", saved.conv2);
  const auto check_packed = [&](const char* name, const Tensor& packed, const c10::SymInt& size) {
    if (packed.defined() && packed.dim() == 1 && packed.sym_size(0) == 0) return;
    check_shape(op, name, packed, {size}, "(0) or of the weights' size", "input", input);
  };
  check_packed("packed1", saved.packed1, packed1_size(block));
  if (saved.packed2.defined()) check_packed("packed2", saved.packed2, packed_size(block[kConv2Weight]));
}

}  // namespace dpa
