// The image encoder's kernels on a GPU: each layer of ResNet-18 against float64 with every plan worth a measurement, timed;
// then the whole network by the measured plans, and as an op launches it: by the model's plans, from images.
//   conv2d_bench TYPE [SIZES [LAYERS]]   TYPE: bf16, tf32 or fp16; SIZES: which of `kSizes`, as digits, or all;
//                                        LAYERS: times alone, with no comparison (ablations)
#include <cmath>
#include <functional>
#include <iterator>

#include "kernels/plans/conv2d/network.h"
#include "test/kernels/conv2d_bench_network.h"
#include "test/kernels/conv2d_bench_reference.cuh"
#include "test/kernels/device.h"

using namespace dpa::test;

namespace {

cudaStream_t stream;
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
        for (const Layer& l : step.layers) weights.back()[i].push_back(make_weights(l.shape, seed));
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
  std::vector<double*> references[2];  // by rounding (`operand`)
  void refer(int index) {
    forget();
    refer(index, false);
    if (sizeof(T) == 4) refer(index, true);
  }
  void refer(int index, bool even) {
    const Stage& step = net.steps[index];
    for (int i = 0; i < networks; i++)
      for (size_t l = 0; l < step.layers.size(); l++) {
        const Shape& s = step.layers[l].shape;
        double* y;
        CHECK(cudaMalloc(&y, static_cast<int64_t>(s.batch) * s.out_height * s.out_width * s.out_channels * 8));
        reference_conv<T><<<4096, 256>>>(s, static_cast<const T*>(memory[i][step.layers[l].in]),
                                         weights[index][i][l].raw, nullptr, y, padded(dtype, s.channels), even);
        if (s.groups) reference_norm<<<s.batch * s.groups, 256>>>(s, y, 1e-5f);
        references[even].push_back(y);
      }
  }
  void forget() {
    for (auto& some : references) {
      for (double* y : some) CHECK(cudaFree(y));
      some.clear();
    }
  }
  // The largest error of a step against `references`; `pooled`: of the stem, in the place of what the pool makes.
  double verify(int index, int tiling, bool pooled = false) {
    const auto& wanted = references[sizeof(T) == 4 && tiling >= 0 && kTilings[tiling].im2col];
    const Stage& step = net.steps[index];
    double worst = 0;
    for (int i = 0; i < networks; i++)
      for (size_t l = 0; l < step.layers.size(); l++) {
        const Layer& layer = step.layers[l];
        const Shape& s = layer.shape;
        const Weights& w = weights[index][i][l];
        const double* y = wanted[i * step.layers.size() + l];
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

  static cudaGraphExec_t captured(const std::function<void()>& f) { return dpa::test::captured(stream, f); }
  // Median microseconds of a replay; `flush`: something larger than L2 is written before each.
  static double timed(cudaGraphExec_t exec, int times, void* flush = nullptr) {
    return median_us(
        stream, times, [&] { CHECK(cudaGraphLaunch(exec, stream)); },
        [&] {
          if (flush) CHECK(cudaMemsetAsync(flush, 1, 256 << 20, stream));
        });
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
    const double us = timed(exec, 7) / 8, error = check ? verify(0, -1, true) : 0;
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
      for (const auto& [p, clocks] : plans_of(step, device, networks, check ? 24 : 8, !check)) {
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
        const double error = check ? verify(index, p.tiling) : 0;
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
    const auto report = [&](const char* what, const std::vector<StepPlan>& plans, const std::function<void()>& f) {
      CHECK(cudaMemset(epoch, 0, 4));
      CHECK(cudaDeviceSynchronize());
      const auto exec = captured(f);
      const double warm = timed(exec, 30), cold = timed(exec, 15, flush);
      double error = 0;
      for (size_t i = 0; i + 1 < net.steps.size(); i++)
        if (net.steps[i].conv && (i > 0 || stem < 0))
          refer(static_cast<int>(i)), error = std::max(error, verify(static_cast<int>(i), plans[i].tiling));
      if (stem >= 0) refer(0), error = std::max(error, verify(0, -1, true));
      std::printf("%-44s warm %.1f us, cold %.1f us, worst error %.1e%s\n", what, warm, cold, error,
                  error < 3 * bound ? "" : " WRONG");
      CHECK(cudaGraphExecDestroy(exec));
      std::fflush(stdout);
    };
    const auto measured = launches_of(best, 0, networks);
    report("measured plans, PDL:", best, [&] { walk(best, measured, stem, 0, networks, epoch, true, true); });
    auto free = launches_of(best, 0, networks);  // what cooperative launches cost: nothing else may run beside it
    for (Launch& l : free) l.waits = false;
    report("measured plans, PDL, not cooperative:", best,
           [&] { walk(best, free, stem, 0, networks, epoch, true, true); });
    const auto model = launches_of(chosen, 0, networks);
    report("the model's plans, PDL:", chosen, [&] { walk(chosen, model, stem, 0, networks, epoch, true, true); });
    report("the same, from images:", chosen, [&] {
      prepare(0, networks, false);
      walk(chosen, model, stem, 0, networks, epoch, true, true);
    });
    std::vector<std::vector<Launch>> each;
    for (int n = 0; n < networks; n++) each.push_back(launches_of(alone, n, 1));
    for (const bool fused : {false, true}) {
      if (fused && stem < 0) continue;
      report(fused ? "one by one, from images, stems:" : "one by one, from images:", alone, [&] {
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

struct Size {
  int batch, height, width, networks;
  bool group_norm;
};
constexpr Size kSizes[] = {{2, 84, 84, 1, true},     {4, 84, 84, 1, true},     {4, 216, 216, 1, true},
                           {2, 240, 320, 2, false},  {2, 480, 640, 2, false},  {100, 84, 84, 1, true},
                           {16, 240, 320, 1, false}, {56, 216, 288, 1, false}, {24, 96, 96, 1, false}};

template <class T>
void run_sizes(DType dtype, const char* type, const std::string& which, const Device& device, void* flush, bool check) {
  for (size_t i = 0; i < std::size(kSizes); i++) {
    if (which != "all" && which.find(static_cast<char>('0' + i)) == std::string::npos) continue;
    const Size& s = kSizes[i];
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
  const std::string which = argc > 2 ? argv[2] : "all";
  const bool check = argc < 4;
  std::printf("%d multiprocessors, wgmma %d\n", device.multiprocessors, device.wgmma);
  if (type == "bf16") run_sizes<__nv_bfloat16>(DType::kBFloat16, "bf16", which, device, flush, check);
  if (type == "tf32") run_sizes<float>(DType::kFloat32, "tf32", which, device, flush, check);
  if (type == "fp16") run_sizes<__half>(DType::kFloat16, "fp16", which, device, flush, check);
  return 0;
}
