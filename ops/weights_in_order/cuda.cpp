// Weights of one dtype in the other order go by one launch; any other by a copy of its own.
#include "ops/common/cuda.h"

#include <torch/library.h>

#include "kernels/cuda/weights_in_order/weights_in_order.h"
#include "ops/common/strides.h"
#include "ops/weights_in_order/weights_in_order.h"

namespace dpa {
namespace {

/// Collects weights, and copies them when there are as many as a launch takes.
class WeightLaunches {
 public:
  WeightLaunches(at::ScalarType from, at::ScalarType to, bool channels_last)
      : stream_(c10::cuda::getCurrentCUDAStream()) {
    args_.from = kernel_dtype(from), args_.to = kernel_dtype(to), args_.channels_last = channels_last;
    args_.count = args_.rows = 0;
  }
  bool takes(const Tensor& weight) const {
    if (weight.numel() == 0 || weight.scalar_type() == at::kDouble) return false;
    const bool in_other = args_.channels_last ? weight.is_contiguous() : is_channels_last_image(weight);
    return in_other && kernel_dtype(weight.scalar_type()) == args_.from &&
           weight.size(2) * weight.size(3) <= kernels::kMostWeightsTaps && weight.numel() <= INT32_MAX &&
           args_.rows + weight.size(0) <= INT32_MAX;
  }
  void add(const Tensor& weight, const Tensor& copy) {
    args_.weights[args_.count++] = {weight.const_data_ptr(), copy.mutable_data_ptr(), args_.rows,
                                    static_cast<int>(weight.size(1)),
                                    static_cast<int>(weight.size(2) * weight.size(3))};
    args_.rows += static_cast<int>(weight.size(0));
    if (args_.count == kernels::kWeightsAtOnce) finish();
  }
  void finish() {
    if (args_.count > 0) C10_CUDA_CHECK(kernels::weights_in_order(args_, stream_));
    args_.count = args_.rows = 0;
  }

 private:
  kernels::WeightsInOrder args_;
  cudaStream_t stream_;
};

std::vector<Tensor> weights_in_order_cuda(at::TensorList weights, at::ScalarType dtype, bool channels_last) {
  check_weights_in_order(weights, dtype);
  std::vector<Tensor> copies;
  if (weights.empty()) return copies;
  const c10::cuda::CUDAGuard guard(weights[0].device());
  const bool narrow = dtype != at::kDouble && weights[0].scalar_type() != at::kDouble;
  WeightLaunches launches(narrow ? weights[0].scalar_type() : at::kFloat, narrow ? dtype : at::kFloat, channels_last);
  for (const auto& weight : weights) {
    copies.push_back(empty_image_like(weight, channels_last, weight.options().dtype(dtype)));
    if (narrow && launches.takes(weight))
      launches.add(weight, copies.back());
    else
      copies.back().copy_(weight);
  }
  launches.finish();
  return copies;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("weights_in_order", &weights_in_order_cuda); }

}  // namespace dpa
