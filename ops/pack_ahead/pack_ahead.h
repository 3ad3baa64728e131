// `dpa::pack_ahead`: the order in which a network's forward will reach its layers, for a captured graph, in which the
// weights of what comes next are packed while a residual block runs.
#pragma once
#include <array>

#include "ops/common/check.h"

namespace dpa {

/// `counts` splits the weights into layers: those of a `joint_linear`, which have two dimensions; that of a convolution;
/// or those of a residual block's convolutions, the first, the second and, if there is one, the residual one. `batch` and
/// `lengths` say what layers will read that keep their input's length, 0 of others: weights that are read in place are left
/// out. Without lengths every weight is packed.
void check_pack_ahead(at::TensorList weights, at::IntArrayRef counts, at::ScalarType dtype, c10::SymInt batch,
                      at::SymIntArrayRef lengths);

/// On CUDA, when a layer of these weights is reached, before it allocates anything: the weights as its forward packs
/// them (a block's second convolution apart), ready on the current stream, or undefined where they were not packed
/// ahead. The layers up to the first block are packed from the start on, those up to the next one from each block on.
using PackedAhead = std::array<Tensor, 2>;
PackedAhead packed_ahead(at::TensorList weights, at::ScalarType dtype);

}  // namespace dpa
