// out = relu(group_norm(input) * weight + bias + residual) and its backward, on channels-last images.
//
// Dimensions: B samples, C channels, H * W rows a sample, G groups; a group of a sample is H * W rows of C / G
// neighbouring channels.
//
// grid    one cluster a sample and `width` vectors of 16 bytes of its rows (plan.h), which are whole groups
// cluster blocks that share the rows, interleaved; they exchange sums through distributed shared memory, in the order of
//         their ranks
// thread  one vector of every row that it owns, so that its channels and its group stay the same
//
// Where a thread's rows fit, its vectors are copied to shared memory at the start (`kHeld`), all at once, and every pass
// reads them there: no thread waits for memory twice, and registers stay few, so that more blocks hide the waits of one
// another. Rows of larger images are found in L1 or L2 by the passes after the first. Means and squared deviations are
// merged four vectors at a time, so a mean far from zero costs no digits. Nothing is saved between forward and backward
// but what both are given.
#include "kernels/cuda/common/ptx_copy.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/group_norm_act/group_norm_act.h"
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels {
namespace {

constexpr int kThreads = kGroupNormActThreads, kWarps = kThreads / kWarpSize, kTogether = kGroupNormActVectors;
constexpr int kMostGroups = kWarpSize;  // of a block: only vectors of narrow groups are joined, within a warp

/// Where a thread stands.
template <class T>
struct Place {
  int lane, warp, column, rank, ranks;  // column: of its vector among the block's
  int row, step, rows;                  // its first row, from one to the next, and the end
  int channel;                          // its first one
  int stride;                           // vectors from a row to the next
  int64_t sample, first;                // first: its vector in row 0

  __device__ explicit Place(const GroupNormAct& args) {
    const GroupNormActPlan& plan = args.plan;
    lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    column = threadIdx.x & (plan.width - 1);
    ranks = plan.cluster, rank = blockIdx.x & (ranks - 1);
    const int team = static_cast<int>(blockIdx.x / ranks);
    sample = team / plan.columns;
    const int slots = kThreads / plan.width;
    row = rank * slots + threadIdx.x / plan.width, step = ranks * slots;
    rows = static_cast<int>(args.shape.rows);
    stride = plan.columns * plan.width;
    const int place = team % plan.columns * plan.width + column;
    channel = place * kVector<T>;
    first = sample * rows * stride + place;
  }
  /// Of the thread's vector in a row.
  __device__ __forceinline__ int64_t offset(int of_row) const { return first + int64_t{of_row} * stride; }
  /// What all threads of the cluster wrote to shared memory is visible after.
  __device__ __forceinline__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (ranks > 1) return ptx::cluster_sync();
#endif
    __syncthreads();
  }
  /// The two halves of waiting until no block of the cluster reads another's shared memory any more.
  __device__ __forceinline__ void have_read() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (ranks > 1) ptx::cluster_arrive();
#endif
  }
  __device__ __forceinline__ void wait_for_readers() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (ranks > 1) ptx::cluster_wait();
#endif
  }
};

/// A thread's vectors of up to `kImages` images, of which some may be null.
template <class T, int kImages, bool kHeld>
struct Rows {
  const uint4* images[kImages];
  uint4* slots = nullptr;  // (kImages, held, kThreads), from the thread's own on
  int held = 0;

