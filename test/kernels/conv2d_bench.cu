// The image encoder's kernels on a GPU: each layer of ResNet-18 against float64, candidate plans timed, then the whole
// network launch by launch.
//   conv2d_bench [bf16|tf32|fp16]...
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/conv2d/launch.h"

using namespace dpa::kernels;
using namespace dpa::kernels::conv2d;

namespace {

#define CHECK(call)                                                                          \
  do {                                                                                       \
    cudaError_t error_ = (call);                                                             \
    if (error_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::fflush(stdout);                                                                   \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

cudaStream_t stream;
std::vector<void*> owned;
void* allocate(size_t n, int fill) {
  void* p;
  CHECK(cudaMalloc(&p, n + 256));
  CHECK(cudaMemset(p, fill, n + 256));
  owned.push_back(p);
  return p;
}

__device__ float hashed(uint64_t i) {  // about normal
  float sum = 0;
  for (int k = 0; k < 4; k++) {
    uint64_t x = (i * 4 + k + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull, x = (x ^ (x >> 27)) * 0x94D049BB133111EBull, x ^= x >> 31;
    sum += static_cast<float>(x >> 40) / 16777216.0f - 0.5f;
  }
  return sum * 1.7f;
}
__global__ void random_floats(float* to, int64_t n, float size, float around, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
    to[i] = around + size * hashed(seed + i);
}
template <class T>
__global__ void random_rows(T* to, int64_t rows, int channels, int pitch, uint64_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows * pitch; i += gridDim.x * 256ll)
    to[i] = narrow<T>(i % pitch < channels ? hashed(seed + i) : 0.0f);
}

// Reference: one output value a thread, in double; operands as the tensor cores take them.
template <class T>
__device__ double operand(const T* p) {
  if constexpr (sizeof(T) == 4) {
    const uint32_t bits = (__float_as_uint(*p) + 0x1000) & 0xffffe000u;
    return __uint_as_float(bits);
  } else {
    return widen(*p);
  }
}
template <class T>
__global__ void reference_conv(Shape s, const T* x, const float* weights, const float* bias, double* y, int pitch) {
  const int64_t all = static_cast<int64_t>(s.batch) * s.out_height * s.out_width * s.out_channels;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < all; i += gridDim.x * 256ll) {
    const int k = i % s.out_channels, q = i / s.out_channels % s.out_width,
              p = i / s.out_channels / s.out_width % s.out_height, n = i / s.out_channels / s.out_width / s.out_height;
    double sum = bias ? bias[k] : 0;
    for (int r = 0; r < s.kernel_height; r++)
      for (int t = 0; t < s.kernel_width; t++) {
        const int h = p * s.stride - s.pad_top + r, w = q * s.stride - s.pad_left + t;
        if (h < 0 || w < 0 || h >= s.height || w >= s.width) continue;
        const T* row = x + ((static_cast<int64_t>(n) * s.height + h) * s.width + w) * pitch;
        for (int c = 0; c < s.channels; c++) {
          const float f =
              weights[((static_cast<int64_t>(k) * s.channels + c) * s.kernel_height + r) * s.kernel_width + t];
          T stored = narrow<T>(f);
          sum += operand(row + c) * operand(&stored);
        }
      }
    y[i] = sum;
  }
}
__global__ void reference_norm(Shape s, double* y, float eps) {  // a block: (sample, group)
  __shared__ double scratch[256];
  const int group = blockIdx.x % s.groups, n = blockIdx.x / s.groups, width = s.out_channels / s.groups;
  const int64_t pixels = static_cast<int64_t>(s.out_height) * s.out_width, count = pixels * width;
  double* base = y + n * pixels * s.out_channels + group * width;
  double mean = 0, result[2];
  for (int pass = 0; pass < 2; pass++) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += 256) {
      const double v = base[i / width * s.out_channels + i % width];
      sum += pass ? (v - mean) * (v - mean) : v;
    }
    scratch[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
      if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
      __syncthreads();
    }
    result[pass] = scratch[0] / count;
    mean = result[0];
    __syncthreads();
  }
  const double factor = 1 / sqrt(result[1] + eps);
  for (int64_t i = threadIdx.x; i < count; i += 256) {
    double& v = base[i / width * s.out_channels + i % width];
    v = (v - mean) * factor;
  }
}
// Applies what follows, compares: errors[0] the largest |made - wanted| / (1 + |wanted|), as the bits of a float.
template <class T>
__global__ void compare(Shape s, const double* y, const float* scale, const float* shift, const T* residual, int relu,
                        const T* made, int pitch, unsigned* worst, double* squares) {
  const int64_t rows = static_cast<int64_t>(s.batch) * s.out_height * s.out_width;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < rows * pitch; i += gridDim.x * 256ll) {
    const int k = i % pitch;
    double wanted = 0;
    if (k < s.out_channels) {
      wanted = y[i / pitch * s.out_channels + k] * scale[k] + shift[k];
      if (residual) wanted += widen(residual[i]);
      if (relu && wanted < 0) wanted = 0;
    }
    const double error = fabs(static_cast<double>(widen(made[i])) - wanted) / (1 + fabs(wanted));
    atomicMax(worst, __float_as_uint(error == error ? static_cast<float>(error) : 1e30f));
    atomicAdd(squares, error * error);
  }
}

