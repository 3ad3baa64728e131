// The other end of a product: the normalisation that follows a convolution, where a tile holds whole groups of whole
// samples (plan.h: `normalises`).
//
//   x = sums + bias, rounded to the tensors' type;  out = mish(normalised x * weight + bias) * scale + shift + residual
//
// A warp takes one group of one sample at a time: its `time` rows, `samples` apart in the tile, of `group` neighbouring
// columns, four columns a lane, in kPasses passes over as many rows as 32 lanes hold. The group stays in the warp's
// registers, so its statistics need no other warp. Values, statistics and rounding are those of kernels/group_norm_mish
// on the rounded x.
#pragma once
#include "kernels/conv1d/product.cuh"
#include "kernels/group_norm_mish/common.cuh"

namespace dpa::kernels::conv1d {

// One group of one sample. The whole warp calls; `from` is the address of the lane's first sums, `at` the place of its
// first element in the tensors, `n` its channel.
template <class T, int kColumns, int kPasses>
__device__ __forceinline__ void normalise_group(const ProductArgs& args, uint32_t from, int rows_a_pass, int sample,
                                                int n, int64_t at) {
  constexpr int kStride = ProductShape<kColumns>::kStride;
  const Normalisation& norm = args.normalisation;
  const bool wide = norm.parameter_dtype == DType::kFloat32;
  const int64_t pass = rows_a_pass * args.outputs;
  float4 residual[kPasses], sums[kPasses];
#pragma unroll
  for (int p = 0; p < kPasses; ++p) residual[p] = load_four<T>(norm.residual, false, at + p * pass, 0.f);
  const float4 conv_bias = load_four<T>(args.addends.bias, args.float_bias, n, 0.f);
  const float4 weight = load_four<T>(norm.weight, wide, n, 1.f), bias = load_four<T>(norm.bias, wide, n, 0.f);
  const float4 scale = load_four<T>(norm.scale, false, sample * norm.scale_stride + n, 1.f);
  const float4 shift = load_four<T>(norm.shift, false, sample * norm.shift_stride + n, 0.f);
  add_peers<kPasses>(sums, from, rows_a_pass * args.plan.rows.samples * kStride * 4, args.plan.splits);
  float x[kPasses][4], sum = 0, squares = 0;
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    const float raw[4] = {sums[p].x + conv_bias.x, sums[p].y + conv_bias.y, sums[p].z + conv_bias.z,
                          sums[p].w + conv_bias.w};
    if (args.out) store_four<T>(args.out, at + p * pass, raw);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[p][e] = widen(narrow<T>(raw[e])), sum += x[p][e];
  }
  const float over = 1.0f / static_cast<float>(kPasses * 128), mean = warp_sum(sum) * over;
#pragma unroll
  for (int p = 0; p < kPasses; ++p)
#pragma unroll
    for (int e = 0; e < 4; ++e) squares += (x[p][e] - mean) * (x[p][e] - mean);
  const float rstd = rsqrtf(warp_sum(squares) * over + static_cast<float>(norm.eps));
  const float slope[4] = {weight.x, weight.y, weight.z, weight.w}, start[4] = {bias.x, bias.y, bias.z, bias.w};
  const float times[4] = {scale.x, scale.y, scale.z, scale.w}, plus[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
  for (int p = 0; p < kPasses; ++p) {
    const float before[4] = {residual[p].x, residual[p].y, residual[p].z, residual[p].w};
    float out[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float normalised = fmaf(x[p][e], rstd, -mean * rstd);
      out[e] = channels_last::Mish(normalised * slope[e] + start[e]).value * times[e] + plus[e] + before[e];
    }
    store_four<T>(norm.out, at + p * pass, out);
  }
}

// The block's share of the tile's samples, group by group.
template <class T, int kColumns, int kPasses>
__device__ __forceinline__ void finish_groups(const ProductArgs& args, const Place& place, const float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int time = args.plan.rows.time, group = args.normalisation.group;
  const int samples = args.plan.rows.samples / args.plan.splits, groups = kColumns / group;
  const int lanes = group / 4, column = lane % lanes * 4, row = lane / lanes, rows_a_pass = 32 / lanes;
  for (int pair = warp; pair < samples * groups; pair += kMultipliers / 32) {
    const int in_tile = place.rank * samples + pair / groups, first = pair % groups * group;
    const int sample = place.first_sample + in_tile, n = place.first_column + first + column;
    if (sample >= args.batch || place.first_column + first >= args.outputs) continue;
    const float* from =
        tile + (row * args.plan.rows.samples + in_tile) * ProductShape<kColumns>::kStride + first + column;
    const int64_t at = (static_cast<int64_t>(sample) * time + row) * args.outputs + n;
    normalise_group<T, kColumns, kPasses>(args, ptx::shared_address(from), rows_a_pass, sample, n, at);
  }
}

}  // namespace dpa::kernels::conv1d
