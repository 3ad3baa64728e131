// `kernels::adamw_ema` against the formulas in float64 on the host: element types, sizes, addresses that are no multiple
// of a vector, more tensors than a launch takes, and what must stay untouched.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernels/cuda/adamw_ema/adamw_ema.h"
#include "kernels/cuda/common/dtype.cuh"

namespace dpa::kernels {
namespace {

constexpr double kPoison = 12345;  // around every tensor
constexpr int64_t kGuard = 32;

template <class T>
double number(T x) {
  return static_cast<double>(x);
}
double number(__half x) { return __half2float(x); }
double number(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
T stored(double x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(static_cast<float>(x));
  else
    return static_cast<T>(x);
}
template <class T>
constexpr DType kDType = std::is_same_v<T, double>   ? DType::kFloat64
                         : std::is_same_v<T, float>  ? DType::kFloat32
                         : std::is_same_v<T, __half> ? DType::kFloat16
                                                     : DType::kBFloat16;

/// Elements that host and device see, from an offset on, between guards.
template <class T>
class Elements {
 public:
  Elements(int64_t count, int64_t offset) : count_(count), offset_(offset + kGuard), all_(count + offset + 2 * kGuard) {
    EXPECT_EQ(cudaMallocManaged(&data_, all_ * sizeof(T)), cudaSuccess);
    for (int64_t i = 0; i < all_; ++i) data_[i] = stored<T>(kPoison);
  }
  ~Elements() { cudaFree(data_); }
  Elements(const Elements&) = delete;
  T* data() { return data_ + offset_; }
  T& operator[](int64_t i) { return data_[offset_ + i]; }
  bool guarded() const {
    for (int64_t i = 0; i < all_; ++i)
      if ((i < offset_ || i >= offset_ + count_) && number(data_[i]) != number(stored<T>(kPoison))) return false;
    return true;
  }

 private:
  T* data_ = nullptr;
  int64_t count_, offset_, all_;
};

struct Call {
  std::vector<int64_t> counts;
  int64_t offset = 0;  // of the gradients, in elements, from 16 bytes
  bool average = true, decoupled = true, maximize = false, clear = false;
  double grad_scale = 0, found_inf = 0, clip = 0, lr_at = 0, weight_decay = 0.1;  // 0: absent
};

template <class P, class G>
struct Tensors {
  using A = Accumulate<P>;
  Elements<P> param, exp_avg, exp_avg_sq;
  Elements<G> grad;
  Elements<A> average;
  Elements<float> step;
  Tensors(int64_t n, int64_t offset)
      : param(n, 0), exp_avg(n, 0), exp_avg_sq(n, 0), grad(n, offset), average(n, 0), step(1, 0) {}
};

template <class P, class G>
void expect_right(const Call& call) {
  using A = Accumulate<P>;
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::vector<std::unique_ptr<Tensors<P, G>>> all;
  std::vector<AdamWTensor> table;
  for (const int64_t n : call.counts) {
    auto& t = *all.emplace_back(std::make_unique<Tensors<P, G>>(n, call.offset));
    for (int64_t i = 0; i < n; ++i) {
      t.param[i] = stored<P>(normal(random)), t.grad[i] = stored<G>(normal(random));
      t.exp_avg[i] = stored<P>(normal(random) / 8), t.exp_avg_sq[i] = stored<P>(std::abs(normal(random)));
      t.average[i] = static_cast<A>(normal(random));
    }
    t.step[0] = static_cast<float>(all.size() % 5);
    table.push_back({t.param.data(), t.grad.data(), t.exp_avg.data(), t.exp_avg_sq.data(),
                     call.average ? t.average.data() : nullptr, t.step.data(), n});
  }
  Elements<float> scale(1, 0), found(1, 0), lr(1, 0);
  Elements<A> clip(1, 0);
  Elements<int64_t> updates(1, 0);
  scale[0] = static_cast<float>(call.grad_scale), found[0] = static_cast<float>(call.found_inf);
  lr[0] = static_cast<float>(call.lr_at), clip[0] = static_cast<A>(call.clip), updates[0] = 9;
  AdamWEma args = {};
  args.dtype = kDType<P>, args.grad_dtype = kDType<G>;
  args.tensors = table.data(), args.tensor_count = static_cast<int64_t>(table.size());
  args.lr = 0.01, args.beta1 = 0.9, args.beta2 = 0.99, args.weight_decay = call.weight_decay, args.eps = 1e-3;
  if (call.lr_at != 0) args.lr_at = lr.data();
  if (call.grad_scale != 0) args.grad_scale = scale.data();
  if (call.found_inf != 0) args.found_inf = found.data();
  if (call.clip != 0) args.clip = clip.data();
  if (call.average) args.updates = updates.data();
  args.schedule = {0.75, 1, 0, 0.9999};
  args.maximize = call.maximize, args.decoupled = call.decoupled, args.clear = call.clear;
  Elements<char> scratch(static_cast<int64_t>(adamw_ema_scratch(args.tensor_count)), 0);
  args.scratch = scratch.data();

  struct Expected {
    double param, grad, exp_avg, exp_avg_sq, average;
  };
  std::vector<std::vector<Expected>> expected;
  std::vector<float> steps;
  const double decay = 1 - std::pow(1 + 8.0, -0.75), lr_now = call.lr_at != 0 ? number(lr[0]) : 0.01;
  for (auto& t : all) {
    const int64_t n = call.counts[expected.size()];
    auto& list = expected.emplace_back();
    steps.push_back(t->step[0] + (call.found_inf == 0));
    for (int64_t i = 0; i < n; ++i) {
      Expected e = {number(t->param[i]), number(t->grad[i]), number(t->exp_avg[i]), number(t->exp_avg_sq[i]), 0};
      double g = e.grad;
      if (call.grad_scale != 0) g /= number(scale[0]);
      if (call.clip != 0) g *= number(clip[0]);
      if (call.maximize) g = -g;
      if (call.found_inf == 0) {
        if (call.decoupled)
          e.param -= lr_now * call.weight_decay * e.param;
        else
          g += call.weight_decay * e.param;
        e.exp_avg = 0.9 * e.exp_avg + 0.1 * g;
        e.exp_avg_sq = 0.99 * e.exp_avg_sq + 0.01 * g * g;
        const double step = steps.back(), second = e.exp_avg_sq / (1 - std::pow(0.99, step));
        e.param -= lr_now * e.exp_avg / (1 - std::pow(0.9, step)) / (std::sqrt(second) + 1e-3);
      }
      e.average = number(t->average[i]);
      if (call.average) e.average = decay * e.average + (1 - decay) * number(stored<P>(e.param));
      if (call.clear) e.grad = 0;
      list.push_back(e);
    }
  }
  ASSERT_EQ(adamw_ema(args, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const double digits = std::is_same_v<P, double>   ? 1e-9  // the schedule is of float32's step count
                        : std::is_same_v<P, float>  ? 3e-6
                        : std::is_same_v<P, __half> ? 1e-3
                                                    : 8e-3;
  const auto close = [&](double got, double wanted) {
    return std::abs(got - wanted) <= digits * (1 + std::abs(wanted));
  };
  for (size_t k = 0; k < all.size(); ++k) {
    auto& t = *all[k];
    ASSERT_EQ(t.step[0], steps[k]) << k;
    for (int64_t i = 0; i < call.counts[k]; ++i) {
      const Expected& e = expected[k][i];
      ASSERT_TRUE(close(number(t.param[i]), e.param)) << k << " " << i << " " << number(t.param[i]) << " " << e.param;
      ASSERT_TRUE(close(number(t.exp_avg[i]), e.exp_avg)) << k << " " << i;
      ASSERT_TRUE(close(number(t.exp_avg_sq[i]), e.exp_avg_sq)) << k << " " << i;
      ASSERT_TRUE(close(number(t.average[i]), e.average)) << k << " " << i << " " << number(t.average[i]);
      ASSERT_EQ(number(t.grad[i]), e.grad) << k << " " << i;
    }
    ASSERT_TRUE(t.param.guarded() && t.grad.guarded() && t.exp_avg.guarded() && t.exp_avg_sq.guarded() &&
                t.average.guarded() && t.step.guarded())
        << k;
  }
  ASSERT_TRUE(scratch.guarded());
}

class AdamWEmaKernel : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device here";
  }
};

const std::vector<int64_t> kCounts = {1, 4096, 0, 7, 0, 2048, 2049, 3 * 4096 + 5, 100000, 0};

TEST_F(AdamWEmaKernel, EveryType) {
  for (const bool average : {true, false}) {
    Call call{kCounts};
    call.average = average;
    expect_right<float, float>(call);
    expect_right<double, double>(call);
    expect_right<__half, __half>(call);
    expect_right<__nv_bfloat16, __nv_bfloat16>(call);
    expect_right<float, __half>(call);
    expect_right<float, __nv_bfloat16>(call);
  }
}

TEST_F(AdamWEmaKernel, GradientsAtAnyAddress) {
  for (const int64_t offset : {1, 2, 3, 5}) {
    Call call{kCounts, offset};
    call.clear = true;
    expect_right<float, float>(call);
    expect_right<float, __nv_bfloat16>(call);
    expect_right<__half, __half>(call);
    expect_right<double, double>(call);
  }
}

TEST_F(AdamWEmaKernel, ScaleClipAndRateFromTheDevice) {
  Call call{kCounts};
  call.grad_scale = 1024, call.clip = 0.37, call.lr_at = 0.02;
  expect_right<float, float>(call);
  expect_right<double, double>(call);
  call.maximize = true, call.decoupled = false;
  expect_right<float, float>(call);
  call.weight_decay = 0;
  expect_right<float, float>(call);
}

TEST_F(AdamWEmaKernel, InfiniteGradientsMoveTheAveragesAlone) {
  for (const bool clear : {false, true})
    for (const bool average : {false, true}) {
      Call call{kCounts};
      call.found_inf = 1, call.clear = clear, call.average = average;
      expect_right<float, float>(call);
    }
}

TEST_F(AdamWEmaKernel, MoreTensorsThanALaunchTakes) {
  Call call;
  for (int i = 0; i < 1000; ++i) call.counts.push_back(i % 37);
  expect_right<float, float>(call);
}

TEST_F(AdamWEmaKernel, NoTensorIsNoLaunch) { expect_right<float, float>(Call{}); }

}  // namespace
}  // namespace dpa::kernels
