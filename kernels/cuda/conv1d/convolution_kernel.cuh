// fprop and dgrad: out[b, phases j + p, n] = sum over terms i and channels c of A B,
//   A = x[b, stride j + shift[p][i], c]
//   B = weight[tap[p][i]][n, c] (fprop: rows along K) or weight[tap[p][i]][c, n] (dgrad: rows along N). In tf32,
//       which wgmma takes with rows along K alone, dgrad's weights are packed the other way round: [n, c].
//
// An output tile is 128 rows (j, sample), times outside, by kColumns channels n. A step contracts 128 bytes of channels
// of one term. TMA loads a box of A, those channels x times x samples, with zeros where it leaves the sample, which is the
// padding; no patch matrix exists. Where a tile holds whole samples, one box serves all terms: a term shifts time, and so
// begins at another row of the box, inside a swizzle atom too: the swizzle follows addresses. Else each term has its own.
//
// cluster   one output tile, or the two that share the groups of a normalisation; split-K: a tile's blocks take
//           consecutive shares of the boxes, and each stores an equal share of rows
// block     a producer warp issues loads, two consumer warpgroups multiply 64 rows x kColumns each, accumulators in
//           registers. A warpgroup skips terms that read nothing but padding in its rows
// epilogue  accumulators go to shared memory, the producer warp sends them; epilogue.cuh adds the cluster's and stores them,
//           epilogue_norm.cuh and epilogue_exchange.cuh store what a normalisation makes of them
//
// Of pairs of float16 numbers (TwoHalves) the boxes come three times: high halves of x by low halves of the weights,
// low by high, then high by high. The sums of the first two are those of low halves. Tensor cores round every sum
// towards zero: each step of the last round is summed up alone and then added, rounded to the nearest.
//
// A float32 weight may come as two tf32 numbers (weight_parts): a step of its term each, one after the other. Or weights are
// read as they lie in the parameter, in other steps and by another main loop, of the transposed GEMM (in_place.cuh).
//
// A shortcut is one more step a box, or two, a weight of one tap, whose accumulators are a tile of their own without a
// normalisation.
//
// Dependent launch. Prefetchable weights (conv1d.h) are read before grid dependency synchronisation, and nothing else
// is:
// - the block may run as soon as every block of the previous kernel P has triggered the dependent launch or ended;
// - P, or the nearest kernel before it that triggers no earlier, called grid dependency synchronisation before that, so
//   whatever lies before that kernel has ended and is visible;
// - prefetchable weights were written by a kernel before that one.
//
// A grid of no more blocks than multiprocessors triggers the dependent launch when its mainloop is done. Its blocks
// reserve so much shared memory that no two share a multiprocessor, which would halve their rate: the next kernel's
// blocks begin on the other half of the device, or each where one of these has ended.
#pragma once
#include "kernels/cuda/conv1d/epilogue.cuh"
#include "kernels/cuda/conv1d/epilogue_exchange.cuh"
#include "kernels/cuda/conv1d/epilogue_norm.cuh"
#include "kernels/cuda/conv1d/in_place.cuh"
#include "kernels/math/two_halves.h"

namespace dpa::kernels::conv1d {

// The producer thread. Prefetchable weights of the first phase are loaded before the grid dependency resolves.
template <class T, int kColumns, WeightLayout kLayout, bool kShortcut>
struct Producer {
  using Shape = ConvShape<kColumns>;
  const TensorMaps& maps;
  const ConvArgs& args;
  const TileCoord& coord;
  const Work& work;
  uint32_t memory;
  Pipelines& pipelines;

  __device__ __forceinline__ int term(int box) const { return args.plan.together ? 0 : box / args.plan.chunks; }
  // Which round a box is of; takes its place in it.
  __device__ __forceinline__ int round_of(int& box) const {
    const int round = kHalves<T> ? box / work.of_round : 0;
    box -= kHalves<T> ? round * work.of_round : 0;
    return round;
  }
  // Whether a chunk is of the first of two tensors.
  __device__ __forceinline__ bool of_first(int chunk) const { return chunk < args.plan.first_chunks; }

