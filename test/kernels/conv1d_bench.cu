// Times of a convolution's three GEMMs and of packing its weights, beside the time at a rate of arithmetic.
#include "kernels/cuda/conv1d/mma.h"
#include "test/kernels/conv1d_case.cuh"

namespace dpa::test {
namespace {

// Median microseconds of one call within a graph of `kCalls`.
template <class F>
double graph_time(F&& call) {
  constexpr int kCalls = 20, kRuns = 9;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  call(stream);
  CHECK(cudaStreamSynchronize(stream));
  const auto exec = captured(stream, [&] {
    for (int i = 0; i < kCalls; ++i) call(stream);
  });
  const double us = median_us(stream, kRuns, [&] { CHECK(cudaGraphLaunch(exec, stream)); });
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaStreamDestroy(stream));
  return us / kCalls;
}

template <class T>
void bench_type(DType type, double rate) {
  std::printf("%22s %5s %.0f %18s %18s %18s %8s   us (TFLOP/s), splits\n", "B T y x k s", "at", rate, "fprop", "dgrad",
              "wgrad", "pack");
  struct Row {
    int64_t batch, length, y_channels, x_channels;
    int taps, stride;
  };
  std::vector<Row> rows;
  for (int64_t batch : {64, 256, 1024})
    for (int level = 0; level < 3; ++level) rows.push_back({batch, 16 >> level, 256 << level, 256 << level, 5, 1});
  rows.push_back({64, 4, 2048, 2048, 5, 1});
  rows.push_back({64, 8, 512, 2048, 5, 1});
  rows.push_back({256, 8, 512, 2048, 5, 1});
  rows.push_back({256, 16, 256, 256, 3, 2});
  rows.push_back({256, 16, 256, 256, 4, 2});
  rows.push_back({256, 8, 512, 2048, 1, 1});
  rows.push_back({256, 16, 256, 2, 5, 1});
  rows.push_back({64, 32, 256, 256, 5, 1});
  rows.push_back({64, 64, 512, 512, 5, 1});
  rows.push_back({64, 32, 1024, 1024, 5, 1});
  rows.push_back({128, 4, 384, 384, 5, 1});
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  for (const auto& r : rows) {
    const int padding = r.stride == 2 ? 1 : r.taps / 2;
    const Conv1d c{type, r.batch, r.length / r.stride, r.y_channels, r.length, r.x_channels, r.taps, r.stride, padding};
    Case<T> t(c, 1);
    const double work = 2.0 * r.batch * (r.length / r.stride) * r.y_channels * r.x_channels * r.taps;
    const double g = graph_time([&](cudaStream_t s) { t.run_fprop(true, s); });
    const double x = graph_time([&](cudaStream_t s) { t.run_dgrad(true, s); });
    const double w = graph_time([&](cudaStream_t s) { t.run_wgrad(false, s); });
    const double p =
        graph_time([&](cudaStream_t s) { CHECK(pack_weights(DType::kFloat32, c.dtype, t.packings(), s)); });
    const double q =
        Case<T>::kFloat ? graph_time([&](cudaStream_t s) { CHECK(pack_weights_transposed(t.packings(true), s)); }) : 0;
    double in_place[2] = {};
    if (Case<T>::kFloat && has_wgmma() && can_read_in_place(c)) {
      t.c.in_place = true;
      in_place[0] = graph_time([&](cudaStream_t s) { t.run_fprop(true, s); });
      in_place[1] = graph_time([&](cudaStream_t s) { t.run_dgrad(true, s); });
    }
    const int multiprocessors = properties.multiProcessorCount;
    auto fprop_plan = plan_fprop(c, multiprocessors), dgrad_plan = plan_dgrad(c, multiprocessors);
    auto wgrad_plan = plan_wgrad(c, multiprocessors);
    if (!by_wgmma(c)) {  // the tile's rows in the place of its blocks
      fprop_plan = plan_mma_fprop(c, multiprocessors).conv, fprop_plan.splits = fprop_plan.tile_rows;
      dgrad_plan = plan_mma_dgrad(c, multiprocessors).conv, dgrad_plan.splits = dgrad_plan.tile_rows;
      wgrad_plan.splits = plan_mma_wgrad(c, multiprocessors).splits;
    }
    std::printf(
        "%5lld %2lld %4lld %4lld %d %d %10.1f %7.1f (%3.0f) %dx%d %7.1f (%3.0f) %dx%d %7.1f (%3.0f) %dx%d %8.1f "
        "%8.1f in place %7.1f %7.1f\n",
        (long long)r.batch, (long long)r.length, (long long)r.y_channels, (long long)r.x_channels, r.taps, r.stride,
        work / rate / 1e6, g, work / g / 1e6, fprop_plan.tile_columns, fprop_plan.splits, x, work / x / 1e6,
        dgrad_plan.tile_columns, dgrad_plan.splits, w, work / w / 1e6, wgrad_plan.height, wgrad_plan.splits, p, q,
        in_place[0], in_place[1]);
  }
}

}  // namespace

void run_bench() {
  bench_type<__nv_bfloat16>(DType::kBFloat16, 600);
  bench_type<float>(DType::kFloat32, 300);
}

}  // namespace dpa::test
