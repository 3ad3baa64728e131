// An LLTM cell: gates = X @ weights^T + bias in thirds (input gate, output gate, candidate), then the state.
// B samples, S states, I features, K = S + I inputs, X = cat(old_h, input) read from its two parts.
//
// forward_small      grid (S / 4, B / 4), block 4 warps: a warp owns one state (its three rows of the weights) for four
//                    samples, whose rows of X the block keeps in shared memory. Lanes split K, so rows of the weights
//                    are read side by side and once for four samples; lane b ends up with sample b and writes it.
// state              a thread owns two neighbouring states of one sample where they lie at multiples of two, else one.
// gate_gradients     a thread owns one (sample, state). Its place, here and in `state`, follows from its number by a
//                    32-bit division where the numbers are that small: 64-bit ones take a third of the kernel's time.
// bias_gradient      a block owns 32 gates: 32 warps split the batch, lanes are gates, a last sum over warps.
// copy_rows          a thread owns one unit of X, of 16 bytes where rows are whole numbers of them, else one element.
// product_gradients  two jobs in one launch, distinguished by the block's number. The first 3 S blocks own a row of the
//                    weights' gradient, a thread a column, and sum over the batch. The others own 32 columns of X's
//                    gradient for one sample: 8 warps split the 3 S gates, lanes are columns, a last sum over warps.
// A cell follows the last one's in a sequence, and its backward is a chain: kernels that may follow one of these are
// dependent launches. Those behind a library's GEMM are not: it does not trigger them.
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/lltm/lltm.h"
#include "kernels/math/lltm.h"
#include "kernels/plans/lltm/plan.h"

namespace dpa::kernels {
namespace {

constexpr int kStates = 4, kSamples = 4, kThreads = 256, kColumns = 32;

/// X[sample, column], from the part that holds it.
template <class T>
__device__ Accumulate<T> read_x(const Lltm& args, int64_t sample, int64_t column) {
  return column < args.state ? widen(static_cast<const T*>(args.old_h)[sample * args.state + column])
                             : widen(static_cast<const T*>(args.input)[sample * args.features + column - args.state]);
}

/// The cell of (sample, state) from its GEMM's outputs.
template <class T>
__device__ math::LltmCell<Accumulate<T>> cell_of(const Lltm& args, int64_t sample, int64_t state, Accumulate<T> input,
                                                 Accumulate<T> output, Accumulate<T> candidate) {
  const T* bias = static_cast<const T*>(args.bias) + state;
  return {input + widen(bias[0]), output + widen(bias[args.state]), candidate + widen(bias[2 * args.state]),
          widen(static_cast<const T*>(args.old_cell)[sample * args.state + state])};
}

template <class T>
__device__ void write_state(const Lltm& args, int64_t i, const math::LltmCell<Accumulate<T>>& cell) {
  static_cast<T*>(args.new_h)[i] = narrow<T>(cell.h());
  static_cast<T*>(args.new_cell)[i] = narrow<T>(cell.cell);
}

template <class T>
__global__ void forward_small(Lltm args) {
  using A = Accumulate<T>;
  __shared__ A x[kSamples][kLltmMaxInputs];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t blocks = (args.state + kStates - 1) / kStates, inputs = args.state + args.features;
  const int64_t state = blockIdx.x % blocks * kStates + warp, first = blockIdx.x / blocks * kSamples;
  grid_dependency_sync();
  for (int64_t k = threadIdx.x; k < inputs; k += blockDim.x)
    for (int b = 0; b < kSamples; ++b) x[b][k] = first + b < args.batch ? read_x<T>(args, first + b, k) : A(0);
  __syncthreads();
  if (state >= args.state) return;  // a whole warp at a time

  A sums[3][kSamples] = {};
  const T* weights = static_cast<const T*>(args.weights) + state * inputs;
  const int64_t third = args.state * inputs;
  for (int64_t k = lane; k < inputs; k += kWarpSize) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const A w = widen(weights[gate * third + k]);
#pragma unroll
      for (int b = 0; b < kSamples; ++b) sums[gate][b] += w * x[b][k];
    }
  }
  trigger_dependent_launch();
  A mine[3] = {};
#pragma unroll
  for (int gate = 0; gate < 3; ++gate)
#pragma unroll
    for (int b = 0; b < kSamples; ++b) {
      const A sum = warp_sum(sums[gate][b]);
      if (lane == b) mine[gate] = sum;
    }
  const int64_t sample = first + lane;
  if (lane >= kSamples || sample >= args.batch) return;
  write_state<T>(args, sample * args.state + state, cell_of<T>(args, sample, state, mine[0], mine[1], mine[2]));
  if (args.gates)
    for (int gate = 0; gate < 3; ++gate)
      static_cast<A*>(args.gates)[(sample * 3 + gate) * args.state + state] = mine[gate];
}

