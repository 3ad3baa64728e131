// The convolution's kernels against sums in float64 on random shapes, and their times: conv1d_test [WORD]...
//   test    both of:
//   conv    the three GEMMs
//   norm    fprop with a normalisation after it (conv1d_norm_test.cu)
//   bench   times (conv1d_bench.cu)
#include <random>
#include <string>

#include "kernels/cuda/conv1d/mma.h"
#include "test/kernels/conv1d_case.cuh"

namespace dpa::test {
namespace {

// The same, delayed: the dependent launch has started long before.
template <class T>
__global__ void delayed_fill(T* x, int64_t rows, int64_t channels, int64_t width, uint64_t seed, bool whole) {
  trigger_dependent_launch();
  grid_dependency_sync();
  for (int i = 0; i < 100; ++i) __nanosleep(1000);
  put_noise(x, rows, channels, width, seed, /*scale=*/1, whole);
}

// Whether convolutions whose input is still being written when they are launched give the same bits.
template <class T>
bool waits_for_delayed_input(Case<T>& t, uint64_t seed, bool addends) {
  const auto y_once = to_host<uint16_t>(t.y_out), x_once = to_host<uint16_t>(t.x_out);
  for (auto* buffer : {&t.x, &t.y, &t.y_out, &t.x_out}) CHECK(cudaMemset(buffer->data, 0xFF, buffer->bytes));
  CHECK(launch_dependent(delayed_fill<T>, 64, 256, 0, reinterpret_cast<T*>(t.x.data), t.x_rows, t.c.x_channels,
                         t.x_width, seed + 1, in_full(t.c)));
  t.run_fprop(addends);
  CHECK(launch_dependent(delayed_fill<T>, 64, 256, 0, reinterpret_cast<T*>(t.y.data), t.y_rows, t.c.y_channels,
                         t.y_width, seed, in_full(t.c)));
  t.run_dgrad(addends);
  CHECK(cudaDeviceSynchronize());
  const auto gradient_once = to_host<uint32_t>(t.gradient);
  for (auto* buffer : {&t.x, &t.gradient}) CHECK(cudaMemset(buffer->data, 0xFF, buffer->bytes));
  CHECK(launch_dependent(delayed_fill<T>, 64, 256, 0, reinterpret_cast<T*>(t.x.data), t.x_rows, t.c.x_channels,
                         t.x_width, seed + 1, in_full(t.c)));
  t.run_wgrad(false);
  CHECK(cudaDeviceSynchronize());
  return y_once == to_host<uint16_t>(t.y_out) && x_once == to_host<uint16_t>(t.x_out) &&
         gradient_once == to_host<uint32_t>(t.gradient);
}

// Whether an x of two tensors, of which the first has whole chunks, gives the bits of one; for dgrad they have one width.
template <class T>
bool in_two(Case<T>& t, uint64_t seed, bool addends) {
  if (t.c.x_channels <= 64 || t.c.x_channels % 8 != 0) return true;
  Conv1d c = t.c;
  c.first_channels = 64 * (1 + static_cast<int64_t>(seed / 7) % ((c.x_channels - 1) / 64));
  const bool two = c.x_channels % 16 == 0;
  const int64_t half = two ? c.x_channels / 2 : c.x_channels;
  Halves x(sizeof(T), t.x_rows, c.x_channels, c.first_channels), out(sizeof(T), t.x_rows, c.x_channels, half),
      residual(sizeof(T), t.x_rows, c.x_channels, half);
  x.take(t.x), residual.take(t.x_residual);
  const auto y_once = to_host<uint16_t>(t.y_out), x_once = to_host<uint16_t>(t.x_out),
             gradient_once = to_host<uint16_t>(t.gradient);
  for (auto* buffer : {&t.y_out, &t.x_out, &t.gradient}) CHECK(cudaMemset(buffer->data, 0xFF, buffer->bytes));
  const Rows both{x.first.data, x.more.data};
  const Addends add{addends ? t.bias.data : nullptr, DType::kFloat32, {addends ? t.y_residual.data : nullptr}};
  CHECK(fprop(c, both, {t.fprop_weights(), true}, add, t.y_out.data, t.workspace.data, 0));
  Addends add_back = add;
  add_back.residual = addends ? Rows{residual.first.data, residual.more.data} : Rows{};
  Conv1d back = c;
  back.first_channels = two ? half : 0;
  CHECK(dgrad(back, t.y.data, {t.dgrad_weights(), true}, add_back, {out.first.data, two ? out.more.data : nullptr},
              t.workspace.data, 0));
  CHECK(wgrad(c, t.y.data, both, t.gradient.data, DType::kFloat32, t.workspace.data, 0));
  CHECK(cudaDeviceSynchronize());
  out.give(t.x_out);
  return y_once == to_host<uint16_t>(t.y_out) && x_once == to_host<uint16_t>(t.x_out) &&
         gradient_once == to_host<uint16_t>(t.gradient) && out.first.guard_intact() && out.more.guard_intact();
}

template <class T>
bool test_case(const Conv1d& c, uint64_t seed, bool addends) {
  Case<T> t(c, seed);
  constexpr bool kFloat = std::is_same_v<T, float>;
  const double unit = kFloat ? 1.01 / (1 << 24) : std::is_same_v<T, __half> ? 0.501 / 1024 : 0.501 / 128;
  const double slack = cut_off<T>(c.taps, std::max(c.x_channels, c.y_channels));
  const float* bias = addends ? as<float>(t.bias) : nullptr;
  t.run_fprop(addends), t.run_dgrad(addends), t.run_wgrad(false), t.run_wgrad(true);
  CHECK(cudaDeviceSynchronize());
  Buffer y_exact(t.y_out.bytes / sizeof(T) * 8), x_exact(t.x_out.bytes / sizeof(T) * 8), wgrad_exact(t.weights * 8),
      wgrad_lost(t.weights * 8);
  slow_fprop<T><<<2048, 256>>>(c, as<T>(t.x), as<float>(t.weight), bias, addends ? as<T>(t.y_residual) : nullptr,
                               as<double>(y_exact), t.x_width);
  slow_dgrad<T><<<2048, 256>>>(c, as<T>(t.y), as<float>(t.weight), bias, addends ? as<T>(t.x_residual) : nullptr,
                               as<double>(x_exact), t.y_width);
  int multiprocessors;
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  WgradPlan plan = plan_wgrad(c, multiprocessors);
  int flat = 0;
  if (!by_wgmma(c) || !wgmma_takes_taps(c)) {
    const auto mma = plan_mma_wgrad(c, multiprocessors);
    plan.splits = mma.splits, plan.rows.count = mma.steps, flat = mma.step_rows;
    if (kFloat) plan.rows.count = c.batch * c.y_length / 8 / kTf32Times + 1;
  }
  slow_wgrad<T><<<2048, 256>>>(c, plan, flat, as<T>(t.y), as<T>(t.x), as<double>(wgrad_exact), as<double>(wgrad_lost),
                               t.y_width, t.x_width);
  CHECK(cudaDeviceSynchronize());
  const double g = worst(to_host<T>(t.y_out), to_host<double>(y_exact), unit, slack);
  const double s = worst(to_host<T>(t.x_out), to_host<double>(x_exact), unit, slack);
  // The blocks of a tile add their sums, each addition rounded to nearest.
  const double nearest = std::max(8, plan.splits) / double(1 << 24), tiny = 1e-7;
  const auto lost = to_host<double>(wgrad_lost), sums = to_host<double>(wgrad_exact);
  const double w = worst(to_host<float>(t.gradient), sums, nearest, tiny, lost);
  const double h = worst(to_host<T>(t.half_gradient), sums, unit, tiny, lost);
  const bool guards = t.y_out.guard_intact() && t.x_out.guard_intact() && t.gradient.guard_intact() &&
                      t.half_gradient.guard_intact() && t.packed.guard_intact() && t.transposed.guard_intact() &&
                      t.workspace.guard_intact();
  // The same call again must give the same bits.
  const auto once = to_host<float>(t.gradient);
  const auto once_out = to_host<uint16_t>(t.y_out);
  t.run_wgrad(false), t.run_fprop(addends);
  CHECK(cudaDeviceSynchronize());
  const auto again = to_host<float>(t.gradient);
  const bool repeats =
      std::memcmp(once.data(), again.data(), t.gradient.bytes) == 0 && once_out == to_host<uint16_t>(t.y_out);
  const bool late = waits_for_delayed_input(t, seed, addends), two = in_two(t, seed, addends);
  const bool good = g <= 1 && s <= 1 && w <= 1 && h <= 1 && guards && repeats && late && two;
  if (!good || seed < 2000)
    std::printf(
        "%s%s B %lld y %lldx%lld x %lldx%lld k %d s %d p %d: fprop %.2f dgrad %.2f wgrad %.2f %.2f%s%s "
        "%s%s%s\n",
        kFloat && in_full(c)        ? "full"
        : kFloat                    ? "tf32"
        : std::is_same_v<T, __half> ? "f16 "
                                    : "bf16",
        c.in_place ? " in place" : "", (long long)c.batch, (long long)c.y_length, (long long)c.y_channels,
        (long long)c.x_length, (long long)c.x_channels, c.taps, c.stride, c.padding, g, s, w, h, guards ? "" : " GUARD",
        repeats ? "" : " UNSTEADY", late ? "" : " EARLY", two ? "" : " TWO", good ? "ok" : "WRONG");
  return good;
}

bool test_shape(DType dtype, int64_t batch, int64_t length, int64_t y_channels, int64_t x_channels, int taps,
                int stride, uint64_t seed, bool addends) {
  const int padding = stride == 2 && taps == 4 ? 1 : taps / 2;
  const int64_t y_length = (length + 2 * padding - taps) / stride + 1;
  if (y_length <= 0) return true;
  const Conv1d c{dtype, batch, y_length, y_channels, length, x_channels, taps, stride, padding};
  if (!takes(c)) return std::printf("not served: T %d k %d s %d\n", int(length), taps, stride), false;
  if (dtype == DType::kFloat32) {
    Conv1d in_place = c;
    in_place.in_place = true;
    return test_case<float>(c, seed, addends) &&
           (!has_wgmma() || !can_read_in_place(c) || test_case<float>(in_place, seed, addends));
  }
  return dtype == DType::kFloat16 ? test_case<__half>(c, seed, addends) : test_case<__nv_bfloat16>(c, seed, addends);
}

int run_tests() {
  int wrong = 0;
  uint64_t seed = std::random_device{}() % 1000;
  std::printf("seed %llu\n", (unsigned long long)seed);
  const auto try_one = [&](DType dtype, int64_t b, int64_t l, int64_t n, int64_t w, int k, int s, bool add) {
    wrong += !test_shape(dtype, b, l, n, w, k, s, seed += 7, add);
  };
  constexpr auto kB = DType::kBFloat16;
  for (const auto type : {kB, DType::kFloat32}) {  // the networks' own
    try_one(type, 64, 16, 256, 256, 5, 1, false), try_one(type, 64, 8, 512, 512, 5, 1, true);
    try_one(type, 64, 4, 1024, 1024, 5, 1, true), try_one(type, 64, 16, 256, 2, 5, 1, true);
    try_one(type, 64, 16, 2, 256, 1, 1, true), try_one(type, 64, 16, 256, 256, 3, 2, true);
    try_one(type, 64, 16, 256, 256, 4, 2, true), try_one(type, 256, 16, 512, 256, 1, 1, false);
    try_one(type, 1024, 16, 256, 256, 5, 1, true), try_one(type, 3, 48, 256, 256, 5, 1, true);
    try_one(type, 64, 16, 192, 96, 7, 1, true), try_one(type, 16, 64, 320, 192, 3, 1, true);
  }
  for (const auto type : {kB, DType::kFloat16}) {  // weight gradients whose blocks work on tile after tile
    try_one(type, 128, 4, 1024, 1024, 5, 1, true), try_one(type, 16, 16, 2048, 1024, 5, 1, false);
    try_one(type, 33, 20, 900, 600, 5, 1, false), try_one(type, 64, 12, 1000, 516, 5, 1, true);
    try_one(type, 7, 70, 640, 1024, 5, 1, true), try_one(type, 70, 5, 1024, 700, 5, 1, false);
  }
  std::mt19937 random(std::random_device{}());
  seed = 2000 + random() % 100000;
  const auto pick = [&](int low, int high) { return static_cast<int>(low + random() % (high - low + 1)); };
  constexpr DType types[] = {DType::kFloat32, kB, DType::kFloat16};
  for (int i = 0; i < 180; ++i) {
    const int taps_of[] = {1, 3, 4, 5, 7, pick(1, 9)};
    const int taps = taps_of[pick(0, 5)], stride = taps == 4 ? 2 : taps == 3 ? pick(1, 2) : 1;
    const int length = (i % 4 == 0 ? pick(65, 300) : pick(1, 64)) * (taps == 4 ? 2 : 1);
    try_one(types[i % 3], pick(1, i % 4 ? 20 : 90), length, pick(1, i % 5 ? 150 : 600), pick(1, i % 5 ? 150 : 600),
            taps, stride, i % 7 > 2);
  }
  for (int i = 0; i < 60; ++i)  // weights as they lie in the parameter
    try_one(DType::kFloat32, pick(1, i % 3 ? 20 : 150), pick(i % 4 ? 4 : 1, i % 5 ? 32 : 128),
            pick(1, i % 4 ? 150 : 700), 4 * pick(1, i % 4 ? 40 : 175), 1 + 2 * pick(0, 3), 1, i % 7 > 2);
  std::printf("%s: %d wrong\n", wrong ? "FAILED" : "passed", wrong);
  return wrong;
}

}  // namespace
}  // namespace dpa::test

int main(int count, char** arguments) {
  using namespace dpa::test;
  int wrong = 0;
  for (int i = 1; i < count; ++i) {
    const std::string what = arguments[i];
    if (what == "test" || what == "conv") wrong += run_tests();
    if (what == "test" || what == "norm") wrong += run_norm_tests();
    if (what == "bench") run_bench();
  }
  return wrong != 0;
}
