#include <torch/library.h>

#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {
namespace {

BlockForward residual_block1d_forward_cpu(DPA_BLOCK_PARAMETERS) { return residual_block1d_of_ops(DPA_BLOCK); }

Tensor residual_block1d_cpu(DPA_BLOCK_PARAMETERS) { return std::get<0>(residual_block1d_of_ops(DPA_BLOCK)); }

BlockGradientTuple residual_block1d_backward_cpu(const Tensor& grad, DPA_BLOCK_PARAMETERS, const Tensor& conv1,
                                                 const Tensor& activation, const Tensor& conv2, const Tensor& packed1,
                                                 const Tensor& packed2, BlockMask mask) {
  const auto block = DPA_BLOCK;
  const BlockSaved saved{conv1, activation, conv2, packed1, packed2};
  check_residual_block1d(block);
  check_block_saved(block, grad, saved);
  return as_tuple(residual_block1d_backward_of_ops(grad, block, saved, mask));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("residual_block1d", &residual_block1d_cpu);
  m.impl("residual_block1d_forward", &residual_block1d_forward_cpu);
  m.impl("residual_block1d_backward", &residual_block1d_backward_cpu);
}

}  // namespace dpa
