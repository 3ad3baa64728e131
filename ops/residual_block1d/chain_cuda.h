// A block's kernels, launched one after the other on buffers of this file's own: no dispatcher, no autograd, one packing
// for all weights; in a captured graph on branches. Only files built with CUDA include this.
#pragma once
#include <ATen/ops/empty.h>

#include <optional>

#include "kernels/cuda/common/clusters.h"
#include "ops/group_norm_mish/channels_last.h"
#include "ops/residual_block1d/residual_block1d.h"
#include "ops/residual_block1d/weights_cuda.h"

namespace dpa {

namespace norms = kernels::channels_last;

/// Of a forward: yet to be packed; packed by a branch that has just joined, or all read in place; or packed by an earlier
/// kernel than the last.
enum PackedWeights { kFresh, kPackedAhead, kPackedBefore };

/// A block whose layers the kernels all take.
class Chain {
 public:
  /// `alone`: nothing runs beside it.
  explicit Chain(const ResidualBlock& block, const WeightPlaces& packed, bool alone = false)
      : block_(block),
        packed_(packed),
        alone_(alone),
        stream_(c10::cuda::getCurrentCUDAStream()),
        type_(block[kInput].scalar_type()),
        batch_(block[kInput].size(0)),
        length_(block[kInput].size(2)),
        channels_(block[kConv1Weight].size(0)) {
    shape_ = {batch_, channels_, length_, block.num_groups};
    const int size = static_cast<int>(block[kInput].element_size());
    plan_ = block[kInput].numel() > 0 ? kernels::teams(shape_, size, kernels::has_clusters()) : kernels::NormPlan{};
  }

  /// Whether the kernels take such sizes and dtypes, whatever the strides.
  bool fits() const {
    if (channels_ % 8 != 0) return false;  // rows of activations between the kernels
    if (!gemm::supported() || !plan_.fits()) return false;
    for (const auto slot : kBlockWeights)
      if (block_[slot].defined() && !gemm::takes(convolution(slot))) return false;
    for (const auto slot : kBlockVectors)
      if (block_[slot].defined() && block_[slot].scalar_type() != block_[kConv1Weight].scalar_type()) return false;
    return true;
  }
  /// A forward packs weights, or reads them in place as it does the other parameters.
  bool serves() const {
    for (const auto slot : kBlockWeights)
      if (block_[slot].defined() && !block_[slot].is_contiguous()) return false;
    for (const auto slot : kBlockVectors)
      if (block_[slot].defined() && !(block_[slot].is_contiguous() && is_aligned(block_[slot]))) return false;
    return fits();
  }

  /// Output, conv1, activation and conv2, of which `keep` keeps what the backward reads: else conv1 and conv2 stay
  /// undefined.
  std::array<Tensor, 4> forward(bool keep, PackedWeights weights) const {
    const bool fresh = weights == kFresh, prefetchable = weights == kPackedBefore;
    Branches packing;
    if (fresh) pack(packing);
    const auto x = padded_rows(block_[kInput]), skip = skip_rows();
    const gemm::Rows input = side_by_side(x, skip);
    const auto activated = activation(), out = activation();
    Tensor conv1 = keep ? activation() : Tensor(), conv2 = keep ? activation() : Tensor();
    const bool convolves = block_[kResidualWeight].defined();
    // Without a convolution the channels are the output's, of whole vectors.
    const auto residual = convolves ? activation() : x;
    const bool beside = convolves && takes_shortcut();
    // Beside a convolution that reads its weights in place, the residual one is a branch of a captured graph.
    std::optional<Branches> branch;
    if (convolves && !beside && reads_in_place(kConv1Weight)) {
      branch.emplace().fork();
      convolve({kResidualWeight, kResidualBias, prefetchable}, input, residual, &*branch);
    }
    layer({kConv1Weight, kConv1Bias, prefetchable}, input, conv1, Tensor(), first_norm(conv1), activated,
          beside ? residual : Tensor());
    if (convolves && !beside && !branch) convolve({kResidualWeight, kResidualBias, true}, input, residual);
    if (fresh) packing.join();
    if (branch) branch->join();
    const bool before = !fresh || !packing.apart() || reads_in_place(kConv2Weight);  // the first convolution
    layer({kConv2Weight, kConv2Bias, before}, side_by_side(activated), conv2, residual, second_norm(conv2), out);
    return {out, conv1, activated, conv2};
  }