/// Calls f(i, sample, state) for the thread's share of the cells, i counting them row by row.
template <class Index, class F>
__device__ void for_each_cell(const Lltm& args, const F& f) {
  const Index states = static_cast<Index>(args.state), count = static_cast<Index>(args.batch * args.state);
  const Index step = static_cast<Index>(int64_t{gridDim.x} * blockDim.x);
  for (Index i = static_cast<Index>(int64_t{blockIdx.x} * blockDim.x + threadIdx.x); i < count; i += step)
    f(int64_t{i}, int64_t{i / states}, int64_t{i % states});
}

template <class T>
__device__ math::LltmCell<Accumulate<T>> finished_cell(const Lltm& args, int64_t sample, int64_t state) {
  const auto* gates = static_cast<const Accumulate<T>*>(args.gates) + sample * 3 * args.state + state;
  return cell_of<T>(args, sample, state, gates[0], gates[args.state], gates[2 * args.state]);
}

template <class T, class Index, int Width>
__global__ void state(Lltm args) {
  using A = Accumulate<T>;
  using Stored = Vector<T, Width>;
  using GemmOutputs = Vector<A, Width>;
  const Index states = static_cast<Index>(args.state / Width), count = static_cast<Index>(args.batch) * states;
  const Index step = static_cast<Index>(int64_t{gridDim.x} * blockDim.x);
  for (Index i = static_cast<Index>(int64_t{blockIdx.x} * blockDim.x + threadIdx.x); i < count; i += step) {
    const Index column = i % states;
    const auto* gates = static_cast<const GemmOutputs*>(args.gates) + 3 * int64_t{i - column} + column;
    const auto* bias = static_cast<const Stored*>(args.bias) + column;
    GemmOutputs x[3];
    Stored b[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
      x[gate] = gates[gate * int64_t{states}], b[gate] = bias[gate * int64_t{states}];
    const Stored old_cell = static_cast<const Stored*>(args.old_cell)[i];
    trigger_dependent_launch();
    Stored new_h, new_cell;
#pragma unroll
    for (int w = 0; w < Width; ++w) {
      const auto gate = [&](int third) { return x[third].data[w] + widen(b[third].data[w]); };
      const math::LltmCell<A> cell(gate(0), gate(1), gate(2), widen(old_cell.data[w]));
      new_h.data[w] = narrow<T>(cell.h());
      new_cell.data[w] = narrow<T>(cell.cell);
    }
    static_cast<Stored*>(args.new_h)[i] = new_h;
    static_cast<Stored*>(args.new_cell)[i] = new_cell;
  }
}

template <class T, class Index>
__global__ void gate_gradients(LltmBackward args) {
  using A = Accumulate<T>;
  grid_dependency_sync();
  trigger_dependent_launch();
  const auto at = [](const void* grad, const int64_t* strides, int64_t sample, int64_t state) {
    return widen(static_cast<const T*>(grad)[sample * strides[0] + state * strides[1]]);
  };
  for_each_cell<Index>(args.forward, [&](int64_t i, int64_t sample, int64_t state) {
    const int64_t states = args.forward.state;
    const auto grad = finished_cell<T>(args.forward, sample, state)
                          .gradient(at(args.grad_h, args.grad_h_strides, sample, state),
                                    at(args.grad_cell, args.grad_cell_strides, sample, state));
    A* to = static_cast<A*>(args.grad_gates) + sample * 3 * states + state;
    to[0] = grad.input, to[states] = grad.output, to[2 * states] = grad.candidate;
    if (args.grad_old_cell) static_cast<T*>(args.grad_old_cell)[i] = narrow<T>(grad.old_cell);
  });
}

template <class T>
__global__ void bias_gradient(LltmBackward args) {
  using A = Accumulate<T>;
  __shared__ A partial[kWarpSize][kWarpSize + 1];  // one more, so that columns lie in different banks
  const int64_t gates = 3 * args.forward.state, first = int64_t{blockIdx.x} * kWarpSize;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  A sum = 0;
  grid_dependency_sync();
  if (first + lane < gates)
#pragma unroll 8
    for (int64_t b = warp; b < args.forward.batch; b += kWarpSize)
      sum += static_cast<const A*>(args.grad_gates)[b * gates + first + lane];
  partial[warp][lane] = sum;
  __syncthreads();
  sum = warp_sum(partial[lane][warp]);
  if (lane == 0 && first + warp < gates) static_cast<T*>(args.grad_bias)[first + warp] = narrow<T>(sum);
}

/// Columns are counted in units.
template <class Unit, class Index, bool Join>
__global__ void copy_rows(LltmRows args) {
  const Index left = static_cast<Index>(args.left_columns), right = static_cast<Index>(args.right_columns);
  const Index columns = left + right, count = static_cast<Index>(args.rows * (args.left_columns + args.right_columns));
  const Index step = static_cast<Index>(int64_t{gridDim.x} * blockDim.x);
  grid_dependency_sync();
  trigger_dependent_launch();
  for (Index i = static_cast<Index>(int64_t{blockIdx.x} * blockDim.x + threadIdx.x); i < count; i += step) {
    const Index row = i / columns, column = i % columns;
    Unit* part = column < left ? static_cast<Unit*>(args.left) + row * left + column
                               : static_cast<Unit*>(args.right) + row * right + (column - left);
    Unit* whole = static_cast<Unit*>(args.both) + i;
    if constexpr (Join)
      *whole = *part;
    else
      *part = *whole;
  }
}

/// One row of the weights' gradient, and the bias's element beside it.
template <class T>
__device__ void weight_gradient(const LltmBackward& args, int64_t gate) {
  using A = Accumulate<T>;
  const Lltm& in = args.forward;
  const int64_t inputs = in.state + in.features, gates = 3 * in.state;
  const A* grad = static_cast<const A*>(args.grad_gates) + gate;
  if (args.grad_weights)
    for (int64_t k = threadIdx.x; k < inputs; k += blockDim.x) {
      A sum = 0;
      for (int64_t b = 0; b < in.batch; ++b) sum += grad[b * gates] * read_x<T>(in, b, k);
      static_cast<T*>(args.grad_weights)[gate * inputs + k] = narrow<T>(sum);
    }
  if (args.grad_bias && threadIdx.x == 0) {
    A sum = 0;
    for (int64_t b = 0; b < in.batch; ++b) sum += grad[b * gates];
    static_cast<T*>(args.grad_bias)[gate] = narrow<T>(sum);
  }
}

/// kColumns columns of one sample's row of X's gradient.
template <class T>
__device__ void input_gradient(const LltmBackward& args, int64_t block) {
  using A = Accumulate<T>;
  __shared__ A partial[kThreads / kWarpSize][kColumns];
  const Lltm& in = args.forward;
  const int64_t inputs = in.state + in.features, gates = 3 * in.state, blocks = (inputs + kColumns - 1) / kColumns;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t sample = block / blocks, k = block % blocks * kColumns + lane;
  const A* grad = static_cast<const A*>(args.grad_gates) + sample * gates;
  A sum = 0;
  if (k < inputs)
    for (int64_t j = warp; j < gates; j += kThreads / kWarpSize)
      sum += grad[j] * widen(static_cast<const T*>(in.weights)[j * inputs + k]);
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || k >= inputs) return;
  for (int w = 1; w < kThreads / kWarpSize; ++w) sum += partial[w][lane];
  if (k < in.state) {
    if (args.grad_old_h) static_cast<T*>(args.grad_old_h)[sample * in.state + k] = narrow<T>(sum);
  } else if (args.grad_input) {
    static_cast<T*>(args.grad_input)[sample * in.features + k - in.state] = narrow<T>(sum);
  }
}

