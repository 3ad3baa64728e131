// The epilogue with a normalisation, where a tile holds whole groups of whole samples (plan.h: `normalises`).
//
//   x = sums + bias, rounded to the tensors' type
//   out = mish(normalised x * weight + bias) * scale + shift + residual
//
// A warp takes one group of one sample at a time: its `time` rows, `samples` apart in the tile, of `group` neighbouring
// columns, four columns a lane, in kPasses passes over as many rows as 32 lanes hold. Where a row's lanes do not divide
// 32, those that are left repeat others' work and count nowhere. The group stays in the warp's
// registers, so its statistics need no other warp. Values, statistics and rounding are those of
// kernels/cuda/group_norm_mish on the rounded x.
#pragma once
#include "kernels/cuda/conv1d/epilogue.cuh"
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels::conv1d {

// Where a lane is in the tensors: `n` is the channel of its first element, `at` that element's place, `pass` the
// distance to the next pass; `counts`: whether no other lane has these elements, of which a group has 1 / `over`.
struct GroupCoord {
  int sample, n;
  int64_t at, pass;
  bool counts;
  float over;
};

// What a group needs beside its sums: loads in flight.
template <class T, int kPasses>
struct GroupNeeds {
  Bits<T> residual[kPasses], scale, shift;
  ParameterBits conv_bias, weight, bias;

  __device__ __forceinline__ GroupNeeds(const ConvArgs& args, const GroupCoord& coord) {
    const Normalisation& norm = args.normalisation;
    const bool is_float = norm.parameter_dtype == DType::kFloat32;
#pragma unroll
    for (int p = 0; p < kPasses; ++p) residual[p].load(norm.residual, coord.at + p * coord.pass);
    scale.load(norm.scale, coord.sample * norm.scale_stride + coord.n);
    shift.load(norm.shift, coord.sample * norm.shift_stride + coord.n);
    conv_bias.template load<T>(args.addends.bias, args.float_bias, coord.n);
    weight.template load<T>(norm.weight, is_float, coord.n);
    bias.template load<T>(norm.bias, is_float, coord.n);
  }
};

// One group of one sample, from its sums. The whole warp calls.
template <class T, int kPasses>
__device__ __forceinline__ void normalise_group(const ConvArgs& args, const GroupCoord& coord,
                                                const GroupNeeds<T, kPasses>& needs, const float4 (&sums)[kPasses]) {
  const Normalisation& norm = args.normalisation;
  const bool is_float = norm.parameter_dtype == DType::kFloat32;
  const float4 conv_bias = needs.conv_bias.template values<T>(args.addends.bias, args.float_bias, 0.f);
  float x[kPasses][4], sum = 0, squares = 0;
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    const float raw[4] = {sums[p].x + conv_bias.x, sums[p].y + conv_bias.y, sums[p].z + conv_bias.z,
                          sums[p].w + conv_bias.w};
    if (args.out && coord.counts) store_four<T>(args.out, coord.at + p * coord.pass, raw);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[p][e] = widen(narrow<T>(raw[e])), sum += x[p][e];
  }
  const float mean = warp_sum(coord.counts ? sum : 0) * coord.over;
#pragma unroll
  for (int p = 0; p < kPasses; ++p)
#pragma unroll
    for (int e = 0; e < 4; ++e) squares += (x[p][e] - mean) * (x[p][e] - mean);
  const float rstd = rsqrtf(warp_sum(coord.counts ? squares : 0) * coord.over + static_cast<float>(norm.eps));
  const float4 weight = needs.weight.template values<T>(norm.weight, is_float, 1.f);
  const float4 bias = needs.bias.template values<T>(norm.bias, is_float, 0.f);
  const float4 scale = needs.scale.values(norm.scale, 1.f), shift = needs.shift.values(norm.shift, 0.f);
  const float slope[4] = {weight.x, weight.y, weight.z, weight.w}, start[4] = {bias.x, bias.y, bias.z, bias.w};
  const float times[4] = {scale.x, scale.y, scale.z, scale.w}, plus[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    const float4 residual = needs.residual[p].values(norm.residual, 0.f);
    const float before[4] = {residual.x, residual.y, residual.z, residual.w};
    float out[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float normalised = sizeof(T) == 4 ? (x[p][e] - mean) * rstd : fmaf(x[p][e], rstd, -mean * rstd);
      out[e] = channels_last::Mish(normalised * slope[e] + start[e]).value * times[e] + plus[e] + before[e];
    }
    if (coord.counts) store_four<T>(norm.out, coord.at + p * coord.pass, out);
  }
}

