// What the two kernels of the weight gradient share: the epilogue of a tile of kHeight * 128 channels i by kXChannels
// channels j by all taps k.
//
// Accumulators go to shared memory in the gradient's order. With one block a tile, bulk copies write them, a channel i
// at a time; else a warp takes a channel, adds the sums of all the cluster's blocks in rank order and stores them.
#pragma once
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/cuda/conv1d/launch.cuh"

namespace dpa::kernels::conv1d {

struct WgradArgs {
  WgradPlan plan;
  int64_t y_channels, x_channels;
  int stride, padding;
  bool float_gradient;
  void* gradient;
};

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
        const float4 v = quads ? ptx::load_peer(there, true) : make_float4(ptx::load_peer_word(there), 0, 0, 0);
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

// wgrad_tf32.cu: `wgrad` of float32.
cudaError_t wgrad_tf32(const Conv1d& conv, const void* y, const void* x, void* gradient, cudaStream_t stream,
                       int64_t y_pitch);

}  // namespace dpa::kernels::conv1d