  /// What the parameters' gradients need goes to branches beside the way to the input's gradient, which comes first
  /// wherever both are ready: it is the longer one. `saved.packed2` goes when it has been read.
  ///
  /// `fresh`: the weights are yet to be packed, transposed; in a graph beside the kernels before their convolution.
  /// `later`: the block before joins what is left of the branches.
  BlockGradients backward(const Tensor& grad_, BlockSaved& saved, const BlockMask& mask, bool fresh, bool later) const {
    BlockGradients to;
    const auto grad = padded_rows(grad_), x = padded_rows(block_[kInput]), skip = skip_rows();
    const gemm::Rows input = side_by_side(x, skip);
    const bool of_input = mask[kInput] || mask[kSkip];
    const auto scratch = at::empty({2, batch_ * length_ * channels_}, grad.options());
    const auto partials = at::empty({2, 3, slices(shape_, plan_), channels_}, grad.options().dtype(at::kFloat));
    const auto part = [&](int i) { return behind(scratch, i * scratch.size(1)); };
    // The first normalisation's teams have read their groups before they write them.
    void *grad_conv2 = part(0), *grad_activation = part(1), *grad_conv1 = grad_activation;
    gemm::Rows through = side_by_side(grad);
    const bool convolves = block_[kResidualWeight].defined() && of_input;
    const auto allocate_inputs = [&] {
      to[kInput] = input_like(kInput);
      if (skip.defined()) to[kSkip] = input_like(kSkip);
      return gemm::OutputRows{to[kInput].mutable_data_ptr(), mutable_data_or_null(to[kSkip])};
    };
    gemm::OutputRows grad_input{};
    Branches parameters, beside, packing;
    parameters.fork();
    if (fresh) packing.fork(), pack_transposed(kConv2Weight, packing.side());
    if (convolves) beside.fork();
    normalise_back(second_norm(saved.conv2), through.rows, grad_conv2, kSecond, mask, partials[0], to);
    if (convolves) {
      grad_input = allocate_inputs();
      void* const between = workspace_back(kResidualWeight);
      beside.fork_for_fills();
      if (fresh) pack_transposed(kResidualWeight, beside.side());
      convolve_back(kResidualWeight, !fresh, through.rows, {}, grad_input, between, beside.side());
      through = {grad_input.rows, grad_input.more};
    }
    residual_back(grad, input, mask, to, parameters);
    parameters.fork();
    if (fresh) packing.join();
    convolve_back(kConv2Weight, !fresh, grad_conv2, {}, {grad_activation}, workspace_back(kConv2Weight), stream_);
    if (fresh && of_input) pack_transposed(kConv1Weight, packing.side());
    weight_back(kConv2Weight, grad_conv2, side_by_side(saved.activation), mask, to, parameters);
    // What is placed there from here on is written after the GEMM that read it: the next fork follows that.
    saved.packed2.reset();
    normalise_back(first_norm(saved.conv1), grad_activation, grad_conv1, kFirst, mask, partials[1], to);
    parameters.fork();
    if (convolves) beside.join();
    if (fresh) packing.join();
    // The epilogue adds an element of what the residual convolution makes, and stores the sum in its place.
    if (of_input && !convolves) grad_input = allocate_inputs();
    if (of_input)
      convolve_back(kConv1Weight, !fresh || reads_in_place(kConv1Weight), grad_conv1, through, grad_input,
                    workspace_back(kConv1Weight), stream_);
    add_slices(partials, mask, to, parameters);
    weight_back(kConv1Weight, grad_conv1, input, mask, to, parameters);
    Unjoined::join();
    if (later) {
      for (const auto& tensor : {grad, x, skip, scratch, partials, saved.activation}) kept_.push_back(tensor);
      Unjoined::hold(parameters, kept_, at::ArrayRef<Tensor>(to).slice(kConv1Weight, kScale - kConv1Weight));
    } else {
      parameters.join();
    }
    for (const auto slot : {kInput, kSkip})
      if (!mask[slot]) to[slot] = Tensor();
    return to;
  }

 private:
  gemm::Conv1d convolution(BlockSlot weight) const {
    auto conv = same_length(block_[weight], type_, batch_, length_);
    conv.alone = alone_;
    if (block_[kSkip].defined() && weight != kConv2Weight) conv.first_channels = block_[kInput].size(1);
    conv.in_place = reads_in_place(weight);
    return conv;
  }
  bool reads_in_place(BlockSlot weight) const { return !alone_ && dpa::reads_in_place(block_, weight); }
  Tensor activation() const {
    return empty_in_order(batch_, channels_, length_, /*channels_last=*/true, block_[kInput].options());
  }
  Tensor input_like(BlockSlot slot) const {
    return empty_in_order(batch_, block_[slot].size(1), length_, /*channels_last=*/true, block_[kInput].options());
  }
  Tensor skip_rows() const { return block_[kSkip].defined() ? padded_rows(block_[kSkip]) : Tensor(); }
  static gemm::Rows side_by_side(const Tensor& x, const Tensor& more = {}) {
    return {x.const_data_ptr(), data_or_null(more)};
  }