struct Layer {
  Shape shape;
  int in = 0, out = 0, residual = -1;  // buffers
  bool relu = false;
  const char* name = "";
};
struct Step {  // layers of a launch, or a pool
  bool conv = true;
  PoolKind kind = PoolKind::kMax;
  std::vector<Layer> layers;
  Pool pool = {};
  int in = 0, out = 0;
  std::string name;
};
struct Network {
  std::vector<Step> steps;
  std::vector<size_t> buffers;  // bytes, per network
};

Network resnet18(DType dtype, int batch, int height, int width, bool group_norm) {
  Network net;
  const auto buffer = [&](int n, int h, int w, int c) {
    net.buffers.push_back(static_cast<size_t>(n) * h * w * pieces_of(dtype, c) * kPieceBytes);
    return static_cast<int>(net.buffers.size()) - 1;
  };
  const auto groups = [&](int c) { return group_norm ? c / 16 : 0; };
  const int h2 = (height + 1) / 2, w2 = (width + 1) / 2;
  int h = h2, w = w2;
  int x = buffer(batch, h, w, 12);
  {  // 7 x 7, stride 2, of 3 channels as 4 x 4 of 2 x 2 pixels
    Step s;
    s.name = "conv1";
    s.layers.push_back(
        {{dtype, batch, h, w, 12, h, w, 64, 4, 4, 1, 2, 2, groups(64)}, x, buffer(batch, h, w, 64), -1, true});
    x = s.layers[0].out;
    net.steps.push_back(s);
  }
  {
    Step s;
    s.conv = false, s.kind = PoolKind::kMax, s.name = "maxpool", s.in = x;
    const int ph = (h - 1) / 2 + 1, pw = (w - 1) / 2 + 1;
    s.out = buffer(batch, ph, pw, 64);
    s.pool = {nullptr, nullptr, batch, h, w, 64, pieces_of(dtype, 64), ph, pw, 3, 2, 1, 1.0f};
    h = ph, w = pw, x = s.out;
    net.steps.push_back(s);
  }
  int channels = 64;
  for (int stage = 0; stage < 4; stage++)
    for (int block = 0; block < 2; block++) {
      const int out = 64 << stage, stride = stage && !block ? 2 : 1;
      Step a, b;
      const Shape first = shape_of(dtype, batch, h, w, channels, out, 3, stride, 1, groups(out));
      const int mid = buffer(batch, first.out_height, first.out_width, out);
      a.layers.push_back({first, x, mid, -1, true});
      int identity = x;
      if (stride == 2) {
        identity = buffer(batch, first.out_height, first.out_width, out);
        a.layers.push_back(
            {shape_of(dtype, batch, h, w, channels, out, 1, stride, 0, groups(out)), x, identity, -1, false});
      }
      h = first.out_height, w = first.out_width;
      const int end = buffer(batch, h, w, out);
      b.layers.push_back({shape_of(dtype, batch, h, w, out, out, 3, 1, 1, groups(out)), mid, end, identity, true});
      const std::string at = std::to_string(stage + 1) + "." + std::to_string(block);
      a.name = "layer" + at + (stride == 2 ? ".conv1+shortcut" : ".conv1"), b.name = "layer" + at + ".conv2";
      net.steps.push_back(a), net.steps.push_back(b);
      x = end, channels = out;
    }
  Step s;
  s.conv = false, s.kind = PoolKind::kAverage, s.name = "average", s.in = x;
  s.out = buffer(batch, 1, 1, 2 * 512);
  s.pool = {nullptr, nullptr, batch, h, w, 512, pieces_of(dtype, 512), 1, 1, 0, 0, 0, 1.0f};
  net.steps.push_back(s);
  return net;
}

