// Widths that kernels like: whether a network is packed among zeros, and how wide.
#pragma once
#include "kernels/plans/unet1d/call.h"

namespace dpa::kernels::unet1d {

/// The config to pack a network by for calls of a size: `config`, or one of wider levels that computes the same: each
/// GroupNorm group is filled up with channels whose weights are zero, which the norms do not count. The kernels for one
/// sample and in clusters take powers of two alone, teams groups of a multiple of four channels, and phases divide such
/// widths into more slices. Whichever takes least time (`path_time`), though wider levels have more weights to read.
/// `layers`: whether a call may also run layer by layer.
Config widths_for(const Config& config, DType dtype, int batch, int horizon, bool layers, const Device& device);

}  // namespace dpa::kernels::unet1d
