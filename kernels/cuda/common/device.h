// What the current device is. Host code.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace dpa::kernels {

/// An attribute of the current device, or `otherwise` where there is none.
inline int device_attribute(cudaDeviceAttr attribute, int otherwise = 0) {
  int device = 0, value = 0;
  const bool known =
      cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
  return known ? value : otherwise;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount, 1); }

/// Whether it runs Hopper's own instructions: this build's architectures include 90a, and it is one.
inline bool runs_hopper_code() {
#ifdef DPA_SM90A
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
#else
  return false;
#endif
}

/// What `ask` answers for a device, asked once. One static object a question.
class OncePerDevice {
 public:
  template <class Ask>
  int operator()(int device, Ask ask) {
    if (device < 0 || device >= static_cast<int>(answers_.size())) return 0;
    int current = 0;
    if (answers_[device] == 0)
      answers_[device] = 1 + (cudaGetDevice(&current) == cudaSuccess && current == device ? ask() : 0);
    return answers_[device] - 1;
  }

 private:
  std::array<std::atomic<int>, 64> answers_{};  // and one; 0: not asked
};

}  // namespace dpa::kernels