  /// `shared` has the block's slots, where there are any; nobody but this thread reads its own.
  __device__ __forceinline__ Rows(const Place<T>& place, int held_, uint4* shared, const void* const (&from)[kImages])
      : slots(shared + threadIdx.x), held(held_) {
#pragma unroll
    for (int i = 0; i < kImages; ++i) images[i] = static_cast<const uint4*>(from[i]);
    if constexpr (kHeld) {
      int slot = 0;
      for (int row = place.row; row < place.rows; row += place.step, ++slot) {
#pragma unroll
        for (int i = 0; i < kImages; ++i)
          if (images[i]) copy(at(i, slot), images[i] + place.offset(row));
      }
#if __CUDA_ARCH__ >= 800
      ptx::copy_async_wait();
#endif
    }
  }
  __device__ __forceinline__ static void copy(uint4* to, const uint4* from) {
#if __CUDA_ARCH__ >= 800
    ptx::copy_async_16(ptx::shared_address(to), from);
#else
    *to = *from;
#endif
  }
  __device__ __forceinline__ uint4* at(int image, int slot) const { return slots + (image * held + slot) * kThreads; }
  /// The vector of the thread's row number `slot`, which is at `offset`.
  __device__ __forceinline__ uint4 load(int image, int slot, int64_t offset) const {
    return kHeld ? *at(image, slot) : images[image][offset];
  }
  /// Calls `use(slot, offset, vectors)` for every row.
  template <class Use>
  __device__ __forceinline__ void each(const Place<T>& place, Use&& use) const {
    constexpr int kAtOnce = kHeld ? 1 : kTogether;
    for (int base = place.row, slot = 0; base < place.rows; base += kAtOnce * place.step, slot += kAtOnce) {
      uint4 vectors[kAtOnce][kImages];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = base + k * place.step;
#pragma unroll
        for (int i = 0; i < kImages; ++i)
          if (row < place.rows && images[i]) vectors[k][i] = load(i, slot + k, place.offset(row));
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = base + k * place.step;
        if (row < place.rows) use(slot + k, place.offset(row), vectors[k]);
      }
    }
  }
};

/// A thread's channels of weight or bias.
template <class T, class P>
__device__ __forceinline__ void load_channels(float (&to)[kVector<T>], const void* from, int channel, float otherwise) {
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) to[i] = from ? widen(static_cast<const P*>(from)[channel + i]) : otherwise;
}

/// Mean and 1 / standard deviation of a thread's group. Every thread of the cluster must call; before the shared memory
/// of `Scratch` goes, `have_read` and `wait_for_readers`.
template <class T>
struct Statistics {
  float mean, rstd;

  struct Scratch {
    float warps[kWarps][kMostGroups][3], block[kMostGroups][3];
  };

  template <class Inputs>
  __device__ __forceinline__ Statistics(const GroupNormAct& args, const Place<T>& place, const Inputs& inputs,
                                        Scratch& scratch) {
    const int width = args.plan.width, group = args.plan.group;
    Moments m;
    for (int base = place.row, slot = 0; base < place.rows; base += kTogether * place.step, slot += kTogether) {
      uint4 vectors[kTogether];
      int held = 0;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int row = base + k * place.step;
        vectors[k] = {};
        if (row < place.rows) {
          vectors[k] = inputs.load(0, slot + k, place.offset(row));
          ++held;
        }
      }
      float sum = 0, squares = 0;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        float x[kVector<T>];
        unpack<T>(vectors[k], x);
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) sum += x[i];
      }
      const float count = static_cast<float>(held * kVector<T>), mean_ = sum / count;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        float x[kVector<T>];
        unpack<T>(vectors[k], x);
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) squares += k < held ? (x[i] - mean_) * (x[i] - mean_) : 0.0f;
      }
      m.merge(count, mean_, squares);
    }
    for (int offset = 1; offset < group && offset < kWarpSize; offset *= 2) m.merge_lane(offset);
    for (int offset = width; offset < kWarpSize; offset *= 2) m.merge_lane(offset);
    const int key = place.column / group;
    if (place.lane < width && place.lane % group == 0) {
      float* const to = scratch.warps[place.warp][key];
      to[0] = m.count, to[1] = m.mean, to[2] = m.squares;
    }
    __syncthreads();
    if (threadIdx.x < width / group) {
      Moments all;
      for (int w = 0; w < kWarps; ++w) {
        const float* const from = scratch.warps[w][threadIdx.x];
        all.merge(from[0], from[1], from[2]);
      }
      float* const to = scratch.block[threadIdx.x];
      to[0] = all.count, to[1] = all.mean, to[2] = all.squares;
    }
    place.sync();
    Moments all;
    for (int rank = 0; rank < place.ranks; ++rank) {
      const float* const from = scratch.block[key];
      all.merge(load_of_peer(from, rank), load_of_peer(from + 1, rank), load_of_peer(from + 2, rank));
    }
    mean = all.mean;
    rstd = rsqrtf(all.squares / all.count + args.eps);
  }
  __device__ __forceinline__ float normalized(float x) const { return (x - mean) * rstd; }
};

