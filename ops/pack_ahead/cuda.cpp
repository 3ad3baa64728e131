// Memory of what is packed ahead is the main stream's, from when the packing may begin: the branch follows what the
// stream has got by then, so nothing that used this memory before is still running.
#include "ops/common/cuda.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/cuda/common/capture.h"
#include "ops/conv1d/gemm.h"
#include "ops/pack_ahead/pack_ahead.h"

namespace dpa {
namespace {

/// The capture that the current stream is in, or 0.
unsigned long long capture_id() {
  unsigned long long id = 0;
  C10_CUDA_CHECK(kernels::capture_id(c10::cuda::getCurrentCUDAStream(), &id));
  return id;
}

struct Layer {
  std::vector<Tensor> weights;
  int64_t batch, length;  // of what it reads; a length of 0 is unknown, or is not kept
  PackedAhead packed;
  std::optional<Branches> branch;  // that packs
};

/// Linear weights are packed for one GEMM for all, in their order.
bool is_joint(const Layer& layer) { return layer.weights[0].dim() == 2; }
bool is_block(const Layer& layer) { return !is_joint(layer) && layer.weights.size() > 1; }

bool packs(const Layer& layer, at::ScalarType dtype) {
  for (const auto& weight : layer.weights)
    if (!weight.is_contiguous() || weight.numel() == 0) return false;
  const auto type = layer.weights[0].scalar_type();
  if (is_joint(layer) && dtype == at::kFloat) return false;  // those are PyTorch's
  return type == dtype || (type == at::kFloat && (dtype == at::kHalf || dtype == at::kBFloat16));
}

/// Which of the layer's weights are packed.
std::vector<size_t> packed_weights(const Layer& layer, at::ScalarType dtype) {
  std::vector<size_t> packed;
  for (size_t i = 0; i < layer.weights.size(); ++i)
    if (layer.length <= 0 ||
        !reads_in_place(same_length(layer.weights[i], dtype, layer.batch, layer.length), layer.weights[i]))
      packed.push_back(i);
  return packed;
}

int64_t elements(const Tensor& weight, at::ScalarType dtype) {
  const int64_t taps = weight.dim() == 3 ? weight.size(2) : 1;
  return weight_parts(weight, dtype) * taps * weight.size(0) * gemm::padded(weight.size(1));
}

/// The tensor that each weight goes to: the second convolution's of a block to the second one.
void pack(Layer& layer, at::ScalarType dtype) {
  const auto& w = layer.weights;
  const auto which = packed_weights(layer, dtype);
  if (which.empty()) return;
  const auto place = [&](size_t i) { return is_block(layer) && i == 1; };
  int64_t sizes[2] = {};
  for (const auto i : which) sizes[place(i)] += elements(w[i], dtype);
  for (int i = 0; i < 2; ++i)
    if (sizes[i] > 0) layer.packed[i] = at::empty({sizes[i]}, w[0].options().dtype(dtype));
  layer.branch.emplace();
  layer.branch->fork();
  gemm::Packings packings{};
  int64_t behind[2] = {};
  for (const auto i : which) {
    const auto& to = layer.packed[place(i)];
    void* const packed = static_cast<char*>(to.mutable_data_ptr()) + behind[place(i)] * to.element_size();
    packings.each[packings.count++] = packing(w[i], packed, dtype);
    behind[place(i)] += elements(w[i], dtype);
    if (packings.count < gemm::kMaxPackings && i != which.back()) continue;
    C10_CUDA_CHECK(
        gemm::pack_weights(kernel_dtype(w[0].scalar_type()), kernel_dtype(dtype), packings, layer.branch->side()));
    packings.count = 0;
  }
}

bool is_of(const Layer& layer, at::TensorList weights) {
  return std::equal(layer.weights.begin(), layer.weights.end(), weights.begin(), weights.end(),
                    [](const Tensor& a, const Tensor& b) { return a.is_same(b); });
}

struct Order {
  unsigned long long capture;
  at::ScalarType dtype;
  std::vector<Layer> layers;
  size_t next = 0;
};
// Of the forward that this thread captures. Not freed when a thread ends: the device may be gone by then.
thread_local Order* order = nullptr;

/// Starts to pack the layers up to the next block.
void start() {
  for (size_t i = order->next; i < order->layers.size(); ++i) {
    if (packs(order->layers[i], order->dtype)) pack(order->layers[i], order->dtype);
    if (is_block(order->layers[i])) break;
  }
}

/// Joins the branches of the layers up to one.
void pass_over(size_t end) {
  for (; order->next < end; ++order->next)
    if (auto& branch = order->layers[order->next].branch) branch->join();
}

void forget() { delete std::exchange(order, nullptr); }

void pack_ahead_cuda(at::TensorList weights, at::IntArrayRef counts, at::ScalarType dtype, c10::SymInt batch,
                     at::SymIntArrayRef lengths) {
  check_pack_ahead(weights, counts, dtype, batch, lengths);
  const c10::cuda::CUDAGuard guard(weights[0].device());
  const auto capture = capture_id();
  if (order != nullptr && order->capture == capture) pass_over(order->layers.size());
  forget();
  if (capture == 0 || !gemm::supported()) return;
  order = new Order{capture, dtype, {}};
  size_t i = 0;
  for (size_t n = 0; n < counts.size(); ++n) {
    const auto of = weights.slice(i, counts[n]);
    const int64_t length = lengths.empty() ? 0 : lengths[n].expect_int();
    order->layers.push_back({of.vec(), batch.expect_int(), length, {}, {}});
    i += counts[n];
  }
  start();
}

}  // namespace

PackedAhead packed_ahead(at::TensorList weights, at::ScalarType dtype) {
  if (order == nullptr) return {};
  if (capture_id() != order->capture) return forget(), PackedAhead{};
  auto& layers = order->layers;
  size_t at = order->next;
  while (at < layers.size() && !is_of(layers[at], weights)) ++at;
  if (at == layers.size()) return {};
  pass_over(at + 1);
  const auto packed = dtype == order->dtype ? layers[at].packed : PackedAhead{};
  layers[at].packed = {};
  if (is_block(layers[at])) start();
  if (order->next == layers.size()) forget();
  return packed;
}

TORCH_LIBRARY_IMPL(dpa, CUDA, m) { m.impl("pack_ahead", &pack_ahead_cuda); }

}  // namespace dpa
