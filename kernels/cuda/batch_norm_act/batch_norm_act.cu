// out = relu(batch_norm(input) * weight + bias + residual) and its backward, in training, on channels-last images.
//
// Dimensions: C channels, rows = B * H * W; statistics are of a channel's rows.
//
// Two kernels each way. The first takes sums over the rows (forward: moments; backward: the gradients of bias and
// weight), the second adds up what the first has left and maps every element.
//
// grid    one block for `width` vectors of 16 bytes of its rows and a share of the rows (plan.h)
// cluster blocks of the first kernel that share a column; they add up their sums through distributed shared memory, in
//         the order of their ranks, and leave one slice
// thread  one vector of every row that it owns, so that its channels stay the same
//
// The second kernel walks from the last row to the first, for the last ones are in L2. A thread's
// moments are about its first value, a block's about its mean, so no mean or outlier costs digits.
#include "kernels/cuda/batch_norm_act/batch_norm_act.h"
#include "kernels/cuda/batch_norm_act/block.cuh"
#include "kernels/cuda/common/clusters.h"

namespace dpa::kernels {
namespace {

using namespace batch_norm;

/// The first kernel of the forward: each slice's means, and squared distances from them.
template <class T>
__global__ void __launch_bounds__(kThreads, kBatchNormActBlocks) moments(const __grid_constant__ BatchNormAct args) {
  constexpr int kAtOnce = 4, kSize = kVector<T>;
  __shared__ BlockSums<1> sums;
  __shared__ float means[kMost];
  const Place<T> place(args);
  float about[kSize] = {}, sum[1][kSize] = {}, squares[1][kSize] = {};
  if (place.row < place.rows) unpack<T>(vector_at(args.input, place.vector + place.row * place.stride), about);
  uint4 inputs[kAtOnce];
  place.template each<kAtOnce, false>([&](int k, int64_t at) { inputs[k] = vector_at(args.input, at); },
                                      [&](int k, int64_t) {
                                        float x[kSize];
                                        unpack<T>(inputs[k], x);
#pragma unroll
                                        for (int i = 0; i < kSize; ++i) {
                                          const float d = x[i] - about[i];
                                          sum[0][i] += d, squares[0][i] = fmaf(d, d, squares[0][i]);
                                        }
                                      });
  // The thread's means from here on, as distances from a value that all threads of the column know.
  float common[kSize];
  unpack<T>(vector_at(args.input, place.vector + place.first_row(args.plan) * place.stride), common);
  const float count = static_cast<float>(place.row < place.rows ? (place.rows - 1 - place.row) / place.step + 1 : 0);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float mean = count > 0 ? sum[0][i] / count : 0.0f;
    squares[0][i] -= mean * sum[0][i];
    if (squares[0][i] < 0) squares[0][i] = 0;  // NaN stays
    about[i] = count > 0 ? about[i] - common[i] + mean : 0.0f;
    sum[0][i] = about[i] * count;
  }
  sums.add(place, args.plan.width, sum);
  const int rows = place.rows_of_block();
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float apart = about[i] - sums.block[0][place.column * kSize + i] / static_cast<float>(rows);
    squares[0][i] = fmaf(apart * apart, count, squares[0][i]);
  }
  const int channel = threadIdx.x;
  const bool writes = channel < args.plan.width * kSize;
  if (writes)
    means[channel] =
        sums.block[0][channel] / static_cast<float>(rows) +
        widen(static_cast<const T*>(
            args.input)[int64_t{place.first_row(args.plan)} * args.shape.channels + place.first + channel]);
  __syncthreads();
  sums.add(place, args.plan.width, squares);
  place.sync(args.plan);
  if (place.rank == 0 && writes) {
    Moments all;
    for (int rank = 0; rank < args.plan.cluster; ++rank)
      all.merge(static_cast<float>(place.rows_of_block(rank)), load_of_peer(&means[channel], rank),
                load_of_peer(&sums.block[0][channel], rank));
    const int64_t to = int64_t{place.block / args.plan.cluster} * args.shape.channels + place.first + channel;
    args.partials[to] = all.mean, args.partials[args.plan.slices * args.shape.channels + to] = all.squares;
  }
  place.sync(args.plan);  // no block ends while another reads its shared memory
}

/// Where the second kernel's blocks add up slices: a thread takes one channel and every `kParts`-th slice.
struct Slices {
  static constexpr int kParts = kThreads / kMost;
  int channel, part;  // the channel among the block's

  __device__ Slices() : channel(threadIdx.x % kMost), part(threadIdx.x / kMost) {}
};

