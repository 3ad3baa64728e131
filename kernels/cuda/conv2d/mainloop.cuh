// The GEMM of a tile: what a block multiplies.
#pragma once
#include "kernels/cuda/conv2d/load.cuh"

namespace dpa::kernels::conv2d::device {

// What is shared by the threads of a team must be complete, or read, before anyone goes on.
template <class C>
DPA_DEVICE void sync_team() {
  constexpr Tiling t = C::kTiling;
  if constexpr (t.team() == kThreads)
    sync_block();
  else if constexpr (t.team() == 32)
    sync_warp();
  else
    sync_threads(1 + thread() / t.team(), t.team());
}

template <class C>
using Accumulators = float[C::kTiling.m_tiles][2 * C::kTiling.n_tiles][4];
// The first row of a warp's fragment. Where A comes from shared memory, each warp of a warpgroup has 16 of an MMA's 64 rows.
template <class C>
DPA_DEVICE int fragment_row(int warp, int i) {
  constexpr Tiling t = C::kTiling;
  return t.im2col ? (warp / 4 * t.m_tiles + i) * 64 + warp % 4 * 16 : warp / t.warps_n * t.m_tiles * 16 + i * 16;
}

// A step is 32 bytes of K. Its fragments of A, by ldmatrix. `rows`: where this lane's rows lie; `flip`: of the pieces of
// this step, which are permuted.
template <class T, int kTiles>
DPA_DEVICE void load_a(uint4 (&a)[kTiles], const uint32_t (&rows)[kTiles], uint32_t flip) {
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    uint32_t words[4];
    load_matrix_x4(words, rows[i] ^ flip);
    if constexpr (T::kElements == 4) {
#pragma unroll
      for (int k = 0; k < 4; k++) words[k] = to_tf32(as_float(words[k]));
    }
    a[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
// Of B, 16 columns each: where lane l's row of step 0 lies in a chunk.
DPA_DEVICE uint32_t b_row(int lane) { return (lane >> 4) * 1024 + (lane >> 3 & 1) * 128 + (lane & 7) * 16; }

// A lane's rows of A in the stages of a loader.
template <class C>
struct ChunkRows {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kSteps = 4;  // of a stage
  uint32_t first;
  DPA_DEVICE ChunkRows(const Conv&, const Tile&, const Loader<C>&) {
    const int lane = thread() & 31, warp = thread() % t.team() / 32;
    first = (warp / t.warps_n * t.m_tiles * 16 + (lane & 15)) * kChunkBytes + ((lane >> 4 ^ (lane & 7)) << 4);
  }
  DPA_DEVICE void find(uint32_t (&rows)[t.m_tiles], uint32_t stage, int) const {
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++) rows[i] = stage + first + i * 16 * kChunkBytes;
  }
  DPA_DEVICE void next() {}
};
// Pixels: row m of tap s is pixel m + s, or zeros where that tap is beyond an edge.
template <class C>
struct PixelRows {
  static constexpr Tiling t = C::kTiling;
  static constexpr int kSteps = t.taps * 4;
  uint32_t inside[t.m_tiles], zeros;
  int pixel, slabs, slab, row;
  DPA_DEVICE PixelRows(const Conv& v, const Tile& at, const PixelLoader<C>& loader)
      : slabs(loader.slabs), slab(loader.slab), row(loader.row) {
    const int lane = thread() & 31, warp = thread() % t.team() / 32, pixels = v.out_height * v.out_width;
    pixel = warp / t.warps_n * t.m_tiles * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++) {
      const int m = pixel + i * 16, rest = (at.first_row + m) % pixels, p = rest / v.out_width;
      inside[i] = m < at.rows ? taps_inside(v, p, rest - p * v.out_width) : 0;
    }
    zeros = shared_address(Parameters<C>::at().zeros);
  }
  DPA_DEVICE void find(uint32_t (&rows)[t.m_tiles], uint32_t stage, int tap) const {
    const int lane = thread() & 31;
    const uint32_t wanted = tap_bits(row, tap);
    const uint32_t first = stage + (pixel + tap) * kChunkBytes + (PixelLoader<C>::place(pixel + tap, lane >> 4) << 4);
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++) rows[i] = (inside[i] & wanted) == wanted ? first + i * 16 * kChunkBytes : zeros;
  }
  DPA_DEVICE void next() {
    if (++slab == slabs) slab = 0, row++;
  }
};
template <class C>
using RowsOf = std::conditional_t<C::kTiling.taps == 1, ChunkRows<C>, PixelRows<C>>;