  // Step i of a box.
  __device__ __forceinline__ void load_b(const PipelineState& at, int box, int i) const {
    if constexpr (kLayout == kInPlace) {
      const int chunk = box % args.plan.chunks,
                channel = chunk * kStepChannels<T> - (of_first(chunk) ? 0 : args.beyond);
      const InPlaceStage& stage = args.in_place;
      const uint32_t full = acquire(pipelines.weights, at, stage.boxes * stage.box_bytes);
      return load_in_place(&maps.weights, stage, coord.first_column, channel + i * kInPlaceChannels,
                           memory + Shape::kBoxesBytes + at.stage * stage.bytes, full);
    }
    const bool shortcut = kShortcut && i >= work.terms;
    const CUtensorMap* const map = shortcut ? &maps.shortcut : &maps.weights;
    const bool low = round_of(box) == 0 && kHalves<T> || work.parts > 1 && (i & 1);
    const int term_of_step = term(box) + (work.parts > 1 ? i / 2 : i);
    const int tap = shortcut ? i - work.terms : args.plan.tap[coord.phase][term_of_step] + (low ? args.taps : 0),
              chunk = box % args.plan.chunks, channel = chunk * kStepChannels<T> - (of_first(chunk) ? 0 : args.beyond);
    const uint32_t full = acquire(pipelines.weights, at, args.weight_bytes);
    const uint32_t to = memory + Shape::kBoxesBytes + at.stage * Shape::kWeightBytes;
    if constexpr (kLayout == kAlongN) {
#pragma unroll 1
      for (int n = 0; n < kColumns / 64; ++n)
        ptx::tma_load(to + n * kChunk * kRowBytes, map, coord.first_column + n * 64, channel, tap, full);
    } else {
      ptx::tma_load(to, map, channel, coord.first_column, tap, full);
    }
  }

  __device__ __forceinline__ void load_a(const PipelineState& at, int box) const {
    const int plane = round_of(box) == 1 ? static_cast<int>(args.batch) : 0;
    const int shift = args.plan.together ? args.plan.lowest : args.plan.shift[coord.phase][term(box)];
    const int chunk = box % args.plan.chunks;
    const bool first = of_first(chunk);
    ptx::tma_load(memory + at.stage * args.box_stage, first ? &maps.x : &maps.more_x,
                  (first ? chunk : chunk - args.plan.first_chunks) * kStepChannels<T>, coord.first_sample + plane,
                  coord.first_time * args.plan.stride + shift, acquire(pipelines.boxes, at, args.box_bytes));
  }

