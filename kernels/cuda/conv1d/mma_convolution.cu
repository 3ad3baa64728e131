// fprop and dgrad by warp-level MMAs (`mma.sync`), for compute capability 8.0 and later: the GEMM of convolution.cu
// where the device has no wgmma, and of small convolutions of float32 (`in_full`) everywhere.
//
// An output tile is 128 or 64 rows (j, sample), times outside, by 128 or 64 channels n (mma_plan.cpp chooses). A step
// contracts 128 bytes of channels of one term. A box of A, those channels of the tile's samples and times, serves all
// terms; rows that are padding are read from a row of zeros. Every thread issues its share of the copies, some steps
// ahead.
//
// block     eight warps, 64 rows x 32 columns each; where the tile has fewer places than that, groups of warps
//           contract different slices of each step
// splits    where there are few tiles, several blocks contract a part of K each and store their sums; a second launch
//           adds those of a tile
// epilogue  that of convolution.cu, for one block a tile
#include "kernels/cuda/conv1d/epilogue.cuh"
#include "kernels/cuda/conv1d/epilogue_norm.cuh"
#include "kernels/cuda/conv1d/mma.h"
#include "kernels/cuda/conv1d/mma_convolution.cuh"

namespace dpa::kernels::conv1d {
namespace {

// A warp's passes over a group, which have a main loop in common.
template <class T, class Shape>
__device__ __forceinline__ void normalise_tile(const ConvArgs& to, const TileCoord& coord,
                                               const SharedSums<Shape::kColumns>& sums) {
  const auto normalise = [&](auto passes) {
    normalise_groups<T, Shape::kColumns, decltype(passes)::value, /*kSplit=*/false>(to, coord, sums, /*barrier=*/0);
  };
  switch (to.out_length * to.normalisation.group / 128) {
    case 1: return normalise(std::integral_constant<int, 1>{});
    case 2: return normalise(std::integral_constant<int, 2>{});
    case 4: return normalise(std::integral_constant<int, 4>{});
    default: return normalise(std::integral_constant<int, 8>{});
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kByWgmma = true;
#else
constexpr bool kByWgmma = false;
#endif

// kMajorN: weights run along N, as dgrad reads those of 16 bits.
template <class T, class Shape, bool kMajorN, int kStride>
__device__ __forceinline__ void run_block(const MmaArgs& args, const ConvArgs& to) {
  grid_dependency_sync();
  if (args.adds) {
    add_partials<Shape>(args, blockIdx.x);
  } else {
    const unsigned splits = args.plan.splits;
    sum_tile<Operand<T>, Shape, kMajorN, kStride, kHalves<T>, kInFull<T>>(
        args, mma_tile<Shape>(args.plan.conv, blockIdx.x / splits), static_cast<int>(blockIdx.x % splits));
    if (args.partials) return store_partials<Shape>(args, blockIdx.x);
  }
  const TileCoord coord(to.plan, Shape::kColumns, blockIdx.x);
  const SharedSums<Shape::kColumns> sums(to, coord, ptx::shared_address(tile_of_sums()), /*others=*/0);
  if constexpr (!kMajorN && kStride == 1 && !kHalves<T>)
    if (to.normalisation.out) return normalise_tile<Result<T>, Shape>(to, coord, sums);
  store_rows<Result<T>, Shape::kColumns>(to, destination(to), coord, sums);
}

template <class T, class Shape, bool kMajorN, int kStride>
__global__ void __launch_bounds__(kMmaThreads, kInFull<T> ? 1 : 2)
    mma_kernel(const __grid_constant__ MmaArgs args, const __grid_constant__ ConvArgs to) {
#if __CUDA_ARCH__ >= 800
  // Elsewhere nobody launches it: see `by_wgmma`.
  if constexpr (kInFull<T> || !kByWgmma) run_block<T, Shape, kMajorN, kStride>(args, to);
#endif
}

template <class T, class Shape, bool kMajorN, int kStride = 1>
cudaError_t launch_mma(MmaArgs args, const ConvArgs& to, cudaStream_t stream) {
  const auto launch = [&](int64_t blocks) {
    const Launch launch{blocks, kMmaThreads, /*cluster=*/0, mma_bytes(args.plan), stream, /*urgent=*/true};
    return launch_cluster(mma_kernel<T, Shape, kMajorN, kStride>, launch, args, to);
  };
  if (const cudaError_t error = launch(args.plan.tiles() * args.plan.splits); error != cudaSuccess || !args.partials)
    return error;
  args.adds = true;
  return launch(args.plan.tiles());
}

template <class F>
cudaError_t dispatch_operands(const Conv1d& conv, F&& f) {
  if (conv.halves) return f(TypeTag<TwoHalves>{});
  if (in_full(conv)) return f(TypeTag<InFull>{});
  return dispatch_to_32_bits(conv.dtype, f);
}

template <class T, class F>
cudaError_t dispatch_shape(const ConvPlan& plan, F&& f) {
  if constexpr (kInFull<T>) {
    return f(MmaShape<64, 64>{});
  } else {
    if (plan.tile_rows == 128) return plan.tile_columns == 128 ? f(MmaShape<128, 128>{}) : f(MmaShape<128, 64>{});
    return plan.tile_columns == 128 ? f(MmaShape<64, 128>{}) : f(MmaShape<64, 64>{});
  }
}

ConvArgs epilogue_args(const MmaPlan& plan, const MmaArgs& args, const Addends& addends, const OutputRows& out,
                       const Normalisation& normalisation) {
  ConvArgs to{};
  to.plan = plan.conv, to.batch = args.batch, to.out_length = args.out_length, to.outputs = args.outputs;
  to.addends = addends, to.float_bias = addends.bias_dtype == DType::kFloat32;
  to.out = out.rows, to.more_out = out.more, to.pitch = out.more ? args.outputs / 2 : args.outputs;
  to.normalisation = normalisation;
  to.shares = Shares(plan.conv, normalisation.out ? normalisation.group : plan.conv.column_step);
  return to;
}

// Whether there is what several blocks a tile need.
bool take_workspace(MmaArgs& args, void* workspace) {
  if (args.plan.splits > 1) args.partials = static_cast<float*>(workspace);
  return args.plan.splits == 1 || workspace;
}

}  // namespace

cudaError_t mma_fprop(const Conv1d& conv, const Rows& x, const void* weights, const Addends& addends, void* y,
                      const Normalisation& normalisation, void* workspace, cudaStream_t stream) {
  const int group = normalisation.out ? normalisation.group : 0;
  const auto plan = plan_mma_fprop(conv, multiprocessors(), group);
  if (!plan.fits() || (normalisation.out && (conv.halves || !normalises(conv, plan.conv, group))))
    return cudaErrorInvalidValue;
  auto args = mma_args(plan, conv, /*is_dgrad=*/false, x.rows, x.more, weights);
  if (!take_workspace(args, workspace)) return cudaErrorInvalidValue;
  const ConvArgs to = epilogue_args(plan, args, addends, {y}, normalisation);
  return dispatch_operands(conv, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (conv.stride == 2) return launch_mma<T, MmaShape<64, 64>, /*kMajorN=*/false, 2>(args, to, stream);
    return dispatch_shape<T>(
        plan.conv, [&](auto shape) { return launch_mma<T, decltype(shape), /*kMajorN=*/false>(args, to, stream); });
  });
}

cudaError_t mma_dgrad(const Conv1d& conv, const void* y, const void* weights, const Addends& addends,
                      const OutputRows& x, void* workspace, cudaStream_t stream) {
  const auto plan = plan_mma_dgrad(conv, multiprocessors());
  if (!plan.fits() || (x.more && conv.first_channels * 2 != conv.x_channels)) return cudaErrorInvalidValue;
  auto args = mma_args(plan, conv, /*is_dgrad=*/true, y, nullptr, weights);
  if (!take_workspace(args, workspace)) return cudaErrorInvalidValue;
  const ConvArgs to = epilogue_args(plan, args, addends, x, {});
  return dispatch_operands(conv, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_shape<T>(plan.conv, [&](auto shape) {
      return launch_mma<T, decltype(shape), /*kMajorN=*/sizeof(Operand<T>) == 2>(args, to, stream);
    });
  });
}

}  // namespace dpa::kernels::conv1d