template <class T>
__global__ void product_gradients(LltmBackward args, int64_t weight_blocks) {
  grid_dependency_sync();
  if (blockIdx.x < weight_blocks)
    weight_gradient<T>(args, blockIdx.x);
  else
    input_gradient<T>(args, blockIdx.x - weight_blocks);
}

template <bool Join, class Unit>
cudaError_t launch_units(LltmRows args, int64_t elements, cudaStream_t stream) {
  args.left_columns /= elements;
  args.right_columns /= elements;
  const int64_t count = args.rows * (args.left_columns + args.right_columns);
  const auto kernel = fits_32_bits(count) ? copy_rows<Unit, uint32_t, Join> : copy_rows<Unit, int64_t, Join>;
  return launch_dependent(kernel, grid_for(count, kThreads), kThreads, stream, args);
}

template <bool Join>
cudaError_t launch_rows(const LltmRows& args, cudaStream_t stream) {
  return dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int64_t kElements = sizeof(uint4) / sizeof(T);
    const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    const bool whole = args.left_columns % kElements == 0 && args.right_columns % kElements == 0 &&
                       (address(args.left) | address(args.right) | address(args.both)) % sizeof(uint4) == 0;
    return whole ? launch_units<Join, uint4>(args, kElements, stream) : launch_units<Join, T>(args, 1, stream);
  });
}

}  // namespace

