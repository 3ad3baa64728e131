// Formulas that CPU and CUDA kernels share are plain functions of scalars, marked for both.
#pragma once
#ifdef __CUDACC__
#define DPA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DPA_HOST_DEVICE inline
#endif
