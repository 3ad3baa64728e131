// The epilogue with a normalisation of groups that no warp holds alone (plan.h: `exchange`): the values of
// epilogue_norm.cuh, whose statistics come in three steps.
//
//   row      a warp adds up its rows of the tile (epilogue.cuh), rounds them and keeps them there; of each it stores the
//            mean and the sum of squares about it, group by group
//   block    a team of threads makes one of the rows of a sample that the block has
//   cluster  the blocks that share the group exchange theirs; each makes mean and standard deviation of all
//
// Sums are about the mean of what they are of, so nothing cancels, and are added in an order that the sizes determine.
#pragma once
#include "kernels/cuda/conv1d/epilogue.cuh"
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels::conv1d {

// Of `count` values: their mean, and the sum of the squares of their distances from it.
struct alignas(16) Moments {
  float mean, squares, count, unused;
};

// Behind the tiles of sums.
struct MomentTables {
  float2 rows[kTileRows][16];      // mean and squares of a row's group
  Moments block[kMaxMoments];      // sample by group
  float2 statistics[kMaxMoments];  // mean and 1 / standard deviation
};
static_assert(2 * ConvShape<128>::kTile * 4 + sizeof(MomentTables) <=
                  ConvShape<128>::bytes(kMaxWeights) - sizeof(Pipelines),
              "the tables find their place behind two tiles");
static_assert(ConvShape<128>::kTile * 4 + sizeof(MomentTables) <= ConvShape<128>::kBytes - sizeof(Pipelines),
              "and behind one, with few stages");

// The columns of a tile as groups: those of a larger group are one.
struct TileGroups {
  int width, count, lanes;  // columns of a group here, groups, lanes of a group
  int group, lane;          // of this thread's four columns

  __device__ __forceinline__ explicit TileGroups(const ConvArgs& args) {
    width = min(args.normalisation.group, args.plan.column_step), count = args.plan.column_step / width;
    lanes = width / 4;
    group = static_cast<int>(threadIdx.x) % 32 / lanes, lane = static_cast<int>(threadIdx.x) % 32 % lanes;
  }
};

// The sum over the lanes of a group, in each of them. The whole warp calls.
__device__ __forceinline__ float group_sum(float value, const TileGroups& groups) {
#pragma unroll 1
  for (int offset = 1; offset < groups.lanes; offset *= 2) {
    const float other = __shfl_down_sync(~0u, value, offset);
    if (groups.lane + offset < groups.lanes) value += other;
  }
  return __shfl_sync(~0u, value, static_cast<int>(threadIdx.x) % 32 - groups.lane);
}

// What four rows need beside their sums: loads in flight.
template <class T>
struct RowNeeds {
  int64_t at[4];
  Bits<T> residual[4], scale[4], shift[4];

  // Rows r to r + 3 of the warp's.
  __device__ __forceinline__ void load(const ConvArgs& args, const TileCoord& coord, const WarpRows& rows, int r, int n,
                                       bool here) {
    const Normalisation& norm = args.normalisation;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = __shfl_sync(~0u, rows.lane_offset, (r + i) & 31);
      at[i] = row < 0 || !here || r + i >= rows.count ? -1 : row + n;
      if (at[i] < 0) continue;
      const int64_t sample = coord.first_sample + (rows.first + r + i) % args.plan.rows.samples;
      residual[i].load(norm.residual, at[i]);
      scale[i].load(norm.scale, sample * norm.scale_stride + n);
      shift[i].load(norm.shift, sample * norm.shift_stride + n);
    }
  }
};