struct Weights {
  float *raw, *scale, *shift;
  void* packed;
};

template <class T>
struct Bench {
  DType dtype;
  Network net;
  int networks;
  Device device;
  std::vector<std::vector<void*>> memory;                  // (network, buffer)
  std::vector<std::vector<std::vector<Weights>>> weights;  // (step, network, layer)
  uint32_t *epoch, *parities;
  uint64_t seed = 1;

  Bench(DType d, Network n, int count, const Device& dev) : dtype(d), net(std::move(n)), networks(count), device(dev) {
    for (int i = 0; i < networks; i++) {
      memory.emplace_back();
      for (const size_t bytes : net.buffers) memory[i].push_back(allocate(bytes, 0xff));
    }
    for (const Step& step : net.steps) {
      weights.emplace_back();
      for (int i = 0; i < networks && step.conv; i++) {
        weights.back().emplace_back();
        for (const Layer& l : step.layers) weights.back()[i].push_back(make(l.shape));
      }
    }
    epoch = static_cast<uint32_t*>(allocate(4, 0));
    parities = static_cast<uint32_t*>(allocate(8, 0));
    const uint32_t one = 1;
    CHECK(cudaMemcpy(parities + 1, &one, 4, cudaMemcpyHostToDevice));
    const Shape& s = net.steps[0].layers[0].shape;
    for (int i = 0; i < networks; i++)
      random_rows<T><<<256, 256>>>(static_cast<T*>(memory[i][0]), static_cast<int64_t>(s.batch) * s.height * s.width,
                                   s.channels, padded(dtype, s.channels), seed += 100000007);
    CHECK(cudaDeviceSynchronize());
  }
  Weights make(const Shape& s) {
    const int64_t n = static_cast<int64_t>(s.out_channels) * s.channels * s.kernel_height * s.kernel_width;
    Weights w = {static_cast<float*>(allocate(n * 4, 0xff)), static_cast<float*>(allocate(s.out_channels * 4, 0xff)),
                 static_cast<float*>(allocate(s.out_channels * 4, 0xff)), allocate(weight_bytes(s), 0xff)};
    random_floats<<<256, 256>>>(w.raw, n, 1 / std::sqrt(static_cast<float>(n / s.out_channels)), 0, seed += 100000007);
    random_floats<<<4, 256>>>(w.scale, s.out_channels, 0.2f, 1, seed += 1009);
    random_floats<<<4, 256>>>(w.shift, s.out_channels, 0.2f, 0, seed += 1009);
    CHECK(launch_pack(s, w.raw, nullptr, w.packed, nullptr));
    return w;
  }

