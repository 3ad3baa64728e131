// fprop and dgrad: which kernel a convolution takes, and its launch. The kernel by wgmma: convolution_kernel.cuh; the other
// (`by_wgmma`): mma_convolution.cu.
#include <algorithm>

#include "kernels/cuda/conv1d/convolution_kernel.cuh"
#include "kernels/cuda/conv1d/launch_conv.cuh"
#include "kernels/cuda/conv1d/mma.h"
#include "kernels/cuda/conv1d/tensor_map.h"
#include "kernels/plans/conv1d/mma_plan.h"

namespace dpa::kernels::conv1d {
namespace {

template <bool kDgrad>
cudaError_t run(const Conv1d& conv, const ConvPlan& plan, const Rows& x, const Weights& weights, const Addends& addends,
                const OutputRows& out, const Normalisation& normalisation, const Shortcut& shortcut,
                cudaStream_t stream) {
  const int64_t x_length = kDgrad ? conv.y_length : conv.x_length;
  const int64_t x_channels = kDgrad ? conv.y_channels : conv.x_channels;
  TensorMaps maps;
  const int step_channels = chunk(conv);  // of a step
  const int planes = conv.halves ? 2 : 1;
  const DType dtype = conv.halves ? DType::kFloat16 : conv.dtype;
  const int box_times = plan.rows.time + plan.reach, box_rows = box_times * plan.rows.samples;
  const auto x_map = [&](const void* rows, int64_t channels, CUtensorMap* map) {
    return make_map({dtype, rows, planes * conv.batch, x_length, padded(channels), plan.rows.samples, box_times,
                     step_channels, plan.stride, /*planes_inside=*/true},
                    map);
  };
  if (const auto error = x_map(x.rows, x.more ? conv.first_channels : x_channels, &maps.x)) return error;
  maps.more_x = maps.x;
  if (x.more)
    if (const auto error = x_map(x.more, x_channels - conv.first_channels, &maps.more_x)) return error;
  const InPlaceStage in_place = in_place_stage(plan, conv.taps, kDgrad);
  const auto weight_map = [&](const void* packed, int taps, int parts, CUtensorMap* map) {
    if (conv.in_place)
      return make_map({dtype, packed, 1, conv.y_channels, conv.x_channels * taps, 1, in_place.rows, in_place.width, 1},
                      map);
    if (dtype == DType::kFloat32)
      return make_map({dtype, packed, parts * taps, kDgrad ? conv.x_channels : conv.y_channels, padded(x_channels), 1,
                       plan.column_step, step_channels, 1},
                      map);
    return make_map({dtype, packed, planes * taps, conv.y_channels, padded(conv.x_channels), 1,
                     kDgrad ? kChunk : plan.column_step, 64, 1},
                    map);
  };
  if (const auto error = weight_map(weights.packed, conv.taps, plan.parts, &maps.weights)) return error;
  maps.shortcut = maps.weights;
  const int shortcut_parts = weight_parts(conv.dtype, conv.y_channels * conv.x_channels);
  if (shortcut.out)
    if (const auto error = weight_map(shortcut.weights.packed, 1, shortcut_parts, &maps.shortcut)) return error;
  const int64_t blocks = plan.rows.count * plan.phases * plan.column_tiles * plan.splits;
  // The MMAs read a whole tile's rows, and a stage begins with a whole swizzle atom of 8 rows.
  const uint32_t box_stage = std::max((box_rows + 7) / 8 * 8, kTileRows) * kRowBytes;
  const int boxes = std::min(kMaxBoxes, static_cast<int>(ConvShape<128>::kBoxesBytes / box_stage));
  const bool alone = blocks <= multiprocessors(), small_tile = plan.tile_columns <= 128;
  if (shortcut.out && !(alone && small_tile && plan.together && !conv.in_place)) return cudaErrorInvalidValue;
  if (conv.in_place && !can_read_in_place(conv)) return cudaErrorInvalidValue;
  if (out.more && conv.first_channels * 2 != conv.x_channels) return cudaErrorInvalidValue;
  if (plan.splits > 1 && !alone) return cudaErrorInvalidValue;  // others' sums would find no place
  const int few_stages = plan.tile_columns == 64 ? ConvShape<64>::kWeights : ConvShape<128>::kWeights;
  const bool one_block = alone || (conv.halves && plan.tile_columns > 64);  // a multiprocessor
  const int in_place_stages = plan.tile_columns * kRowBytes * kMaxWeights / static_cast<int>(in_place.bytes);
  const int stages = conv.in_place ? std::min(kMaxWeights, in_place_stages)
                     : !small_tile ? ConvShape<256>::kWeights
                     : one_block   ? kMaxWeights
                                   : few_stages;
  // A small grid's blocks start long before the previous kernel ends, and a large one's hardly before: then what is
  // read early delays the first box of x.
  const int prefetched = !weights.prefetchable || (shortcut.out && !shortcut.weights.prefetchable) ? 0
                         : blocks * 2 <= multiprocessors()                                         ? stages
                                                           : std::min(stages, kFewWeights);
  ConvArgs args{};
  args.plan = plan, args.batch = conv.batch, args.out = out.rows, args.blocks = static_cast<unsigned>(blocks);
  args.out_length = kDgrad ? conv.x_length : conv.y_length, args.outputs = kDgrad ? conv.x_channels : conv.y_channels;
  args.more_out = out.more, args.pitch = out.more ? args.outputs / 2 : args.outputs;
  args.addends = addends, args.float_bias = addends.bias_dtype == DType::kFloat32;
  args.normalisation = normalisation, args.shortcut = shortcut, args.shortcut_parts = shortcut_parts;
  args.shares = Shares(plan, normalisation.out ? normalisation.group : plan.column_step);
  args.prefetched = prefetched, args.release = alone;
  args.beyond = x.more ? static_cast<int>(plan.first_chunks * step_channels - conv.first_channels) : 0;
  args.boxes = boxes, args.box_bytes = static_cast<uint32_t>(box_rows) * kRowBytes, args.box_stage = box_stage;
  args.weights = stages, args.weight_bytes = static_cast<uint32_t>(plan.column_step) * kRowBytes;
  args.in_place = in_place;
  args.taps = conv.taps;
  if (conv.in_place) return launch_in_place(maps, args, stream);
  if (conv.halves) return launch_halves(kDgrad, plan.tile_columns, maps, args, stream);
  return dispatch_to_32_bits(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr WeightLayout kLayout = kDgrad && sizeof(T) == 2 ? kAlongN : kAlongK;
    return dispatch_value<64, 128, 256>(plan.tile_columns, [&](auto columns) {
      constexpr int kColumns = columns.value;
      if constexpr (!kDgrad) {
        if (normalisation.out) {
          if constexpr (kColumns <= 128)
            if (shortcut.out) return launch_normalised<T, kColumns, kAlongK, true>(maps, args, stream);
          return launch_normalised<T, kColumns, kAlongK>(maps, args, stream);
        }
      }
      return launch_conv<T, kColumns, kLayout>(maps, args, stream);
    });
  });
}

}  // namespace

