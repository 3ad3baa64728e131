// Branches of a captured graph, for work that not everything behind it waits for.
#pragma once
#include <ATen/Context.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/common/cuda.h"
#include "ops/common/later_join.h"

namespace dpa {

/// `later` goes on when what `earlier` has got so far is done.
inline void follow(c10::cuda::CUDAStream later, c10::cuda::CUDAStream earlier) {
  if (later == earlier) return;
  cudaEvent_t event;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(event, earlier));
  C10_CUDA_CHECK(cudaStreamWaitEvent(later, event));
  C10_CUDA_CHECK(cudaEventDestroy(event));
}

inline bool is_capturing() {
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status));
  return status == cudaStreamCaptureStatusActive;
}

/// The next stream for a branch. They are not PyTorch's, whose pool gives out 32 in turns: a capture's own stream and that
/// of an exchange between GPUs are of those too, and a branch that gets one of them runs beside nothing.
inline c10::cuda::CUDAStream branch_stream(c10::DeviceIndex device) {
  struct Streams {
    std::mutex mutex;
    std::array<cudaStream_t, 128> each{};  // more than most passes have branches
    size_t given = 0;
  };
  static std::array<Streams, C10_COMPILE_TIME_MAX_GPUS> of_devices;
  Streams& streams = of_devices.at(device);
  const std::lock_guard lock(streams.mutex);
  cudaStream_t& stream = streams.each[streams.given++ % streams.each.size()];
  if (!stream) {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  return c10::cuda::getStreamFromExternal(stream, device);
}

/// While a graph is captured, work that others need not wait for goes to a second branch of it, such as the gradients
/// of parameters: neither they nor the input's gradient fill the device at the networks' sizes. Outside of a capture
/// the host is the limit, and one stream is less work for it. `fork`: what the side stream gets from here on follows
/// what the main stream has got. `join`: the other way round; memory that the side stream uses may be given back after
/// it.
class Branches {
 public:
  Branches() : main_(c10::cuda::getCurrentCUDAStream()), side_(main_) {
    if (is_capturing()) side_ = branch_stream(main_.device_index());
  }
  void fork() { follow(side_, main_); }
  /// What has been allocated since the fork may be given to the side stream: in PyTorch's deterministic mode the main
  /// stream fills it first.
  void fork_for_fills() {
    const auto& context = at::globalContext();
    if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) fork();
  }
  void join() { follow(main_, side_); }
  c10::cuda::CUDAStream main() const { return main_; }
  c10::cuda::CUDAStream side() const { return side_; }
  /// Whether there are two.
  bool apart() const { return side_ != main_; }

 private:
  c10::cuda::CUDAStream main_, side_;
};

/// At the start of a backward op: whether the branch that makes the gradients of edges `first` up to `end` may be joined
/// later.
inline bool joins_later(const Tensor& grad, size_t first, size_t end) {
  return LaterJoin::take(grad) && is_capturing() && LaterJoin::allowed(first, end);
}

/// The branches of a backward pass that nothing has joined yet: an op later joins them, or the engine at the end of the
/// pass. What they read, `kept`, lives until then. What they write, `gradients`, must: whoever has let go of one before
/// has read it, too.
class Unjoined {
 public:
  static void hold(const Branches& branch, const std::vector<Tensor>& kept, at::ArrayRef<Tensor> gradients) {
    auto unjoined = current();
    if (!unjoined) {
      unjoined = std::make_shared<Unjoined>(torch::autograd::get_current_graph_task_id());
      torch::autograd::Engine::get_default_engine().queue_callback([unjoined] { unjoined->finish(); });
      current_ = unjoined;
    }
    unjoined->branches_.push_back(branch);
    unjoined->kept_.insert(unjoined->kept_.end(), kept.begin(), kept.end());
    for (const auto& gradient : gradients)
      if (gradient.defined()) unjoined->written_.push_back(gradient.storage().getWeakStorageImpl());
  }
  /// The present op's own branch may follow them, too, without what its main stream has got since it forked.
  static void join(std::optional<c10::cuda::CUDAStream> own = std::nullopt) {
    if (const auto unjoined = current()) unjoined->join_here(own);
  }

  explicit Unjoined(int task) : task_(task) {}

 private:
  static std::shared_ptr<Unjoined> current() {
    auto unjoined = current_.lock();
    if (unjoined && unjoined->task_ != torch::autograd::get_current_graph_task_id()) unjoined.reset();
    return unjoined;
  }
  void join_here(std::optional<c10::cuda::CUDAStream> own = std::nullopt) {
    for (auto& branch : branches_) {
      branch.join();
      if (own) follow(*own, branch.side());
    }
    for (const auto& gradient : written_)
      TORCH_CHECK(!gradient.expired(), "dpa: a gradient was read before it was computed, in a captured backward pass");
    branches_.clear(), kept_.clear(), written_.clear();
  }
  /// The engine has made those streams current that its caller goes on with.
  void finish() {
    for (const auto& branch : branches_) {
      const c10::cuda::CUDAGuard guard(branch.main().device());
      follow(c10::cuda::getCurrentCUDAStream(), branch.side());
    }
    join_here();
  }

  int task_;
  std::vector<Branches> branches_;
  std::vector<Tensor> kept_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> written_;
  static inline thread_local std::weak_ptr<Unjoined> current_;  // the engine has the pass's
};

}  // namespace dpa