  // A plan of a step: of each layer, alike for all networks; they share a tiling.
  struct StepPlan {
    int tiling = -1;
    std::vector<ConvPlan> plans;
    bool deferred = false;
    int blocks = 0;
    double clocks = 0;
  };
  std::vector<StepPlan> plans_of(const Step& step, const Device& d) const {
    std::vector<StepPlan> made;
    for (const Choice& c : candidates(step.layers[0].shape, d)) {
      StepPlan p;
      p.tiling = c.plan.tiling, p.deferred = c.deferred, p.clocks = c.clocks;
      p.plans.push_back(c.plan);
      bool waits = c.plan.waits(c.deferred);
      for (size_t i = 1; i < step.layers.size(); i++) {
        ConvPlan other;
        if (!make_plan(step.layers[i].shape, c.plan.tiling, 1, other)) break;
        p.plans.push_back(other);
        waits |= other.waits(c.deferred);
      }
      if (p.plans.size() != step.layers.size()) continue;
      for (const ConvPlan& plan : p.plans) p.blocks += plan.blocks() * networks;
      const int resident = resident_blocks(p.tiling, d);
      if (waits && p.blocks > resident) {
        if (!step.layers[0].shape.groups || c.plan.splits > 1) continue;
        p.deferred = true;
      }
      made.push_back(p);
      if (made.size() == 10) break;
    }
    return made;
  }
  Launch launch_of(int index, const StepPlan& p, const uint32_t* parity) {
    const Step& step = net.steps[index];
    Launch launch = {};
    launch.epoch = parity;
    for (int i = 0; i < networks; i++)
      for (size_t l = 0; l < step.layers.size(); l++) {
        const Layer& layer = step.layers[l];
        const ConvPlan& plan = p.plans[l];
        Conv c = conv_of(layer.shape, plan, p.deferred && plan.exchange);
        const Weights& w = weights[index][i][l];
        c.x = memory[i][layer.in], c.weights = w.packed, c.out = memory[i][layer.out];
        c.residual = layer.residual < 0 ? nullptr : memory[i][layer.residual];
        c.scale = w.scale, c.shift = w.shift, c.relu = layer.relu;
        if (plan.partial_words()) c.partials = static_cast<uint32_t*>(allocate(plan.partial_words() * 4, 0));
        if (plan.moment_words(layer.shape))
          c.moments = static_cast<uint32_t*>(allocate(plan.moment_words(layer.shape) * 4, 0));
        c.first_block = launch.blocks;
        launch.blocks += c.blocks;
        launch.waits |= plan.waits(p.deferred);
        launch.convs[launch.count++] = c;
      }
    return launch;
  }
  void enqueue(const StepPlan& p, Launch launch, const uint32_t* parity, bool dependent) {
    launch.epoch = parity;
    CHECK(launch_convs(dtype, p.tiling, launch, dependent, stream));
    for (int i = 0; i < launch.count; i++)
      if (launch.convs[i].deferred)
        CHECK(launch_normalise(dtype, launch.convs[i], parity, 2 * device.multiprocessors, dependent, stream));
  }
  Pool pool_of(const Step& step, int network) const {
    Pool p = step.pool;
    p.x = memory[network][step.in], p.out = memory[network][step.out];
    return p;
  }