  void pack(std::initializer_list<BlockSlot> weights, c10::cuda::CUDAStream stream) const {
    gemm::Packings packings{};
    for (const auto slot : weights)
      if (block_[slot].defined() && !reads_in_place(slot))
        packings.each[packings.count++] = packing(block_[slot], packed_[slot], type_);
    if (packings.count == 0) return;
    C10_CUDA_CHECK(
        gemm::pack_weights(kernel_dtype(block_[kConv1Weight].scalar_type()), kernel_dtype(type_), packings, stream));
  }
  /// Of float32, contiguous, as dgrad reads it.
  void pack_transposed(BlockSlot slot, c10::cuda::CUDAStream stream) const {
    if (reads_in_place(slot)) return;
    C10_CUDA_CHECK(gemm::pack_weights_transposed({{packing(block_[slot], packed_[slot], type_)}, 1}, stream));
  }
  /// In a graph the second convolution's weights are packed while the first one runs: memory limits one, latency and
  /// the tensor cores the other. Launched one by one, a launch less is worth more.
  void pack(Branches& branch) const {
    if (!branch.apart()) return pack({kConv1Weight, kConv2Weight, kResidualWeight}, stream_);
    pack({kConv1Weight, kResidualWeight}, stream_);
    branch.fork();
    pack({kConv2Weight}, branch.side());
  }

  /// `prefetchable`: see `gemm::Weights`. After the first GEMM all of the block's weights are, but for those that
  /// another branch has packed.
  struct Convolution {
    BlockSlot weight, bias;
    bool prefetchable;
  };
  gemm::Weights weights(const Convolution& c) const {
    return {reads_in_place(c.weight) ? block_[c.weight].const_data_ptr() : packed_[c.weight], c.prefetchable};
  }
  gemm::Addends addends(BlockSlot bias) const {
    return {data_or_null(block_[bias]), kernel_dtype(block_[kConv1Weight].scalar_type()), {}};
  }
  void convolve(const Convolution& c, const gemm::Rows& x, const Tensor& out, Branches* branch = nullptr) const {
    own_.push_back(dpa::convolve(/*dgrad=*/false, convolution(c.weight), x, weights(c), addends(c.bias), out, branch));
  }
  int group() const { return static_cast<int>(channels_ / block_.num_groups); }
  /// Whether the residual convolution can run in the launch of the first one.
  bool takes_shortcut() const {
    const auto conv = convolution(kConv1Weight);
    return block_[kResidualWeight].size(2) == 1 && gemm::normalises(conv, group()) &&
           gemm::takes_shortcut(conv, group());
  }
  /// A convolution and its normalisation, in one kernel where its tiles hold whole groups; `side`: where the residual
  /// convolution goes that runs beside it.
  void layer(const Convolution& c, const gemm::Rows& x, Tensor conv, const Tensor& residual, norms::GroupNormMish norm,
             const Tensor& out, const Tensor& side = {}) const {
    norm.residual = data_or_null(residual), norm.out = out.mutable_data_ptr();
    if (gemm::normalises(convolution(c.weight), group())) {
      const gemm::Normalisation normalisation{
          group(),    norm.eps,          norm.parameter_dtype, norm.weight,   norm.bias, norm.scale,
          norm.shift, norm.scale_stride, norm.shift_stride,    norm.residual, norm.out};
      gemm::Shortcut beside{};
      if (side.defined())
        beside = {weights({kResidualWeight, kResidualBias, c.prefetchable}), addends(kResidualBias),
                  side.mutable_data_ptr()};
      own_.push_back(workspace(gemm::fprop_workspace(convolution(c.weight), group()), out));
      C10_CUDA_CHECK(gemm::fprop_normalised(convolution(c.weight), x, weights(c), addends(c.bias),
                                            mutable_data_or_null(conv), normalisation, beside,
                                            mutable_data_or_null(own_.back()), stream_));
      return;
    }
    if (!conv.defined()) conv = activation();
    convolve(c, x, conv);
    norm.input = conv.const_data_ptr();
    C10_CUDA_CHECK(norms::forward(norm, stream_));
  }
  void* workspace_back(BlockSlot weight) const {
    own_.push_back(workspace(gemm::dgrad_workspace(convolution(weight)), block_[weight]));
    return mutable_data_or_null(own_.back());
  }
  void convolve_back(BlockSlot weight, bool prefetchable, const void* grad, const gemm::Rows& residual,
                     const gemm::OutputRows& out, void* between, c10::cuda::CUDAStream stream) const {
    const gemm::Addends addends{nullptr, kernel_dtype(type_), residual};
    C10_CUDA_CHECK(
        gemm::dgrad(convolution(weight), grad, weights({weight, {}, prefetchable}), addends, out, between, stream));
  }
  /// Where a gradient goes, or null where it is not wanted.
  void* gradient(BlockSlot slot, const BlockMask& mask, BlockGradients& to) const {
    if (!mask[slot]) return nullptr;
    to[slot] = at::empty(block_[slot].sizes(), block_[slot].options());
    return to[slot].mutable_data_ptr();
  }
  void weight_back(BlockSlot weight, const void* grad, const gemm::Rows& x, const BlockMask& mask, BlockGradients& to,
                   Branches& branch) const {
    if (!mask[weight]) return;
    void* out = gradient(weight, mask, to);
    kept_.push_back(workspace(gemm::wgrad_workspace(convolution(weight)), block_[kInput]));
    branch.fork_for_fills();
    C10_CUDA_CHECK(gemm::wgrad(convolution(weight), grad, x, out, kernel_dtype(block_[weight].scalar_type()),
                               mutable_data_or_null(kept_.back()), branch.side()));
  }

