// The kernels of mma_convolution.cuh and mma_wgrad.cuh in the emulator, against sums in float64, on the host. Shared
// memory, the memory around each operand and the results are poisoned. Compiled with DPA_EMULATE.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/conv1d/mma_convolution.cuh"
#include "kernels/cuda/conv1d/mma_wgrad.cuh"

using namespace dpa::kernels;
using namespace dpa::kernels::conv1d;

namespace {

std::mt19937 generator(1);

// Float32 as pairs of float16 numbers.
struct TwoHalves {};
template <class T>
constexpr bool kHalves = std::is_same_v<T, TwoHalves>;
// Float32 in full.
struct InFull {};
template <class T>
constexpr bool kInFull = std::is_same_v<T, InFull>;
template <class T>
using Operand = std::conditional_t<kHalves<T>, device::Half, std::conditional_t<kInFull<T>, float, T>>;
template <class T>
constexpr bool kOfFloat = kIsFloat<Operand<T>>;
template <class T>
constexpr int kPlanes = kHalves<T> ? 2 : 1;

// Rows of `width` elements of T whose first `channels` are random; NaN before and behind, zeros up to the width. Of pairs
// a plane of all high halves, times `scale`, then one of the low ones.
template <class T>
struct Rows {
  std::vector<uint8_t> bytes;
  std::vector<double> values;
  int64_t channels;
  static constexpr int64_t kGuard = 4096;

  Rows(int64_t rows, int64_t channels_, int64_t width, float scale = dpa::math::kActivationScale)
      : values(rows * channels_), channels(channels_) {
    bytes.assign(2 * kGuard + kPlanes<T> * rows * width * kSize<Operand<T>> + 256, 0xff);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < width; ++c) {
        const float value = c < channels ? std::uniform_real_distribution<float>(-1, 1)(generator) : 0.0f;
        uint32_t stored;
        double exact;
        if constexpr (kHalves<T>) {
          uint32_t low;
          device::split_pair(value, 0.0f, scale, stored, low), exact = value;
          std::memcpy(data() + ((rows + r) * width + c) * kSize<Operand<T>>, &low, kSize<Operand<T>>);
        } else if constexpr (kOfFloat<T>) {
          stored = device::bits(value), exact = kInFull<T> ? value : device::as_float(device::to_tf32(value));
        } else {
          stored = device::pack(T{}, value, 0.0f) & 0xffff, exact = device::unpack(T{}, stored).x;
        }
        std::memcpy(data() + (r * width + c) * kSize<Operand<T>>, &stored, kSize<Operand<T>>);
        if (c < channels) values[r * channels + c] = exact;
      }
  }
  uint8_t* data() {
    const auto at = reinterpret_cast<uintptr_t>(bytes.data()) + kGuard;
    return reinterpret_cast<uint8_t*>((at + 127) / 128 * 128);
  }
  double at(int64_t row, int64_t channel) const { return values[row * channels + channel]; }
};

// Those of x, whose last channels may be a tensor of their own.
template <class T>
struct XRows {
  Rows<T> first, more;

  XRows(int64_t rows, int64_t channels, int64_t of_first)
      : first(rows, of_first, padded(of_first)),
        more(of_first < channels ? rows : 0, channels - of_first, padded(channels - of_first)) {}
  const uint8_t* more_data() { return more.channels > 0 ? more.data() : nullptr; }
  double at(int64_t row, int64_t channel) const {
    return channel < first.channels ? first.at(row, channel) : more.at(row, channel - first.channels);
  }
};

struct Worst {
  double error = 0;
  int64_t wrong = 0;
  void add(double got, double exact, double allowed) {
    const double e = std::abs(got - exact) / allowed;
    if (!(e <= error)) error = e;
    wrong += !(e <= 1);
  }
};

template <class T>
DType type_of() {
  return kOfFloat<T> ? DType::kFloat32 : std::is_same_v<T, device::Half> ? DType::kFloat16 : DType::kBFloat16;
}

