// `dpa::adamw_ema_` on CUDA: AdamW on many tensors, and the moving averages of what it makes, in one pass over memory.
//
//   g = +-grad / grad_scale * clip            step += 1
//   param -= lr weight_decay param            (or g += weight_decay param)
//   exp_avg += (1 - beta1) (g - exp_avg),  exp_avg_sq += (1 - beta2) (g^2 - exp_avg_sq)
//   param -= lr / (1 - beta1^step) exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)
//   average += (1 - decay) (param - average),  grad = 0 where it is cleared
//
// Five reads and four writes an element: memory's speed is the limit. Two kernels for up to kMostTensors tensors, whose
// addresses are a parameter of both, so that a graph owns them:
// prepare: a thread a tensor. It counts the step and computes in it what its elements have in common.
// update: a block a chunk of kRounds * kThreads vectors of 16 bytes, found by bisection; a thread a vector of each list a
//   round. Tensors that do not all begin at 16 bytes (views of a bucket), and the last elements of the others, go one
//   element at a time, kUnroll of them loaded before the first is used. Blocks are small and many: with five on a
//   multiprocessor enough loads are under way. Hints that nothing is read twice cost 2 to 3 %.
#include "kernels/cuda/adamw_ema/adamw_ema.h"
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 256, kRounds = 4, kUnroll = 4, kVectorBytes = 16, kMostTensors = 320;

struct Table {
  AdamWTensor tensors[kMostTensors];
  unsigned first_chunk[kMostTensors + 1];  // of each tensor; behind the last, how many there are
  int count;
};
static_assert(sizeof(Table) <= 24 << 10, "a kernel takes 32764 bytes of parameters, the other ones among them");

/// Of a call.
struct Options {
  double lr, beta1, beta2, weight_decay, eps;
  const float *lr_at, *grad_scale, *found_inf;
  const void* clip;
  const int64_t* updates;
  math::EmaSchedule schedule;
  bool maximize, decoupled, clear;
};

/// What `prepare` leaves for the elements of a tensor.
template <class A>
struct Prepared {
  math::AdamW<A> step;
  A grad_scale, clip, average_weight;
  bool skip;
};

__device__ __forceinline__ float power(float base, float exponent) { return powf(base, exponent); }
__device__ __forceinline__ double power(double base, double exponent) { return pow(base, exponent); }

template <class A>
__global__ void __launch_bounds__(kThreads)
    prepare(const __grid_constant__ Table table, const Options o, Prepared<A>* prepared) {
  const int t = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  grid_dependency_sync();
  if (t >= table.count) return;
  float* const step = table.tensors[t].step;
  Prepared<A> p = {};
  p.skip = o.found_inf != nullptr && *o.found_inf != 0.0f;
  if (!p.skip) *step += 1.0f;
  const A count = static_cast<A>(*step);
  p.step.lr = o.lr_at ? static_cast<A>(*o.lr_at) : static_cast<A>(o.lr);
  p.step.beta1 = static_cast<A>(o.beta1), p.step.beta2 = static_cast<A>(o.beta2);
  p.step.weight_decay = static_cast<A>(o.weight_decay), p.step.eps = static_cast<A>(o.eps);
  p.step.step_size = p.step.lr / (A(1) - power(p.step.beta1, count));
  p.step.correction2_sqrt = sqrt(A(1) - power(p.step.beta2, count));
  p.step.decoupled = o.decoupled;
  p.grad_scale = o.grad_scale ? static_cast<A>(*o.grad_scale) : A(1);
  p.clip = o.clip ? *static_cast<const A*>(o.clip) : A(1);
  p.average_weight = o.updates ? static_cast<A>(o.schedule.weight(static_cast<double>(*o.updates))) : A(0);
  prepared[t] = p;
}

/// A tensor's elements from one of them on.
template <class P, class G>
struct Chunk {
  P *param, *exp_avg, *exp_avg_sq;
  G* grad;
  Accumulate<P>* average;

  __device__ Chunk(const AdamWTensor& t, int64_t first)
      : param(static_cast<P*>(t.param) + first),
        exp_avg(static_cast<P*>(t.exp_avg) + first),
        exp_avg_sq(static_cast<P*>(t.exp_avg_sq) + first),
        grad(static_cast<G*>(t.grad) + first),
        average(static_cast<Accumulate<P>*>(t.average) + first) {}
};

/// `count` vectors of `Width` elements, `Unroll` at once a thread.
template <class P, class G, bool kAverage, int Width, int Unroll>
__device__ __forceinline__ void update_vectors(const Chunk<P, G>& chunk, int count, const Prepared<Accumulate<P>>& p,
                                               const Options& o) {
  using A = Accumulate<P>;
  using VP = Vector<P, Width>;
  using VG = Vector<G, Width>;
  using VA = Vector<A, Width>;
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kThreads * Unroll) {
    VP param[Unroll], exp_avg[Unroll], exp_avg_sq[Unroll];
    VG grad[Unroll];
    VA average[Unroll];
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      const int i = first + u * kThreads;
      if (i >= count) break;
      param[u] = reinterpret_cast<const VP*>(chunk.param)[i];
      grad[u] = reinterpret_cast<const VG*>(chunk.grad)[i];
      exp_avg[u] = reinterpret_cast<const VP*>(chunk.exp_avg)[i];
      exp_avg_sq[u] = reinterpret_cast<const VP*>(chunk.exp_avg_sq)[i];
      if constexpr (kAverage) average[u] = reinterpret_cast<const VA*>(chunk.average)[i];
    }
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      const int i = first + u * kThreads;
      if (i >= count) break;
