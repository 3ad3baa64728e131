#include "kernels/cuda/common/clusters.h"
#include "kernels/cuda/common/device.h"

namespace dpa::kernels {
namespace {

/// Compiled for the architectures that all kernels are compiled for.
__global__ void like_all() {}

}  // namespace

bool has_clusters() {
  static OncePerDevice known;
  int device = 0;
  const auto ask = [] {
    cudaFuncAttributes attributes = {};
    return static_cast<int>(cudaFuncGetAttributes(&attributes, like_all) == cudaSuccess && attributes.ptxVersion >= 90);
  };
  return cudaGetDevice(&device) == cudaSuccess && known(device, ask) != 0;
}

}  // namespace dpa::kernels
