// The scalar formulas that CPU and CUDA kernels share, against libm in long double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/math/diffusion_step.h"
#include "kernels/math/lltm.h"
#include "kernels/math/mish.h"

namespace dpa::math {
namespace {

long double exact_mish(long double x) { return x * std::tanh(std::log1p(std::exp(x))); }

TEST(Exponential, IsGoodToTwoUnitsInTheLastPlace) {
  for (float x = -87.0f; x <= 88.0f; x += 0.0137f) {
    const double exact = std::exp(static_cast<double>(x));
    EXPECT_NEAR(exponential(x) / exact, 1.0, 2.5e-7) << x;
  }
}

TEST(Hyperbolic, FloatsAreGoodToFourUnitsInTheLastPlace) {
  const auto near = [](float value, double exact, float x) {
    EXPECT_NEAR(value, exact, 4 * std::abs(exact) * std::numeric_limits<float>::epsilon() + 1e-38) << x;
  };
  for (double power = -20; power <= 2; power += 0.00137) {
    for (const double sign : {1.0, -1.0}) {
      const auto x = static_cast<float>(sign * std::pow(10.0, power));
      const auto exact = static_cast<double>(x);
      if (exact < 88) near(exponential_minus_1(x), std::expm1(exact), x);
      if (std::abs(exact) < 87) near(sigmoid(x), 1 / (1 + std::exp(-exact)), x);
      near(hyperbolic_tangent(x), std::tanh(exact), x);
    }
  }
}

TEST(Hyperbolic, KeepsNanAndItsLimits) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kFar = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isnan(exponential_minus_1(kNan)) && std::isnan(hyperbolic_tangent(kNan)) &&
              std::isnan(sigmoid(kNan)));
  EXPECT_EQ(exponential_minus_1(-kFar), -1.0f);
  EXPECT_EQ(hyperbolic_tangent(-kFar), -1.0f);
  EXPECT_EQ(hyperbolic_tangent(kFar), 1.0f);
  EXPECT_EQ(sigmoid(kFar), 1.0f);
  EXPECT_EQ(sigmoid(-kFar), 0.0f);
}

TEST(Mish, FollowsItsDefinition) {
  for (double x = -60; x <= 60; x += 0.0173) {
    const double exact = static_cast<double>(exact_mish(x));
    EXPECT_NEAR(mish(x), exact, 1e-14 * (1 + std::abs(exact))) << x;
    EXPECT_NEAR(mish(static_cast<float>(x)), exact_mish(static_cast<float>(x)), 4e-7 * (1 + std::abs(exact))) << x;
  }
}

TEST(Mish, DerivativeIsTheSlope) {
  for (double x = -30; x <= 30; x += 0.0173) {
    const long double h = 1e-6L;
    const double slope = static_cast<double>((exact_mish(x + h) - exact_mish(x - h)) / (2 * h));
    EXPECT_NEAR(mish_derivative(x), slope, 1e-9) << x;
    EXPECT_NEAR(mish_derivative(static_cast<float>(x)), slope, 2e-6) << x;
  }
}