bool has_wgmma() { return runs_hopper_code(); }

bool by_wgmma(const Conv1d& conv) { return has_wgmma() && !in_full(conv); }

bool supported() { return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8; }

bool takes_in_place(const Conv1d& conv) { return reads_in_place(conv) && has_wgmma(); }

bool takes(const Conv1d& conv) {
  if (!by_wgmma(conv)) return supported() && mma_serves(conv);
  return serves(conv) && (wgmma_takes_taps(conv) || plan_mma_wgrad(conv, multiprocessors()).fits());
}

int64_t fprop_workspace(const Conv1d& conv, int group) {
  return by_wgmma(conv) ? 0 : plan_mma_fprop(conv, multiprocessors(), group).partials_bytes();
}

int64_t dgrad_workspace(const Conv1d& conv) {
  return by_wgmma(conv) ? 0 : plan_mma_dgrad(conv, multiprocessors()).partials_bytes();
}

cudaError_t fprop(const Conv1d& conv, const Rows& x, const Weights& weights, const Addends& addends, void* y,
                  void* workspace, cudaStream_t stream) {
  if (!by_wgmma(conv)) return mma_fprop(conv, x, weights.packed, addends, y, {}, workspace, stream);
  return run<false>(conv, plan_fprop(conv, multiprocessors()), x, weights, addends, {y}, {}, {}, stream);
}

bool normalises(const Conv1d& conv, int group) {
  if (by_wgmma(conv)) {
    const auto plan = plan_normalised(conv, group, multiprocessors());
    return plan.exchange || plan.passes > 0;
  }
  const auto plan = plan_mma_fprop(conv, multiprocessors(), group);
  return plan.fits() && normalises(conv, plan.conv, group);
}

bool takes_shortcut(const Conv1d& conv, int group) {
  if (!by_wgmma(conv)) return false;
  Conv1d shortcut = conv;
  shortcut.taps = 1, shortcut.padding = 0;
  if (in_full(shortcut)) return false;  // tf32 would not be its own accuracy
  const auto plan = plan_normalised(conv, group, multiprocessors());
  const int64_t blocks = plan.rows.count * plan.column_tiles * plan.splits;
  return !conv.in_place && plan.together && plan.tile_columns <= 128 && blocks <= multiprocessors();
}

cudaError_t fprop_normalised(const Conv1d& conv, const Rows& x, const Weights& weights, const Addends& addends, void* y,
                             const Normalisation& normalisation, const Shortcut& shortcut, void* workspace,
                             cudaStream_t stream) {
  if (!by_wgmma(conv)) {
    if (shortcut.out) return cudaErrorInvalidValue;
    return mma_fprop(conv, x, weights.packed, addends, y, normalisation, workspace, stream);
  }
  const auto plan = plan_normalised(conv, normalisation.group, multiprocessors());
  return run<false>(conv, plan, x, weights, addends, {y}, normalisation, shortcut, stream);
}

cudaError_t dgrad(const Conv1d& conv, const void* y, const Weights& weights, const Addends& addends,
                  const OutputRows& x, void* workspace, cudaStream_t stream) {
  if (!by_wgmma(conv)) return mma_dgrad(conv, y, weights.packed, addends, x, workspace, stream);
  return run<true>(conv, plan_dgrad(conv, multiprocessors()), {y}, weights, addends, x, {}, {}, stream);
}

}  // namespace dpa::kernels::conv1d
