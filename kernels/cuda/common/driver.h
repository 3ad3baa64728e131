// Functions of the driver, looked up at run time: the library does not link with the driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace dpa::kernels {

/// Null where the driver has no such function of the interface of CUDA 12.0.
template <class Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION < 12050  // the runtime has no function that takes the version, and this one takes its own
  const auto error = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found);
#else
  const auto error = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
#endif
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(entry) : nullptr;
}

}  // namespace dpa::kernels