TEST(Mish, KeepsNanAndStaysFiniteFarOut) {
  EXPECT_TRUE(std::isnan(mish(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(mish(1e30f), 1e30f);
  EXPECT_EQ(mish(-1e30f), -0.0f);
  EXPECT_EQ(mish_derivative(1e30f), 1.0f);
  EXPECT_EQ(mish_derivative(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(mish_derivative(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Clamp, KeepsNan) {
  EXPECT_EQ(clamp(2.0, 1.0), 1.0);
  EXPECT_EQ(clamp(-2.0, 1.0), -1.0);
  EXPECT_EQ(clamp(0.5, 1.0), 0.5);
  EXPECT_TRUE(std::isnan(clamp(std::nan(""), 1.0)));
}

TEST(LltmCell, FollowsItsDefinition) {
  for (double raw : {-60.0, -1.3, -1e-9, 0.0, 0.4, 7.0}) {
    const LltmCell<double> cell(0.3, -0.7, raw, 0.2);
    const double input = 1 / (1 + std::exp(-0.3)), output = 1 / (1 + std::exp(0.7));
    const double expected = 0.2 + input * (raw > 0 ? raw : std::expm1(raw));
    EXPECT_NEAR(cell.cell, expected, 1e-15 * (1 + std::abs(expected))) << raw;
    EXPECT_NEAR(cell.h(), std::tanh(expected) * output, 1e-15) << raw;
  }
}

TEST(LltmCell, GradientIsTheSlope) {
  const double at[4] = {0.3, -0.7, -0.4, 0.2}, h = 1e-6, grad_h = 0.8, grad_cell = -1.7;
  for (double raw : {-1.1, 0.9}) {
    const auto loss = [&](int moved, double by) {
      double x[4] = {at[0], at[1], raw, at[3]};
      if (moved >= 0) x[moved] += by;
      const LltmCell<double> cell(x[0], x[1], x[2], x[3]);
      return grad_h * cell.h() + grad_cell * cell.cell;
    };
    const auto slope = [&](int i) { return (loss(i, h) - loss(i, -h)) / (2 * h); };
    const auto g = LltmCell<double>(at[0], at[1], raw, at[3]).gradient(grad_h, grad_cell);
    EXPECT_NEAR(g.input, slope(0), 1e-8);
    EXPECT_NEAR(g.output, slope(1), 1e-8);
    EXPECT_NEAR(g.candidate, slope(2), 1e-8);
    EXPECT_NEAR(g.old_cell, slope(3), 1e-8);
  }
}

TEST(LltmCell, StaysFiniteFarOutAndKeepsNan) {
  const LltmCell<float> far(-1e30f, 1e30f, -1e30f, 2.0f);
  EXPECT_EQ(far.cell, 2.0f);
  EXPECT_EQ(far.h(), std::tanh(2.0f));
  EXPECT_TRUE(std::isnan(LltmCell<float>(0, 0, std::numeric_limits<float>::quiet_NaN(), 0).h()));
}

TEST(SchedulerStep, GradientIsTheSlopeOfTheStep) {
  const double table[6] = {0.9, -0.4, 0.7, 0.2, 0.1, 0.3}, h = 1e-6;
  for (double clip : {0.1, 10.0}) {
    const SchedulerStep<double> step(table, 0, clip, true);
    const double o = 0.6, s = -0.8, n = 0.5;
    const auto g = step.gradient(1.0, o, s, n);
    EXPECT_NEAR(g.model_output, (step.step(o + h, s, n) - step.step(o - h, s, n)) / (2 * h), 1e-8);
    EXPECT_NEAR(g.sample, (step.step(o, s + h, n) - step.step(o, s - h, n)) / (2 * h), 1e-8);
    EXPECT_NEAR(g.noise, table[5], 1e-12);
    for (int c = 0; c < 6; ++c) {
      double up[6], down[6];
      for (int i = 0; i < 6; ++i) up[i] = table[i] + (i == c ? h : 0), down[i] = table[i] - (i == c ? h : 0);
      const SchedulerStep<double> a(up, 0, clip, true), b(down, 0, clip, true);
      EXPECT_NEAR(g.row[c], (a.step(o, s, n) - b.step(o, s, n)) / (2 * h), 1e-8) << c;
    }
  }
}

TEST(DenoiseStep, AddsNoNoiseAtTimestepZero) {
  const double table[10] = {0.6, 0.8, 0.5, 0.4, 0.3, 0.6, 0.8, 0.5, 0.4, 0.3};
  const DenoiseStep<double> first(table, 0, 0, true), second(table, 1, 0, true);
  EXPECT_EQ(first.step(0.1, 0.2, 7.0), first.step(0.1, 0.2, -7.0));
  EXPECT_NEAR(second.step(0.1, 0.2, 1.0) - second.step(0.1, 0.2, 0.0), 0.3, 1e-15);
}

}  // namespace
}  // namespace dpa::math
