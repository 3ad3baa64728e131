// The GEMMs of conv1d.h by warp-level MMAs, which conv1d.h's own choose where wgmma does not multiply: see `by_wgmma`.
#pragma once
#include "kernels/cuda/conv1d/conv1d.h"

namespace dpa::kernels::conv1d {

bool by_wgmma(const Conv1d& conv);

cudaError_t mma_fprop(const Conv1d& conv, const Rows& x, const void* weights, const Addends& addends, void* y,
                      const Normalisation& normalisation, void* workspace, cudaStream_t stream);
cudaError_t mma_dgrad(const Conv1d& conv, const void* y, const void* weights, const Addends& addends,
                      const OutputRows& x, void* workspace, cudaStream_t stream);
// `workspace`: of as many bytes as `wgrad_workspace` says.
cudaError_t mma_wgrad(const Conv1d& conv, const void* y, const Rows& x, void* gradient, DType gradient_dtype,
                      void* workspace, cudaStream_t stream);

}  // namespace dpa::kernels::conv1d
