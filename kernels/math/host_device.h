// Formulas that CPU and CUDA kernels share are plain functions of scalars, marked for both. They are inlined wherever
// they are called, because a loop with a call in it does not vectorise.
#pragma once
#ifdef __CUDACC__
#define DPA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DPA_HOST_DEVICE inline __attribute__((always_inline))
#endif
