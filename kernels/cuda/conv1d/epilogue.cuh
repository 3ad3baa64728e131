// The epilogue: a warp takes rows of the tile, a lane four neighbouring columns of each. Accumulators of the cluster's
// blocks are added, one's own and then those of the next ranks (split-K), then bias and residual.
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
  return there ? (sample * args.out_length + time) * args.pitch : -1;
}

// The rows of a warp: `count` of them from `first` on, and where each begins in the output, one a lane.
struct WarpRows {
  int first, count;  // among the block's
  int64_t lane_offset;

  __device__ __forceinline__ WarpRows(const ConvArgs& args, const TileCoord& coord) {
    const int of_warp = args.shares.of_warp, begin = coord.rank * args.shares.rows;
    first = static_cast<int>(threadIdx.x) / 32 * of_warp;
    count = min(of_warp, min(args.shares.rows, args.plan.tile_rows - begin) - first);
    lane_offset = row_offset(args, coord, begin + first + threadIdx.x % 32);
  }
};

// A block's rows of a tile's sums: its own, and what the cluster's other blocks have sent of theirs. Each block sends every
// other the rows that that one finishes, in one copy: loads from a peer would bring 8 bytes a clock. A block may exit
// once all have received.
template <int kColumns>
struct SharedSums {
  static constexpr int kRow = ConvShape<kColumns>::kStride * 4;  // bytes
  uint32_t own, others, bytes;  // addresses of its first row; of what the next ranks send, `bytes` apart

  // tile: address of the sums; others: of a place for those of as many rows as other blocks' shares have.
  __device__ __forceinline__ SharedSums(const ConvArgs& args, const TileCoord& coord, uint32_t tile, uint32_t others)
      : own(tile + coord.rank * args.shares.rows * kRow), others(others), bytes(args.shares.rows * kRow) {}
  // A warp calls it. Before: the tile is written, fenced for copies, and this warp has synchronised with who wrote it;
  // every block has left its stages. The barrier counts the bytes that come, and says that the block's own sums are there.
  __device__ __forceinline__ void send(const ConvArgs& args, const TileCoord& coord, uint32_t barrier) const {
    const int splits = args.plan.splits, share = args.shares.rows, lane = threadIdx.x % 32, distance = lane + 1;
    const auto rows_of = [&](int rank) { return max(0, min(share, args.plan.tile_rows - rank * share)); };
    if (lane == 0) ptx::barrier_expect(barrier, (splits - 1) * rows_of(coord.rank) * kRow);
    const int to = coord.rank - distance + (coord.rank < distance ? splits : 0), rank = coord.first_peer + to;
    if (distance < splits && rows_of(to) > 0)
      ptx::copy_to_cluster(ptx::cluster_address(others + (distance - 1) * bytes, rank),
                           own + (to - coord.rank) * static_cast<int>(bytes), rows_of(to) * kRow,
                           ptx::cluster_address(barrier, rank));
    __syncwarp();
  }
  // Sums of four columns of rows, `at` bytes behind the block's first row: its own, then those of the next ranks.
  template <int kRows>
  __device__ __forceinline__ void add(float4 (&sums)[kRows], const uint32_t (&at)[kRows], int splits) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = ptx::load_shared(own + at[i]);
    uint32_t from = others;
#pragma unroll 1
    for (int next = 1; next < splits; ++next, from += bytes) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 v = ptx::load_shared(from + at[i]);
        sums[i].x += v.x, sums[i].y += v.y, sums[i].z += v.z, sums[i].w += v.w;
      }
    }
  }
};
// Rows of others, and those behind a share's last that a warp reads and does not use: of its four, or of eight.
static_assert(ConvShape<128>::kTile * 4 + (kTileRows - kTileRows / kMaxSplits + 4) * SharedSums<128>::kRow <=
                  ConvShape<128>::bytes(kMaxWeights) - sizeof(Pipelines),
              "others' sums find their place behind the tile");
static_assert(2 * ConvShape<64>::kTile * 4 + (kTileRows - kTileRows / kMaxSplits) * SharedSums<64>::kRow <=
                  ConvShape<64>::bytes(kMaxWeights) - sizeof(Pipelines),
              "and behind two");

struct Destination {
  const void* bias;
  Rows residual;
  OutputRows out;
};

__device__ __forceinline__ Destination destination(const ConvArgs& args) {
  return {args.addends.bias, args.addends.residual, {args.out, args.more_out}};
}

// Lanes of a row of at most 128 columns, four each; a warp takes 32 / kRowLanes rows at a time.
template <int kColumns>
constexpr int kRowLanes = kColumns < 128 ? kColumns / 4 : 32;