// The warp's rows: sums and bias, rounded, in their place in the tile, and moments of each.
template <class T>
__device__ __forceinline__ void finish_rows(const ConvArgs& args, const TileCoord& coord, const WarpRows& rows,
                                            const TileGroups& groups, float* tile, MomentTables& tables) {
  constexpr int kStride = ConvShape<128>::kStride;
  const int column = threadIdx.x % 32 * 4, n = coord.first_column + column;
  const bool here = n < args.outputs && column < args.plan.column_step;
  ParameterBits bias_bits{};
  if (here) bias_bits.load<T>(args.addends.bias, args.float_bias, n);
  const float4 bias = bias_bits.values<T>(args.addends.bias, args.float_bias, 0.f);
#pragma unroll 1
  for (int r = 0; r < rows.count; r += 4) {
    float4 sums[4];
    add_peers<4, true>(sums, ptx::shared_address(tile + (rows.first + r) * kStride + column), kStride * 4,
                       args.plan.splits, coord);
#pragma unroll 1
    for (int i = 0; i < 4 && r + i < rows.count && rows.first + r + i < args.plan.tile_rows; ++i) {
      const float4 sum = i == 0 ? sums[0] : i == 1 ? sums[1] : i == 2 ? sums[2] : sums[3];
      const float raw[4] = {sum.x + bias.x, sum.y + bias.y, sum.z + bias.z, sum.w + bias.w};
      const int64_t row = __shfl_sync(~0u, rows.lane_offset, r + i);
      if (args.out && row >= 0 && here) store_four<T>(args.out, row + n, raw);
      float x[4], total = 0, squares = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = widen(narrow<T>(raw[e])), total += x[e];
      const float mean = group_sum(total, groups) / static_cast<float>(groups.width);
#pragma unroll
      for (int e = 0; e < 4; ++e) squares += (x[e] - mean) * (x[e] - mean);
      squares = group_sum(squares, groups);
      const int tile_row = rows.first + r + i;
      if (groups.lane == 0 && groups.group < groups.count)
        tables.rows[tile_row][groups.group] = make_float2(mean, squares);
      *reinterpret_cast<float4*>(tile + tile_row * kStride + column) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
}

// Moments of the rows of each sample that the block has, by eight threads each.
__device__ __forceinline__ void block_moments(const ConvArgs& args, const TileCoord& coord, const WarpRows& rows,
                                              const TileGroups& groups, MomentTables& tables) {
  constexpr int kTeam = 8;
  const int samples = args.plan.rows.samples, of_block = rows.count * (kConsumerThreads / 32);
  const int begin = coord.rank * of_block, end = min(begin + of_block, args.plan.tile_rows);
  const int pairs = samples * groups.count, member = threadIdx.x % kTeam;
  const float width = static_cast<float>(groups.width);
#pragma unroll 1
  for (int base = 0; base < pairs; base += kConsumerThreads / kTeam) {
    const int pair = base + threadIdx.x / kTeam, group = pair % groups.count, sample = pair / groups.count;
    const int first = begin + (sample + samples - begin % samples) % samples;  // its first row here
    const int last = pair < pairs ? end : 0;
    const auto sum_of_team = [](float value) {
#pragma unroll
      for (int offset = 1; offset < kTeam; offset *= 2) value += __shfl_xor_sync(~0u, value, offset);
      return value;
    };
    float means = 0, count = 0, squares = 0;
#pragma unroll 1
    for (int row = first + member * samples; row < last; row += kTeam * samples)
      means += tables.rows[row][group].x, count += 1;
    count = sum_of_team(count);
    const float mean = sum_of_team(means) / fmaxf(count, 1.f);
#pragma unroll 1
    for (int row = first + member * samples; row < last; row += kTeam * samples) {
      const float2 of_row = tables.rows[row][group];
      squares += of_row.y + width * (of_row.x - mean) * (of_row.x - mean);
    }
    squares = sum_of_team(squares);
    if (member == 0 && pair < pairs) tables.block[pair] = {mean, squares, count * width, 0.f};
  }
}

// Mean and standard deviation of each sample and group of the tile, from the moments of the cluster's blocks.
__device__ __forceinline__ void all_statistics(const ConvArgs& args, const TileGroups& groups, MomentTables& tables) {
  const int pair = threadIdx.x, peers = args.plan.splits * args.plan.exchange;
  if (pair >= args.plan.rows.samples * groups.count) return;
  const uint32_t own = ptx::shared_address(&tables.block[pair]);
  float4 of[kMaxSplits];
#pragma unroll
  for (int p = 0; p < kMaxSplits; ++p) {
    of[p] = ptx::load_peer(ptx::peer_address(own, min(p, peers - 1)), p < peers);
  }
  float count = 0, mean = 0, squares = 0;
#pragma unroll
  for (int p = 0; p < kMaxSplits; ++p) ptx::arrived(of[p]), count += of[p].z, mean += of[p].z * of[p].x;
  mean /= count;
#pragma unroll
  for (int p = 0; p < kMaxSplits; ++p) squares += of[p].y + of[p].z * (of[p].x - mean) * (of[p].x - mean);
  tables.statistics[pair] = make_float2(mean, rsqrtf(squares / count + static_cast<float>(args.normalisation.eps)));
}

// The whole of it, by the consumer threads; the cluster's sums are in the tiles. The producer warp of a cluster takes
// part in the one barrier of it.
template <class T>
__device__ __forceinline__ void normalise_rows(const ConvArgs& args, const TileCoord& coord, float* tile,
                                               MomentTables& tables) {
  const Normalisation& norm = args.normalisation;
  const WarpRows rows(args, coord);
  const TileGroups groups(args);
  const int column = threadIdx.x % 32 * 4, n = coord.first_column + column;
  const bool here = n < args.outputs && column < args.plan.column_step;
  const bool is_float = norm.parameter_dtype == DType::kFloat32;
  ParameterBits weight_bits{}, bias_bits{};
  if (here) weight_bits.load<T>(norm.weight, is_float, n), bias_bits.load<T>(norm.bias, is_float, n);
  RowNeeds<T> needs;
  needs.load(args, coord, rows, 0, n, here);
  finish_rows<T>(args, coord, rows, groups, tile, tables);
  ptx::sync_threads(1, kConsumerThreads);
  block_moments(args, coord, rows, groups, tables);
  ptx::cluster_sync();
  all_statistics(args, groups, tables);
  ptx::sync_threads(1, kConsumerThreads);
  const float4 weight = weight_bits.values<T>(norm.weight, is_float, 1.f);
  const float4 bias = bias_bits.values<T>(norm.bias, is_float, 0.f);
  const float slope[4] = {weight.x, weight.y, weight.z, weight.w}, start[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll 1
  for (int r = 0; r < rows.count; r += 4) {
    if (r > 0) needs.load(args, coord, rows, r, n, here);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (needs.at[i] < 0) continue;
      const int row = rows.first + r + i;
      const float4 values = ptx::load_shared(ptx::shared_address(tile + row * ConvShape<128>::kStride + column));
      const float2 statistics = tables.statistics[row % args.plan.rows.samples * groups.count + groups.group];
      const float4 scale = needs.scale[i].values(norm.scale, 1.f), shift = needs.shift[i].values(norm.shift, 0.f);
      const float4 residual = needs.residual[i].values(norm.residual, 0.f);
      const float x[4] = {values.x, values.y, values.z, values.w}, times[4] = {scale.x, scale.y, scale.z, scale.w};
      const float plus[4] = {shift.x, shift.y, shift.z, shift.w};
      const float before[4] = {residual.x, residual.y, residual.z, residual.w};
      float out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float normalised = sizeof(T) == 4 ? (x[e] - statistics.x) * statistics.y
                                                : fmaf(x[e], statistics.y, -statistics.x * statistics.y);
        out[e] = channels_last::Mish(normalised * slope[e] + start[e]).value * times[e] + plus[e] + before[e];
      }
      store_four<T>(norm.out, needs.at[i], out);
    }
  }
}

}  // namespace dpa::kernels::conv1d
