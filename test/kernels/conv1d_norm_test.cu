// A convolution with GroupNorm, Mish and FiLM after it in one launch, against float64.
#include <random>

#include "test/kernels/conv1d_case.cuh"

namespace dpa::test {
namespace {

// group_norm_mish of the rows `y`, a block a group of a sample.
template <class T>
__global__ void slow_norm(Conv1d c, int group, double eps, const T* y, const float* weight, const float* bias,
                          const T* scale, const T* shift, int64_t stride, const T* residual, double* out) {
  __shared__ double statistics[2];
  const int64_t sample = blockIdx.x, first = blockIdx.y * group, of = c.y_length * group;
  const auto at = [&](int64_t e) { return (sample * c.y_length + e / group) * c.y_channels + first + e % group; };
  if (threadIdx.x == 0) {
    double sum = 0, squares = 0;
    for (int64_t e = 0; e < of; ++e) sum += widen(y[at(e)]);
    for (int64_t e = 0; e < of; ++e) squares += (widen(y[at(e)]) - sum / of) * (widen(y[at(e)]) - sum / of);
    statistics[0] = sum / of, statistics[1] = 1 / sqrt(squares / of + eps);
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < of; e += blockDim.x) {
    const int64_t n = first + e % group, film = sample * stride + n;
    const double u = (widen(y[at(e)]) - statistics[0]) * statistics[1] * weight[n] + bias[n];
    const double mish = u * tanh(log1p(exp(u)));
    out[at(e)] = mish * (scale ? widen(scale[film]) : 1) + (shift ? widen(shift[film]) : 0) +
                 (residual ? widen(residual[at(e)]) : 0);
  }
}

// fprop with a normalisation after it, and a shortcut beside it where the kernels take one: the convolution against
// float64, the normalisation against float64 of the convolution's own rounded output.
template <class T>
bool test_normalised(Conv1d c, int group, uint64_t seed, bool film, bool residual, bool concatenated) {
  constexpr bool kFloat = std::is_same_v<T, float>;
  const double unit = kFloat ? 1.01 / (1 << 24) : std::is_same_v<T, __half> ? 0.501 / 1024 : 0.501 / 128;
  const double slack = cut_off<T>(c.taps, c.x_channels);
  const bool beside = takes_shortcut(c, group);
  Case<T> t(c, seed);
  const int64_t eights = (c.x_channels - 1) / 8;  // of the first of two tensors, at most
  concatenated = concatenated && eights > 0 && c.x_channels % 8 == 0;
  if (concatenated) c.first_channels = 8 * (1 + static_cast<int64_t>(seed / 13) % eights);
  concatenated = concatenated && takes_shortcut(c, group) == beside;
  if (!concatenated) c.first_channels = 0;
  Conv1d one = c;
  one.taps = 1, one.padding = 0;
  Case<T> s(one, seed + 100);
  const int64_t channels = c.y_channels, stride = channels + 8, first = concatenated ? c.first_channels : c.x_channels;
  Buffer parameters(channels * 8), films(2 * c.batch * stride * sizeof(T)), out(t.y_out.bytes),
      exact(t.y_rows * channels * 8);
  Halves x(sizeof(T), t.x_rows, t.x_width, first);
  Case<T>::template put<float>(parameters, 2, channels, channels, seed + 6, 1);
  Case<T>::template put<T>(films, 2 * c.batch, stride, stride, seed + 7, 1);
  if (concatenated) x.take(t.x);
  CHECK(cudaDeviceSynchronize());
  const T *scale = as<T>(films), *shift = scale + c.batch * stride;
  const float* weight = as<float>(parameters);
  const Normalisation norm{group,
                           1e-5,
                           DType::kFloat32,
                           weight,
                           weight + channels,
                           film ? scale : nullptr,
                           shift,
                           stride,
                           stride,
                           residual ? t.y_residual.data : nullptr,
                           out.data};
  const Addends add{t.bias.data, DType::kFloat32, {}}, add_side{s.bias.data, DType::kFloat32, {}};
  const Shortcut side{{s.fprop_weights(), true}, add_side, s.y_out.data};
  const Rows input = concatenated ? Rows{x.first.data, x.more.data} : Rows{t.x.data};
  Buffer workspace(fprop_workspace(c, group));
  const auto run = [&](void* y) {
    CHECK(cudaMemset(out.data, 0xFF, out.bytes));
    CHECK(cudaMemset(workspace.data, 0xFF, workspace.bytes));
    CHECK(fprop_normalised(c, input, {t.fprop_weights(), true}, add, y, norm, beside ? side : Shortcut{},
                           workspace.data, 0));
    CHECK(cudaDeviceSynchronize());
  };
  run(t.y_out.data);
  slow_fprop<T>
      <<<2048, 256>>>(c, as<T>(t.x), as<float>(t.weight), as<float>(t.bias), nullptr, as<double>(exact), t.x_width);
  CHECK(cudaDeviceSynchronize());
  const double conv = worst(to_host<T>(t.y_out), to_host<double>(exact), unit, slack);
  slow_norm<T><<<dim3(c.batch, channels / group), 128>>>(c, group, 1e-5, as<T>(t.y_out), weight, weight + channels,
                                                         norm.scale ? scale : nullptr, shift, stride,
                                                         residual ? as<T>(t.y_residual) : nullptr, as<double>(exact));
  CHECK(cudaDeviceSynchronize());
  const double normalised = worst(to_host<T>(out), to_host<double>(exact), unit, kFloat ? 1e-5 : 2e-5);
  double shortcut = 0;
  if (beside) {
    slow_fprop<T>
        <<<2048, 256>>>(one, as<T>(t.x), as<float>(s.weight), as<float>(s.bias), nullptr, as<double>(exact), t.x_width);
    CHECK(cudaDeviceSynchronize());
    shortcut = worst(to_host<T>(s.y_out), to_host<double>(exact), unit, slack);
  }
  const auto once = to_host<uint16_t>(out);
  bool repeats = true;
  for (int i = 0; i < 3; ++i) run(nullptr), repeats = repeats && once == to_host<uint16_t>(out);
  const bool guards =
      out.guard_intact() && t.y_out.guard_intact() && s.y_out.guard_intact() && workspace.guard_intact();
  const bool good = conv <= 1 && normalised <= 1 && shortcut <= 1 && repeats && guards;
  int multiprocessors;
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  const auto plan = plan_normalised(c, group, multiprocessors);
  if (!good || seed < 2000)
    std::printf(
        "norm %s%s B %lld T %lld %lldx%lld k %d group %d: conv %.2f norm %.2f shortcut %s%.2f, splits %d exchange %d "
        "step %d%s%s %s\n",
        kFloat                      ? "tf32"
        : std::is_same_v<T, __half> ? "f16 "
                                    : "bf16",
        c.in_place ? " in place" : "", (long long)c.batch, (long long)c.y_length, (long long)c.y_channels,
        (long long)c.x_channels, c.taps, group, conv, normalised, beside ? concatenated ? "of two " : "" : "none ",
        shortcut, plan.splits, plan.exchange, plan.column_step, guards ? "" : " GUARD", repeats ? "" : " UNSTEADY",
        good ? "ok" : "WRONG");
  return good;
}

}  // namespace

int run_norm_tests() {
  int wrong = 0, served = 0;
  uint64_t seed = std::random_device{}() % 1000;
  std::printf("seed of the normalised %llu\n", (unsigned long long)seed);
  const auto try_one = [&](DType type, int64_t batch, int64_t length, int64_t channels, int64_t in, int taps,
                           int group) {
    const Conv1d c{type, batch, length, channels, length, in, taps, 1, taps / 2};
    if (!takes(c) || !normalises(c, group)) return false;
    const uint64_t s = seed += 13;
    const bool film = s % 2, residual = s % 3, two = s % 5 > 1;
    Conv1d in_place = c;
    in_place.in_place = type == DType::kFloat32 && has_wgmma() && can_read_in_place(c);
    if (in_place.in_place && normalises(in_place, group))
      wrong += !test_normalised<float>(in_place, group, s, film, residual, two);
    const bool good = type == DType::kFloat32   ? test_normalised<float>(c, group, s, film, residual, two)
                      : type == DType::kFloat16 ? test_normalised<__half>(c, group, s, film, residual, two)
                                                : test_normalised<__nv_bfloat16>(c, group, s, film, residual, two);
    wrong += !good, ++served;
    return true;
  };
  for (const auto type : {DType::kBFloat16, DType::kFloat32}) {
    for (int level = 0; level < 3; ++level) {  // the networks' own
      const int64_t c = 512 << level;
      try_one(type, 8, 64 >> level, c, level ? c / 2 : 6, 5, c / 8), try_one(type, 8, 64 >> level, c, c, 5, c / 8);
      try_one(type, 16, 16 >> level, c, c, 5, c / 8), try_one(type, 16, 48 >> level, c / 2, c / 2, 5, c / 16);
      try_one(type, 28, 32 >> level, c / 2, c / 4, 3, c / 16), try_one(type, 64, 16 >> level, 384, 384, 5, 48);
    }
    for (int length = 2; length <= 32; length *= 2)  // lanes that a row's do not divide
      for (const int group : {12, 20, 24, 40, 48, 80, 96, 120}) {
        try_one(type, 129, length, group * 8, 128, 5, group), try_one(type, 40, length, group * 3, 320, 3, group);
      }
    try_one(type, 8, 16, 1024, 4096, 5, 128), try_one(type, 8, 32, 512, 2048, 5, 64);
    try_one(type, 4, 128, 256, 256, 5, 32), try_one(type, 1, 12, 640, 320, 3, 80),
        try_one(type, 300, 48, 256, 256, 5, 32);
    // Small ones, of float32 in full: of which a tile is not filled, and a group fills one.
    try_one(type, 8, 16, 64, 32, 5, 8), try_one(type, 3, 16, 64, 32, 5, 8), try_one(type, 8, 8, 128, 24, 5, 64);
  }
  std::mt19937 random(std::random_device{}());
  seed = 2000 + random() % 100000;
  const auto pick = [&](int low, int high) { return static_cast<int>(low + random() % (high - low + 1)); };
  constexpr DType types[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (int i = 0; i < 160; ++i) {
    const int groups[] = {8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 120, 128, 256};
    const int group = groups[pick(0, 13)], taps[] = {1, 3, 5, 7};
    const int64_t in = pick(0, 2) ? pick(1, 8) * 64 : pick(1, 300);
    try_one(types[i % 3], pick(1, i % 4 ? 20 : 90), pick(1, 128), int64_t{group} * pick(1, 8), in, taps[pick(0, 3)],
            group);
  }
  std::printf("%s: %d wrong of %d normalised\n", wrong ? "FAILED" : "passed", wrong, served);
  return wrong;
}

}  // namespace dpa::test