// The lane's four columns from column `column` of the tile on. What a few rows need is loaded before any of them is
// finished.
template <class T, int kColumns>
__device__ __forceinline__ void store_columns(const ConvArgs& args, const Destination& to, const TileCoord& coord,
                                              const SharedSums<kColumns>& shared, const WarpRows& rows, int column) {
  constexpr int kRows = 4, kAtATime = 32 / kRowLanes<kColumns>, kRow = SharedSums<kColumns>::kRow;
  const int n = coord.first_column + column, lane_row = static_cast<int>(threadIdx.x) % 32 / kRowLanes<kColumns>;
  const bool here = n < args.outputs && column < args.plan.column_step;
  ParameterBits bias_bits{};
  if (here) bias_bits.load<T>(to.bias, args.float_bias, n);
  const bool of_more = n >= args.pitch;  // of the second of two tensors
  const void* const residual_rows = of_more ? to.residual.more : to.residual.rows;
  void* const out_rows = of_more ? to.out.more : to.out.rows;
  const int64_t place = of_more ? n - args.pitch : n;
  uint32_t from = (rows.first + lane_row) * kRow + column * 4;
#pragma unroll 1
  for (int r = lane_row; r - lane_row < rows.count; r += kRows * kAtATime, from += kRows * kAtATime * kRow) {
    int64_t at[kRows];
    Bits<T> residual[kRows];
    float4 sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = __shfl_sync(~0u, rows.lane_offset, r + i * kAtATime);
      at[i] = row < 0 || !here || r + i * kAtATime >= rows.count ? -1 : row + place;
      residual[i].load(at[i] < 0 ? nullptr : residual_rows, at[i]);
    }
    if (!__any_sync(~0u, at[0] >= 0 || at[1] >= 0 || at[2] >= 0 || at[3] >= 0)) continue;
    uint32_t places[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) places[i] = from + i * kAtATime * kRow;
    shared.add(sums, places, args.plan.splits);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 bias = bias_bits.values<T>(to.bias, args.float_bias, 0.f);
      const float4 before = residual[i].values(at[i] < 0 ? nullptr : residual_rows, 0.f);
      const float out[4] = {sums[i].x + bias.x + before.x, sums[i].y + bias.y + before.y, sums[i].z + bias.z + before.z,
                            sums[i].w + bias.w + before.w};
      if (at[i] >= 0) store_four<T>(out_rows, at[i], out);
    }
  }
}

// The same for a number of columns that is no multiple of four, of one tensor: an element a lane, from row to row, since
// there may be but two columns.
template <class T, int kColumns>
__device__ __noinline__ void store_ragged(const ConvArgs& args, const Destination& to, const TileCoord& coord,
                                          const SharedSums<kColumns>& shared, const WarpRows& rows) {
  const T* residual = static_cast<const T*>(to.residual.rows);
  const int columns = min(kColumns, static_cast<int>(args.outputs) - coord.first_column);
#pragma unroll 1
  for (int item = threadIdx.x % 32; item < rows.count * columns; item += 32) {
    const int r = item / columns, column = item - r * columns, n = coord.first_column + column;
    const int64_t row = row_offset(args, coord, coord.rank * args.shares.rows + rows.first + r);
    if (row < 0) continue;
    const uint32_t at = (rows.first + r) * SharedSums<kColumns>::kRow + column * 4;
    float sum = __uint_as_float(ptx::load_shared_word(shared.own + at));
#pragma unroll 1
    for (int next = 1; next < args.plan.splits; ++next)
      sum += __uint_as_float(ptx::load_shared_word(shared.others + (next - 1) * shared.bytes + at));
    if (to.bias)
      sum += args.float_bias ? static_cast<const float*>(to.bias)[n] : widen(static_cast<const T*>(to.bias)[n]);
    if (residual) sum += widen(residual[row + n]);
    static_cast<T*>(to.out.rows)[row + n] = narrow<T>(sum);
  }
}

template <class T, int kColumns>
__device__ __forceinline__ void store_rows(const ConvArgs& args, const Destination& to, const TileCoord& coord,
                                           const SharedSums<kColumns>& shared) {
  const WarpRows rows(args, coord);
  if (args.outputs % 4 != 0) return store_ragged<T, kColumns>(args, to, coord, shared, rows);
#pragma unroll 1
  for (int half = 0; half < kColumns; half += 128)
    store_columns<T, kColumns>(args, to, coord, shared, rows, half + threadIdx.x % kRowLanes<kColumns> * 4);
}

}  // namespace dpa::kernels::conv1d
