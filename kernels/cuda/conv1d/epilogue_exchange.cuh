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

// The lane's columns of its warp's rows, and what they need. It can be known before the sums are.
template <class T>
struct LaneRows {
  OwnedRows rows;
  int column, n, count;  // the first of four columns, in the tile and of the output; of the rows that are there
  int64_t at;            // of the first row's columns in the output
  RowNeeds<T> needs;

  __device__ __forceinline__ LaneRows(const ConvArgs& args, const TileCoord& coord)
      : rows(args, coord),
        column(threadIdx.x % 32 * 4),
        n(coord.first_column + column),
        count(rows_there(args, coord)),
        at(first_row(args, coord) * args.outputs + n),
        needs(args, coord, rows, at, n, count) {}

 private:
  __device__ __forceinline__ int64_t first_row(const ConvArgs& args, const TileCoord& coord) const {
    return coord.first_sample * args.plan.rows.time + rows.begin + rows.first;
  }
  __device__ __forceinline__ int rows_there(const ConvArgs& args, const TileCoord& coord) const {
    const int64_t left = args.batch * args.plan.rows.time - first_row(args, coord);
    const bool here = n < args.outputs && column < args.plan.column_step;
    return here ? static_cast<int>(max(min(left, int64_t{rows.count}), int64_t{0})) : 0;
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

// Threads that join moments, and the moments of `all` values: each thread's part of them has `count`, which may be 0.
// Sums are about `pivot`, which is near the mean.
constexpr int kTeam = kConsumerThreads / 32;
static_assert(kTeam >= kMaxSplits, "a thread a warp, a part or a block");
__device__ __forceinline__ float2 join_moments(float2 part, int count, float pivot, float all) {
  float sums[3] = {};  // of the distances from the pivot, of their squares, and the squares within
  if (count > 0) {
    const float distance = part.x - pivot, weighted = static_cast<float>(count) * distance;
    sums[0] = weighted, sums[1] = weighted * distance, sums[2] = part.y;
  }
#pragma unroll
  for (int offset = 1; offset < kTeam; offset *= 2)
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, offset);
  const float mean = __fdividef(sums[0], all);
  return make_float2(pivot + mean, sums[2] + fmaxf(sums[1] - sums[0] * mean, 0.f));
}

// The samples by groups of which the block has a part, from the tile's sample `sample` on.
struct OwnedPairs {
  int sample, count;
  __device__ __forceinline__ OwnedPairs(const Shares& e, int begin, int owned)
      : sample(e.by_times(begin)), count(owned > 0 ? (e.by_times(begin + owned - 1) - sample + 1) * e.groups : 0) {}
};
__device__ __forceinline__ float2 statistics_of(const ConvArgs& args, float2 moments) {
  const Normalisation& norm = args.normalisation;
  return make_float2(moments.x, rsqrtf(fmaf(moments.y, args.shares.over, static_cast<float>(norm.eps))));
}

// The moments of each sample's rows that the block has, by a team each, a thread a warp's. Where they cross, a thread
// sends them to a sharer each; else they are the statistics.
__device__ __forceinline__ void block_moments(const ConvArgs& args, const TileCoord& coord, const OwnedRows& rows,
                                              MomentTables& tables, uint32_t barrier) {
  const Shares& e = args.shares;
  const int times = args.plan.rows.time, warp = threadIdx.x % kTeam;
  const OwnedPairs pairs(e, rows.begin, rows.owned);
#pragma unroll 1
  for (int base = 0; base < pairs.count; base += kConsumerThreads / kTeam) {
    const int wanted = base + static_cast<int>(threadIdx.x) / kTeam, pair = min(wanted, pairs.count - 1);
    const int above = e.by_groups(pair), sample = pairs.sample + above, group = pair - above * e.groups;
    const int begin = max(sample * times - rows.begin, 0), end = min((sample + 1) * times - rows.begin, rows.owned);
    const int first = max(begin, warp * e.of_warp), count = min(end, (warp + 1) * e.of_warp) - first;
    const float2 run = count > 0 ? tables.runs[first][group] : float2{};
    const float2 joined =
        join_moments(run, count * e.width, tables.runs[begin][group].x, static_cast<float>((end - begin) * e.width));
    if (!e.crosses) {
      if (warp == 0) tables.statistics[sample * e.groups + group] = statistics_of(args, joined);
      continue;
    }
    const Sharers to(e, sample, times);
    if (wanted >= pairs.count || warp >= to.count * e.tiles) continue;
    const int tile = warp >= to.count, rank = to.first + warp - tile * to.count;
    const int their_pair = (sample - e.by_times(rank * e.rows)) * e.groups + group;
    const int part = (coord.first_peer > 0 ? to.count : 0) + coord.rank - to.first;
    const int peer = tile * args.plan.splits + rank;
    ptx::send_cluster_8(ptx::cluster_address(ptx::shared_address(&tables.parts[their_pair * e.parts + part]), peer),
                        make_uint2(__float_as_uint(joined.x), __float_as_uint(joined.y)),
                        ptx::cluster_address(barrier, peer));
  }
}

// Bytes of moments that come to the block.
__device__ __forceinline__ int moments_to_come(const ConvArgs& args, const TileCoord& coord) {
  const Shares& e = args.shares;
  const int times = args.plan.rows.time, begin = coord.rank * e.rows, end = min(begin + e.rows, args.plan.tile_rows);
  int blocks = 0;
#pragma unroll 1
  for (int sample = e.by_times(begin); begin < end && sample * times < end; ++sample)
    blocks += Sharers(e, sample, times).count;
  return blocks * e.tiles * e.groups * int{sizeof(float2)};
}

// The statistics of each sample's group that the block has a part of, from all parts, by a team each, a thread a part.
__device__ __forceinline__ void cluster_statistics(const ConvArgs& args, const OwnedRows& rows, MomentTables& tables,
                                                   uint32_t barrier) {
  const Shares& e = args.shares;
  const int times = args.plan.rows.time, p = threadIdx.x % kTeam;
  const OwnedPairs pairs(e, rows.begin, rows.owned);
  if (pairs.count > 0) ptx::barrier_wait(barrier, 0);
#pragma unroll 1
  for (int base = 0; base < pairs.count; base += kConsumerThreads / kTeam) {
    const int pair = min(base + static_cast<int>(threadIdx.x) / kTeam, pairs.count - 1), above = e.by_groups(pair);
    const int sample = pairs.sample + above;
    const Sharers from(e, sample, times);
    const bool there = p < from.count * e.tiles;
    const int rank = from.first + (p >= from.count ? p - from.count : p);
    const int rows_of = min((sample + 1) * times, (rank + 1) * e.rows) - max(sample * times, rank * e.rows);
    const float2* const parts = tables.parts + pair * e.parts;
    const float2 joined = join_moments(there ? parts[p] : float2{}, there ? rows_of * e.width : 0, parts[0].x,
                                       static_cast<float>(times * e.width * e.tiles));
    if (p == 0) tables.statistics[pairs.sample * e.groups + pair] = statistics_of(args, joined);
  }
}

// The whole of it, by the consumer threads; sums are on their way. The warp arrives at the cluster's next barrier once it
// has read what others sent: with a shortcut, all that they sent of this tile's sums; else the moments too.
template <class T, bool kShortcut>
__device__ __forceinline__ void normalise_rows(const ConvArgs& args, const TileCoord& coord, const LaneRows<T>& lane,
                                               const SharedSums<128>& shared, MomentTables& tables,
                                               uint32_t sums_barrier, uint32_t moments_barrier) {
  const Normalisation& norm = args.normalisation;
  const Shares& e = args.shares;
  const OwnedRows& rows = lane.rows;
  const RowNeeds<T>& needs = lane.needs;
  const LaneGroup mine(e);
  uint32_t places[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    places[i] = (rows.first + i) * SharedSums<128>::kRow + (lane.column ^ swizzle(rows.sample[i])) * 4;
  ptx::barrier_wait(sums_barrier, 0);
  float4 x[4];
  shared.add(x, places, args.plan.splits);
  const float4 conv_bias = needs.conv_bias.template values<T>(args.addends.bias, args.float_bias, 0.f);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = widen_four<T>(
        narrow_four<T>({x[i].x + conv_bias.x, x[i].y + conv_bias.y, x[i].z + conv_bias.z, x[i].w + conv_bias.w}));
  warp_moments(e, rows, x, mine, tables);
  // All blocks have left their stages long ago: their sums are here. This says that theirs have been read.
  const auto arrive_for_others = [] { ptx::cluster_wait(), ptx::cluster_arrive_relaxed(); };
  ptx::sync_threads(1, kConsumerThreads);
  if (kShortcut) arrive_for_others();
  block_moments(args, coord, rows, tables, moments_barrier);
  if (e.crosses) cluster_statistics(args, rows, tables, moments_barrier);
  ptx::sync_threads(1, kConsumerThreads);
  if (!kShortcut) arrive_for_others();
  const bool is_float = norm.parameter_dtype == DType::kFloat32;
  const float4 weight = needs.weight.template values<T>(norm.weight, is_float, 1.f);
  const float4 bias = needs.bias.template values<T>(norm.bias, is_float, 0.f);
  const float slope[4] = {weight.x, weight.y, weight.z, weight.w}, start[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= lane.count) continue;
    const float2 statistics = tables.statistics[rows.sample[i] * e.groups + mine.group];
    const float4 scale = needs.scale[i].values(norm.scale, 1.f), shift = needs.shift[i].values(norm.shift, 0.f);
    const float4 residual = needs.residual[i].values(norm.residual, 0.f);
    const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, times[4] = {scale.x, scale.y, scale.z, scale.w};
    const float plus[4] = {shift.x, shift.y, shift.z, shift.w};
    const float before[4] = {residual.x, residual.y, residual.z, residual.w};
    if (args.out) store_four<T>(args.out, lane.at + i * args.outputs, values);
    float out[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float normalised = sizeof(T) == 4 ? (values[c] - statistics.x) * statistics.y
                                              : fmaf(values[c], statistics.y, -statistics.x * statistics.y);
      out[c] = channels_last::Mish(normalised * slope[c] + start[c]).value * times[c] + plus[c] + before[c];
    }
    store_four<T>(norm.out, lane.at + i * args.outputs, out);
  }
}

}  // namespace dpa::kernels::conv1d
