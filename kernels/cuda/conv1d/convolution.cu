// gather and scatter: out[b, phases j + p, n] = sum over terms i and channels c of
//                     x[b, stride j + shift[p][i], c] weight[tap[p][i]][n, c]    (gather: rows of weights along K)
//                                               or    weight[tap[p][i]][c, n]    (scatter: rows of weights along N)
//
// An output tile is 128 rows (j, sample), times outside, by kColumns channels n. A step contracts 64 channels of one
// term. The copy engine brings a box of x, 64 channels x times x samples, with zeros where it leaves the sample, which
// is the padding; no patch matrix exists anywhere. Where a sample's rows are whole pieces of the swizzle, one box
// serves all terms: a term shifts time, and so begins at another row of the box. Else each term has its own.
//
// cluster  one output tile; its blocks take consecutive shares of the boxes, and each finishes an equal share of rows
// block    one warp copies, two warpgroups multiply 64 rows x kColumns each, accumulators in registers. A warpgroup
//          passes over terms that meet nothing but padding in its rows
// end      sums go to shared memory; finish.cuh adds up those of the cluster's blocks and stores them, normalise.cuh
//          stores what a normalisation makes of them
//
// A side is one more step a box, a weight of one tap, whose sums are a tile of their own without a normalisation.
//
// Dependent launch. Weights that are settled (conv1d.h) are read before the wait for the predecessor, and nothing else
// is:
// - the block may run as soon as every block of the predecessor P has released it or ended;
// - P, or the nearest kernel before it that releases no earlier, waited for its own predecessor before that, so
//   whatever lies before that kernel has ended and can be seen;
// - settled weights were written by a kernel before that one.
//
// A grid of no more blocks than multiprocessors releases its successor when its products are done, long after its own
// wait. Its blocks ask for so much shared memory that no two share a multiprocessor, which would halve their rate: the
// successor's begin on the other half of the device, or each where one of these has ended.
#include <algorithm>

#include "kernels/cuda/conv1d/epilogue.cuh"
#include "kernels/cuda/conv1d/epilogue_norm.cuh"
#include "kernels/cuda/conv1d/tensor_map.h"

namespace dpa::kernels::conv1d {
namespace {

// What a block contracts: boxes of x, one after the other, each for `terms` steps of weights, and one of the side's.
struct Work {
  int first, count;  // boxes
  int terms;         // that a box serves
  int start, delta;  // where the first term's rows begin in a box, in bytes, and from term to term
  int side;          // where the side's begin

  __device__ Work(const ProductArgs& args, const Place& place) {
    const ProductPlan& plan = args.plan;
    const int* const shift = plan.shift[0];
    const int all = plan.terms[place.phase], bytes = plan.rows.samples * kChunk * 2;
    terms = plan.together ? all : 1;
    start = plan.together ? (shift[0] - plan.lowest) * bytes : 0;
    delta = plan.together ? (shift[1] - shift[0]) * bytes : 0;
    side = -plan.lowest * bytes;
    const int2 mine = share(plan.together ? plan.chunks : all * plan.chunks, place.rank, plan.splits);
    first = mine.x, count = mine.y - mine.x;
  }
};

// The copying thread. Settled weights of the first round come before the predecessor's end.
template <int kColumns, bool kScatter, bool kSide>
struct Copier {
  using Shape = ProductShape<kColumns>;
  const ProductMaps& maps;
  const ProductArgs& args;
  const Place& place;
  const Work& work;
  uint32_t memory;
  Rings& rings;

  __device__ __forceinline__ int term(int box) const { return args.plan.together ? 0 : box / args.plan.chunks; }

  __device__ __forceinline__ void copy_weights(const Position<kMaxWeights>& at, int box, int i) const {
    const bool side = kSide && i == work.terms;
    const CUtensorMap* const map = side ? &maps.side : &maps.weights;
    const int tap = side ? 0 : args.plan.tap[place.phase][term(box) + i], channel = box % args.plan.chunks * kChunk;
    const uint32_t full = acquire(rings.weights, at, Shape::kWeightBytes);
    const uint32_t to = memory + Shape::kBoxesBytes + at.stage * Shape::kWeightBytes;
    if constexpr (kScatter) {
#pragma unroll 1
      for (int n = 0; n < kColumns / 64; ++n)
        copy_box(to + n * kChunk * 128, map, place.first_column + n * 64, channel, tap, full);
    } else {
      copy_box(to, map, channel, place.first_column, tap, full);
    }
  }

