// gather and scatter: out[b, phases j + p, n] = sum over terms i and channels c of
//                     x[b, stride j + shift[p][i], c] weight[tap[p][i]][n, c]    (gather: rows of weights along K)
//                                               or    weight[tap[p][i]][c, n]    (scatter: rows of weights along N)
//
// An output tile is 128 rows (j, sample), times outside, by kColumns channels n. A step contracts 64 channels of one
// term. The copy engine brings a box of x, 64 channels x times x samples, with zeros where it leaves the sample, which
// is the padding; no patch matrix exists anywhere. Where a sample's rows are whole pieces of the swizzle, one box
// serves all terms: a term shifts time, and so begins at another row of the box. Else each term has its own.
//
// cluster  one output tile; its blocks take consecutive shares of the boxes, and each finishes an equal share of the
// rows block    one warp copies, two warpgroups multiply 64 rows x kColumns each, accumulators in registers end sums go
// to shared memory; finish.cuh adds up those of the cluster's blocks and stores them, normalise.cuh
//          stores what a normalisation makes of them
//
// Blocks behind those of the product belong to its side: the same tiles of x, a weight of one tap, no normalisation.
//
// Dependent launch. Weights that are settled (conv1d.h) are read before the wait for the predecessor, and nothing else
// is:
// - the block may run as soon as every block of the predecessor P has released it or ended;
// - P, or the nearest kernel before it that releases no earlier, waited for its own predecessor before that, so
// whatever
//   lies before that kernel has ended and can be seen;
// - settled weights were written by a kernel before that one.
// A block releases its successor only when its products are done, long after its own wait.
#include <algorithm>

#include "kernels/conv1d/finish.cuh"
#include "kernels/conv1d/normalise.cuh"
#include "kernels/conv1d/tensor_map.h"

namespace dpa::kernels::conv1d {
namespace {

// What a block contracts: boxes of x, one after the other, each for `terms` steps of weights.
struct Work {
  int first, count;  // boxes
  int terms;         // that a box serves
  int start, delta;  // where the first term's rows begin in a box, in bytes, and from term to term
  bool side;

  __device__ Work(const ProductArgs& args, const Place& place, bool of_side) : side(of_side) {
    const ProductPlan& plan = args.plan;
    const int* const shift = plan.shift[0];
    const int all = side ? 1 : plan.terms[place.phase], bytes = plan.rows.samples * kChunk * 2;
    terms = plan.together ? all : 1;
    start = plan.together ? ((side ? 0 : shift[0]) - plan.lowest) * bytes : 0;
    delta = plan.together && !side ? (shift[1] - shift[0]) * bytes : 0;
    const int2 mine = share(plan.together ? plan.chunks : all * plan.chunks, place.rank, plan.splits);
    first = mine.x, count = mine.y - mine.x;
  }
};

// The copying thread. Settled weights of the first round come before the predecessor's end.
template <int kColumns, bool kScatter>
struct Copier {
  using Shape = ProductShape<kColumns>;
  const CUtensorMap *x, *weights;
  const ProductArgs& args;
  const Place& place;
  const Work& work;
  uint32_t memory;
  Rings<Shape::kWeights>& rings;

  __device__ __forceinline__ int term(int box) const { return args.plan.together ? 0 : box / args.plan.chunks; }

  __device__ __forceinline__ void copy_weights(const Position<Shape::kWeights>& at, int box, int i) const {
    const int tap = work.side ? 0 : args.plan.tap[place.phase][term(box) + i],
              channel = box % args.plan.chunks * kChunk;
    const uint32_t full = acquire(rings.weights, at, Shape::kWeightBytes);
    const uint32_t to = memory + Shape::kBoxesBytes + at.stage * Shape::kWeightBytes;
    if constexpr (kScatter) {
#pragma unroll 1
      for (int n = 0; n < kColumns / 64; ++n)
        copy_box(to + n * kChunk * 128, weights, place.first_column + n * 64, channel, tap, full);
    } else {
      copy_box(to, weights, channel, place.first_column, tap, full);
    }
  }

  __device__ __forceinline__ void copy_x(const Position<kMaxBoxes>& at, int box) const {
    const int shift = args.plan.together ? args.plan.lowest : work.side ? 0 : args.plan.shift[place.phase][term(box)];
    copy_box(memory + at.stage * args.box_stage, x, box % args.plan.chunks * kChunk, place.first_sample,
             place.first_time * args.plan.stride + shift, acquire(rings.boxes, at, args.box_bytes));
  }