cudaError_t lltm_small(const Lltm& args, cudaStream_t stream) {
  const int64_t blocks = (args.state + kStates - 1) / kStates * ((args.batch + kSamples - 1) / kSamples);
  return dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_dependent(forward_small<T>, grid_for(blocks, 1), kStates * kWarpSize, stream, args);
  });
}

cudaError_t lltm_state(const Lltm& args, cudaStream_t stream) {
  return dispatch(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = 2;
    const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    const auto stored = address(args.bias) | address(args.old_cell) | address(args.new_h) | address(args.new_cell);
    const bool pairs = args.state % kWidth == 0 && stored % sizeof(Vector<T, kWidth>) == 0 &&
                       address(args.gates) % sizeof(Vector<Accumulate<T>, kWidth>) == 0;
    const int64_t cells = args.batch * args.state;
    if (!fits_32_bits(cells)) return launch(state<T, int64_t, 1>, grid_for(cells, kThreads), kThreads, stream, args);
    if (!pairs) return launch(state<T, uint32_t, 1>, grid_for(cells, kThreads), kThreads, stream, args);
    return launch(state<T, uint32_t, kWidth>, grid_for(cells / kWidth, kThreads), kThreads, stream, args);
  });
}

cudaError_t lltm_gate_gradients(const LltmBackward& args, cudaStream_t stream) {
  const int64_t count = args.forward.batch * args.forward.state;
  return dispatch(args.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel = fits_32_bits(count) ? gate_gradients<T, uint32_t> : gate_gradients<T, int64_t>;
    return launch_dependent(kernel, grid_for(count, kThreads), kThreads, stream, args);
  });
}

cudaError_t lltm_bias_gradient(const LltmBackward& args, cudaStream_t stream) {
  return dispatch(args.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_dependent(bias_gradient<T>, grid_for(3 * args.forward.state, kWarpSize), kWarpSize * kWarpSize,
                            stream, args);
  });
}

cudaError_t lltm_join(const LltmRows& args, cudaStream_t stream) { return launch_rows<true>(args, stream); }
cudaError_t lltm_split(const LltmRows& args, cudaStream_t stream) { return launch_rows<false>(args, stream); }

cudaError_t lltm_operand_gradients(const LltmBackward& args, cudaStream_t stream) {
  const Lltm& in = args.forward;
  const int64_t weight_blocks = args.grad_weights || args.grad_bias ? 3 * in.state : 0;
  const int64_t column_blocks = (in.state + in.features + kColumns - 1) / kColumns;
  const int64_t input_blocks = args.grad_input || args.grad_old_h ? in.batch * column_blocks : 0;
  return dispatch(in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_dependent(product_gradients<T>, grid_for(weight_blocks + input_blocks, 1), kThreads, stream, args,
                            weight_blocks);
  });
}

}  // namespace dpa::kernels