template <class T, class P, bool kHeld>
__global__ void __launch_bounds__(kThreads, kHeld ? 4 : 3) forward(const __grid_constant__ GroupNormAct args) {
  extern __shared__ uint4 slots[];
  __shared__ typename Statistics<T>::Scratch scratch;
  const Place<T> place(args);
  const Rows<T, 2, kHeld> rows(place, args.plan.held, slots, {args.input, args.residual});
  const Statistics<T> s(args, place, rows, scratch);
  place.have_read();
  float weight[kVector<T>], bias[kVector<T>];
  load_channels<T, P>(weight, args.weight, place.channel, 1.0f);
  load_channels<T, P>(bias, args.bias, place.channel, 0.0f);
  rows.each(place, [&](int, int64_t at, const uint4(&vectors)[2]) {
    float x[kVector<T>], residual[kVector<T>] = {};
    unpack<T>(vectors[0], x);
    if (args.residual) unpack<T>(vectors[1], residual);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      x[i] = fmaf(s.normalized(x[i]), weight[i], bias[i]) + residual[i];
      if (args.relu && x[i] < 0) x[i] = 0;  // NaN stays
    }
    static_cast<uint4*>(args.out)[at] = pack<T>(x);
  });
  place.wait_for_readers();
}

/// `kResidual`: there is a residual, which the sign of ReLU's input depends on.
template <class T, class P, bool kResidual, bool kHeld>
__global__ void __launch_bounds__(kThreads, kHeld ? 3 : 2) backward(const __grid_constant__ GroupNormActBackward args) {
  constexpr int kBoth = 2 * kVector<T>;  // per vector: shares in the gradients of weight, then of bias
  constexpr int kImages = kResidual ? 3 : 2;
  extern __shared__ uint4 slots[];
  __shared__ typename Statistics<T>::Scratch scratch;
  __shared__ float means[kMostGroups][2];
  const GroupNormAct& in = args.forward;
  // (kWarps, kBoth, lanes), (kBoth, width) of the block, (kBoth, width) of all
  float* const sums = reinterpret_cast<float*>(slots + kImages * in.plan.held * kThreads);
  const int width = in.plan.width, group = in.plan.group;
  const Place<T> place(in);
  const void* from[kImages] = {in.input, args.grad};
  if constexpr (kResidual) from[2] = in.residual;
  const Rows<T, kImages, kHeld> rows(place, in.plan.held, slots, from);
  const Statistics<T> s(in, place, rows, scratch);
  float weight[kVector<T>], bias[kVector<T>], both[kBoth] = {};
  load_channels<T, P>(weight, in.weight, place.channel, 1.0f);
  load_channels<T, P>(bias, in.bias, place.channel, 0.0f);
  // The normalised input, and the gradient behind ReLU.
  const auto read = [&](const uint4(&vectors)[kImages], float(&x)[kVector<T>], float(&g)[kVector<T>], bool masks) {
    unpack<T>(vectors[0], x), unpack<T>(vectors[1], g);
    float residual[kVector<T>] = {};
    if constexpr (kResidual) unpack<T>(vectors[2], residual);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      x[i] = s.normalized(x[i]);
      if (masks && fmaf(x[i], weight[i], bias[i]) + residual[i] <= 0) g[i] = 0;  // as in the forward, bit for bit
    }
  };
  rows.each(place, [&](int slot, int64_t, const uint4(&vectors)[kImages]) {
    float x[kVector<T>], g[kVector<T>];
    read(vectors, x, g, in.relu);
    if (kHeld && in.relu) *rows.at(1, slot) = pack<T>(g);  // what ReLU leaves of it
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) both[i] = fmaf(g[i], x[i], both[i]), both[kVector<T> + i] += g[i];
  });
  for (int offset = width; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kBoth; ++i) both[i] += __shfl_xor_sync(0xffffffffu, both[i], offset);
  }
  const int lanes = width < kWarpSize ? width : kWarpSize;
  if (place.lane < lanes) {
#pragma unroll
    for (int i = 0; i < kBoth; ++i) sums[(place.warp * kBoth + i) * lanes + place.lane] = both[i];
  }
  __syncthreads();
  float* const of_block = sums + kWarps * kBoth * lanes;
  float* const of_all = of_block + kBoth * width;
  const int apart = width / lanes;  // warps that hold other columns
  for (int item = threadIdx.x; item < kBoth * width; item += kThreads) {
    const int i = item / width, column = item & (width - 1);
    float sum = 0;
    for (int w = column / kWarpSize; w < kWarps; w += apart) sum += sums[(w * kBoth + i) * lanes + column % lanes];
    of_block[item] = sum;
  }
  place.sync();
  const int first = place.channel - place.column * kVector<T>;
  for (int item = threadIdx.x; item < kBoth * width; item += kThreads) {
    float sum = 0;
    for (int rank = 0; rank < place.ranks; ++rank) sum += load_of_peer(of_block + item, rank);
    of_all[item] = sum;
    const int i = item / width, channel = first + (item & (width - 1)) * kVector<T> + i % kVector<T>;
    const int64_t which = i / kVector<T> * in.shape.batch + place.sample;
    if (args.partials && place.rank == 0) args.partials[which * in.shape.channels + channel] = sum;
  }
  place.have_read();
  __syncthreads();
  for (int key = place.warp; key < width / group; key += kWarps) {  // a warp takes a group, whose channels lie i-major
    float dot = 0, sum = 0;
    for (int item = place.lane; item < group * kVector<T>; item += kWarpSize) {
      const int i = item / group, column = key * group + item % group, channel = first + column * kVector<T> + i;
      const float w = in.weight ? widen(static_cast<const P*>(in.weight)[channel]) : 1.0f;
      dot += w * of_all[i * width + column], sum += w * of_all[(kVector<T> + i) * width + column];
    }
    const float over = 1.0f / (static_cast<float>(in.shape.rows) * static_cast<float>(group * kVector<T>));
    dot = warp_sum(dot) * over, sum = warp_sum(sum) * over;
    if (place.lane == 0) means[key][0] = dot, means[key][1] = sum;
  }
  __syncthreads();
  const float dot = means[place.column / group][0], sum = means[place.column / group][1];
  rows.each(place, [&](int, int64_t at, const uint4(&vectors)[kImages]) {
    float x[kVector<T>], g[kVector<T>];
    read(vectors, x, g, in.relu && !kHeld);
    if (args.grad_residual) static_cast<uint4*>(args.grad_residual)[at] = pack<T>(g);
    if (!args.grad_input) return;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) x[i] = s.rstd * (fmaf(g[i], weight[i], -sum) - x[i] * dot);
    static_cast<uint4*>(args.grad_input)[at] = pack<T>(x);
  });
  place.wait_for_readers();
}