  // The largest error of a step against float64 on the same input.
  double verify(int index) {
    const Step& step = net.steps[index];
    double worst = 0;
    for (int i = 0; i < networks; i++)
      for (size_t l = 0; l < step.layers.size(); l++) {
        const Layer& layer = step.layers[l];
        const Shape& s = layer.shape;
        const Weights& w = weights[index][i][l];
        double *y, *squares;
        unsigned* most;
        const int64_t n = static_cast<int64_t>(s.batch) * s.out_height * s.out_width * s.out_channels;
        CHECK(cudaMalloc(&y, n * 8));
        CHECK(cudaMalloc(&squares, 8));
        CHECK(cudaMalloc(&most, 4));
        CHECK(cudaMemset(squares, 0, 8));
        CHECK(cudaMemset(most, 0, 4));
        reference_conv<T><<<4096, 256>>>(s, static_cast<const T*>(memory[i][layer.in]), w.raw, nullptr, y,
                                         padded(dtype, s.channels));
        if (s.groups) reference_norm<<<s.batch * s.groups, 256>>>(s, y, 1e-5f);
        compare<T><<<1024, 256>>>(
            s, y, w.scale, w.shift, layer.residual < 0 ? nullptr : static_cast<const T*>(memory[i][layer.residual]),
            layer.relu, static_cast<const T*>(memory[i][layer.out]), padded(dtype, s.out_channels), most, squares);
        float e;
        CHECK(cudaMemcpy(&e, most, 4, cudaMemcpyDeviceToHost));
        worst = std::max(worst, static_cast<double>(e));
        CHECK(cudaFree(y));
        CHECK(cudaFree(squares));
        CHECK(cudaFree(most));
      }
    return worst;
  }
  void poison(int index) {
    for (int i = 0; i < networks; i++)
      for (const Layer& l : net.steps[index].layers) CHECK(cudaMemset(memory[i][l.out], 0xff, net.buffers[l.out]));
    CHECK(cudaDeviceSynchronize());
  }

  static cudaGraphExec_t captured(const std::function<void()>& f) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    f();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
  }
  // Median microseconds of a replay; `flush`: something larger than L2 is written before each.
  static double timed(cudaGraphExec_t exec, int times, void* flush = nullptr) {
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    std::vector<float> all;
    for (int i = 0; i < times + 3; i++) {
      if (flush) {
        CHECK(cudaMemsetAsync(flush, i, 256 << 20, stream));
      }
      CHECK(cudaEventRecord(a, stream));
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaEventRecord(b, stream));
      CHECK(cudaEventSynchronize(b));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, a, b));
      if (i >= 3) all.push_back(ms * 1000);
    }
    std::sort(all.begin(), all.end());
    CHECK(cudaEventDestroy(a));
    CHECK(cudaEventDestroy(b));
    return all[all.size() / 2];
  }

  void run(const char* name, void* flush) {
    std::printf("\n== %s\n", name);
    const double bound = sizeof(T) == 4 ? 1e-4 : std::is_same_v<T, __half> ? 7e-4 : 5e-3;
    std::vector<StepPlan> best(net.steps.size());
    std::vector<Launch> launches(net.steps.size());
    double sum = 0;
    for (size_t i = 0; i < net.steps.size(); i++) {
      const Step& step = net.steps[i];
      if (!step.conv) {
        const auto exec = captured([&] {
          for (int k = 0; k < 16; k++)
            for (int n = 0; n < networks; n++)
              CHECK(launch_pool(dtype, step.kind, pool_of(step, n), nullptr, k > 0, stream));
        });
        const double us = timed(exec, 10) / 16;
        std::printf("%-24s %7.2f us\n", step.name.c_str(), us);
        sum += us;
        CHECK(cudaGraphExecDestroy(exec));
        continue;
      }
      double least = 1e30;
      const Shape& s = step.layers[0].shape;
      std::printf("%-24s rows %6d columns %4d chunks %3d:", step.name.c_str(), s.batch * s.out_height * s.out_width,
                  s.out_channels, chunks_of(s));
      for (const StepPlan& p : plans_of(step, device)) {
        const Launch launch = launch_of(static_cast<int>(i), p, parities);
        poison(static_cast<int>(i));
        const int repeats = 8;
        const auto exec = captured([&] {
          for (int k = 0; k < repeats; k++) enqueue(p, launch, parities + k % 2, k > 0);
        });
        const double us = timed(exec, 7) / repeats;
        const cudaError_t status = cudaStreamSynchronize(stream);
        CHECK(status);
        const double error = verify(static_cast<int>(i));
        std::printf("  [%d/%d%s %d] %.2f us (model %.2f) %.1e%s", p.tiling, p.plans[0].splits,
                    p.deferred ? " deferred" : "", p.blocks, us, p.clocks / 1755, error,
                    error < bound * (p.deferred ? 3 : 1) ? "" : " WRONG");
        CHECK(cudaGraphExecDestroy(exec));
        if (us < least && error < bound * (p.deferred ? 3 : 1)) least = us, best[i] = p, launches[i] = launch;
      }
      std::printf("\n");
      std::fflush(stdout);
      if (best[i].tiling < 0) {
        std::printf("%s: no plan is right\n", step.name.c_str());
        return;
      }
      enqueue(best[i], launches[i], parities + 0, false);
      CHECK(cudaStreamSynchronize(stream));
      verify(static_cast<int>(i));
      sum += least;
    }
    std::printf("sum of the best: %.1f us\n", sum);
    const int last = static_cast<int>(net.steps.size()) - 1;
    // The last one only says what a cooperative launch costs: nothing else may run beside it.
    enum { kPlain, kDependent, kAlone };
    for (const int mode : {kPlain, kDependent, kAlone}) {
      const bool dependent = mode != kPlain;
      // Fresh messages: the words of a timed launch have a parity of their own.
      for (size_t i = 0; i < net.steps.size(); i++)
        if (net.steps[i].conv) {
          launches[i] = launch_of(static_cast<int>(i), best[i], epoch);
          launches[i].waits &= mode != kAlone;
        }
      CHECK(cudaMemset(epoch, 0, 4));
      CHECK(cudaDeviceSynchronize());
      const auto exec = captured([&] {
        for (int i = 0; i <= last; i++) {
          const Step& step = net.steps[i];
          if (step.conv) {
            enqueue(best[i], launches[i], epoch, dependent && i > 0);
            continue;
          }
          for (int n = 0; n < networks; n++)
            CHECK(launch_pool(dtype, step.kind, pool_of(step, n), i == last && n + 1 == networks ? epoch : nullptr,
                              dependent, stream));
        }
      });
      const double warm = timed(exec, 50), cold = timed(exec, 30, flush);
      double error = 0;
      for (int i = 0; i < last; i++)
        if (net.steps[i].conv) error = std::max(error, verify(i));
      std::printf("launch by launch, %s: warm %.1f us, cold %.1f us, worst error %.1e%s\n",
                  mode == kAlone ? "PDL, not cooperative"
                  : dependent    ? "PDL"
                                 : "plain",
                  warm, cold, error, error < 3 * bound ? "" : " WRONG");
      CHECK(cudaGraphExecDestroy(exec));
      std::fflush(stdout);
    }
  }
};

