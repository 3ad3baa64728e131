// The launchers of the image encoder's kernels. A launch's own error is returned.
//
// Messages: `epoch`, partials and moments lie in memory that a call's first launch zeroes; or that is zero before the
// first of several calls, of which each ends with one `finished` (launch_pools). All launches on it are in one stream's
// order.
// `dependent`: programmatic dependent launch. Packed weights and parameters are read before the preceding kernels have
// ended, so those must not write them.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/cuda/conv2d/conv2d.h"

namespace dpa::kernels::conv2d {

/// A launch whose blocks wait for one another (`Launch::waits`) is cooperative: two that run at once, in two streams, would
/// otherwise each hold a part of the device and wait for the other's part for ever. An error says that its blocks are more
/// than the device holds.
cudaError_t launch_convs(DType dtype, int tiling, const Launch& launch, bool dependent, cudaStream_t stream);
/// Whether the tilings by warpgroups run on the current device: `Device::wgmma`.
bool has_wgmma();
/// First layers with their max pooling, of as many networks as there are stems, of equal sizes.
cudaError_t launch_stems(DType dtype, const Stems& stems, int blocks, bool wgmma, bool dependent, cudaStream_t stream);
/// Of networks of equal sizes. `finished`: the epoch, where this is the last launch of a call; else null.
cudaError_t launch_pools(DType dtype, PoolKind kind, const Pools& pools, uint32_t* finished, bool dependent,
                         cudaStream_t stream);
/// Of windows of 3 x 3 over raw maps, which are normalised on their way.
cudaError_t launch_normalised_pools(DType dtype, const Pools& pools, const RawMaps& raw, int blocks, bool dependent,
                                    cudaStream_t stream);
cudaError_t launch_normalise(DType dtype, const Conv& conv, const uint32_t* epoch, int blocks, bool dependent,
                             cudaStream_t stream);
/// Weights (out_channels, channels, kernel_height, kernel_width) in float32 to what the kernels read (pack.cuh),
/// rounded to the dtype (tf32 for float32). `factor`, of each output channel, is multiplied in (a folded BatchNorm); may
/// be null. `weight_bytes(shape)` are written.
/// `cells`: `shape` is shape_of_cells and the weights are (out_channels, 3, 7, 7).
cudaError_t launch_pack(const Shape& shape, const float* weights, const float* factor, void* packed,
                        cudaStream_t stream, bool cells = false);

/// Of images of equal sizes.
cudaError_t launch_preprocess(DType dtype, const Preprocesses& all, bool dependent, cudaStream_t stream);

}  // namespace dpa::kernels::conv2d
