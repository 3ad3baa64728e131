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
// The passes over a block's rows after the first find them in L1 or L2, so an image may be of any size. Means and
// squared deviations are merged four vectors at a time, so a mean far from zero costs no digits. Nothing is saved
// between forward and backward but what both are given.
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/group_norm_act/group_norm_act.h"
#include "kernels/cuda/group_norm_mish/common.cuh"

namespace dpa::kernels {
namespace {

constexpr int kThreads = kGroupNormActThreads, kWarps = kThreads / kWarpSize, kAtOnce = kGroupNormActVectors;
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
  /// Calls `f(vector's offset, ...)` for kAtOnce rows at a time: `load` all, then `use` those that there are.
  template <class Load, class Use>
  __device__ __forceinline__ void each(Load&& load, Use&& use) const {
    for (int base = row; base < rows; base += kAtOnce * step) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (base + k * step < rows) load(k, first + int64_t{base + k * step} * stride);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (base + k * step < rows) use(k, first + int64_t{base + k * step} * stride);
    }
  }
};

template <class T>
__device__ __forceinline__ uint4 vector_at(const void* data, int64_t at) {
  return static_cast<const uint4*>(data)[at];
}

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

  __device__ __forceinline__ Statistics(const GroupNormAct& args, const Place<T>& place, Scratch& scratch) {
    const int width = args.plan.width, group = args.plan.group;
    Moments m;
    for (int base = place.row; base < place.rows; base += kAtOnce * place.step) {
      uint4 vectors[kAtOnce];
      int held = 0;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = base + k * place.step;
        vectors[k] = {};
        if (row < place.rows) {
          vectors[k] = vector_at<T>(args.input, place.first + int64_t{row} * place.stride);
          ++held;
        }
      }
      float sum = 0, squares = 0;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        float x[kVector<T>];
        unpack<T>(vectors[k], x);
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) sum += x[i];
      }
      const float count = static_cast<float>(held * kVector<T>), mean_ = sum / count;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
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

template <class T, class P>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ GroupNormAct args) {
  __shared__ typename Statistics<T>::Scratch scratch;
  const Place<T> place(args);
  const Statistics<T> s(args, place, scratch);
  place.have_read();
  float weight[kVector<T>], bias[kVector<T>];
  load_channels<T, P>(weight, args.weight, place.channel, 1.0f);
  load_channels<T, P>(bias, args.bias, place.channel, 0.0f);
  uint4 inputs[kAtOnce], residuals[kAtOnce];
  place.each(
      [&](int k, int64_t at) {
        inputs[k] = vector_at<T>(args.input, at);
        if (args.residual) residuals[k] = vector_at<T>(args.residual, at);
      },
      [&](int k, int64_t at) {
        float x[kVector<T>], residual[kVector<T>] = {};
        unpack<T>(inputs[k], x);
        if (args.residual) unpack<T>(residuals[k], residual);
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
template <class T, class P, bool kResidual>
__global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ GroupNormActBackward args) {
  constexpr int kBoth = 2 * kVector<T>;  // per vector: shares in the gradients of weight, then of bias
  extern __shared__ float sums[];        // (kWarps, kBoth, lanes), (kBoth, width) of the block, (kBoth, width) of all
  __shared__ typename Statistics<T>::Scratch scratch;
  __shared__ float means[kMostGroups][2];
  const GroupNormAct& in = args.forward;
  const int width = in.plan.width, group = in.plan.group;
  const Place<T> place(in);
  const Statistics<T> s(in, place, scratch);
  float weight[kVector<T>], bias[kVector<T>], both[kBoth] = {};
  load_channels<T, P>(weight, in.weight, place.channel, 1.0f);
  load_channels<T, P>(bias, in.bias, place.channel, 0.0f);
  uint4 inputs[kAtOnce], grads[kAtOnce], residuals[kAtOnce];
  const auto load = [&](int k, int64_t at) {
    inputs[k] = vector_at<T>(in.input, at), grads[k] = vector_at<T>(args.grad, at);
    if constexpr (kResidual) residuals[k] = vector_at<T>(in.residual, at);
  };
  // The normalised input, and the gradient behind ReLU.
  const auto read = [&](int k, float(&x)[kVector<T>], float(&g)[kVector<T>]) {
    unpack<T>(inputs[k], x), unpack<T>(grads[k], g);
    float residual[kVector<T>] = {};
    if constexpr (kResidual) unpack<T>(residuals[k], residual);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      x[i] = s.normalized(x[i]);
      if (in.relu && fmaf(x[i], weight[i], bias[i]) + residual[i] <= 0) g[i] = 0;  // as in the forward, bit for bit
    }
  };
  place.each(load, [&](int k, int64_t) {
    float x[kVector<T>], g[kVector<T>];
    read(k, x, g);
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
  place.each(load, [&](int k, int64_t at) {
    float x[kVector<T>], g[kVector<T>];
    read(k, x, g);
    if (args.grad_residual) static_cast<uint4*>(args.grad_residual)[at] = pack<T>(g);
    if (!args.grad_input) return;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) x[i] = s.rstd * (fmaf(g[i], weight[i], -sum) - x[i] * dot);
    static_cast<uint4*>(args.grad_input)[at] = pack<T>(x);
  });
  place.wait_for_readers();
}

template <class Args>
cudaError_t launch_clusters(void (*kernel)(Args), const GroupNormAct& in, size_t shared, cudaStream_t stream,
                            const Args& args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = in.plan.cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(in.shape.batch * in.plan.columns * in.plan.cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = in.plan.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace

bool group_norm_act_clusters() {
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, forward<float, float>) == cudaSuccess && attributes.ptxVersion >= 90;
}

cudaError_t group_norm_act(const GroupNormAct& args, cudaStream_t stream) {
  return channels_last::dispatch_types(args, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    return launch_clusters(forward<T, P>, args, 0, stream, args);
  });
}

cudaError_t group_norm_act_backward(const GroupNormActBackward& args, cudaStream_t stream) {
  const GroupNormAct& in = args.forward;
  return channels_last::dispatch_types(in, [&](auto tag, auto parameter) {
    using T = typename decltype(tag)::type;
    using P = typename decltype(parameter)::type;
    const int width = in.plan.width, lanes = width < kWarpSize ? width : kWarpSize;
    const size_t shared = sizeof(float) * 2 * kVector<T> * (kWarps * lanes + 2 * width);
    if (in.relu && in.residual) return launch_clusters(backward<T, P, true>, in, shared, stream, args);
    return launch_clusters(backward<T, P, false>, in, shared, stream, args);
  });
}

}  // namespace dpa::kernels