struct Run {
  MmaArgs args;
  float* out;
};

template <class T, class Shape, bool kMajorN, int kStride>
void convolution_block(void* argument) {
  const Run& run = *static_cast<Run*>(argument);
  const ConvPlan& plan = run.args.plan.conv;
  const int splits = run.args.plan.splits;
  const MmaTile tile = mma_tile<Shape>(plan, run.args.adds ? device::block() : device::block() / splits);
  if (run.args.adds)
    add_partials<Shape>(run.args, device::block());
  else
    sum_tile<Operand<T>, Shape, kMajorN, kStride, kHalves<T>, kInFull<T>>(run.args, tile, device::block() % splits);
  if (run.args.partials && !run.args.adds) return store_partials<Shape>(run.args, device::block());
  const float* sums = tile_of_sums();
  for (int e = device::thread(); e < Shape::kRows * Shape::kColumns; e += kMmaThreads) {
    const int row = e / Shape::kColumns, n = e % Shape::kColumns + tile.first_column;
    const int sample = tile.first_sample + row % plan.rows.samples;
    const int64_t time = int64_t{tile.first_time + row / plan.rows.samples} * plan.phases + tile.phase;
    if (row < plan.rows.samples * plan.rows.time && sample < run.args.batch && time < run.args.out_length &&
        n < run.args.outputs)
      run.out[(sample * run.args.out_length + time) * run.args.outputs + n] =
          sums[row * Shape::kStride + e % Shape::kColumns];
  }
}

template <class T, bool kMajorN>
void launch_convolution(Run& run) {
  const ConvPlan& plan = run.args.plan.conv;
  const auto tiles = static_cast<int>(run.args.plan.tiles());
  const auto go = [&](auto shape) {
    using Shape = decltype(shape);
    const auto launch = [&](int blocks) {
      device::launch(
          blocks, mma_bytes(run.args.plan),
          plan.stride == 2 ? convolution_block<T, Shape, kMajorN, 2> : convolution_block<T, Shape, kMajorN, 1>, &run,
          generator());
    };
    std::vector<float4> partials(run.args.plan.partials_bytes() / sizeof(float4), float4{NAN, NAN, NAN, NAN});
    if (!partials.empty()) run.args.partials = &partials[0].x;
    launch(tiles * run.args.plan.splits);
    if (partials.empty()) return;
    run.args.adds = true;
    launch(tiles);
  };
  if (plan.tile_rows == 128)
    plan.tile_columns == 128 ? go(MmaShape<128, 128>{}) : go(MmaShape<128, 64>{});
  else
    plan.tile_columns == 128 ? go(MmaShape<64, 128>{}) : go(MmaShape<64, 64>{});
}

// The second parts of weights that have two, which tf32 holds; the weights become the sums.
template <class T>
std::vector<float> second_parts(const Conv1d& c, Rows<T>& weight) {
  std::vector<float> parts(weight_parts(c) == 2 ? weight.values.size() : 0);
  for (size_t e = 0; e < parts.size(); ++e) {
    parts[e] = std::ldexp(static_cast<float>(static_cast<int>(generator() % 1024) - 512), -20);
    weight.values[e] += parts[e];
  }
  return parts;
}

// The weights (d0, d1, taps) as fprop reads them, or transposed as dgrad does in float32.
template <class T>
std::vector<uint8_t> pack(const Conv1d& c, Rows<T>& stored, const std::vector<float>& second, bool transposed) {
  const int64_t rows = transposed ? c.x_channels : c.y_channels, row = transposed ? c.y_channels : c.x_channels;
  const int64_t width = padded(row);
  const int planes = second.empty() ? kPlanes<T> : 2;
  std::vector<uint8_t> packed(planes * c.taps * rows * width * kSize<Operand<T>> + 64, 0);
  uint8_t* to = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(packed.data()) + 15) / 16 * 16);
  for (int plane = 0; plane < planes; ++plane)
    for (int k = 0; k < c.taps; ++k)
      for (int64_t i = 0; i < c.y_channels; ++i)
        for (int64_t j = 0; j < c.x_channels; ++j) {
          const int64_t e = (i * c.x_channels + j) * c.taps + k, of_plane = c.y_channels * c.x_channels * c.taps;
          const void* from = plane == 1 && !second.empty() ? static_cast<const void*>(&second[e])
                                                           : stored.data() + (plane * of_plane + e) * kSize<Operand<T>>;
          std::memcpy(to + (((plane * c.taps + k) * rows + (transposed ? j : i)) * width + (transposed ? i : j)) *
                               kSize<Operand<T>>,
                      from, kSize<Operand<T>>);
        }
  return packed;
}