  __device__ void run() const {
    const int steps = kLayout == kInPlace ? kBoxStages : work.terms + work.side;  // of a box
    PipelineState weight_at;
    const int prefetched = min(args.prefetched, work.count * steps);
#pragma unroll 1
    for (int step = 0; step < prefetched; ++step, weight_at.advance(args.weights))
      load_b(weight_at, work.first + step / steps, step % steps);
    grid_dependency_sync();
    PipelineState box_at;
    int step = 0;
#pragma unroll 1
    for (int box = work.first; box < work.first + work.count; ++box, box_at.advance(args.boxes)) {
      load_a(box_at, box);
#pragma unroll 1
      for (int i = 0; i < steps; ++i, ++step) {
        if (step < prefetched) continue;
        load_b(weight_at, box, i);
        weight_at.advance(args.weights);
      }
    }
  }
};

// The consumer warpgroups' mainloop: a stage is released once the MMAs of the next step are in flight.
template <class T, int kColumns, WeightLayout kLayout, bool kShortcut, bool kSplit, bool kBySample>
__device__ __forceinline__ void consume_tiles(uint32_t memory, Pipelines& pipelines, const ConvArgs& args,
                                              const Work& work, float* tile) {
  using Shape = ConvShape<kColumns>;
  constexpr bool kMajorN = kLayout == kAlongN;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const uint32_t rows = memory + warpgroup * 64 * kRowBytes, weights = memory + Shape::kBoxesBytes;
  const int first_term = (args.plan.together ? args.plan.first_term[warpgroup] : 0) * work.parts;
  const int end_term = (args.plan.together ? args.plan.end_term[warpgroup] : 1) * work.parts;
  // A stage that is held while others are skipped may be the one that the producer waits for.
  const bool drains = first_term + work.terms - end_term > 1;
  constexpr int kSums = kColumns / 2, kShortcutSums = kShortcut ? kSums : 1;
  float sums[kSums], shortcut_sums[kShortcutSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
  for (int i = 0; i < kShortcutSums; ++i) shortcut_sums[i] = 0;
  PipelineState weight_at;
  PipelineState box_at;
  int weight_previous = -1, box_previous = -1;
  bool high = !kHalves<T>;
  const auto release_previous = [&] {
    if (weight_previous >= 0) release(pipelines.weights, weight_previous);
    if (box_previous >= 0) release(pipelines.boxes, box_previous);
    weight_previous = box_previous = -1;
  };
  const auto contract = [&](float(&to)[kSums], int start) {
    wgmma::fence();
    const uint64_t a = wgmma::swizzled(rows + box_at.stage * args.box_stage + start, 16, 1024, wgmma::Swizzle::k128);
    const uint64_t b = wgmma::swizzled(weights + weight_at.stage * Shape::kWeightBytes,
                                       kMajorN ? kChunk * kRowBytes : 16, 1024, wgmma::Swizzle::k128);
    const auto multiply = [&](float(&sum)[kSums], bool add) {
#pragma unroll
      for (int k = 0; k < kRowBytes / 32; ++k)
        wgmma::mma_ss<Operand<T>, kColumns, 0, kMajorN>(sum, a + k * 2, b + k * (kMajorN ? 128 : 2), add || k > 0);
      wgmma::commit();
    };
    if constexpr (kHalves<T>) {
      if (high) {
        float step[kSums];
        multiply(step, false);
        wgmma::wait<0>();
        release_previous();
        release(pipelines.weights, weight_at.stage);
#pragma unroll
        for (int i = 0; i < kSums; ++i) to[i] += step[i];
        return;
      }
    }
    multiply(to, true);
    wgmma::wait<1>();
    release_previous();
    weight_previous = weight_at.stage;
  };
  // What has been summed up is of low halves.
  const auto scale_low = [&] {
    wgmma::wait<0>();
    release_previous();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= 1 / math::kLowScale;
  };
#pragma unroll 1
  for (int box = 0; box < work.count; ++box) {
    if constexpr (kHalves<T>) {
      if (!high && work.first + box >= (kRounds - 1) * work.of_round) scale_low(), high = true;
    }
    ptx::barrier_wait(full_barrier(pipelines.boxes, box_at), box_at.phase);
#pragma unroll 1
    for (int term = 0; term < work.terms; ++term) {
      ptx::barrier_wait(full_barrier(pipelines.weights, weight_at), weight_at.phase);
      if (term < first_term || term >= end_term) {
        if (drains) wgmma::wait<0>(), release_previous();
        release(pipelines.weights, weight_at.stage);
      } else {
        contract(sums, work.start + (work.parts > 1 ? term / 2 : term) * work.delta);
      }
      weight_at.advance(args.weights);
    }
    if constexpr (kShortcut) {
#pragma unroll 1
      for (int part = 0; part < work.side; ++part) {
        ptx::barrier_wait(full_barrier(pipelines.weights, weight_at), weight_at.phase);
        contract(shortcut_sums, work.shortcut);
        weight_at.advance(args.weights);
      }
    }
    if (box_previous >= 0) release(pipelines.boxes, box_previous);
    box_previous = box_at.stage;
    box_at.advance(args.boxes);
  }
  wgmma::wait<0>();
  if constexpr (kHalves<T>) {
    if (!high) scale_low();
  }
  leave_stages<kSplit>(args);
  if constexpr (kBySample)
    store_by_sample<kColumns>(args, tile, sums);
  else
    store_sums<kColumns, Shape::kStride>(tile, sums, [](int j) { return 8 * j; });
  if constexpr (kShortcut)
    store_sums<kColumns, Shape::kStride>(tile + Shape::kTile, shortcut_sums, [](int j) { return 8 * j; });
}

constexpr int kSumsWritten = 2;  // a barrier of the block, at which the producer warp waits for what it sends
constexpr int kExchange = -1;    // the passes of a normalisation whose moments a cluster's blocks exchange

// kPasses: of the normalisation, kExchange, or 0 without one. kSplit: the cluster may have several blocks, each of which has a
// multiprocessor, as far as the plan goes, and may use all of its registers. kShortcut: with a side.
template <class T, int kColumns, WeightLayout kLayout, int kPasses, bool kSplit, bool kShortcut>
__global__ void __launch_bounds__(kThreads, kSplit || kShortcut || (kHalves<T> && kColumns > 64)
                                                ? 1
                                                : ConvShape<kColumns>::kBlocks)
    conv_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ ConvArgs args) {
  static_assert(!kShortcut || kPasses != 0, "a shortcut's sums replace those of a tile that is finished by then");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see `supported`
  using Shape = ConvShape<kColumns>;
  // Alone in the block's shared memory, it begins where that does, at a multiple of 1024.
  extern __shared__ __align__(1024) uint8_t memory[];
  const int stages_bytes = (kLayout == kInPlace ? kMaxWeights : args.weights) * Shape::kWeightBytes;
  auto& pipelines = *reinterpret_cast<Pipelines*>(memory + Shape::kBoxesBytes + stages_bytes);
  float* const tile = reinterpret_cast<float*>(memory);
  const TileCoord coord(args.plan, args.plan.column_step, blockIdx.x);
  constexpr bool kParts = std::is_same_v<T, float>;
  const Work work(args, coord, kHalves<T> ? kRounds : 1, kParts ? args.plan.parts : 1,
                  !kShortcut ? 0
                  : kParts   ? args.shortcut_parts
                             : 1);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&maps.x);
    ptx::prefetch_tensor_map(&maps.weights);
    pipelines.boxes.init();
    pipelines.weights.init();
    cuda::ptx::mbarrier_init(&pipelines.sums, 1);
    cuda::ptx::mbarrier_init(&pipelines.moments, 1);
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  }
  __syncthreads();
  const uint32_t first = ptx::shared_address(tile), second = first + Shape::kTile * 4,
                 behind = kShortcut ? second + Shape::kTile * 4 : second,
                 barrier = ptx::shared_address(&pipelines.sums),
                 moments_barrier = ptx::shared_address(&pipelines.moments);
  const SharedSums<kColumns> sums(args, coord, first, behind + (kPasses == kExchange ? sizeof(MomentTables) : 0)),
      of_shortcut(args, coord, second, first);
  if (threadIdx.x >= kConsumerThreads) {
    if (threadIdx.x == kConsumerThreads)
      Producer<T, kColumns, kLayout, kShortcut>{maps, args, coord, work, ptx::shared_address(memory), pipelines}.run();
    __syncwarp();
    if constexpr (kSplit) {
      ptx::cluster_arrive_relaxed();
      if (kPasses == kExchange && args.shares.crosses && threadIdx.x == kConsumerThreads)
        ptx::barrier_expect(moments_barrier, moments_to_come(args, coord));
      __syncwarp();
      ptx::sync_threads(kSumsWritten, kThreads);
      ptx::cluster_wait();
      sums.send(args, coord, barrier);
      if constexpr (kShortcut) ptx::cluster_meet(), of_shortcut.send(args, coord, barrier);
      ptx::cluster_meet();
    }
  } else {
    grid_dependency_sync();
    // Loads of what rows need beside sums come before those, but for a shortcut, whose sums take the registers.
    [[maybe_unused]] const auto early = [&] {
      if constexpr (kPasses == kExchange && !kShortcut)
        return LaneRows<T>(args, coord);
      else
        return 0;
    }();
    constexpr bool kBySample = kSplit && kPasses != 0;
    if constexpr (kLayout == kInPlace)
      consume_in_place<kColumns, kBySample>(ptx::shared_address(memory), pipelines, args, work, tile);
    else
      consume_tiles<T, kColumns, kLayout, kShortcut, kSplit, kBySample>(ptx::shared_address(memory), pipelines, args,
                                                                        work, tile);
    if constexpr (kSplit) {
      cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);  // copies read the tiles
      ptx::arrive_threads(kSumsWritten, kThreads);
    } else if constexpr (kPasses != 0) {
      ptx::sync_threads(1, kConsumerThreads);
    } else {
      __syncwarp();  // a warp finishes its own rows
    }
    // A tile's sums are here, and all blocks have come so far; nobody leaves before all have received what it sent.
    const auto received = [&](int phase) {
      ptx::barrier_wait(barrier, phase), ptx::cluster_wait(), ptx::cluster_arrive_relaxed();
    };
    if constexpr (kPasses == kExchange) {
      auto& tables = *reinterpret_cast<MomentTables*>(memory + (behind - first));
      if constexpr (kShortcut)
        normalise_rows<T, true>(args, coord, LaneRows<T>(args, coord), sums, tables, barrier, moments_barrier);
      else
        normalise_rows<T, false>(args, coord, early, sums, tables, barrier, moments_barrier);
    } else if constexpr (kPasses != 0) {
      normalise_groups<T, kColumns, kPasses, kSplit>(args, coord, sums, barrier);
    }
    if constexpr (kSplit && kPasses != kExchange) received(0);
    if constexpr (kShortcut) {
      if constexpr (kSplit) received(1);
      const Addends& addends = args.shortcut.addends;
      store_rows<T, kColumns>(args, {addends.bias, addends.residual, {args.shortcut.out}}, coord, of_shortcut);
    }
    if constexpr (kPasses == 0) store_rows<Result<T>, kColumns>(args, destination(args), coord, sums);
    if constexpr (kSplit) ptx::cluster_wait();
  }
