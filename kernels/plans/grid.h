// How much work a grid takes: pure functions of its size.
#pragma once
#include <algorithm>
#include <cstdint>

namespace dpa::kernels {

/// Blocks for `items` pieces of work, `per_block` a block. Kernels stride over what does not fit into one grid.
inline unsigned grid_for(int64_t items, int64_t per_block) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  const int64_t blocks = items / per_block + (items % per_block != 0);
  return static_cast<unsigned>(std::min(blocks, kMaxBlocks));
}

/// Whether 32-bit numbers count `items`, and a grid's reach beyond them too.
inline bool fits_32_bits(int64_t items) { return items < (int64_t{1} << 31); }

}  // namespace dpa::kernels