  __device__ void run() const {
    Position<Shape::kWeights> weight_at;
    const int early = args.settled ? min(Shape::kWeights, work.count * work.terms) : 0;
#pragma unroll 1
    for (int step = 0; step < early; ++step, weight_at.advance())
      copy_weights(weight_at, work.first + step / work.terms, step % work.terms);
    wait_for_predecessor();
    Position<kMaxBoxes> box_at;
    int step = 0;
#pragma unroll 1
    for (int box = work.first; box < work.first + work.count; ++box, box_at.advance(args.boxes)) {
      copy_x(box_at, box);
#pragma unroll 1
      for (int i = 0; i < work.terms; ++i, ++step) {
        if (step < early) continue;
        copy_weights(weight_at, box, i);
        weight_at.advance();
      }
    }
  }
};

// The multiplying warpgroups: a stage is given back once the products of the next step are under way.
template <class T, int kColumns, bool kScatter>
__device__ __forceinline__ void multiply_tiles(uint32_t memory, Rings<ProductShape<kColumns>::kWeights>& rings,
                                               const ProductArgs& args, const Work& work, float* tile) {
  using Shape = ProductShape<kColumns>;
  const uint32_t rows = memory + work.start + threadIdx.x / 128 * 64 * 128, weights = memory + Shape::kBoxesBytes;
  const int steps = work.count * work.terms;
  float sums[kColumns / 2];
  Position<Shape::kWeights> weight_at;
  Position<kMaxBoxes> box_at;
  int term = 0, weight_before = 0, box_before = -1;
  for (int step = 0; step < steps; ++step) {
    if (term == 0) ptx::barrier_wait(full_barrier(rings.boxes, box_at), box_at.round);
    ptx::barrier_wait(full_barrier(rings.weights, weight_at), weight_at.round);
    products_fence();
    const uint64_t a = operand(rows + box_at.stage * args.box_stage + term * work.delta, 16, 1024, Swizzle::k128);
    const uint64_t b =
        operand(weights + weight_at.stage * Shape::kWeightBytes, kScatter ? kChunk * 128 : 16, 1024, Swizzle::k128);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      product<T, kColumns, 0, kScatter>(sums, a + k * 2, b + k * (kScatter ? 128 : 2), !(step == 0 && k == 0));
    products_commit();
    if (step > 0) {
      products_wait<1>();
      release(rings.weights, weight_before);
      if (box_before >= 0) release(rings.boxes, box_before);
    }
    weight_before = weight_at.stage, box_before = -1;
    weight_at.advance();
    if (++term == work.terms) {
      term = 0, box_before = box_at.stage;
      box_at.advance(args.boxes);
    }
  }
  products_wait<0>();
  if (args.release) release_successor();
  ptx::sync_threads(1, kMultipliers);  // the tile takes the place of what the other warpgroup still read
  store_sums<kColumns, Shape::kStride>(tile, sums, [](int j) { return 8 * j; });
}

// kPasses: of the normalisation, or 0 without one.
template <class T, int kColumns, bool kScatter, int kPasses>
__global__ void __launch_bounds__(kThreads, ProductShape<kColumns>::kBlocks)
    product_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ CUtensorMap side_map, const __grid_constant__ ProductArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it: see `supported`
  using Shape = ProductShape<kColumns>;
  // Alone in the block's shared memory, it begins where that does, at a multiple of 1024.
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& rings = *reinterpret_cast<Rings<Shape::kWeights>*>(memory + Shape::kBarriersAt);
  float* const tile = reinterpret_cast<float*>(memory);
  const bool side = kPasses > 0 && blockIdx.x >= args.blocks;
  const Place place(args.plan, kColumns, blockIdx.x - (side ? args.blocks : 0));
  const Work work(args, place, side);
  const CUtensorMap* const weights = side ? &side_map : &w_map;
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(weights);
    rings.boxes.init();
    rings.weights.init();
  }
  __syncthreads();
  const bool alone = args.plan.splits == 1;
  if (threadIdx.x >= kMultipliers) {
    if (threadIdx.x == kMultipliers)
      Copier<kColumns, kScatter>{&x_map, weights, args, place, work, ptx::shared_address(memory), rings}.run();
    __syncwarp();
    if (!alone) cluster_sync(), cluster_sync();
  } else {
    wait_for_predecessor();
    multiply_tiles<T, kColumns, kScatter>(ptx::shared_address(memory), rings, args, work, tile);
    if (kPasses > 0 && !side) {
      alone ? ptx::sync_threads(1, kMultipliers) : cluster_sync();
      if constexpr (kPasses > 0) finish_groups<T, kColumns, kPasses>(args, place, tile);
    } else {
      alone ? __syncwarp() : cluster_sync();  // alone, a warp finishes its own rows
      const Destination own{args.addends.bias, args.addends.residual, args.out};
      const Destination beside{args.side.addends.bias, args.side.addends.residual, args.side.out};
      finish_rows<T, kColumns>(args, side ? beside : own, place, tile);
    }
    if (!alone) cluster_sync();  // nobody leaves while a peer still reads its tile
  }
#endif
}

