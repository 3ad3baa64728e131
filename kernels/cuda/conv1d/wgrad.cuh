// What the two kernels of the weight gradient share: prologue, launch, and the epilogue of a tile of kHeight * 128
// channels i by kXChannels channels j by all taps k.
//
// Accumulators go to shared memory in the gradient's order. With one block a tile, bulk copies write them, a channel i
// at a time; else a warp takes a channel, adds the sums of all the cluster's blocks in rank order and stores them.
#pragma once
#include <climits>

#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/cuda/conv1d/launch.cuh"
#include "kernels/cuda/conv1d/tensor_map.h"

namespace dpa::kernels::conv1d {

struct WgradArgs {
  WgradPlan plan;
  int64_t y_channels, x_channels;
  int first_channels;  // of x, of the first of two tensors, or more than there are
  int stride, padding;
  bool float_gradient;
  void* gradient;
};

// A map of x, and the same of the second of two tensors.
struct XMaps {
  CUtensorMap first, more;
};
// A box of x, of the channels from `channel` on.
struct XBox {
  const CUtensorMap* map;
  int channel;
  __device__ __forceinline__ XBox(const XMaps& maps, int channel_, int first_channels)
      : map(channel_ < first_channels ? &maps.first : &maps.more),
        channel(channel_ < first_channels ? channel_ : channel_ - first_channels) {}
};

// What a block works on: its tile begins at channels (first_y, first_x), and it contracts `steps` of the rows.
struct WgradBlock {
  uint8_t* memory;  // aligned for TMA
  int rank, first_y, first_x;
  int2 steps;  // from the first one to before the last
};

// Every thread of the block calls it, before it reads what earlier kernels wrote. `init`: of the barriers, by one thread.
template <class Shape, class F>
__device__ __forceinline__ WgradBlock begin_block(const CUtensorMap& y_map, const XMaps& x_maps, const WgradPlan& plan,
                                                  F&& init) {
  extern __shared__ uint8_t shared[];
  const unsigned splits = plan.splits, x_tiles = static_cast<unsigned>(plan.x_tiles);
  WgradBlock block;
  block.memory = shared + (kAlignment - ptx::shared_address(shared) % kAlignment) % kAlignment;
  block.rank = blockIdx.x % splits;
  block.first_x = blockIdx.x / splits % x_tiles * Shape::kXChannels;
  block.first_y = blockIdx.x / splits / x_tiles * Shape::kYChannels;
  block.steps = share(static_cast<int>(plan.rows.count), block.rank, plan.splits);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&y_map);
    ptx::prefetch_tensor_map(&x_maps.first);
    init();
  }
  return block;
}

// The barriers that the consumers' epilogue meets, for the other warps.
__device__ __forceinline__ void follow_epilogue(const WgradPlan& plan) {
  __syncwarp();
  if (plan.splits > 1) ptx::cluster_sync(), ptx::cluster_sync();
}

// Calls f with Shape<taps, boxes of 32 channels j, height>.
template <template <int, int, int> class Shape, class F>
cudaError_t dispatch_tile(int taps, int height, F&& f) {
  switch (taps) {
    case 1: return height == 2 ? f(Shape<1, 4, 2>{}) : f(Shape<1, 4, 1>{});
    case 3: return f(Shape<3, 2, 1>{});  // the high one does not fit
    case 7: return f(Shape<7, 1, 1>{});  // nor here
    case 4: return height == 2 ? f(Shape<4, 1, 2>{}) : f(Shape<4, 1, 1>{});
    case 5: return height == 2 ? f(Shape<5, 1, 2>{}) : f(Shape<5, 1, 1>{});
    default: return cudaErrorInvalidValue;
  }
}

template <class Shape, class Kernel>
cudaError_t launch_wgrad(Shape, Kernel kernel, const CUtensorMap& y_map, const XMaps& x_maps, const WgradArgs& args,
                         cudaStream_t stream) {
  const WgradPlan& plan = args.plan;
  const Launch launch{plan.y_tiles * plan.x_tiles * plan.splits, kConsumerThreads + Shape::kProducerThreads,
                      plan.splits, Shape::kBytes, stream};
  return launch_cluster(kernel, launch, y_map, x_maps, args);
}

// A thread's sums in the tile, rows of kRow words in the gradient's order. The block's warpgroups are done with the
// stages.
template <class Shape>
__device__ __forceinline__ void store_tile(float* tile, const float (&sums)[Shape::kHeight][Shape::kSums]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::kHeight; ++m) {
    float* row = tile + ((warp / 4 * Shape::kHeight + m) * 64 + warp % 4 * 16 + lane / 4) * Shape::kRow;
#pragma unroll
    for (int c = 0; c < Shape::kColumns / 8; ++c) {
      const int tap = 8 * c / Shape::kXChannels, j = 8 * c % Shape::kXChannels + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i / 2 * 8 * Shape::kRow + (j + i % 2) * Shape::kTaps + tap] = sums[m][4 * c + i];
    }
  }
}