// The weight gradient; returns how many blocks share a tile.
template <class T>
int test_wgrad(const Conv1d& c, int multiprocessors, XRows<T>& x, Rows<T>& y, Worst& wgrad, double slack) {
  const auto plan = plan_mma_wgrad(c, multiprocessors);
  const int64_t weights = c.y_channels * c.x_channels * c.taps;
  std::vector<float> gradient(weights, NAN), partials(plan.splits > 1 ? weights * plan.splits : 0, NAN);
  MmaWgradArgs args{plan,
                    int(c.batch * c.y_length),
                    int(c.batch * c.x_length),
                    int(c.y_length),
                    int(c.x_length),
                    int(c.y_channels),
                    int(c.x_channels),
                    int(x.first.channels),
                    padded(c.y_channels),
                    padded(x.first.channels),
                    padded(c.x_channels - x.first.channels),
                    c.taps,
                    c.stride,
                    c.padding,
                    y.data(),
                    x.first.data(),
                    x.more_data(),
                    gradient.data(),
                    plan.splits > 1 ? partials.data() : nullptr,
                    true};
  const auto blocks = static_cast<int>(plan.y_tiles * plan.x_tiles * plan.splits);
  const auto go = [&](auto slots) {
    device::launch(
        blocks, mma_wgrad_bytes(c, plan),
        [](void* argument) {
          const auto& a = *static_cast<MmaWgradArgs*>(argument);
          wgrad_block<Operand<T>, decltype(slots)::value, kInFull<T>>(a, wgrad_tile(a, device::block()));
        },
        &args, generator());
  };
  switch (plan.slots) {
    case 4: go(std::integral_constant<int, 4>{}); break;
    case 5: go(std::integral_constant<int, 5>{}); break;
    case 6: go(std::integral_constant<int, 6>{}); break;
    case 7: go(std::integral_constant<int, 7>{}); break;
    case 8: go(std::integral_constant<int, 8>{}); break;
    default: go(std::integral_constant<int, 9>{});
  }
  for (int64_t i = 0; i < c.y_channels; ++i)
    for (int64_t j = 0; j < c.x_channels; ++j)
      for (int k = 0; k < c.taps; ++k) {
        double sum = 0;
        for (int64_t b = 0; b < c.batch; ++b)
          for (int64_t t = 0; t < c.y_length; ++t)
            if (const int64_t u = c.stride * t + k - c.padding; u >= 0 && u < c.x_length)
              sum += y.at(b * c.y_length + t, i) * x.at(b * c.x_length + u, j);
        const int64_t e = (i * c.x_channels + j) * c.taps + k;
        double got = plan.splits > 1 ? 0 : gradient[e];
        for (int s = 0; s < plan.splits && plan.splits > 1; ++s) got += partials[s * weights + e];
        wgrad.add(got, sum, slack);
      }
  return plan.splits;
}