  __device__ __forceinline__ void copy_x(const Position<kMaxBoxes>& at, int box) const {
    const int shift = args.plan.together ? args.plan.lowest : args.plan.shift[place.phase][term(box)];
    const int chunk = box % args.plan.chunks, more = chunk - args.x_chunks;
    copy_box(memory + at.stage * args.box_stage, more < 0 ? &maps.x : &maps.more_x, (more < 0 ? chunk : more) * kChunk,
             place.first_sample, place.first_time * args.plan.stride + shift, acquire(rings.boxes, at, args.box_bytes));
  }

  __device__ void run() const {
    const int steps = work.terms + kSide;  // of a box
    Position<kMaxWeights> weight_at;
    const int early = min(args.early, work.count * steps);
#pragma unroll 1
    for (int step = 0; step < early; ++step, weight_at.advance(args.weights))
      copy_weights(weight_at, work.first + step / steps, step % steps);
    wait_for_predecessor();
    Position<kMaxBoxes> box_at;
    int step = 0;
#pragma unroll 1
    for (int box = work.first; box < work.first + work.count; ++box, box_at.advance(args.boxes)) {
      copy_x(box_at, box);
#pragma unroll 1
      for (int i = 0; i < steps; ++i, ++step) {
        if (step < early) continue;
        copy_weights(weight_at, box, i);
        weight_at.advance(args.weights);
      }
    }
  }
};

// The multiplying warpgroups: a stage is given back once the products of the next step are under way.
template <class T, int kColumns, bool kScatter, bool kSide>
__device__ __forceinline__ void multiply_tiles(uint32_t memory, Rings& rings, const ProductArgs& args, const Work& work,
                                               float* tile) {
  using Shape = ProductShape<kColumns>;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const uint32_t rows = memory + warpgroup * 64 * 128, weights = memory + Shape::kBoxesBytes;
  const int first_term = args.plan.together ? args.plan.first_term[warpgroup] : 0;
  const int end_term = args.plan.together ? args.plan.end_term[warpgroup] : 1;
  // A stage that is held while others are passed over may be the one that the copying thread waits for.
  const bool drains = first_term + work.terms - end_term > 1;
  constexpr int kSums = kColumns / 2, kSideSums = kSide ? kSums : 1;
  float sums[kSums], side_sums[kSideSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
  for (int i = 0; i < kSideSums; ++i) side_sums[i] = 0;
  Position<kMaxWeights> weight_at;
  Position<kMaxBoxes> box_at;
  int weight_before = -1, box_before = -1;
  const auto give_back = [&] {
    if (weight_before >= 0) release(rings.weights, weight_before);
    if (box_before >= 0) release(rings.boxes, box_before);
    weight_before = box_before = -1;
  };
  const auto contract = [&](float(&to)[kSums], int start) {
    products_fence();
    const uint64_t a = operand(rows + box_at.stage * args.box_stage + start, 16, 1024, Swizzle::k128);
    const uint64_t b =
        operand(weights + weight_at.stage * Shape::kWeightBytes, kScatter ? kChunk * 128 : 16, 1024, Swizzle::k128);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      product<T, kColumns, 0, kScatter>(to, a + k * 2, b + k * (kScatter ? 128 : 2), 1);
    products_commit();
    products_wait<1>();
    give_back();
    weight_before = weight_at.stage;
  };
#pragma unroll 1
  for (int box = 0; box < work.count; ++box) {
    ptx::barrier_wait(full_barrier(rings.boxes, box_at), box_at.round);
#pragma unroll 1
    for (int term = 0; term < work.terms; ++term) {
      ptx::barrier_wait(full_barrier(rings.weights, weight_at), weight_at.round);
      if (term < first_term || term >= end_term) {
        if (drains) products_wait<0>(), give_back();
        release(rings.weights, weight_at.stage);
      } else {
        contract(sums, work.start + term * work.delta);
      }
      weight_at.advance(args.weights);
    }
    if constexpr (kSide) {
      ptx::barrier_wait(full_barrier(rings.weights, weight_at), weight_at.round);
      contract(side_sums, work.side);
      weight_at.advance(args.weights);
    }
    if (box_before >= 0) release(rings.boxes, box_before);
    box_before = box_at.stage;
    box_at.advance(args.boxes);
  }
  products_wait<0>();
  if (args.release) release_successor();
  ptx::sync_threads(1, kMultipliers);  // the tile takes the place of what the other warpgroup still read
  store_sums<kColumns, Shape::kStride>(tile, sums, [](int j) { return 8 * j; });
  if constexpr (kSide)
    store_sums<kColumns, Shape::kStride>(tile + Shape::kTile, side_sums, [](int j) { return 8 * j; });
}

// kPasses: of the normalisation, or 0 without one. kSplit: blocks share tiles; then each has a multiprocessor, as far
// as the plan goes, and may use all of its registers. kSide: with a side.
template <class T, int kColumns, bool kScatter, int kPasses, bool kSplit, bool kSide>
__global__ void __launch_bounds__(kThreads, kSplit || kSide ? 1 : ProductShape<kColumns>::kBlocks)
    product_kernel(const __grid_constant__ ProductMaps maps, const __grid_constant__ ProductArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see `supported`
  using Shape = ProductShape<kColumns>;
  // Alone in the block's shared memory, it begins where that does, at a multiple of 1024.
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& rings = *reinterpret_cast<Rings*>(memory + Shape::kBoxesBytes + args.weights * Shape::kWeightBytes);
  float* const tile = reinterpret_cast<float*>(memory);
  const Place place(args.plan, kColumns, blockIdx.x);
  const Work work(args, place);
  if (threadIdx.x == 0) {
    prefetch_map(&maps.x);
    prefetch_map(&maps.weights);
    rings.boxes.init();
    rings.weights.init();
  }
  __syncthreads();
  if (threadIdx.x >= kMultipliers) {
    if (threadIdx.x == kMultipliers)
      Copier<kColumns, kScatter, kSide>{maps, args, place, work, ptx::shared_address(memory), rings}.run();
    __syncwarp();
    if constexpr (kSplit) {
      cluster_sync();
      cluster_arrive_relaxed(), cluster_wait();
    }
  } else {
    bool left = false;
    wait_for_predecessor();
    multiply_tiles<T, kColumns, kScatter, kSide>(ptx::shared_address(memory), rings, args, work, tile);
    if constexpr (kPasses > 0) {
      kSplit ? cluster_sync() : ptx::sync_threads(1, kMultipliers);
      left = finish_groups<T, kColumns, kPasses, kSplit>(args, place, tile, kSplit && !kSide);
      if constexpr (kSide)
        finish_rows<T, kColumns, kSplit>(args, {args.side.addends.bias, args.side.addends.residual, args.side.out},
                                         place, tile + Shape::kTile);
    } else {
      kSplit ? cluster_sync() : __syncwarp();  // alone, a warp finishes its own rows
      finish_rows<T, kColumns, kSplit>(args, {args.addends.bias, args.addends.residual, args.out}, place, tile);
    }
    // Nobody leaves while a peer still reads its tile.
    if (kSplit && !left) cluster_arrive();
    if (kSplit) cluster_wait();
  }
#endif
}

template <class T, int kColumns, bool kScatter, int kPasses = 0, bool kSide = false>
cudaError_t launch_product(const ProductMaps& maps, const ProductArgs& args, cudaStream_t stream) {
  auto kernel = product_kernel<T, kColumns, kScatter, kPasses, /*kSplit=*/false, kSide>;
  if (args.plan.splits > 1) {
    if constexpr (kColumns == 256)
      return cudaErrorInvalidValue;
    else
      kernel = product_kernel<T, kColumns, kScatter, kPasses, /*kSplit=*/true, kSide>;
  }
  const int bytes = ProductShape<kColumns>::bytes(args.weights);
  const Launch launch{args.blocks, kThreads, args.plan.splits, bytes, stream, /*urgent=*/true};
  return launch_cluster(kernel, launch, maps, args);
}

template <class T, int kColumns, bool kSide = false>
cudaError_t launch_normalised(int passes, const ProductMaps& maps, const ProductArgs& args, cudaStream_t stream) {
  switch (passes) {
    case 1: return launch_product<T, kColumns, false, 1, kSide>(maps, args, stream);
    case 2: return launch_product<T, kColumns, false, 2, kSide>(maps, args, stream);
    case 4: return launch_product<T, kColumns, false, 4, kSide>(maps, args, stream);
    case 8: return launch_product<T, kColumns, false, 8, kSide>(maps, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <bool kScatter>
cudaError_t run(const Conv1d& conv, const ProductPlan& plan, const Wide& x, const Weights& weights,
                const Addends& addends, void* out, const Normalisation& normalisation, const Side& side,
                cudaStream_t stream) {
  const int64_t x_length = kScatter ? conv.narrow_length : conv.wide_length;
  const int64_t x_channels = kScatter ? conv.narrow_channels : conv.wide_channels;
  ProductMaps maps;
  const int box_times = plan.rows.time + plan.reach, box_rows = box_times * plan.rows.samples;
  const auto x_map = [&](const void* rows, int64_t channels, CUtensorMap* map) {
    return make_map({conv.dtype, rows, conv.batch, x_length, padded(channels), plan.rows.samples, box_times, kChunk,
                     plan.stride, /*planes_inside=*/true},
                    map);
  };
  if (const auto error = x_map(x.rows, x.more ? x.channels : x_channels, &maps.x)) return error;
  maps.more_x = maps.x;
  if (x.more)
    if (const auto error = x_map(x.more, x_channels - x.channels, &maps.more_x)) return error;
  const auto weight_map = [&](const void* packed, int taps, CUtensorMap* map) {
    return make_map({conv.dtype, packed, taps, conv.narrow_channels, padded(conv.wide_channels), 1,
                     kScatter ? kChunk : plan.tile_columns, 64, 1},
                    map);
  };
  if (const auto error = weight_map(weights.packed, conv.taps, &maps.weights)) return error;
  maps.side = maps.weights;
  if (side.out)
    if (const auto error = weight_map(side.weights.packed, 1, &maps.side)) return error;
  const int64_t blocks = plan.rows.count * plan.phases * plan.column_tiles * plan.splits;
  // The products read a whole tile's rows, and a stage begins with a whole swizzled piece of 8 rows.
  const uint32_t box_stage = std::max((box_rows + 7) / 8 * 8, kTileRows) * kChunk * 2;
  const int boxes = std::min(kMaxBoxes, static_cast<int>(ProductShape<128>::kBoxesBytes / box_stage));
  const bool alone = blocks <= multiprocessors(), narrow_tile = plan.tile_columns == 128;
  if (side.out && !(alone && narrow_tile && plan.together)) return cudaErrorInvalidValue;
  const int stages = !narrow_tile ? ProductShape<256>::kWeights : alone ? kMaxWeights : ProductShape<128>::kWeights;
  // A small grid's blocks are there long before their predecessor ends, and a large one's hardly before: then what is
  // read early delays the first box of x.
  const int early = !weights.settled || (side.out && !side.weights.settled) ? 0
                    : blocks * 2 <= multiprocessors()                       ? stages
                                                                            : std::min(stages, kFewWeights);
  const ProductArgs args{plan,
                         conv.batch,
                         kScatter ? conv.wide_length : conv.narrow_length,
                         kScatter ? conv.wide_channels : conv.narrow_channels,
                         addends,
                         addends.bias_dtype == DType::kFloat32,
                         out,
                         normalisation,
                         early,
                         alone,
                         static_cast<unsigned>(blocks),
                         x.more ? static_cast<int>(x.channels / kChunk) : plan.chunks,
                         boxes,
                         stages,
                         static_cast<uint32_t>(box_rows) * kChunk * 2,
                         box_stage,
                         side};
  return dispatch_half(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!kScatter) {
      if (normalisation.out) {
        const int passes = static_cast<int>(conv.narrow_length * normalisation.group / 128);
        if (side.out) return launch_normalised<T, 128, true>(passes, maps, args, stream);
        return plan.tile_columns == 256 ? launch_normalised<T, 256>(passes, maps, args, stream)
                                        : launch_normalised<T, 128>(passes, maps, args, stream);
      }
    }
    return plan.tile_columns == 256 ? launch_product<T, 256, kScatter>(maps, args, stream)
                                    : launch_product<T, 128, kScatter>(maps, args, stream);
  });
}

}  // namespace

bool supported() {
#ifdef DPA_SM90A
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
#else
  return false;
#endif
}

cudaError_t gather(const Conv1d& conv, const void* wide, const Weights& weights, const Addends& addends, void* narrow,
                   cudaStream_t stream) {
  return run<false>(conv, plan_gather(conv, multiprocessors()), {wide}, weights, addends, narrow, {}, {}, stream);
}

bool normalises(const Conv1d& conv, int group) { return normalises(conv, plan_gather(conv, multiprocessors()), group); }

bool takes_side(const Conv1d& conv) {
  const auto plan = plan_gather(conv, multiprocessors());
  const int64_t blocks = plan.rows.count * plan.column_tiles * plan.splits;
  return plan.together && plan.tile_columns == 128 && blocks <= multiprocessors();
}

cudaError_t gather_normalised(const Conv1d& conv, const Wide& wide, const Weights& weights, const Addends& addends,
                              void* narrow, const Normalisation& normalisation, const Side& side, cudaStream_t stream) {
  const auto plan = plan_gather(conv, multiprocessors());
  return run<false>(conv, plan, wide, weights, addends, narrow, normalisation, side, stream);
}

cudaError_t scatter(const Conv1d& conv, const void* narrow, const Weights& weights, const Addends& addends, void* wide,
                    cudaStream_t stream) {
  return run<true>(conv, plan_scatter(conv, multiprocessors()), {narrow}, weights, addends, wide, {}, {}, stream);
}

}  // namespace dpa::kernels::conv1d