#endif
}

template <class T, int kColumns, WeightLayout kLayout, int kPasses = 0, bool kShortcut = false>
cudaError_t launch_conv(const TensorMaps& maps, const ConvArgs& args, cudaStream_t stream) {
  using Shape = ConvShape<kColumns>;
  constexpr bool kAlone = kPasses == kExchange || kLayout == kInPlace;  // on a multiprocessor, whatever the cluster
  auto kernel = conv_kernel<T, kColumns, kLayout, kPasses, /*kSplit=*/kAlone, kShortcut>;
  if (args.plan.cluster() > 1) {
    if constexpr (kColumns == 256)
      return cudaErrorInvalidValue;
    else
      kernel = conv_kernel<T, kColumns, kLayout, kPasses, /*kSplit=*/true, kShortcut>;
  }
  const int bytes = Shape::bytes(kLayout == kInPlace ? kMaxWeights : args.weights);
  const Launch launch{args.blocks, kThreads, args.plan.cluster(), bytes, stream, /*urgent=*/true};
  return launch_cluster(kernel, launch, maps, args);
}

template <class T, int kColumns, WeightLayout kLayout, bool kShortcut = false>
cudaError_t launch_normalised(const TensorMaps& maps, const ConvArgs& args, cudaStream_t stream) {
  if (args.plan.exchange) {
    if constexpr (kColumns == 128) return launch_conv<T, kColumns, kLayout, kExchange, kShortcut>(maps, args, stream);
    return cudaErrorInvalidValue;
  }
  return dispatch_value<1, 2, 4, 8>(args.plan.passes, [&](auto passes) {
    return launch_conv<T, kColumns, kLayout, passes.value, kShortcut>(maps, args, stream);
  });
}

}  // namespace dpa::kernels::conv1d