template <class T>
bool test_shape(Conv1d c, int multiprocessors) {
  c.first_channels = c.x_channels > 8 && generator() % 2 ? 8 * (1 + generator() % ((c.x_channels - 1) / 8)) : 0;
  const int64_t first = c.first_channels > 0 ? c.first_channels : c.x_channels;
  XRows<T> x(c.batch * c.x_length, c.x_channels, first);
  Rows<T> y(c.batch * c.y_length, c.y_channels, padded(c.y_channels));
  // Packed weights are tf32 numbers.
  using Packed = std::conditional_t<kInFull<T>, float, T>;
  Rows<Packed> weight(c.y_channels * c.x_channels, c.taps, c.taps, dpa::math::kWeightScale);
  const auto sixteen = [](const std::vector<uint8_t>& v) {
    return reinterpret_cast<const uint8_t*>((reinterpret_cast<uintptr_t>(v.data()) + 15) / 16 * 16);
  };
  const auto time_of = [&](int64_t t, int k) { return c.stride * t + k - c.padding; };
  constexpr bool kWhole = kHalves<T> || kInFull<T>;
  const double slack = (kWhole ? 5e-7 : 2e-6) * std::sqrt(c.taps * 512.0) + (kWhole ? 2e-6 : 1e-5);

  const auto second = second_parts(c, weight);
  const auto packed = pack(c, weight, second, false);
  std::vector<float> out(c.batch * c.y_length * c.y_channels, NAN);
  Run run{mma_args(plan_mma_fprop(c, multiprocessors), c, false, x.first.data(), x.more_data(), sixteen(packed)),
          out.data()};
  const ConvPlan forward = run.args.plan.conv;
  launch_convolution<T, false>(run);
  Worst fprop, dgrad, wgrad;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t t = 0; t < c.y_length; ++t)
      for (int64_t i = 0; i < c.y_channels; ++i) {
        double sum = 0;
        for (int k = 0; k < c.taps; ++k)
          if (const int64_t u = time_of(t, k); u >= 0 && u < c.x_length)
            for (int64_t j = 0; j < c.x_channels; ++j)
              sum += x.at(b * c.x_length + u, j) * weight.at(i * c.x_channels + j, k);
        fprop.add(out[(b * c.y_length + t) * c.y_channels + i], sum, slack);
      }

  const auto turned = pack(c, weight, second, kOfFloat<T>);
  std::vector<float> back(c.batch * c.x_length * c.x_channels, NAN);
  run = {mma_args(plan_mma_dgrad(c, multiprocessors), c, true, y.data(), nullptr, sixteen(turned)), back.data()};
  launch_convolution<T, !kOfFloat<T>>(run);
  std::vector<double> exact(back.size(), 0);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t t = 0; t < c.y_length; ++t)
      for (int k = 0; k < c.taps; ++k)
        if (const int64_t u = time_of(t, k); u >= 0 && u < c.x_length)
          for (int64_t j = 0; j < c.x_channels; ++j)
            for (int64_t i = 0; i < c.y_channels; ++i)
              exact[(b * c.x_length + u) * c.x_channels + j] +=
                  y.at(b * c.y_length + t, i) * weight.at(i * c.x_channels + j, k);
  for (size_t e = 0; e < back.size(); ++e) dgrad.add(back[e], exact[e], slack);

  int splits = 0;
  if constexpr (!kHalves<T>) splits = test_wgrad<T>(c, multiprocessors, x, y, wgrad, slack);
  const bool good = fprop.wrong + dgrad.wrong + wgrad.wrong == 0;
  std::printf(
      "%s B %d x %dx%d (%d) y %dx%d k %d s %d: tile %dx%d, %d boxes; fprop %.2f dgrad %.2f wgrad %.2f, splits %d, %d, "
      "%d "
      "%s\n",
      kHalves<T>                        ? "two halves"
      : kInFull<T>                      ? "in full"
      : kOfFloat<T>                     ? "tf32"
      : std::is_same_v<T, device::Half> ? "f16 "
                                        : "bf16",
      int(c.batch), int(c.x_length), int(c.x_channels), int(first), int(c.y_length), int(c.y_channels), c.taps,
      c.stride, forward.tile_rows, forward.tile_columns, plan_mma_fprop(c, multiprocessors).boxes, fprop.error,
      dgrad.error, wgrad.error, plan_mma_fprop(c, multiprocessors).splits, run.args.plan.splits, splits,
      good ? "ok" : "WRONG");
  std::fflush(stdout);
  return good;
}