#pragma unroll
      for (int w = 0; w < Width; ++w) {
        A x = widen(param[u].data[w]), m = widen(exp_avg[u].data[w]), v = widen(exp_avg_sq[u].data[w]);
        A g = static_cast<A>(widen(grad[u].data[w]));
        if (o.grad_scale) g /= p.grad_scale;
        if (o.clip) g *= p.clip;
        if (!p.skip) p.step.move(x, o.maximize ? -g : g, m, v);
        param[u].data[w] = narrow<P>(x);
        exp_avg[u].data[w] = narrow<P>(m);
        exp_avg_sq[u].data[w] = narrow<P>(v);
        // Of the stored parameter, as an average that is made afterwards.
        if constexpr (kAverage)
          average[u].data[w] = math::lerp(average[u].data[w], widen(param[u].data[w]), p.average_weight);
      }
      if (!p.skip) {
        reinterpret_cast<VP*>(chunk.param)[i] = param[u];
        reinterpret_cast<VP*>(chunk.exp_avg)[i] = exp_avg[u];
        reinterpret_cast<VP*>(chunk.exp_avg_sq)[i] = exp_avg_sq[u];
      }
      if constexpr (kAverage) reinterpret_cast<VA*>(chunk.average)[i] = average[u];
      if (o.clear) reinterpret_cast<VG*>(chunk.grad)[i] = VG{};
    }
  }
}

template <class P>
constexpr int kWidth = kVectorBytes / sizeof(P);
template <class P>
constexpr int kChunk = kThreads * kRounds * kWidth<P>;

__device__ __forceinline__ bool begins_at_vector(const AdamWTensor& t, int grad_bytes) {
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  return (address(t.param) | address(t.exp_avg) | address(t.exp_avg_sq) | address(t.average)) % kVectorBytes == 0 &&
         address(t.grad) % grad_bytes == 0;
}

/// Blocks that share a multiprocessor's registers; other types than float32 take more of them.
template <class P>
constexpr int kLeastBlocks = sizeof(P) == 4 ? 5 : 1;

template <class P, class G, bool kAverage>
__global__ void __launch_bounds__(kThreads, kLeastBlocks<P>)
    update(const __grid_constant__ Table table, const Options o, const Prepared<Accumulate<P>>* prepared) {
  int number = 0;
  for (int end = table.count; end - number > 1;) {
    const int middle = (number + end) / 2;
    (table.first_chunk[middle] <= blockIdx.x ? number : end) = middle;
  }
  const AdamWTensor& t = table.tensors[number];
  const int64_t first = int64_t{blockIdx.x - table.first_chunk[number]} * kChunk<P>;
  const int count = static_cast<int>(t.count - first < kChunk<P> ? t.count - first : kChunk<P>);
  constexpr int W = kWidth<P>;
  const int vectors = begins_at_vector(t, sizeof(G) * W) ? count / W : 0;
  grid_dependency_sync();
  const Prepared<Accumulate<P>> p = prepared[number];
  if (p.skip && !kAverage && !o.clear) return;
  update_vectors<P, G, kAverage, W, 1>(Chunk<P, G>(t, first), vectors, p, o);
  update_vectors<P, G, kAverage, 1, kUnroll>(Chunk<P, G>(t, first + vectors * W), count - vectors * W, p, o);
}

template <class P, class G>
cudaError_t run(const AdamWEma& args, const Options& o, cudaStream_t stream) {
  using A = Accumulate<P>;
  auto* prepared = static_cast<Prepared<A>*>(args.scratch);
  Table table;
  for (int64_t from = 0; from < args.tensor_count; from += table.count, prepared += table.count) {
    table.count = 0, table.first_chunk[0] = 0;
    while (table.count < kMostTensors && from + table.count < args.tensor_count) {
      const AdamWTensor& t = table.tensors[table.count] = args.tensors[from + table.count];
      const int64_t chunks = table.first_chunk[table.count] + (t.count + kChunk<P> - 1) / kChunk<P>;
      if (chunks >= int64_t{1} << 31) break;  // for the next launch
      table.first_chunk[++table.count] = static_cast<unsigned>(chunks);
    }
    if (table.count == 0) return cudaErrorInvalidValue;  // one tensor of more than 2^42 elements
    cudaError_t error =
        launch_dependent(prepare<A>, grid_for(table.count, kThreads), kThreads, stream, table, o, prepared);
    if (error != cudaSuccess) return error;
    error = launch_dependent(args.updates ? update<P, G, true> : update<P, G, false>, table.first_chunk[table.count],
                             kThreads, stream, table, o, prepared);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

size_t adamw_ema_scratch(int64_t tensor_count) { return tensor_count * sizeof(Prepared<double>); }

cudaError_t adamw_ema(const AdamWEma& a, cudaStream_t stream) {
  const Options o = {a.lr,        a.beta1, a.beta2,   a.weight_decay, a.eps,      a.lr_at,     a.grad_scale,
                     a.found_inf, a.clip,  a.updates, a.schedule,     a.maximize, a.decoupled, a.clear};
  if (a.dtype == DType::kFloat32 && a.grad_dtype == DType::kFloat16) return run<float, __half>(a, o, stream);
  if (a.dtype == DType::kFloat32 && a.grad_dtype == DType::kBFloat16) return run<float, __nv_bfloat16>(a, o, stream);
  if (a.dtype != a.grad_dtype) return cudaErrorInvalidValue;
  return dispatch(a.dtype, [&](auto tag) {
    using P = typename decltype(tag)::type;
    return run<P, P>(a, o, stream);
  });
}

}  // namespace dpa::kernels