// Where a cluster's blocks share a tile, its rows lie sample by sample, so that a block's are neighbours. Rows of different
// samples are most often a multiple of four rows apart then, in the same banks: their columns change places.
__device__ __forceinline__ int swizzle(int sample) { return (sample & 3) * 8; }

// The warp's accumulators to the tile, in that order.
template <int kColumns>
__device__ __forceinline__ void store_by_sample(const ConvArgs& args, float* tile, const float (&sums)[kColumns / 2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x / 32 * 16 + half * 8 + lane / 4;
    const int time = args.shares.by_samples(row), sample = row - time * args.plan.rows.samples;
    if (row >= args.plan.tile_rows) continue;
    float* const to = tile + (sample * args.plan.rows.time + time) * ConvShape<kColumns>::kStride + lane % 4 * 2;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float* const eight = to + ((b * 8) ^ swizzle(sample));
#pragma unroll
      for (int j = b; j < kColumns / 8; j += 4)
        *reinterpret_cast<float2*>(eight + j / 4 * 32) =
            make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
    }
  }
}

// The block's share of the tile's samples, group by group. Samples of a share are powers of two, and most often groups
// are, too: no divisions then.
template <class T, int kColumns, int kPasses, bool kSplit>
__device__ __forceinline__ void normalise_groups(const ConvArgs& args, const TileCoord& coord,
                                                 const SharedSums<kColumns>& shared, uint32_t sums_barrier) {
  constexpr int kRow = SharedSums<kColumns>::kRow, kWarps = kConsumerThreads / 32;
  const auto log2 = [](int n) { return __ffs(n) - 1; };
  const int lane = threadIdx.x % 32, group = args.normalisation.group, lanes = group / 4;
  const bool even = (group & (group - 1)) == 0;
  const int groups = even ? kColumns >> log2(group) : args.plan.column_step / group, samples = args.plan.rows.samples;
  const int share = kSplit ? samples >> log2(args.plan.splits) : samples, pairs = share * groups;
  const int rows_a_pass = args.plan.rows.time / kPasses, row_of_lane = even ? lane >> log2(lanes) : lane / lanes;
  const bool counts = row_of_lane < rows_a_pass;
  const int row = counts ? row_of_lane : 0, column = (counts ? lane - row_of_lane * lanes : 0) * 4;
  const float over = 1.0f / static_cast<float>(args.plan.rows.time * group);
  const int next_row = kSplit ? kRow : samples * kRow;  // a sample's next time
  for (int pair = threadIdx.x / 32; pair < pairs; pair += kWarps) {
    const int of_share = even ? pair >> log2(groups) : pair / groups;
    const int in_tile = coord.rank * share + of_share, first = (pair - of_share * groups) * group;
    const int sample = coord.first_sample + in_tile;
    if (sample >= args.batch || coord.first_column + first >= args.outputs) continue;
    const GroupCoord at{
        sample,
        coord.first_column + first + column,
        (static_cast<int64_t>(sample) * args.plan.rows.time + row) * args.outputs + coord.first_column + first + column,
        rows_a_pass * args.outputs,
        counts,
        over};
    const GroupNeeds<T, kPasses> needs(args, at);
    float4 sums[kPasses];
    uint32_t places[kPasses];
    const int place = kSplit ? of_share * args.plan.rows.time * kRow + ((first + column) ^ swizzle(in_tile)) * 4
                             : of_share * kRow + (first + column) * 4;
#pragma unroll
    for (int p = 0; p < kPasses; ++p) places[p] = place + (p * rows_a_pass + row) * next_row;
    if constexpr (kSplit) ptx::barrier_wait(sums_barrier, 0);
    shared.add(sums, places, args.plan.splits);
    normalise_group<T, kPasses>(args, at, needs, sums);
  }
}

}  // namespace dpa::kernels::conv1d
