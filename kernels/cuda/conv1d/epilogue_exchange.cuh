// The epilogue with a normalisation of groups that no warp holds alone (plan.h: `exchange`): the values of
// epilogue_norm.cuh.
//
//   block    finishes an equal share of the tile's rows, sample by sample: at most 32. Sums lie in the tile in that order,
//            so what another block finishes is sent in one copy
//   warp     four of its block's rows, in registers from the sums to the output; a lane, four neighbouring columns
//
//   moments  of a warp's rows of a sample, group by group; then a team of threads, one a warp, joins those and, where a
//            sample or a group is not the block's alone, sends them to every block that has a part of it
//
// Moments are about the mean of what they are of, so nothing cancels, and are added in an order that the sizes determine.
// A block waits for its own instructions here more than for memory: what the plan decides comes from the host, and
// divisions are multiplications.
#pragma once
#include "kernels/cuda/conv1d/epilogue_norm.cuh"
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels::conv1d {

// Behind the tiles of sums. Moments are a mean, and the sum of the squares of the distances from it.
struct MomentTables {
  float2 runs[kMostOwned][16];     // of a warp's rows of a sample, at the first of them
  float2 parts[kMaxParts];         // the block's samples by groups by the blocks that have a part
  float2 statistics[kMaxMoments];  // the tile's samples by groups: mean and 1 / standard deviation
};

static_assert(2 * ConvShape<128>::kTile * 4 + sizeof(MomentTables) +
                      (kTileRows - kTileRows / kMaxSplits + 2) * SharedSums<128>::kRow <=
                  ConvShape<128>::bytes(kMaxWeights) - sizeof(Pipelines),
              "tables and others' sums find their place behind two tiles");

// Which rows of the tile a block finishes, and which of them a warp, four at most.
struct OwnedRows {
  int begin, owned;  // of the block
  int first, count;  // of the warp, among the block's
  int sample[4];     // of each of them, in the tile

  __device__ __forceinline__ OwnedRows(const ConvArgs& args, const TileCoord& coord) {
    const Shares& e = args.shares;
    begin = coord.rank * e.rows, owned = max(0, min(e.rows, args.plan.tile_rows - begin));
    first = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) * e.of_warp;
    count = max(0, min(e.of_warp, owned - first));
#pragma unroll
    for (int i = 0; i < 4; ++i) sample[i] = e.by_times(begin + first + min(i, max(count - 1, 0)));
  }
};

// A lane's four columns as part of a group; those of a group that is larger than the tile are one.
struct LaneGroup {
  int group, lane;  // the lane among those of the group
  __device__ __forceinline__ explicit LaneGroup(const Shares& e) {
    const int all = static_cast<int>(threadIdx.x) % 32;
    group = e.by_lanes(all), lane = all - group * e.lanes;
  }
};

// What the rows need beside their sums: loads in flight.
template <class T>
struct RowNeeds {
  ParameterBits conv_bias, weight, bias;
  Bits<T> residual[4], scale[4], shift[4];

  // at: of the first row's columns in the output; there are `count` rows of this lane.
  __device__ __forceinline__ RowNeeds(const ConvArgs& args, const TileCoord& coord, const OwnedRows& rows, int64_t at,
                                      int n, int count) {
    const Normalisation& norm = args.normalisation;
    const bool is_float = norm.parameter_dtype == DType::kFloat32;
    if (count > 0) {
      conv_bias.load<T>(args.addends.bias, args.float_bias, n);
      weight.load<T>(norm.weight, is_float, n), bias.load<T>(norm.bias, is_float, n);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      const int64_t sample = coord.first_sample + rows.sample[i];
      residual[i].load(norm.residual, at + i * args.outputs);
      scale[i].load(norm.scale, sample * norm.scale_stride + n);
      shift[i].load(norm.shift, sample * norm.shift_stride + n);
    }
  }
};

// The moments of the warp's rows of each sample, group by group.
__device__ __forceinline__ void warp_moments(const Shares& e, const OwnedRows& rows, const float4 (&x)[4],
                                             const LaneGroup& mine, MomentTables& tables) {
  int first = 0;  // of a sample's rows
#pragma unroll 1
  for (int sample = rows.sample[0]; first < rows.count; ++sample) {
    float sum = 0, squares = 0, count = 0;
    bool of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of[i] = i < rows.count && rows.sample[i] == sample;
      if (of[i]) sum += (x[i].x + x[i].y) + (x[i].z + x[i].w), count += 1;
    }
    float mean = __fdividef(sum, 4 * count);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float d[4] = {x[i].x - mean, x[i].y - mean, x[i].z - mean, x[i].w - mean};
      if (of[i]) squares += fmaf(d[0], d[0], d[1] * d[1]) + fmaf(d[2], d[2], d[3] * d[3]);
    }
    // Neighbouring lanes' become one, then those of their neighbours, in the group's first lane.
