// The epilogue: a warp takes rows of the tile, a lane four neighbouring columns of each. Accumulators of the cluster's
// blocks are added in rank order (split-K), then bias and residual.
//
// `to` says what is added and where the sums go: the convolution's own, or the shortcut's.
//
// This code runs once a launch, so its instructions are cache misses: it is short rather than unrolled.
#pragma once
#include "kernels/cuda/conv1d/convolution.cuh"

namespace dpa::kernels::conv1d {

// Where the output's row that belongs to row `row` of the tile begins, or -1 where there is none.
__device__ __forceinline__ int64_t row_offset(const ConvArgs& args, const TileCoord& coord, unsigned row) {
  const ConvPlan& plan = args.plan;
  const unsigned samples = plan.rows.samples;
  const int sample = coord.first_sample + row % samples;
  const int64_t time = static_cast<int64_t>(coord.first_time + row / samples) * plan.phases + coord.phase;
  const bool there = row < samples * plan.rows.time && sample < args.batch && time < args.out_length;
  return there ? (sample * args.out_length + time) * args.outputs : -1;
}

// The rows of a warp: `count` of them from `first` on, and where each begins in the output, one a lane.
struct WarpRows {
  int first, count;
  int64_t lane_offset;

  __device__ __forceinline__ WarpRows(const ConvArgs& args, const TileCoord& coord) {
    const int warps = kConsumerThreads / 32 * args.plan.splits;
    count = (args.plan.tile_rows + warps - 1) / warps;
    first = (coord.rank * (kConsumerThreads / 32) + static_cast<int>(threadIdx.x) / 32) * count;
    lane_offset = row_offset(args, coord, first + threadIdx.x % 32);
  }
};

struct Destination {
  const void *bias, *residual;
  void* out;
};

// Lanes of a row of at most 128 columns, four each; a warp takes 32 / kRowLanes rows at a time.
template <int kColumns>
constexpr int kRowLanes = kColumns < 128 ? kColumns / 4 : 32;

// The lane's four columns from column `column` of the tile on. What a few rows need is loaded before any of them is
// finished.
template <class T, int kColumns, bool kSplit>
__device__ __forceinline__ void store_columns(const ConvArgs& args, const Destination& to, const TileCoord& coord,
                                              const float* tile, const WarpRows& rows, int column) {
  constexpr int kRows = 4, kAtATime = 32 / kRowLanes<kColumns>, kRow = ConvShape<kColumns>::kStride * 4;
  const int n = coord.first_column + column, lane_row = static_cast<int>(threadIdx.x) % 32 / kRowLanes<kColumns>;
  const bool here = n < args.outputs && column < args.plan.column_step;
  ParameterBits bias_bits{};
  if (here) bias_bits.load<T>(to.bias, args.float_bias, n);
  uint32_t from = ptx::shared_address(tile) + (rows.first + lane_row) * kRow + column * 4;
#pragma unroll 1
  for (int r = lane_row; r - lane_row < rows.count; r += kRows * kAtATime, from += kRows * kAtATime * kRow) {
    int64_t at[kRows];
    Bits<T> residual[kRows];
    float4 sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = __shfl_sync(~0u, rows.lane_offset, r + i * kAtATime);
      at[i] = row < 0 || !here || r + i * kAtATime >= rows.count ? -1 : row + n;
      residual[i].load(at[i] < 0 ? nullptr : to.residual, at[i]);
    }
    if (!__any_sync(~0u, at[0] >= 0 || at[1] >= 0 || at[2] >= 0 || at[3] >= 0)) continue;
    add_peers<kRows, kSplit>(sums, from, kAtATime * kRow, args.plan.splits, coord);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 bias = bias_bits.values<T>(to.bias, args.float_bias, 0.f);
      const float4 before = residual[i].values(at[i] < 0 ? nullptr : to.residual, 0.f);
      const float out[4] = {sums[i].x + bias.x + before.x, sums[i].y + bias.y + before.y, sums[i].z + bias.z + before.z,
                            sums[i].w + bias.w + before.w};
      if (at[i] >= 0) store_four<T>(to.out, at[i], out);
    }
  }
}

// The same for a number of columns that is no multiple of four: an element a lane, from row to row, since there may be
// but two columns.
template <class T, int kColumns, bool kSplit>
__device__ __noinline__ void store_ragged(const ConvArgs& args, const Destination& to, const TileCoord& coord,
                                          const float* tile, const WarpRows& rows) {
  const T* residual = static_cast<const T*>(to.residual);
  const int columns = min(kColumns, static_cast<int>(args.outputs) - coord.first_column);
#pragma unroll 1
  for (int item = threadIdx.x % 32; item < rows.count * columns; item += 32) {
    const int r = item / columns, column = item - r * columns, n = coord.first_column + column;
    const int64_t row = row_offset(args, coord, rows.first + r);
    if (row < 0) continue;
    const uint32_t from = ptx::shared_address(tile + (rows.first + r) * ConvShape<kColumns>::kStride + column);
    float sum = __uint_as_float(ptx::load_shared_word(from));
    if constexpr (kSplit) {
#pragma unroll 1
      for (int next = 1; next < args.plan.splits; ++next)
        sum += ptx::load_peer_word(ptx::peer_address(from, other_rank(coord, next, args.plan.splits)));
    }
    if (to.bias)
      sum += args.float_bias ? static_cast<const float*>(to.bias)[n] : widen(static_cast<const T*>(to.bias)[n]);
    if (residual) sum += widen(residual[row + n]);
    static_cast<T*>(to.out)[row + n] = narrow<T>(sum);
  }
}

template <class T, int kColumns, bool kSplit>
__device__ __forceinline__ void store_rows(const ConvArgs& args, const Destination& to, const TileCoord& coord,
                                           const float* tile) {
  const WarpRows rows(args, coord);
  if (args.outputs % 4 != 0) return store_ragged<T, kColumns, kSplit>(args, to, coord, tile, rows);
#pragma unroll 1
  for (int half = 0; half < kColumns; half += 128)
    store_columns<T, kColumns, kSplit>(args, to, coord, tile, rows, half + threadIdx.x % kRowLanes<kColumns> * 4);
}

}  // namespace dpa::kernels::conv1d