struct Maps {
  CUtensorMap x, weights, side;
};

// A small grid leaves half of the device to its successor, which begins there while it ends. So that the successor's
// blocks do not share multiprocessors instead, which halves their rate, each asks for more memory than half of one.
constexpr int kAloneBytes = 120 * 1024;

template <class T, int kColumns, bool kScatter, int kPasses = 0>
cudaError_t launch_product(const Maps& maps, const ProductArgs& args, cudaStream_t stream) {
  const auto kernel = product_kernel<T, kColumns, kScatter, kPasses>;
  const int64_t blocks = int64_t{args.blocks} * (args.side.out ? 2 : 1);
  const int bytes =
      args.release ? std::max(ProductShape<kColumns>::kBytes, kAloneBytes) : ProductShape<kColumns>::kBytes;
  const Launch launch{blocks, kThreads, args.plan.splits, bytes, stream, /*urgent=*/true};
  return launch_cluster(kernel, launch, maps.x, maps.weights, maps.side, args);
}

template <class T, int kColumns>
cudaError_t launch_normalised(int passes, const Maps& maps, const ProductArgs& args, cudaStream_t stream) {
  switch (passes) {
    case 1: return launch_product<T, kColumns, false, 1>(maps, args, stream);
    case 2: return launch_product<T, kColumns, false, 2>(maps, args, stream);
    case 4: return launch_product<T, kColumns, false, 4>(maps, args, stream);
    case 8: return launch_product<T, kColumns, false, 8>(maps, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <bool kScatter>
cudaError_t run(const Conv1d& conv, const ProductPlan& plan, const void* x, const Weights& weights,
                const Addends& addends, void* out, const Normalisation& normalisation, const Side& side,
                cudaStream_t stream) {
  const int64_t x_length = kScatter ? conv.narrow_length : conv.wide_length;
  const int64_t x_channels = kScatter ? conv.narrow_channels : conv.wide_channels;
  Maps maps;
  const int box_times = plan.rows.time + plan.reach, box_rows = box_times * plan.rows.samples;
  const Boxes x_boxes{conv.dtype,        x,         conv.batch, x_length,    padded(x_channels),
                      plan.rows.samples, box_times, kChunk,     plan.stride, /*planes_inside=*/true};
  if (const auto error = make_map(x_boxes, &maps.x)) return error;
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
  const ProductArgs args{plan,
                         conv.batch,
                         kScatter ? conv.wide_length : conv.narrow_length,
                         kScatter ? conv.wide_channels : conv.narrow_channels,
                         addends,
                         addends.bias_dtype == DType::kFloat32,
                         out,
                         normalisation,
                         weights.settled && (!side.out || side.weights.settled),
                         blocks * (side.out ? 2 : 1) * 2 <= multiprocessors(),
                         static_cast<unsigned>(blocks),
                         boxes,
                         static_cast<uint32_t>(box_rows) * kChunk * 2,
                         box_stage,
                         side};
  return dispatch_half(conv.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!kScatter) {
      if (normalisation.out) {
        const int passes = static_cast<int>(conv.narrow_length * normalisation.group / 128);
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
  return run<false>(conv, plan_gather(conv, multiprocessors()), wide, weights, addends, narrow, {}, {}, stream);
}

bool normalises(const Conv1d& conv, int group) { return normalises(conv, plan_gather(conv, multiprocessors()), group); }

bool takes_side(const Conv1d& conv) {
  const auto plan = plan_gather(conv, multiprocessors());
  return plan.chunks >= plan.splits;
}

cudaError_t gather_normalised(const Conv1d& conv, const void* wide, const Weights& weights, const Addends& addends,
                              void* narrow, const Normalisation& normalisation, const Side& side, cudaStream_t stream) {
  const auto plan = plan_gather(conv, multiprocessors());
  return run<false>(conv, plan, wide, weights, addends, narrow, normalisation, side, stream);
}

cudaError_t scatter(const Conv1d& conv, const void* narrow, const Weights& weights, const Addends& addends, void* wide,
                    cudaStream_t stream) {
  return run<true>(conv, plan_scatter(conv, multiprocessors()), narrow, weights, addends, wide, {}, {}, stream);
}

}  // namespace dpa::kernels::conv1d
