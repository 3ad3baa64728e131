// `dpa::values_differ` on CUDA: elements that lie spread over many tensors, compared with the bytes that were kept of them.
//
// Grid: (views, kParts). The threads of a view's blocks go through its elements side by side; each element is a sector of
// memory of its own, so a launch waits for few misses, one after another.
#include <cstring>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/values_differ/values_differ.h"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 256, kParts = 8;

template <class Word>
__device__ __forceinline__ bool differs(const Views::View& view, const uint8_t* kept) {
  const auto* data = static_cast<const uint8_t*>(view.data);
  bool found = false;
  for (int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); i < view.count;
       i += kParts * kThreads) {
    Word other;  // kept bytes may begin anywhere
    memcpy(&other, kept + i * int64_t{sizeof(Word)}, sizeof(Word));
    found |= *reinterpret_cast<const Word*>(data + i * view.stride) != other;
  }
  return found;
}

__global__ void __launch_bounds__(kThreads) values_differ_kernel(const __grid_constant__ Views views) {
  const Views::View& view = views.of[blockIdx.x];
  const uint8_t* kept = static_cast<const uint8_t*>(views.kept) + view.place;
  bool found = false;
  switch (view.size) {
    case 1: found = differs<uint8_t>(view, kept); break;
    case 2: found = differs<uint16_t>(view, kept); break;
    case 4: found = differs<uint32_t>(view, kept); break;
    default: found = differs<uint64_t>(view, kept); break;
  }
  if (found) *views.differ = true;
}

}  // namespace

cudaError_t values_differ(const Views& args, cudaStream_t stream) {
  return launch(values_differ_kernel, dim3(args.count, kParts), kThreads, stream, args);
}

}  // namespace dpa::kernels