#pragma unroll 1
    for (int offset = 1; offset < e.lanes; offset *= 2) {
      const int other = min(offset, e.lanes - offset - mine.lane);  // lanes whose moments come
      const float distance = __shfl_down_sync(~0u, mean, offset) - mean;
      const float more = __shfl_down_sync(~0u, squares, offset);
      if (other <= 0) continue;
      const float part =
          other == offset ? 0.5f : __fdividef(static_cast<float>(other), static_cast<float>(offset + other));
      squares += fmaf(distance * distance, 4 * count * static_cast<float>(offset) * part, more);
      mean = fmaf(distance, part, mean);
    }
    if (mine.lane == 0 && mine.group < e.groups)
      tables.runs[rows.first + first][mine.group] = make_float2(mean, squares);
    first += static_cast<int>(count);
  }
}

// The blocks that have a part of a sample of the tile, and of each of its groups: `count` from rank `first` on, in every
// one of the tiles that share it.
struct Sharers {
  int first, count;
  __device__ __forceinline__ Sharers(const Shares& e, int sample, int times)
      : first(e.by_rows(sample * times)), count(e.by_rows(sample * times + times - 1) - first + 1) {}
};

// The moments of each sample's rows that the block has, a team of eight threads each, a thread a warp's: sums about the
// first one's mean. Where they cross, a thread sends them to a sharer each; else they are the statistics.
__device__ __forceinline__ void block_moments(const ConvArgs& args, const TileCoord& coord, const OwnedRows& rows,
                                              MomentTables& tables, uint32_t barrier) {
  constexpr int kTeam = kConsumerThreads / 32;
  static_assert(kTeam >= kMaxSplits, "a thread a sharer");
  const Shares& e = args.shares;
  const int times = args.plan.rows.time, sample0 = e.by_times(rows.begin), warp = threadIdx.x % kTeam;
  const int pairs = rows.owned > 0 ? (e.by_times(rows.begin + rows.owned - 1) - sample0 + 1) * e.groups : 0;
#pragma unroll 1
  for (int base = 0; base < pairs; base += kConsumerThreads / kTeam) {
    const int pair = min(base + static_cast<int>(threadIdx.x) / kTeam, pairs - 1), above = e.by_groups(pair);
    const int sample = sample0 + above, group = pair - above * e.groups;
    const int begin = max(sample * times - rows.begin, 0), end = min((sample + 1) * times - rows.begin, rows.owned);
    const int first = max(begin, warp * e.of_warp), count = min(end, (warp + 1) * e.of_warp) - first;
    const float pivot = tables.runs[begin][group].x;
    float sums[3] = {};  // of the rows' distances from it, their squares, and the squares within
    if (count > 0) {
      const float2 run = tables.runs[first][group];
      const float distance = run.x - pivot, weighted = static_cast<float>(count) * distance;
      sums[0] = weighted, sums[1] = weighted * distance, sums[2] = run.y;
    }
#pragma unroll
    for (int offset = 1; offset < kTeam; offset *= 2)
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, offset);
    const float all = static_cast<float>(end - begin), width = static_cast<float>(e.width), mean = sums[0] / all;
    const float squares = sums[2] + width * fmaxf(sums[1] - sums[0] * mean, 0.f);
    if (!e.crosses) {
      if (warp == 0)
        tables.statistics[sample * e.groups + group] =
            make_float2(pivot + mean, rsqrtf(squares / (all * width) + static_cast<float>(args.normalisation.eps)));
      continue;
    }
    const Sharers to(e, sample, times);
    if (base + static_cast<int>(threadIdx.x) / kTeam >= pairs || warp >= to.count * e.tiles) continue;
    const int tile = warp >= to.count, rank = to.first + warp - tile * to.count;
    const int their_pair = (sample - e.by_times(rank * e.rows)) * e.groups + group;
    const int part = (coord.first_peer > 0 ? to.count : 0) + coord.rank - to.first,
              peer = tile * args.plan.splits + rank;
    ptx::send_cluster_8(ptx::cluster_address(ptx::shared_address(&tables.parts[their_pair * e.parts + part]), peer),
                        make_uint2(__float_as_uint(pivot + mean), __float_as_uint(squares)),
                        ptx::cluster_address(barrier, peer));
  }
}

// Bytes of moments that come to the block.
__device__ __forceinline__ int moments_to_come(const ConvArgs& args, const OwnedRows& rows) {
  const Shares& e = args.shares;
  const int times = args.plan.rows.time, end = rows.begin + rows.owned;
  int blocks = 0;
#pragma unroll 1
  for (int sample = e.by_times(rows.begin); rows.owned > 0 && sample * times < end; ++sample)
    blocks += Sharers(e, sample, times).count;
  return blocks * e.tiles * e.groups * int{sizeof(float2)};
}