  norms::GroupNormMish norm(const Tensor& input, BlockSlot weight, BlockSlot bias, const Tensor& scale,
                            const Tensor& shift) const {
    return norm_arguments(kernel_dtype(type_), kernel_dtype(block_[weight].scalar_type()), shape_, plan_, block_.eps,
                          input, block_[weight], block_[bias], scale, shift);
  }
  norms::GroupNormMish first_norm(const Tensor& conv1) const {
    return norm(conv1, kGn1Weight, kGn1Bias, film_[0], film_[1]);
  }
  norms::GroupNormMish second_norm(const Tensor& conv2) const {
    return norm(conv2, kGn2Weight, kGn2Bias, Tensor(), Tensor());
  }

  /// Of the residual convolution, whose gradient is the block's own.
  void residual_back(const Tensor& grad, const gemm::Rows& x, const BlockMask& mask, BlockGradients& to,
                     Branches& branch) const {
    if (mask[kResidualBias]) {
      void* out = gradient(kResidualBias, mask, to);
      branch.fork_for_fills();
      C10_CUDA_CHECK(gemm::column_sums(kernel_dtype(type_), grad.const_data_ptr(), batch_ * length_, channels_,
                                       channels_, out, kernel_dtype(block_[kResidualBias].scalar_type()),
                                       branch.side()));
    }
    weight_back(kResidualWeight, grad.const_data_ptr(), x, mask, to, branch);
  }

  /// Weight and bias of a normalisation, and the bias of the convolution before it: a backward's sums over slices.
  using Parameters = std::array<BlockSlot, 3>;
  static constexpr Parameters kFirst{kGn1Weight, kGn1Bias, kConv1Bias}, kSecond{kGn2Weight, kGn2Bias, kConv2Bias};

  static bool any(const Parameters& parameters, const BlockMask& mask) {
    return mask[parameters[0]] || mask[parameters[1]] || mask[parameters[2]];
  }
  void normalise_back(const norms::GroupNormMish& norm, const void* grad, void* grad_input,
                      const Parameters& parameters, const BlockMask& mask, const Tensor& partials,
                      BlockGradients& to) const {
    norms::GroupNormMishBackward args{};
    args.forward = norm, args.grad = grad, args.grad_input = grad_input;
    if (parameters == kFirst)
      args.grad_scale = gradient(kScale, mask, to), args.grad_shift = gradient(kShift, mask, to);
    // The data gradient's kernel, or one after it, lies between this one and all that the forward has left.
    args.early = parameters == kFirst;
    if (any(parameters, mask)) args.partials = partials.mutable_data_ptr<float>(), args.sums = true;
    C10_CUDA_CHECK(norms::backward(args, stream_));
  }
  /// `partials` are of the second normalisation, then of the first.
  void add_slices(const Tensor& partials, const BlockMask& mask, BlockGradients& to, Branches& branch) const {
    norms::SliceSums sums{kernel_dtype(block_[kGn1Weight].scalar_type()),
                          channels_,
                          partials.size(2),
                          partials.const_data_ptr<float>(),
                          6,
                          {}};
    for (int i = 0; i < 6; ++i) sums.sums[i] = gradient((i < 3 ? kSecond : kFirst)[i % 3], mask, to);
    branch.fork_for_fills();
    if (any(kFirst, mask) || any(kSecond, mask)) C10_CUDA_CHECK(norms::add_slices(sums, branch.side()));
  }

  const ResidualBlock& block_;
  const WeightPlaces packed_;
  const bool alone_;
  c10::cuda::CUDAStream stream_;
  at::ScalarType type_;
  int64_t batch_, length_, channels_;
  kernels::NormShape shape_;
  kernels::NormPlan plan_;
  mutable std::vector<Tensor> kept_;  // until a backward's branches have joined
  mutable std::vector<Tensor> own_;   // workspaces on the way to the input's gradient, until the op has ended
  Tensor film_[2] = {aligned_rows(block_[kScale]), aligned_rows(block_[kShift])};
};

}  // namespace dpa