/// `shared`: bytes besides the slots of `images` images.
template <class Args>
cudaError_t launch_clusters(void (*kernel)(Args), const GroupNormAct& in, int images, size_t shared,
                            cudaStream_t stream, const Args& args) {
  shared += sizeof(uint4) * images * in.plan.held * kThreads;
  const dim3 blocks(static_cast<unsigned>(in.shape.batch * in.plan.columns * in.plan.cluster));
  return LaunchConfig(blocks, kThreads, stream, shared)
      .clusters(in.plan.cluster > 1 ? in.plan.cluster : 0)
      .launch(kernel, args);
}

}  // namespace

cudaError_t group_norm_act(const GroupNormAct& args, cudaStream_t stream) {
  return channels_last::dispatch_types(args, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    const auto kernel = args.plan.held > 0 ? forward<T, P, true> : forward<T, P, false>;
    return launch_clusters(kernel, args, args.residual ? 2 : 1, 0, stream, args);
  });
}

cudaError_t group_norm_act_backward(const GroupNormActBackward& args, cudaStream_t stream) {
  const GroupNormAct& in = args.forward;
  return channels_last::dispatch_types(in, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    const int width = in.plan.width, lanes = width < kWarpSize ? width : kWarpSize;
    const size_t shared = sizeof(float) * 2 * kVector<T> * (kWarps * lanes + 2 * width);
    const bool held = in.plan.held > 0, residual = in.relu && in.residual;
    const auto kernel = residual ? (held ? backward<T, P, true, true> : backward<T, P, true, false>)
                                 : (held ? backward<T, P, false, true> : backward<T, P, false, false>);
    return launch_clusters(kernel, in, residual ? 3 : 2, shared, stream, args);
  });
}

}  // namespace dpa::kernels
