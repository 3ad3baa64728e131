// From a TensorIterator to the launch of an element-wise CUDA kernel.
#pragma once
#include "kernels/cuda/common/elementwise.h"
#include "ops/common/cuda.h"
#include "ops/common/elementwise.h"

namespace dpa {

/// Calls `launcher(args, stream)` for the elements of the iterator, whose dimensions are coalesced: three are rare.
/// `op` and `name`, that of an input, are for the message where even coalesced there are too many.
template <class Launcher>
void binary_cuda(const char* op, const char* name, at::TensorIterator& iterator, const Launcher& launcher) {
  if (iterator.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(iterator.device());
  kernels::Elementwise args{};
  args.dtype = kernel_dtype(iterator.common_dtype());
  args.count = iterator.numel();
  args.dims = iterator.ndim();
  DPA_CHECK(args.dims <= kernels::Elementwise::kMaxDims, op,
            c10::str(name, " must have at most ", kernels::Elementwise::kMaxDims,
                     " dimensions that do not merge with a neighbour"),
            args.dims);
  args.out = iterator.data_ptr(0);
  args.a = iterator.data_ptr(1);
  args.b = iterator.data_ptr(2);
  args.contiguous = iterator.is_contiguous();
  for (int d = 0; d < args.dims; ++d) {
    args.sizes[d] = iterator.shape()[d];
    for (int t = 0; t < 3; ++t) args.strides[t][d] = iterator.strides(t)[d];
  }
  C10_CUDA_CHECK(launcher(args, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace dpa
