// The launchers of channels_last.h for plans with `ranks`.
#pragma once
#include "kernels/cuda/group_norm_mish/channels_last.h"

namespace dpa::kernels::channels_last::large_groups {

cudaError_t forward(const GroupNormMish& args, cudaStream_t stream);
cudaError_t backward(const GroupNormMishBackward& args, cudaStream_t stream);

}  // namespace dpa::kernels::channels_last::large_groups