bool test(DType dtype, bool halves, int64_t batch, int64_t length, int64_t y_channels, int64_t x_channels, int taps,
          int stride, int multiprocessors) {
  const int padding = taps == 4 && stride == 2 ? 1 : taps / 2;
  const int64_t y_length = (length + 2 * padding - taps) / stride + 1;
  if (y_length <= 0) return true;
  Conv1d c{dtype, batch, y_length, y_channels, length, x_channels, taps, stride, padding};
  c.halves = halves;
  if (!mma_serves(c)) return std::printf("not served: T %d k %d s %d\n", int(length), taps, stride), false;
  if (halves) return test_shape<TwoHalves>(c, multiprocessors);
  if (dtype == DType::kFloat32)
    return test_shape<float>(c, multiprocessors) && (!in_full(c) || test_shape<InFull>(c, multiprocessors));
  return dtype == DType::kFloat16 ? test_shape<device::Half>(c, multiprocessors)
                                  : test_shape<device::BFloat16>(c, multiprocessors);
}

}  // namespace

int main(int count, char** arguments) {
  const int random_shapes = count > 1 ? std::atoi(arguments[1]) : 12;
  if (count > 2) generator.seed(std::atoi(arguments[2]));
  int wrong = 0;
  struct Type {
    DType dtype;
    bool halves;
  };
  const auto try_one = [&](Type type, int64_t b, int64_t l, int64_t n, int64_t w, int k, int s, int sms) {
    wrong += !test(type.dtype, type.halves, b, l, n, w, k, s, sms);
  };
  constexpr Type types[] = {
      {DType::kBFloat16, false}, {DType::kFloat16, false}, {DType::kFloat32, false}, {DType::kFloat32, true}};
  for (const auto type : types) {
    try_one(type, 9, 16, 40, 72, 5, 1, 1);    // one multiprocessor: large tiles
    try_one(type, 8, 16, 128, 72, 3, 1, 1);   // the largest ones
    try_one(type, 32, 4, 128, 40, 5, 1, 1);   // terms that read nothing but padding are skipped
    try_one(type, 4, 16, 128, 128, 1, 1, 1);  // wide and low ones
    try_one(type, 3, 10, 72, 40, 7, 1, 100);  // small ones
    try_one(type, 9, 64, 40, 24, 5, 1, 100);  // the weight gradient's rows in two parts
    try_one(type, 2, 20, 24, 40, 9, 1, 100);
    try_one(type, 2, 8, 200, 264, 5, 1, 132);  // several blocks a tile, the last one with less
    try_one(type, 3, 4, 72, 700, 3, 2, 132);
    try_one(type, 2, 4, 520, 40, 4, 2, 132);
    try_one(type, 5, 16, 24, 40, 3, 2, 2);   // downsampling
    try_one(type, 5, 8, 24, 20, 4, 2, 100);  // upsampling, as dgrad
  }
  // Of weights of one part, whose tiles are not those of float32 in full.
  constexpr Type tf32{DType::kFloat32, false};
  try_one(tf32, 8, 16, 304, 296, 3, 1, 1), try_one(tf32, 12, 4, 528, 520, 1, 1, 100);
  for (int i = 0; i < random_shapes; ++i) {
    const auto pick = [](int low, int high) { return static_cast<int>(low + generator() % (high - low + 1)); };
    const int taps = pick(1, 9), stride = taps == 3 || taps == 4 ? pick(1, 2) : 1;
    try_one(types[i % 4], pick(1, 6), i % 5 == 4 ? pick(60, 140) : pick(1, 24), pick(1, 140), pick(1, 140), taps,
            stride, i / 4 % 2 ? 2 : 100);
  }
  std::printf("%s: %d wrong\n", wrong ? "FAILED" : "passed", wrong);
  return wrong != 0;
}
