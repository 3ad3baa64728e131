// Where the GEMMs of kernels/cuda/conv1d and the channels-last normalisation serve every layer of a block, its kernels
// run in a chain (chain_cuda.h). Everything else is the library's ops (formula.cpp).
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common/last_use.h"
#include "ops/pack_ahead/pack_ahead.h"
#include "ops/residual_block1d/chain_cuda.h"
#include "ops/residual_block1d/residual_block1d.h"

namespace dpa {
namespace {

std::vector<Tensor> weights_of(const ResidualBlock& block) {
  std::vector<Tensor> weights{block[kConv1Weight], block[kConv2Weight]};
  if (block[kResidualWeight].defined()) weights.push_back(block[kResidualWeight]);
  return weights;
}

/// The block, with its skip as a part of the input where the kernels do not read, and in the backward write, two.
ResidualBlock as_taken(const ResidualBlock& block, bool backward) {
  if (!block[kSkip].defined()) return block;
  const int64_t own = block[kInput].size(1), more = block[kSkip].size(1);
  const bool whole_vectors = own % 8 == 0 && more % 8 == 0;
  const bool takes_two =
      block[kResidualWeight].defined() && (backward ? gemm::backward_takes_two(own, more) : whole_vectors);
  return takes_two ? block : join_skip(block);
}

BlockForward run(const ResidualBlock& given, bool keep) {
  check_residual_block1d(given);
  const c10::cuda::CUDAGuard guard(given[kInput].device());
  auto [packed1, packed2] = packed_ahead(weights_of(given), given[kInput].scalar_type());
  const auto block = as_taken(given, /*backward=*/false);
  const bool tf32 = block_in_tf32(block);
  if (!tf32 && !block_packs(block)) return residual_block1d_of_ops(block);
  const auto packed = [&](int64_t size) { return at::empty({size}, block[kInput].options()); };
  for (Tensor* t : {&packed1, &packed2})
    if (!t->defined()) *t = packed(0);
  const auto sizes = packed_sizes(block, /*transposed=*/false);
  const bool fresh = packed1.numel() != sizes[0] || packed2.numel() != sizes[1];
  if (fresh) packed1 = packed(sizes[0]), packed2 = packed(sizes[1]);
  if (const Chain chain(block, places(block, packed1, packed2)); chain.serves()) {
    const auto [out, conv1, activation, conv2] = chain.forward(keep, fresh ? kFresh : kPackedAhead);
    if (tf32) return {out, conv1, activation, conv2, packed(0), packed(0)};  // the backward wants them transposed
    return {out, conv1, activation, conv2, packed1, packed2};
  }
  if (tf32) return residual_block1d_of_ops(block);
  const auto [out, conv1, activation, conv2, none1, none2] = residual_block1d_of_ops(block);
  if (keep && fresh) pack_weights(block, places(block, packed1, packed2));
  return {out, conv1, activation, conv2, packed1, packed2};
}

/// What a forward saved as the kernels read it: hooks may bring back other strides and alignments. A tensor that needs
/// no copy gets no second reference (ops/common/last_use.h).
void make_plain(BlockSaved& saved) {
  for (Tensor* t : {&saved.conv1, &saved.activation, &saved.conv2}) *t = padded_rows(*t);
  for (Tensor* t : {&saved.packed1, &saved.packed2})
    if (!t->is_contiguous() || !is_aligned(*t)) *t = t->clone(at::MemoryFormat::Contiguous);
}

BlockForward residual_block1d_forward_cuda(DPA_BLOCK_PARAMETERS) { return run(DPA_BLOCK, /*keep=*/true); }

Tensor residual_block1d_cuda(DPA_BLOCK_PARAMETERS) { return std::get<0>(run(DPA_BLOCK, /*keep=*/false)); }

BlockGradientTuple residual_block1d_backward_cuda(const Tensor& grad, DPA_BLOCK_PARAMETERS, const Tensor& conv1,
                                                  const Tensor& activation, const Tensor& conv2, const Tensor& packed1,
                                                  const Tensor& packed2, BlockMask mask) {
  const auto given = DPA_BLOCK;
  check_residual_block1d(given);
  check_block_saved(given, grad, {conv1, activation, conv2, packed1, packed2});
  const c10::cuda::CUDAGuard guard(input.device());
  const auto block = as_taken(given, /*backward=*/true);
  const bool apart = block[kSkip].defined() || !given[kSkip].defined();
  const auto wanted = apart ? mask : join_skip(mask);
  const auto result = [&](BlockGradients&& gradients) {
    return as_tuple(apart ? std::move(gradients) : part_skip(std::move(gradients), given, mask));
  };
  const bool later = joins_later(grad, kConv1Weight, kScale);
  BlockSaved saved{conv1, activation, conv2, packed1, LastUse::take(packed2)};
  // The forward says whether it packed. An earlier try that failed has taken packed2 with it.
  if (packed1.numel() > 0 && saved.packed2.defined() && saved.packed2.numel() > 0) {
    const auto plain = with_plain_vectors(block);
    if (Chain(plain, places(plain, packed1, saved.packed2)).fits()) {
      make_plain(saved);
      return result(Chain(plain, places(plain, saved.packed1, saved.packed2))
                        .backward(grad, saved, wanted, /*fresh=*/false, later));
    }
  } else if (packed1.numel() == 0 && block_in_tf32(block)) {
    const auto plain = with_contiguous_weights(with_plain_vectors(block));
    const auto sizes = packed_sizes(plain, /*transposed=*/true);
    saved.packed1 = at::empty({sizes[0]}, input.options()), saved.packed2 = at::empty({sizes[1]}, input.options());
    const Chain chain(plain, places(plain, saved.packed1, saved.packed2, /*transposed=*/true));
    if (chain.fits()) {
      make_plain(saved);
      return result(chain.backward(grad, saved, wanted, /*fresh=*/true, later));
    }
    saved.packed1.reset(), saved.packed2.reset();
  }
  return result(residual_block1d_backward_of_ops(grad, block, saved, wanted));
}

}  // namespace

Tensor residual_block1d_on_packed(const ResidualBlock& given, const Tensor& packed) {
  const auto block = as_taken(given, /*backward=*/false);
  const Chain chain(block, places(block, packed), /*alone=*/true);
  return chain.serves() ? chain.forward(/*keep=*/false, kPackedBefore)[0] : Tensor();
}

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("residual_block1d", &residual_block1d_cuda);
  m.impl("residual_block1d_forward", &residual_block1d_forward_cuda);
  m.impl("residual_block1d_backward", &residual_block1d_backward_cuda);
}

}  // namespace dpa