// By mma.sync. The next step's fragments are loaded before a step is multiplied.
template <class C, class T>
DPA_DEVICE void multiply_stage(const RowsOf<C>& lanes, uint32_t stage, Accumulators<C>& sum) {
  constexpr Tiling t = C::kTiling;
  constexpr int kSteps = RowsOf<C>::kSteps;
  const int lane = thread() & 31, column = thread() % t.team() / 32 % t.warps_n;
  const uint32_t b_at = stage + t.input_bytes() + column * t.n_tiles * 2048 + b_row(lane);
  uint4 a[2][t.m_tiles];
  uint32_t b[2][t.n_tiles][4], rows[t.m_tiles];
  const auto load = [&](int step) {
    if (step % 4 == 0) lanes.find(rows, stage, step / 4);
    load_a<T>(a[step % 2], rows, step % 4 << 5);
#pragma unroll
    for (int j = 0; j < t.n_tiles; j++)
      load_matrix_x4(b[step % 2][j], b_at + step / 4 * t.weight_bytes() + step % 4 * 256 + j * 2048);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    if (step + 1 < kSteps) load(step + 1);
#pragma unroll
    for (int i = 0; i < t.m_tiles; i++)
#pragma unroll
      for (int j = 0; j < t.n_tiles; j++) {
        const uint32_t(&words)[4] = b[step % 2][j];
        mma(typename T::Math{}, sum[i][2 * j], a[step % 2][i], words[0], words[1]);
        mma(typename T::Math{}, sum[i][2 * j + 1], a[step % 2][i], words[2], words[3]);
      }
  }
}

// By warpgroups. The fragments of A of two steps are loaded while the two before are multiplied. Rows of A come from
// registers, so that a warp reads them wherever they lie, zeros included, and rounds them to tf32.
template <class C, class T>
DPA_DEVICE void multiply_stage_wgmma(const RowsOf<C>& lanes, uint32_t stage, Accumulators<C>& sum) {
  constexpr Tiling t = C::kTiling;
  constexpr int kGroup = 2, kGroups = RowsOf<C>::kSteps / kGroup, kColumns = t.columns();
  static_assert(t.warps_n == 1 && t.warps_m % 4 == 0, "a warpgroup multiplies all columns");
  const uint32_t b_at = stage + t.input_bytes();
  uint4 a[2][kGroup][t.m_tiles];
  uint32_t rows[t.m_tiles];
#pragma unroll
  for (int group = 0; group < kGroups; group++) {
#pragma unroll
    for (int k = 0; k < kGroup; k++) {
      const int step = group * kGroup + k;
      if (step % 4 == 0) lanes.find(rows, stage, step / 4);
      load_a<T>(a[group % 2][k], rows, step % 4 << 5);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGroup; k++) {
      const int step = group * kGroup + k;
      const uint64_t b = wgmma_operand(b_at + step / 4 * t.weight_bytes() + step % 4 * 256, 128, 1024);
#pragma unroll
      for (int i = 0; i < t.m_tiles; i++)
        wgmma<kColumns>(typename T::Math{}, reinterpret_cast<float(&)[kColumns / 2]>(sum[i]), a[group % 2][k][i], b);
    }
    wgmma_commit();
    if (group + 1 < kGroups)
      wgmma_wait<1>();
    else
      wgmma_wait<0>();
  }
}

// Weights of the first stages, before the dependency is awaited.
template <class L>
DPA_DEVICE void prefetch_weights(L& loader) {
#pragma unroll 1
  for (int i = 0; i < L::t.stages - 1; i++) loader.load_weights();
}
template <class C, class T>
DPA_DEVICE void contract(LoaderOf<C>& loader, RowsOf<C> lanes, Barriers<C>& barriers, Accumulators<C>& sum) {
  constexpr int kStages = C::kTiling.stages;
#pragma unroll 1
  for (int i = 0; i < kStages - 1; i++) {
    loader.load_input();
    copy_async_commit();
  }
  int slot = 0;
#pragma unroll 1
  for (int left = loader.count; left > 0; left--) {
    copy_async_wait<kStages - 2>();
    sync_team<C>();
    loader.load_weights(), loader.load_input();
    copy_async_commit();
    if constexpr (C::kTiling.wgmma) {
      barriers.wait(slot);
      multiply_stage_wgmma<C, T>(lanes, loader.address(slot), sum);
    } else {
      multiply_stage<C, T>(lanes, loader.address(slot), sum);
    }
    lanes.next(), slot = loader.after(slot);
  }
  copy_async_wait<0>();
}

}  // namespace dpa::kernels::conv2d::device