template <class T>
void all_sizes(DType dtype, const char* type, const Device& device, void* flush) {
  struct Size {
    int batch, height, width, networks;
    bool group_norm;
  };
  for (const Size& s : {Size{2, 84, 84, 1, true}, Size{4, 84, 84, 1, true}, Size{4, 216, 216, 1, true},
                        Size{2, 240, 320, 2, false}, Size{2, 480, 640, 2, false}}) {
    char name[200];
    std::snprintf(name, sizeof name, "%s %s: %d network(s) of %d images %d x %d", type,
                  s.group_norm ? "GroupNorm" : "BatchNorm", s.networks, s.batch, s.height, s.width);
    Bench<T> bench(dtype, resnet18(dtype, s.batch, s.height, s.width, s.group_norm), s.networks, device);
    bench.run(name, flush);
    for (void* p : owned) cudaFree(p);
    owned.clear();
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Device device;
  CHECK(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&device.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));
  void* flush;
  CHECK(cudaMalloc(&flush, 256 << 20));
  for (int i = 1; i < std::max(argc, 2); i++) {
    const std::string type = argc > 1 ? argv[i] : "bf16";
    if (type == "bf16") all_sizes<__nv_bfloat16>(DType::kBFloat16, "bf16", device, flush);
    if (type == "tf32") all_sizes<float>(DType::kFloat32, "tf32", device, flush);
    if (type == "fp16") all_sizes<__half>(DType::kFloat16, "fp16", device, flush);
  }
  return 0;
}
