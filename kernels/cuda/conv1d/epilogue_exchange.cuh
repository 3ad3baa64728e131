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

// Sums of the tile's other blocks behind the tables, where no second tile takes the place: `blocks` rows of them, those
// of the next rank first. Each block sends the others their rows in one copy: loads from a peer bring 8 bytes a clock.
struct SentSums {
  static constexpr int kRow = ConvShape<128>::kStride * 4;
  static_assert(ConvShape<128>::kTile * 4 + sizeof(MomentTables) + kTileRows * kRow <=
                    ConvShape<128>::bytes(kMaxWeights) - sizeof(Pipelines),
                "fewer than a tile's rows find their place");
  uint32_t first, bytes;  // address of the first sums; bytes of a block

  __device__ __forceinline__ SentSums(const MomentTables& tables, const WarpRows& rows)
      : first(ptx::shared_address(&tables + 1)), bytes(rows.count * (kConsumerThreads / 32) * kRow) {}
  __device__ __forceinline__ void send(const ConvArgs& args, const TileCoord& coord, const float* tile,
                                       uint32_t barrier) const {
    const int splits = args.plan.splits, distance = static_cast<int>(threadIdx.x) + 1;
    if (threadIdx.x == 0) ptx::barrier_expect(barrier, (splits - 1) * bytes);
    if (distance >= splits) return;
    const int to = coord.rank - distance + (coord.rank < distance ? splits : 0), rank = coord.first_peer + to;
    ptx::copy_to_cluster(ptx::cluster_address(first + (distance - 1) * bytes, rank),
                         ptx::shared_address(tile) + to * bytes, bytes, ptx::cluster_address(barrier, rank));
  }
  // The block's own sums of a column of the warp's rows from `r` on, and the others', in the order of add_peers.
  __device__ __forceinline__ void add(float4 (&sums)[4], const float* tile, const WarpRows& rows, int r, int column,
                                      int splits) const {
    const uint32_t own = ptx::shared_address(tile + column) + (rows.first + r) * kRow;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = ptx::load_shared(own + i * kRow);
    uint32_t from = first + column * 4 + (static_cast<int>(threadIdx.x) / 32 * rows.count + r) * kRow;
#pragma unroll 1
    for (int next = 1; next < splits; ++next, from += bytes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 v = ptx::load_shared(from + i * kRow);
        sums[i].x += v.x, sums[i].y += v.y, sums[i].z += v.z, sums[i].w += v.w;
      }
    }
  }
};

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

// The sums over the lanes of a group, in each of them, of four values side by side. The whole warp calls.
__device__ __forceinline__ void group_sums(float (&values)[4], const TileGroups& groups) {
#pragma unroll 1
  for (int offset = 1; offset < groups.lanes; offset *= 2) {
#pragma unroll
    for (float& value : values) {
      const float other = __shfl_down_sync(~0u, value, offset);
      if (groups.lane + offset < groups.lanes) value += other;
    }
  }
#pragma unroll
  for (float& value : values) value = __shfl_sync(~0u, value, static_cast<int>(threadIdx.x) % 32 - groups.lane);
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

// The warp's rows: sums and bias, rounded, in their place in the tile, and moments of each. Four rows side by side: a
// row waits for shuffles most of its time.
template <class T, bool kSent>
__device__ __forceinline__ void finish_rows(const ConvArgs& args, const TileCoord& coord, const WarpRows& rows,
                                            const TileGroups& groups, float* tile, MomentTables& tables) {
  constexpr int kStride = ConvShape<128>::kStride;
  const int column = threadIdx.x % 32 * 4, n = coord.first_column + column;
  const bool here = n < args.outputs && column < args.plan.column_step;
  const bool tells = groups.lane == 0 && groups.group < groups.count;
  const float over = 1.0f / static_cast<float>(groups.width);
  ParameterBits bias_bits{};
  if (here) bias_bits.load<T>(args.addends.bias, args.float_bias, n);
  const float4 bias = bias_bits.values<T>(args.addends.bias, args.float_bias, 0.f);
#pragma unroll 1
  for (int r = 0; r < rows.count; r += 4) {
    float4 x[4];
    float mean[4], squares[4];
    if constexpr (kSent)
      SentSums(tables, rows).add(x, tile, rows, r, column, args.plan.splits);
    else
      add_peers<4, true>(x, ptx::shared_address(tile + (rows.first + r) * kStride + column), kStride * 4,
                         args.plan.splits, coord);
    const int count = min(min(rows.count, args.plan.tile_rows - rows.first) - r, 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float raw[4] = {x[i].x + bias.x, x[i].y + bias.y, x[i].z + bias.z, x[i].w + bias.w};
      const int64_t row = __shfl_sync(~0u, rows.lane_offset, (r + i) & 31);
      if (args.out && row >= 0 && here && i < count) store_four<T>(args.out, row + n, raw);
      x[i] = make_float4(widen(narrow<T>(raw[0])), widen(narrow<T>(raw[1])), widen(narrow<T>(raw[2])),
                         widen(narrow<T>(raw[3])));
      mean[i] = (x[i].x + x[i].y) + (x[i].z + x[i].w);
    }
    group_sums(mean, groups);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mean[i] *= over;
      const float d[4] = {x[i].x - mean[i], x[i].y - mean[i], x[i].z - mean[i], x[i].w - mean[i]};
      squares[i] = fmaf(d[0], d[0], d[1] * d[1]) + fmaf(d[2], d[2], d[3] * d[3]);
    }
    group_sums(squares, groups);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      const int tile_row = rows.first + r + i;
      if (tells) tables.rows[tile_row][groups.group] = make_float2(mean[i], squares[i]);
      *reinterpret_cast<float4*>(tile + tile_row * kStride + column) = x[i];
    }
  }
}

// Moments of the rows of each sample that the block has, by eight threads each: sums about the first row's mean.
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
    const float pivot = first < last ? tables.rows[first][group].x : 0.f;
    float sums[3] = {};  // of the rows' distances from it, their squares, and the squares within rows
#pragma unroll 1
    for (int row = first + member * samples; row < last; row += kTeam * samples) {
      const float2 of_row = tables.rows[row][group];
      const float distance = of_row.x - pivot;
      sums[0] += distance, sums[1] = fmaf(distance, distance, sums[1]), sums[2] += of_row.y;
    }
#pragma unroll
    for (int offset = 1; offset < kTeam; offset *= 2)
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(~0u, sum, offset);
    if (member != 0 || pair >= pairs) continue;
    const float count = static_cast<float>(max(0, (end - first + samples - 1) / samples));
    const float mean = sums[0] / fmaxf(count, 1.f);
    tables.block[pair] = {pivot + mean, sums[2] + width * fmaxf(sums[1] - sums[0] * mean, 0.f), count * width, 0.f};
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
template <class T, bool kSent>
__device__ __forceinline__ void normalise_rows(const ConvArgs& args, const TileCoord& coord, float* tile,
                                               MomentTables& tables, uint32_t sums_barrier) {
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
  if constexpr (kSent) {
    SentSums(tables, rows).send(args, coord, tile, sums_barrier);
    ptx::barrier_wait(sums_barrier, 0);
  }
  finish_rows<T, kSent>(args, coord, rows, groups, tile, tables);
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
