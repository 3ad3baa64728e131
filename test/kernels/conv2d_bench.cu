// The image encoder's kernels on a GPU: each layer of ResNet-18 against float64 with every plan worth a measurement, timed;
// then the whole network by the measured plans, and as an op launches it: by the model's plans, from images.
//   conv2d_bench TYPE [LAYERS]   TYPE: bf16, tf32 or fp16; LAYERS: times alone, with no comparison (ablations)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/conv2d/launch.h"
#include "kernels/plans/conv2d/network.h"

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

// The same behind max pooling of 3 x 3, stride 2, padding 1.
template <class T>
__global__ void compare_pooled(Shape s, const double* y, const float* scale, const float* shift, int relu,
                               const T* made, unsigned* worst) {
  const int ph = (s.out_height - 1) / 2 + 1, pw = (s.out_width - 1) / 2 + 1, columns = s.out_channels;
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < static_cast<int64_t>(s.batch) * ph * pw * columns;
       i += gridDim.x * 256ll) {
    const int k = i % columns, q = i / columns % pw, p = i / columns / pw % ph, n = i / columns / pw / ph;
    double wanted = -1e300;
    for (int h = max(2 * p - 1, 0); h < min(2 * p + 2, s.out_height); h++)
      for (int w = max(2 * q - 1, 0); w < min(2 * q + 2, s.out_width); w++) {
        const double x = y[((static_cast<int64_t>(n) * s.out_height + h) * s.out_width + w) * columns + k];
        wanted = max(wanted, x * scale[k] + shift[k]);
      }
    if (relu) wanted = max(wanted, 0.0);
    const double error = fabs(static_cast<double>(widen(made[i])) - wanted) / (1 + fabs(wanted));
    atomicMax(worst, __float_as_uint(error == error ? static_cast<float>(error) : 1e30f));
  }
}

struct Layer {
  Shape shape;
  int in = 0, out = 0, residual = -1;  // buffers
  bool relu = false;
  const char* name = "";
};
struct Stage {  // layers of a launch, or a pool
  bool conv = true;
  PoolKind kind = PoolKind::kMax;
  std::vector<Layer> layers;
  Pool pool = {};
  int in = 0, out = 0;
  std::string name;
};
struct Net {
  std::vector<Stage> steps;
  std::vector<size_t> buffers;  // bytes, per network
};

