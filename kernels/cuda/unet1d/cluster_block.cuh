// What every part of the clustered kernel knows: the arguments, the block's place, its barriers, and the circular
// buffer.
#pragma once
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/common/ptx_cluster.cuh"
#include "kernels/cuda/common/ptx_copy.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/unet1d/loop.cuh"
#include "kernels/cuda/unet1d/paths.h"
#include "kernels/cuda/unet1d/tile.cuh"
#include "kernels/math/diffusion_step.h"
#include "kernels/plans/unet1d/cluster_layout.h"

namespace dpa::kernels::unet1d {

constexpr int kClusterThreads = 3 * kGroupThreads;  // GEMMs, outputs, copies of weights
constexpr int kProducerWarps = kGroupThreads / 32;
constexpr int kStepBegun = 3;                // a barrier of both computing warpgroups
constexpr uint32_t kUnwritten = 0xFFFFFFFF;  // no pair of rounded values, and no sum, has these bits

// What the kernel's parts leave out in a form (cluster_layout.h).
__device__ constexpr bool in_passes(ClusterForm form) {
  return form != ClusterForm::kAlone && form != ClusterForm::kWhole;
}
__device__ constexpr bool exchanges(ClusterForm form) { return form != ClusterForm::kWhole; }  // moments

struct ClusterArguments : LoopArguments {
  ClusterLayout layout;
  int first_sample, samples;  // of this launch
  uint8_t* messages;
};

struct ClusterBarriers {
  uint64_t full[kMaxClusterStages], empty[kMaxClusterStages];
  uint64_t sums_full[2];  // this block's units have their partial sums: of the GEMM, of the residual
  // Block i has read what it was sent last: where it shares units with this one; where it does not.
  uint64_t sums_empty[2][kClusterBlocks];
  uint64_t moments_full[2];  // those of the cluster's blocks are there, in turns
};
// Moments of the values that each of the cluster's blocks finishes, of two norms in turns.
using ClusterMoments = float2[2][kClusterBlocks];

// The same value, which is one for the whole warp, in a form in which the compiler knows that: GEMMs do not run side
// by side where it must think that lanes may part.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

__device__ __forceinline__ int stages_of(int steps) { return (steps + kStageSteps - 1) / kStageSteps; }

// A residual convolution comes with the GEMM, as its second segment.
__device__ __forceinline__ int has_residual(const ClusterLayer& l) { return l.num_segments == 2 && !l.upsample; }

// What a warpgroup that computes knows.
struct ClusterRole {
  const ClusterArguments& a;
  uint8_t* const shared;
  ClusterBarriers& barriers;
  const int cluster, rank;
  const ClusterLayer* const layers;
  const int thread, warp, lane;  // thread, warp: in the warpgroup
  const uint32_t base;           // address of `shared`
  int step = 0;
  __device__ ClusterRole(const ClusterArguments& arguments, uint8_t* memory, ClusterBarriers& b, int c, int r)
      : a(arguments),
        shared(memory),
        barriers(b),
        cluster(c),
        rank(r),
        layers(reinterpret_cast<const ClusterLayer*>(memory + arguments.layout.descriptors)),
        thread(threadIdx.x % kGroupThreads),
        warp(uniform(thread / 32)),
        lane(threadIdx.x % 32),
        base(ptx::held(ptx::shared_address(memory))) {}
  // What a step hands over; the next step's lies in the other half.
  __device__ __forceinline__ uint8_t* messages_of(int which) const {
    return a.messages + (which & 1 ? a.layout.message_bytes : 0);
  }
};

// The warps of a group stream this block's weights, GEMM after GEMM, step after step, a stage each in turns, since a copy
// takes a warp some 60 clocks to issue. Lane i copies step j and piece p of a stage, i = j * pieces + p.
template <ClusterForm kForm>
__device__ inline void stream_cluster_weights(const ClusterArguments& a, uint8_t* shared, ClusterBarriers& barriers,
                                              int cluster, int rank, int warp) {
  const ClusterLayout& y = a.layout;
  const auto* layers = reinterpret_cast<const ClusterLayer*>(shared + y.descriptors);
  const uint64_t pass = ptx::evict_first_policy(), keep = ptx::evict_last_policy();
  const int lane = threadIdx.x % 32, step_bytes = y.step_bytes, tile_bytes = step_bytes / 4;
  const uint32_t buffer = ptx::shared_address(shared + y.buffer);
  PipelineState at;
  int turn_of = 0;  // the warp whose stage is next
  for (int step = 0; step < a.steps; step++) {
    for (int i = 1; i <= y.count; i++) {
      const ClusterLayer& l = layers[i];
      const ClusterTile p(l, cluster, rank);
      const int piece_tiles_log2 = min(2, l.packed_tiles_log2), pieces_log2 = 2 - piece_tiles_log2;
      const int j = lane >> pieces_log2, piece = lane & ((1 << pieces_log2) - 1);
      const int tile = p.row_tile * 4 + (piece << piece_tiles_log2);
      const int slice_out = tile >> l.packed_tiles_log2, row = tile & ((1 << l.packed_tiles_log2) - 1);
      const uint32_t to = j * step_bytes + (piece << piece_tiles_log2) * tile_bytes,
                     bytes = tile_bytes << piece_tiles_log2;
      for (int turn = has_residual(l); turn >= 0; turn--) {
        const int s = l.upsample ? p.segment : turn, steps = l.steps[s], of_slice = l.taps[s] << l.steps_log2;
        const int slice_steps = l.taps[s] * l.packed_steps, passes = in_passes(kForm) ? l.passes : 1;
        const uint8_t* from = a.weights + l.weights[s] + row * tile_bytes;
        const uint64_t policy = l.weights[s] < y.kept_bytes ? keep : pass;
        for (int n = 0; n < passes; n++) {
          const ClusterPass at_pass(l, p, n);
          const int64_t base = (static_cast<int64_t>(slice_out) * kSlices + at_pass.slice) * slice_steps;
          for (int q0 = 0; q0 < steps; q0 += kStageSteps, at.advance_by(1, y.stages)) {
            const bool mine = turn_of == warp;
            turn_of = (turn_of + 1) & (kProducerWarps - 1);
            if (!mine) continue;
            const uint32_t full = ptx::shared_address(&barriers.full[at.stage]);
            ptx::barrier_wait(ptx::shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
            if (lane == 0) ptx::barrier_expect(full, min(kStageSteps, steps - q0) * step_bytes);
            __syncwarp();
            int q = q0 + j;
            if (j < kStageSteps && q < steps) {
              int64_t k = base + at_pass.first_step;
              if (q >= of_slice) q -= of_slice, k += slice_steps;
              k += (q >> l.steps_log2) * l.packed_steps + (q & ((1 << l.steps_log2) - 1));
              ptx::copy_bulk(buffer + at.stage * kStageSteps * step_bytes + to,
                             from + (k << l.packed_tiles_log2) * tile_bytes, bytes, full, policy);
            }
          }
        }
      }
    }
  }
}

}  // namespace dpa::kernels::unet1d