/// The second kernel of the forward.
template <class T>
__global__ void __launch_bounds__(kThreads, kBatchNormActBlocks) normalize(const __grid_constant__ BatchNormAct args) {
  constexpr int kAtOnce = 2, kSize = kVector<T>;
  __shared__ float parts[Slices::kParts][3][kMost], means[kMost], scales[kMost];
  const Place<T> place(args);
  const Slices slices;
  const int channels = args.plan.width * kSize, slots = kThreads / args.plan.width;
  float bias[kSize], mean[kSize], scale[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) bias[i] = parameter<T>(args, args.bias, place.channel + i, 0.0f);
  grid_dependency_sync();
  if (slices.channel < channels) {
    Moments m;
    const int64_t all = int64_t{args.plan.slices} * args.shape.channels;
#pragma unroll 4
    for (int s = slices.part; s < args.plan.slices; s += Slices::kParts) {
      const float* const slice = args.partials + s * args.shape.channels + place.first + slices.channel;
      m.merge(static_cast<float>(batch_norm_act_count(args.plan, args.shape.rows, slots, s)), slice[0], slice[all]);
    }
    float(&to)[3][kMost] = parts[slices.part];
    to[0][slices.channel] = m.count, to[1][slices.channel] = m.mean, to[2][slices.channel] = m.squares;
  }
  __syncthreads();
  if (threadIdx.x < channels) {
    Moments m;
    const int c = threadIdx.x;
    for (const auto& part : parts) m.merge(part[0][c], part[1][c], part[2][c]);
    const float var = m.squares / m.count;
    means[c] = m.mean;
    scales[c] = rsqrtf(var + args.eps) * parameter<T>(args, args.weight, place.first + c, 1.0f);
    if (place.block == 0) args.mean[place.first + c] = m.mean, args.var[place.first + c] = var;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    mean[i] = means[place.column * kSize + i], scale[i] = scales[place.column * kSize + i];
  uint4 inputs[kAtOnce], residuals[kAtOnce];
  place.template each<kAtOnce, true>(
      [&](int k, int64_t at) {
        inputs[k] = vector_at(args.input, at);
        if (args.residual) residuals[k] = vector_at(args.residual, at);
      },
      [&](int k, int64_t at) {
        float x[kSize], residual[kSize] = {};
        unpack<T>(inputs[k], x);
        if (args.residual) unpack<T>(residuals[k], residual);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          x[i] = fmaf(x[i] - mean[i], scale[i], bias[i]) + residual[i];
          if (args.relu && x[i] < 0) x[i] = 0;  // NaN stays
        }
        static_cast<uint4*>(args.out)[at] = pack<T>(x);
      });
}

/// What the backward knows of a thread's channels: u = (x - mean) * scale + bias + residual is ReLU's input, bit for
/// bit as in the forward.
template <class T>
struct Channels {
  static constexpr int kSize = kVector<T>;
  float mean[kSize], scale[kSize], bias[kSize];

  __device__ __forceinline__ Channels(const BatchNormAct& in, const Place<T>& place) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int channel = place.channel + i;
      mean[i] = in.mean[channel];
      scale[i] = rsqrtf(in.var[channel] + in.eps) * parameter<T>(in, in.weight, channel, 1.0f);
      bias[i] = parameter<T>(in, in.bias, channel, 0.0f);
    }
  }
  /// Takes the mean from `x`, and clears `g` where ReLU's input was not positive.
  __device__ __forceinline__ void center(const BatchNormAct& in, float (&x)[kSize], float (&g)[kSize],
                                         const float (&residual)[kSize], bool masks) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] -= mean[i];
      if (masks && fmaf(x[i], scale[i], bias[i]) + residual[i] <= 0) g[i] = 0;
    }
  }
};

/// The first kernel of the backward: sums over rows of the gradient behind ReLU, and of it times the centred
/// input. `kResidual`: there is a residual, which the sign of ReLU's input depends on; its gradient is written here.
template <class T, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBatchNormActBlocks)
    gradient_sums(const __grid_constant__ BatchNormActBackward args) {
  constexpr int kSize = kVector<T>, kAtOnce = kResidual ? 1 : 2;
  __shared__ BlockSums<2> shared;
  const BatchNormAct& in = args.forward;
  const Place<T> place(in);
  const Channels<T> of(in, place);
  float sums[2][kSize] = {};
  uint4 inputs[kAtOnce], grads[kAtOnce], residuals[kAtOnce];
  place.template each<kAtOnce, false>(
      [&](int k, int64_t at) {
        inputs[k] = vector_at(in.input, at), grads[k] = vector_at(args.grad, at);
        if constexpr (kResidual) residuals[k] = vector_at(in.residual, at);
      },
      [&](int k, int64_t at) {
        float x[kSize], g[kSize], residual[kSize] = {};
        unpack<T>(inputs[k], x), unpack<T>(grads[k], g);
        if constexpr (kResidual) unpack<T>(residuals[k], residual);
        of.center(in, x, g, residual, in.relu);
        if (args.grad_residual) static_cast<uint4*>(args.grad_residual)[at] = pack<T>(g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) sums[0][i] += g[i], sums[1][i] = fmaf(g[i], x[i], sums[1][i]);
      });
  shared.add(place, in.plan.width, sums);
  place.sync(in.plan);
  const int channel = threadIdx.x % kMost, which = threadIdx.x / kMost;
  if (place.rank == 0 && which < 2 && channel < in.plan.width * kSize) {
    float sum = 0;
    for (int rank = 0; rank < in.plan.cluster; ++rank) sum += load_of_peer(&shared.block[which][channel], rank);
    const int64_t slice = int64_t{which} * in.plan.slices + place.block / in.plan.cluster;
    in.partials[slice * in.shape.channels + place.first + channel] = sum;
  }
  place.sync(in.plan);  // no block ends while another reads its shared memory
}