Net resnet18(DType dtype, int batch, int height, int width, bool group_norm) {
  Net net;
  const auto buffer = [&](int n, int h, int w, int c) {
    net.buffers.push_back(static_cast<size_t>(n) * h * w * pieces_of(dtype, c) * kPieceBytes);
    return static_cast<int>(net.buffers.size()) - 1;
  };
  const auto groups = [&](int c) { return group_norm ? c / 16 : 0; };
  const int h2 = (height + 1) / 2, w2 = (width + 1) / 2;
  int h = h2, w = w2;
  int x = buffer(batch, h, w, 12);
  {  // 7 x 7, stride 2, of 3 channels as 4 x 4 of 2 x 2 pixels
    Stage s;
    s.name = "conv1";
    s.layers.push_back(
        {{dtype, batch, h, w, 12, h, w, 64, 4, 4, 1, 2, 2, groups(64)}, x, buffer(batch, h, w, 64), -1, true});
    x = s.layers[0].out;
    net.steps.push_back(s);
  }
  {
    Stage s;
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
      Stage a, b;
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
  Stage s;
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
  Net net;
  int networks;
  Device device;
  std::vector<std::vector<void*>> memory;                  // (network, buffer)
  std::vector<std::vector<std::vector<Weights>>> weights;  // (step, network, layer)
  uint32_t *epoch, *parities;
  void *result, *image;  // of comparisons; images of 3 channels
  uint64_t seed = 1;

  Bench(DType d, Net n, int count, const Device& dev) : dtype(d), net(std::move(n)), networks(count), device(dev) {
    for (int i = 0; i < networks; i++) {
      memory.emplace_back();
      for (const size_t bytes : net.buffers) memory[i].push_back(allocate(bytes, 0xff));
    }
    for (const Stage& step : net.steps) {
      weights.emplace_back();
      for (int i = 0; i < networks && step.conv; i++) {
        weights.back().emplace_back();
        for (const Layer& l : step.layers) weights.back()[i].push_back(make(l.shape));
      }
    }
    result = allocate(4096, 0);
    epoch = static_cast<uint32_t*>(allocate(4, 0));
    parities = static_cast<uint32_t*>(allocate(8, 0));
    const uint32_t one = 1;
    CHECK(cudaMemcpy(parities + 1, &one, 4, cudaMemcpyHostToDevice));
    const Shape& s = net.steps[0].layers[0].shape;
    for (int i = 0; i < networks; i++)
      random_rows<T><<<256, 256>>>(static_cast<T*>(memory[i][0]), static_cast<int64_t>(s.batch) * s.height * s.width,
                                   s.channels, padded(dtype, s.channels), seed += 100000007);
    const int64_t numbers = int64_t{s.batch} * 12 * s.height * s.width;
    image = allocate(numbers * 4, 0xff);
    random_floats<<<256, 256>>>(static_cast<float*>(image), numbers, 1, 0, seed += 100000007);
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

  static std::vector<Shape> shapes_of(const Stage& step) {
    std::vector<Shape> shapes;
    for (const Layer& l : step.layers) shapes.push_back(l.shape);
    return shapes;
  }
  // Plans worth a measurement, at most `most`: those that the model likes best. `hopper`: the tilings by warpgroups alone.
  std::vector<std::pair<StepPlan, double>> plans_of(const Stage& step, size_t most, bool hopper) const {
    std::vector<std::pair<StepPlan, double>> made;
    std::vector<int> seen(kNumTilings, 0);
    const auto all = candidates(step.layers[0].shape, device, networks);
    for (const Choice& c : all) {
      if (hopper && !kTilings[c.plan.tiling].wgmma) continue;
      if (c.clocks > 4 * all[0].clocks || seen[c.plan.tiling] >= 3 || made.size() >= most) continue;
      StepPlan p = {c.plan.tiling, 0, c.deferred, false, {c.plan}};
      p.waits = c.plan.waits(c.deferred);
      for (size_t i = 1; i < step.layers.size(); i++) {
        ConvPlan other;
        if (!make_plan(step.layers[i].shape, c.plan.tiling, 1, other)) break;
        p.plans.push_back(other);
        p.waits |= other.waits(c.deferred);
      }
      if (p.plans.size() != step.layers.size()) continue;
      for (const ConvPlan& plan : p.plans) p.blocks += plan.blocks() * networks;
      if (p.waits && p.blocks > resident_blocks(p.tiling, device)) {
        if (!step.layers[0].shape.groups || c.plan.splits > 1) continue;
        p.deferred = true, p.waits = false;
      }
      seen[c.plan.tiling]++;
      made.emplace_back(p, c.clocks);
    }
    return made;
  }
  // Of networks [first, first + count).
  Launch launch_of(int index, const StepPlan& p, const uint32_t* parity, int first, int count) {
    const Stage& step = net.steps[index];
    Launch launch = {};
    launch.epoch = parity;
    for (int i = first; i < first + count; i++)
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
        launch.waits |= p.waits;
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
  Pool pool_of(const Stage& step, int network) const {
    Pool p = step.pool;
    p.x = memory[network][step.in], p.out = memory[network][step.out];
    return p;
  }

  Pools pools_of(const Stage& step, int first, int count) const {
    Pools p = {};
    for (int n = first; n < first + count; n++) p.pools[p.count++] = pool_of(step, n);
    return p;
  }
  Stems stems_of(int first, int count) const {
    const Layer& l = net.steps[0].layers[0];
    Stems stems = {};
    for (int n = first; n < first + count; n++) {
      Stem& s = stems.stems[stems.count++] = stem_of(l.shape);
      s.x = memory[n][l.in], s.weights = weights[0][n][0].packed, s.out = memory[n][net.steps[1].out];
      s.scale = weights[0][n][0].scale, s.shift = weights[0][n][0].shift, s.relu = l.relu;
    }
    return stems;
  }

  // The convolutions of a step in double, for the input that there is.
  std::vector<double*> references;
  void refer(int index) {
    forget();
    const Stage& step = net.steps[index];
    for (int i = 0; i < networks; i++)
      for (size_t l = 0; l < step.layers.size(); l++) {
        const Shape& s = step.layers[l].shape;
        double* y;
        CHECK(cudaMalloc(&y, static_cast<int64_t>(s.batch) * s.out_height * s.out_width * s.out_channels * 8));
        reference_conv<T><<<4096, 256>>>(s, static_cast<const T*>(memory[i][step.layers[l].in]),
                                         weights[index][i][l].raw, nullptr, y, padded(dtype, s.channels));
        if (s.groups) reference_norm<<<s.batch * s.groups, 256>>>(s, y, 1e-5f);
        references.push_back(y);
      }
  }
  void forget() {
    for (double* y : references) CHECK(cudaFree(y));
    references.clear();
  }
  // The largest error of a step against `references`; `pooled`: of the stem, in the place of what the pool makes.
  double verify(int index, bool pooled = false) {
    const Stage& step = net.steps[index];
    double worst = 0;
    for (int i = 0; i < networks; i++)
      for (size_t l = 0; l < step.layers.size(); l++) {
        const Layer& layer = step.layers[l];
        const Shape& s = layer.shape;
        const Weights& w = weights[index][i][l];
        const double* y = references[i * step.layers.size() + l];
        CHECK(cudaMemset(result, 0, 16));
        auto* most = static_cast<unsigned*>(result);
        auto* squares = reinterpret_cast<double*>(static_cast<char*>(result) + 8);
        if (pooled)
          compare_pooled<T><<<1024, 256>>>(s, y, w.scale, w.shift, layer.relu,
                                           static_cast<const T*>(memory[i][net.steps[1].out]), most);
        else
          compare<T><<<1024, 256>>>(
              s, y, w.scale, w.shift, layer.residual < 0 ? nullptr : static_cast<const T*>(memory[i][layer.residual]),
              layer.relu, static_cast<const T*>(memory[i][layer.out]), padded(dtype, s.out_channels), most, squares);
        float e;
        CHECK(cudaMemcpy(&e, most, 4, cudaMemcpyDeviceToHost));
        worst = std::max(worst, static_cast<double>(e));
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

  bool has_stem() const { return serves_stem(net.steps[0].layers[0].shape, device); }
  // Microseconds of the stem; `wgmma`: by warpgroups.
  double time_stem(bool wgmma, int blocks, bool check, double bound) {
    for (int n = 0; n < networks; n++)
      CHECK(cudaMemset(memory[n][net.steps[1].out], 0xff, net.buffers[net.steps[1].out]));
    CHECK(cudaDeviceSynchronize());
    const Stems stems = stems_of(0, networks);
    const auto exec = captured([&] {
      for (int k = 0; k < 8; k++) CHECK(launch_stems(dtype, stems, blocks, wgmma, k > 0, stream));
    });
    const double us = timed(exec, 7) / 8, error = check ? verify(0, true) : 0;
    std::printf("  [stem%s %d x %d] %.2f us %.1e%s", wgmma ? " wgmma" : "", blocks, networks, us, error,
                error < bound ? "" : " WRONG");
    CHECK(cudaGraphExecDestroy(exec));
    return error < bound ? us : 1e30;
  }

  // All launches of networks [first, first + count) but the preparation of the images.
  void walk(const std::vector<StepPlan>& plans, const std::vector<Launch>& launches, int stem, int first, int count,
            const uint32_t* parity, bool dependent, bool finish) {
    const int last = static_cast<int>(net.steps.size()) - 1;
    for (int i = 0; i <= last; i++) {
      const Stage& step = net.steps[i];
      if (i == 0 && stem >= 0) {
        const int blocks = stem_blocks(step.layers[0].shape, device, count);
        CHECK(launch_stems(dtype, stems_of(first, count), blocks, stem == 1, dependent, stream));
        i++;
      } else if (step.conv) {
        enqueue(plans[i], launches[i], parity, dependent);
      } else {
        CHECK(launch_pools(dtype, step.kind, pools_of(step, first, count), i == last && finish ? epoch : nullptr,
                           dependent, stream));
      }
    }
  }

  void prepare(int first, int count, bool dependent) {
    const Shape& s = net.steps[0].layers[0].shape;
    Preprocesses all = {};
    for (int n = first; n < first + count; n++) {
      Preprocess& p = all.items[all.count++];
      p.image = image, p.out = memory[n][0], p.pixel = Pixel::kFloat32, p.batch = s.batch, p.channels = 3;
      p.height = p.resized_height = p.crop_height = 2 * s.height,
      p.width = p.resized_width = p.crop_width = 2 * s.width;
      p.stride_x = 1, p.stride_y = p.width, p.stride_c = p.stride_y * p.height, p.stride_n = 3 * p.stride_c;
      p.antialias = p.cells = true;
      for (float& x : p.inverse_std) x = 1;
    }
    CHECK(launch_preprocess(dtype, all, dependent, stream));
  }

  void run(const char* name, void* flush, bool check) {
    std::printf("\n== %s\n", name);
    const double bound = sizeof(T) == 4 ? 1e-4 : std::is_same_v<T, __half> ? 7e-4 : 5e-3;
    std::vector<StepPlan> best(net.steps.size()), chosen(net.steps.size());
    double sum = 0;
    int stem = -1;
    for (size_t i = 0; i < net.steps.size(); i++) {
      const Stage& step = net.steps[i];
      const int index = static_cast<int>(i);
      if (!step.conv) {
        const auto exec = captured([&] {
          for (int k = 0; k < 16; k++)
            CHECK(launch_pools(dtype, step.kind, pools_of(step, 0, networks), nullptr, k > 0, stream));
        });
        const double us = timed(exec, 10) / 16;
        std::printf("%-24s %7.2f us\n", step.name.c_str(), us);
        if (i != 1 || stem < 0) sum += us;
        CHECK(cudaGraphExecDestroy(exec));
        continue;
      }
      double least = 1e30;
      const Shape& s = step.layers[0].shape;
      if (check) refer(index);
      std::printf("%-24s rows %6d columns %4d chunks %3d:", step.name.c_str(), s.batch * s.out_height * s.out_width,
                  s.out_channels, chunks_of(s));
      chosen[i] = plan_step(shapes_of(step), device, networks);
      Launch fastest = {};
      for (const auto& [p, clocks] : plans_of(step, check ? 16 : 8, !check)) {
        const Launch launch = launch_of(index, p, parities, 0, networks);
        poison(index);
        if (const auto error = launch_convs(dtype, p.tiling, launch, false, stream)) {
          std::printf("  [%d/%d %d: %s]", p.tiling, p.plans[0].splits, p.blocks, cudaGetErrorString(error));
          cudaGetLastError();
          continue;
        }
        const int repeats = 8;
        const auto exec = captured([&] {
          for (int k = 0; k < repeats; k++) enqueue(p, launch, parities + (k + 1) % 2, k > 0);
        });
        const double us = timed(exec, 5) / repeats;
        CHECK(cudaStreamSynchronize(stream));
        const double error = check ? verify(index) : 0;
        const bool right = error < bound * (p.deferred ? 3 : 1);
        const bool mine = p.tiling == chosen[i].tiling && p.plans[0].splits == chosen[i].plans[0].splits;
        std::printf("  [%s%d/%d%s %d] %.2f us (model %.2f) %.1e%s", mine ? "*" : "", p.tiling, p.plans[0].splits,
                    p.deferred ? " deferred" : "", p.blocks, us, clocks / 1755, error, right ? "" : " WRONG");
        CHECK(cudaGraphExecDestroy(exec));
        if (us < least && right) least = us, best[i] = p, fastest = launch;
      }
      if (i == 0 && has_stem()) {
        double most = 1e30;
        for (const bool wgmma : {false, true}) {
          if (wgmma ? !device.wgmma : !check) continue;
          const int blocks = stem_blocks(s, device, networks);
          const double us = time_stem(wgmma, blocks, check, bound);
          if (us < most) most = us, stem = wgmma;
        }
        if (stem >= 0) least = most;
      }
      std::printf("\n");
      std::fflush(stdout);
      if (best[i].tiling < 0) {
        std::printf("%s: no plan is right\n", step.name.c_str());
        return;
      }
      enqueue(best[i], fastest, parities + 1, false);
      CHECK(cudaStreamSynchronize(stream));
      sum += least;
    }
    std::printf("sum of the best: %.1f us\n", sum);
    if (check) whole(best, chosen, stem, bound, flush);
    forget();
  }

  // The network by measured plans; by the model's; and as an op has it today, one network after another from images.
  void whole(const std::vector<StepPlan>& best, const std::vector<StepPlan>& chosen, int stem, double bound,
             void* flush) {
    std::vector<StepPlan> alone(net.steps.size());
    for (size_t i = 0; i < net.steps.size(); i++)
      if (net.steps[i].conv) alone[i] = plan_step(shapes_of(net.steps[i]), device, 1);
    const auto launches_of = [&](const std::vector<StepPlan>& plans, int first, int count) {
      std::vector<Launch> made(net.steps.size());  // fresh messages: their parity is the epoch's
      for (size_t i = 0; i < net.steps.size(); i++)
        if (net.steps[i].conv) made[i] = launch_of(static_cast<int>(i), plans[i], epoch, first, count);
      return made;
    };
    const auto report = [&](const char* what, const std::function<void()>& f) {
      CHECK(cudaMemset(epoch, 0, 4));
      CHECK(cudaDeviceSynchronize());
      const auto exec = captured(f);
      const double warm = timed(exec, 30), cold = timed(exec, 15, flush);
      double error = 0;
      for (size_t i = 0; i + 1 < net.steps.size(); i++)
        if (net.steps[i].conv && (i > 0 || stem < 0))
          refer(static_cast<int>(i)), error = std::max(error, verify(static_cast<int>(i)));
      if (stem >= 0) refer(0), error = std::max(error, verify(0, true));
      std::printf("%-44s warm %.1f us, cold %.1f us, worst error %.1e%s\n", what, warm, cold, error,
                  error < 3 * bound ? "" : " WRONG");
      CHECK(cudaGraphExecDestroy(exec));
      std::fflush(stdout);
    };
    const auto measured = launches_of(best, 0, networks);
    report("measured plans, PDL:", [&] { walk(best, measured, stem, 0, networks, epoch, true, true); });
    auto free = launches_of(best, 0, networks);  // what cooperative launches cost: nothing else may run beside it
    for (Launch& l : free) l.waits = false;
    report("measured plans, PDL, not cooperative:", [&] { walk(best, free, stem, 0, networks, epoch, true, true); });
    const auto model = launches_of(chosen, 0, networks);
    report("the model's plans, PDL:", [&] { walk(chosen, model, stem, 0, networks, epoch, true, true); });
    report("the same, from images:", [&] {
      prepare(0, networks, false);
      walk(chosen, model, stem, 0, networks, epoch, true, true);
    });
    std::vector<std::vector<Launch>> each;
    for (int n = 0; n < networks; n++) each.push_back(launches_of(alone, n, 1));
    for (const bool fused : {false, true}) {
      if (fused && stem < 0) continue;
      report(fused ? "one by one, from images, stems:" : "one by one, from images:", [&] {
        for (int n = 0; n < networks; n++) {
          CHECK(cudaMemsetAsync(result, 0, 4096, stream));
          prepare(n, 1, false);
          walk(alone, each[n], fused ? stem : -1, n, 1, epoch, true, n + 1 == networks);
        }
      });
    }
    for (const int count : {1, networks}) {
      const auto exec = captured([&] {
        for (int k = 0; k < 8; k++) prepare(0, count, k > 0);
      });
      std::printf("preprocessing of %d network(s): %.2f us\n", count, timed(exec, 10) / 8);
      CHECK(cudaGraphExecDestroy(exec));
    }
  }
};

template <class T>
void all_sizes(DType dtype, const char* type, const Device& device, void* flush, bool check) {
  struct Size {
    int batch, height, width, networks;
    bool group_norm;
  };
  for (const Size& s : {Size{2, 84, 84, 1, true}, Size{4, 84, 84, 1, true}, Size{4, 216, 216, 1, true},
                        Size{2, 240, 320, 2, false}, Size{2, 480, 640, 2, false}}) {
    if (!check && s.height != 480) continue;
    char name[200];
    std::snprintf(name, sizeof name, "%s %s: %d network(s) of %d images %d x %d", type,
                  s.group_norm ? "GroupNorm" : "BatchNorm", s.networks, s.batch, s.height, s.width);
    Bench<T> bench(dtype, resnet18(dtype, s.batch, s.height, s.width, s.group_norm), s.networks, device);
    bench.run(name, flush, check);
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
  device.wgmma = has_wgmma();
  const std::string type = argc > 1 ? argv[1] : "bf16";
  const bool check = argc < 3;
  std::printf("%d multiprocessors, wgmma %d\n", device.multiprocessors, device.wgmma);
  if (type == "bf16") all_sizes<__nv_bfloat16>(DType::kBFloat16, "bf16", device, flush, check);
  if (type == "tf32") all_sizes<float>(DType::kFloat32, "tf32", device, flush, check);
  if (type == "fp16") all_sizes<__half>(DType::kFloat16, "fp16", device, flush, check);
  return 0;
}