// Mean and standard deviation of a sample's group that the block has a part of, a thread each, from all parts.
__device__ __forceinline__ void cluster_statistics(const ConvArgs& args, const OwnedRows& rows, MomentTables& tables,
                                                   uint32_t barrier) {
  const Shares& e = args.shares;
  const int times = args.plan.rows.time, sample0 = e.by_times(rows.begin), above = e.by_groups(threadIdx.x);
  const int sample = sample0 + above;
  if (rows.owned == 0 || sample * times >= rows.begin + rows.owned) return;
  const Sharers from(e, sample, times);
  const float2* const parts = tables.parts + threadIdx.x * e.parts;
  ptx::barrier_wait(barrier, 0);
  float2 of[kMaxSplits];
  float counts[kMaxSplits], count = 0, mean = 0, squares = 0;
#pragma unroll
  for (int p = 0; p < kMaxSplits; ++p) {
    const bool there = p < from.count * e.tiles;
    const int rank = from.first + (p >= from.count ? p - from.count : p);
    of[p] = there ? parts[p] : float2{};
    const int rows_of = min((sample + 1) * times, (rank + 1) * e.rows) - max(sample * times, rank * e.rows);
    counts[p] = there ? static_cast<float>(rows_of * e.width) : 0.f;
  }
#pragma unroll
  for (int p = 0; p < kMaxSplits; ++p) count += counts[p], mean += counts[p] * of[p].x;
  mean /= count;
#pragma unroll
  for (int p = 0; p < kMaxSplits; ++p) squares += of[p].y + counts[p] * (of[p].x - mean) * (of[p].x - mean);
  tables.statistics[sample * e.groups + threadIdx.x - above * e.groups] =
      make_float2(mean, rsqrtf(squares / count + static_cast<float>(args.normalisation.eps)));
}

// The whole of it, by the consumer threads; sums are on their way. The warp arrives at the cluster's next barrier once it
// has read what others sent: with a shortcut, all that they sent of this tile's sums; else the moments too.
template <class T, bool kShortcut>
__device__ __forceinline__ void normalise_rows(const ConvArgs& args, const TileCoord& coord,
                                               const SharedSums<128>& shared, MomentTables& tables,
                                               uint32_t sums_barrier, uint32_t moments_barrier) {
  const Normalisation& norm = args.normalisation;
  const Shares& e = args.shares;
  const OwnedRows rows(args, coord);
  if (e.crosses && threadIdx.x == 0) ptx::barrier_expect(moments_barrier, moments_to_come(args, rows));
  const int column = threadIdx.x % 32 * 4, n = coord.first_column + column;
  const int row = coord.first_sample * args.plan.rows.time + rows.begin + rows.first;  // of the output
  const int64_t at = row * args.outputs + n, left = args.batch * args.plan.rows.time - row;
  const bool here = n < args.outputs && column < args.plan.column_step;
  const int count = here ? static_cast<int>(max(min(left, int64_t{rows.count}), int64_t{0})) : 0;
  const RowNeeds<T> needs(args, coord, rows, at, n, count);
  const LaneGroup mine(e);
  ptx::barrier_wait(sums_barrier, 0);
  ptx::cluster_wait();
  float4 x[4];
  uint32_t places[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    places[i] = (rows.first + i) * SharedSums<128>::kRow + (column ^ swizzle(rows.sample[i])) * 4;
  shared.add(x, places, args.plan.splits);
  const float4 conv_bias = needs.conv_bias.template values<T>(args.addends.bias, args.float_bias, 0.f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float raw[4] = {x[i].x + conv_bias.x, x[i].y + conv_bias.y, x[i].z + conv_bias.z, x[i].w + conv_bias.w};
    x[i] = make_float4(widen(narrow<T>(raw[0])), widen(narrow<T>(raw[1])), widen(narrow<T>(raw[2])),
                       widen(narrow<T>(raw[3])));
  }
  warp_moments(e, rows, x, mine, tables);
  ptx::sync_threads(1, kConsumerThreads);
  if (kShortcut) ptx::cluster_arrive_relaxed();
  block_moments(args, coord, rows, tables, moments_barrier);
  if (e.crosses) cluster_statistics(args, rows, tables, moments_barrier);
  ptx::sync_threads(1, kConsumerThreads);
  if (!kShortcut) ptx::cluster_arrive_relaxed();
  const bool is_float = norm.parameter_dtype == DType::kFloat32;
  const float4 weight = needs.weight.template values<T>(norm.weight, is_float, 1.f);
  const float4 bias = needs.bias.template values<T>(norm.bias, is_float, 0.f);
  const float slope[4] = {weight.x, weight.y, weight.z, weight.w}, start[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= count) continue;
    const float2 statistics = tables.statistics[rows.sample[i] * e.groups + mine.group];
    const float4 scale = needs.scale[i].values(norm.scale, 1.f), shift = needs.shift[i].values(norm.shift, 0.f);
    const float4 residual = needs.residual[i].values(norm.residual, 0.f);
    const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, times[4] = {scale.x, scale.y, scale.z, scale.w};
    const float plus[4] = {shift.x, shift.y, shift.z, shift.w};
    const float before[4] = {residual.x, residual.y, residual.z, residual.w};
    if (args.out) store_four<T>(args.out, at + i * args.outputs, values);
    float out[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float normalised = sizeof(T) == 4 ? (values[c] - statistics.x) * statistics.y
                                              : fmaf(values[c], statistics.y, -statistics.x * statistics.y);
      out[c] = channels_last::Mish(normalised * slope[c] + start[c]).value * times[c] + plus[c] + before[c];
    }
    store_four<T>(norm.out, at + i * args.outputs, out);
  }
}

}  // namespace dpa::kernels::conv1d