/// The second kernel of the backward. `kMasks`: the gradient is the output's, and ReLU's part is taken here; else it
/// is the residual's, which the first kernel has written, or there is no ReLU.
template <class T, bool kMasks, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBatchNormActBlocks)
    gradients(const __grid_constant__ BatchNormActBackward args) {
  constexpr int kSize = kVector<T>, kAtOnce = kResidual ? 1 : 2;
  __shared__ float parts[Slices::kParts / 2][2][kMost], sums[2][kMost];
  const BatchNormAct& in = args.forward;
  const Place<T> place(in);
  const Slices slices;
  const int channels = in.plan.width * kSize;
  const Channels<T> of(in, place);
  grid_dependency_sync();
  const int which = slices.part % 2, part = slices.part / 2;
  if (slices.channel < channels) {
    float sum = 0;
    const float* const from =
        in.partials + int64_t{which} * in.plan.slices * in.shape.channels + place.first + slices.channel;
#pragma unroll 4
    for (int s = part; s < in.plan.slices; s += Slices::kParts / 2) sum += from[s * in.shape.channels];
    parts[part][which][slices.channel] = sum;
  }
  __syncthreads();
  if (part == 0 && slices.channel < channels) {
    float sum = 0;
    for (const auto& each : parts) sum += each[which][slices.channel];
    const int channel = place.first + slices.channel;
    const float rstd = rsqrtf(in.var[channel] + in.eps), over = 1.0f / static_cast<float>(in.shape.rows);
    sums[which][slices.channel] = sum * over * (which == 0 ? 1.0f : rstd * rstd);
    if (place.block == 0)
      store_parameter<T>(in, which == 0 ? args.grad_bias : args.grad_weight, channel, which == 0 ? sum : sum * rstd);
  }
  if (args.grad_input == nullptr) return;
  __syncthreads();
  float sum[kSize], dot[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    sum[i] = sums[0][place.column * kSize + i], dot[i] = sums[1][place.column * kSize + i];
  const void* const from = kMasks || args.grad_residual == nullptr ? args.grad : args.grad_residual;
  uint4 inputs[kAtOnce], grads[kAtOnce], residuals[kAtOnce];
  place.template each<kAtOnce, true>(
      [&](int k, int64_t at) {
        inputs[k] = vector_at(in.input, at), grads[k] = vector_at(from, at);
        if constexpr (kResidual) residuals[k] = vector_at(in.residual, at);
      },
      [&](int k, int64_t at) {
        float x[kSize], g[kSize], residual[kSize] = {};
        unpack<T>(inputs[k], x), unpack<T>(grads[k], g);
        if constexpr (kResidual) unpack<T>(residuals[k], residual);
        of.center(in, x, g, residual, kMasks);
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[i] = of.scale[i] * (g[i] - sum[i] - x[i] * dot[i]);
        static_cast<uint4*>(args.grad_input)[at] = pack<T>(x);
      });
}

template <class Args>
cudaError_t launch_clusters(void (*kernel)(Args), const BatchNormActPlan& plan, cudaStream_t stream, const Args& args) {
  const dim3 blocks(static_cast<unsigned>(plan.columns * plan.blocks()));
  return LaunchConfig(blocks, kThreads, stream).clusters(plan.cluster > 1 ? plan.cluster : 0).launch(kernel, args);
}

}  // namespace

BatchNormActDevice batch_norm_act_device() {
  BatchNormActDevice found;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return found;  // the launch will report it
  cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  found.clusters = has_clusters();
  return found;
}

cudaError_t batch_norm_act(const BatchNormAct& args, cudaStream_t stream) {
  return dispatch_to_32_bits(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (const auto error = launch_clusters(moments<T>, args.plan, stream, args)) return error;
    return launch_dependent(normalize<T>, args.plan.columns * args.plan.blocks(), kThreads, stream, args);
  });
}

cudaError_t batch_norm_act_backward(const BatchNormActBackward& args, cudaStream_t stream) {
  const BatchNormAct& in = args.forward;
  return dispatch_to_32_bits(in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool residual = in.relu && in.residual, masks = in.relu && args.grad_residual == nullptr;
    const auto sums = residual ? gradient_sums<T, true> : gradient_sums<T, false>;
    const auto map = !masks     ? gradients<T, false, false>
                     : residual ? gradients<T, true, true>
                                : gradients<T, true, false>;
    if (const auto error = launch_clusters(sums, in.plan, stream, args)) return error;
    return launch_dependent(map, in.plan.columns * in.plan.blocks(), kThreads, stream, args);
  });
}

}  // namespace dpa::kernels