// The piece of the gradient that a block's tile is.
struct Piece {
  int64_t begin, step;     // of its first channel, and from channel to channel, in elements
  int channels, elements;  // channels i; elements of each
};

// Alone: the warp's own channels, one a lane.
template <class Shape>
__device__ __forceinline__ void copy_channels(float* gradient, const Piece& piece, const float* tile) {
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
  __syncwarp();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = (warp / 4 * Shape::kHeight + lane / 16) * 64 + warp % 4 * 16 + lane % 16;
  if (lane / 16 < Shape::kHeight && channel < piece.channels) {
    cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared,
                             gradient + piece.begin + channel * piece.step, tile + channel * Shape::kRow,
                             piece.elements * 4);
    cuda::ptx::cp_async_bulk_commit_group();
  }
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>{});
}

template <class T, class Shape>
__device__ __forceinline__ void add_channels(const WgradArgs& args, const Piece& piece, int rank, const float* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, splits = args.plan.splits;
  const int rows = Shape::kYChannels / (kConsumerThreads / 32) / splits,
            first = (rank * (kConsumerThreads / 32) + warp) * rows;
  const bool quads = args.float_gradient && args.x_channels % 4 == 0;
  for (int row = first; row < min(first + rows, piece.channels); ++row) {
    const uint32_t from = ptx::shared_address(tile + row * Shape::kRow);
    const int64_t to = piece.begin + row * piece.step;
    for (int e = quads ? lane * 4 : lane; e < piece.elements; e += quads ? 128 : 32) {
      float4 sum = {};
#pragma unroll 4
      for (int next = 0; next < splits;
           ++next) {  // each rank starts at itself: no two blocks read the same one's at a time
        const uint64_t there = ptx::peer_address(from + e * 4, (rank + next) & (splits - 1));
        const float4 v = quads ? ptx::load_peer(there) : make_float4(ptx::load_peer_word(there), 0, 0, 0);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      if (quads)
        *reinterpret_cast<float4*>(static_cast<float*>(args.gradient) + to + e) = sum;
      else if (args.float_gradient)
        static_cast<float*>(args.gradient)[to + e] = sum.x;
      else
        static_cast<T*>(args.gradient)[to + e] = narrow<T>(sum.x);
    }
  }
}

// The consumers' epilogue, of the block's tile that begins at channels (first_y, first_x).
template <class T, class Shape>
__device__ __forceinline__ void store_gradient(const WgradArgs& args, int first_y, int first_x, int rank,
                                               const float* tile) {
  const int splits = args.plan.splits;
  const Piece piece{(first_y * args.x_channels + first_x) * Shape::kTaps, args.x_channels * Shape::kTaps,
                    static_cast<int>(min(args.y_channels - first_y, int64_t{Shape::kYChannels})),
                    static_cast<int>(min(args.x_channels - first_x, int64_t{Shape::kXChannels})) * Shape::kTaps};
  if (splits == 1 && args.float_gradient && args.x_channels % 4 == 0) {
    copy_channels<Shape>(static_cast<float*>(args.gradient), piece, tile);
  } else {
    splits == 1 ? ptx::sync_threads(1, kConsumerThreads) : ptx::cluster_sync();
    add_channels<T, Shape>(args, piece, rank, tile);
    if (splits > 1) ptx::cluster_sync();  // nobody leaves while a peer still reads its tile
  }
}

// The maps of x, by a function of rows and channels that says what a map has.
template <class F>
cudaError_t make_x_maps(const Conv1d& conv, const Rows& x, F&& boxes, XMaps* maps) {
  const int64_t first = x.more ? conv.first_channels : conv.x_channels;
  if (const auto error = make_map(boxes(x.rows, first), &maps->first)) return error;
  maps->more = maps->first;
  return x.more ? make_map(boxes(x.more, conv.x_channels - first), &maps->more) : cudaSuccess;
}
inline WgradArgs wgrad_args(const Conv1d& conv, const WgradPlan& plan, const Rows& x, bool float_gradient,
                            void* gradient) {
  return {plan,        conv.y_channels, conv.x_channels, x.more ? static_cast<int>(conv.first_channels) : INT_MAX,
          conv.stride, conv.padding,    float_gradient,  gradient};
}

// wgrad_stream.cu: `wgrad` where plan.h's `streams` says so.
cudaError_t wgrad_stream(const Conv1d& conv, const void* y, const Rows& x, float* gradient, cudaStream_t stream);
// wgrad_tf32.cu: `wgrad` of float32.
cudaError_t wgrad_tf32(const Conv1d& conv, const void* y, const Rows& x, void* gradient, cudaStream_t stream);

}  // namespace dpa::kernels::conv1d
