// On the CPU a task is one group of one sample, C / num_groups channels that lie side by side. It is widened into a
// buffer, so that the passes over it (statistics, normalisation, Mish, FiLM) are plain loops that vectorise.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "kernels/math/mish.h"
#include "ops/common/vectorize.h"
#include "ops/group_norm_mish/group_norm_mish.h"

namespace dpa {
namespace {

DPA_VECTORIZE void mish_in_place(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = math::mish(x[i]);
}
void mish_in_place(double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = math::mish(x[i]);
}
/// value[i] = mish(x[i]), slope[i] = its derivative
DPA_VECTORIZE void mish_and_slope(const float* x, float* value, float* slope, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    value[i] = math::mish(x[i]);
    slope[i] = math::mish_derivative(x[i]);
  }
}
void mish_and_slope(const double* x, double* value, double* slope, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    value[i] = math::mish(x[i]);
    slope[i] = math::mish_derivative(x[i]);
  }
}

/// The arguments as plain pointers; null where absent. Weight and bias come in the type of the arithmetic.
template <class T>
struct Arguments {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const T* input;
  const A *weight, *bias;
  const T *scale, *shift, *residual;
  int64_t batch, channels, inner, groups, group_channels, group_size;
  double eps;

  /// No channels make no groups, whatever number divides them.
  int64_t tasks() const { return channels > 0 ? batch * groups : 0; }
};

/// Keeps the contiguous copies alive.
struct Contiguous {
  Tensor input, weight, bias, scale, shift, residual;

  Contiguous(const Tensor& input_, const OptionalTensor& weight_, const OptionalTensor& bias_,
             const OptionalTensor& scale_, const OptionalTensor& shift_, const OptionalTensor& residual_) {
    const auto contiguous = [](const OptionalTensor& t) { return t.has_value() ? t->contiguous() : Tensor(); };
    const auto parameter = [&](const OptionalTensor& t) {
      return t.has_value() ? t->to(accumulate_type(input_.scalar_type())).contiguous() : Tensor();
    };
    input = input_.contiguous();
    weight = parameter(weight_), bias = parameter(bias_);
    scale = contiguous(scale_), shift = contiguous(shift_), residual = contiguous(residual_);
  }
  template <class T>
  Arguments<T> arguments(int64_t groups, double eps) const {
    using A = typename Arguments<T>::A;
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<T>() : nullptr; };
    const auto parameter = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<A>() : nullptr; };
    const int64_t batch = input.size(0), channels = input.size(1);
    const int64_t inner = batch * channels > 0 ? input.numel() / (batch * channels) : 0;
    return {data(input), parameter(weight), parameter(bias), data(scale), data(shift),       data(residual),
            batch,       channels,          inner,           groups,      channels / groups, channels / groups * inner,
            eps};
  }
};

template <class T, class A>
A value_or(const T* data, int64_t i, A otherwise) {
  return data ? static_cast<A>(data[i]) : otherwise;
}

/// Widens group `task` into `x` and normalises it in place; returns 1 / standard deviation.
template <class T, class A>
A normalize(const Arguments<T>& args, int64_t task, A* x) {
  const int64_t n = args.group_size;
  const T* in = args.input + task * n;
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<A>(in[i]);
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  const A mean = static_cast<A>(sum / n);
  for (int64_t i = 0; i < n; ++i) {
    x[i] -= mean;
    squares += double(x[i]) * x[i];
  }
  const A rstd = static_cast<A>(1 / std::sqrt(squares / n + args.eps));
  for (int64_t i = 0; i < n; ++i) x[i] *= rstd;
  return rstd;
}

template <class T, class A>
void forward_task(const Arguments<T>& args, int64_t task, A* x, T* out) {
  const int64_t n = args.group_size, inner = args.inner;
  const int64_t first = task % args.groups * args.group_channels, film = task / args.groups * args.channels;
  normalize(args, task, x);
  for (int64_t c = 0; c < args.group_channels; ++c) {
    const A weight = value_or(args.weight, first + c, A(1)), bias = value_or(args.bias, first + c, A(0));
    for (int64_t i = c * inner; i < (c + 1) * inner; ++i) x[i] = x[i] * weight + bias;
  }
  mish_in_place(x, n);
  for (int64_t c = 0; c < args.group_channels; ++c) {
    const A scale = value_or(args.scale, film + first + c, A(1)), shift = value_or(args.shift, film + first + c, A(0));
    for (int64_t i = c * inner; i < (c + 1) * inner; ++i) x[i] = x[i] * scale + shift;
  }
  if (args.residual)
    for (int64_t i = 0; i < n; ++i) x[i] += static_cast<A>(args.residual[task * n + i]);
  for (int64_t i = 0; i < n; ++i) out[task * n + i] = static_cast<T>(x[i]);
}

/// Where a task writes: the input's gradient, and each channel's share in the others, (B, C) in the accumulate type.
template <class T, class A>
struct Gradients {
  T* input;
  A *weight, *bias, *scale, *shift;
};

template <class T, class A>
void backward_task(const Arguments<T>& args, int64_t task, const T* grad, A* scratch, const Gradients<T, A>& to) {
  const int64_t n = args.group_size, inner = args.inner;
  const int64_t first = task % args.groups * args.group_channels, film = task / args.groups * args.channels;
  A *x = scratch, *u = x + n, *value = u + n, *slope = value + n;
  const A rstd = normalize(args, task, x);
  for (int64_t c = 0; c < args.group_channels; ++c) {
    const A weight = value_or(args.weight, first + c, A(1)), bias = value_or(args.bias, first + c, A(0));
    for (int64_t i = c * inner; i < (c + 1) * inner; ++i) u[i] = x[i] * weight + bias;
  }
  mish_and_slope(u, value, slope, n);
  double sum = 0, dot = 0;  // of the normalised input's gradient, and of it times the normalised input
  for (int64_t c = 0; c < args.group_channels; ++c) {
    const A weight = value_or(args.weight, first + c, A(1)), scale = value_or(args.scale, film + first + c, A(1));
    double grad_weight = 0, grad_bias = 0, grad_scale = 0, grad_shift = 0;
    for (int64_t i = c * inner; i < (c + 1) * inner; ++i) {
      const A g = grad[task * n + i];
      const A grad_u = g * scale * slope[i];
      grad_shift += g;
      grad_scale += g * value[i];
      grad_bias += grad_u;
      grad_weight += grad_u * x[i];
      u[i] = grad_u * weight;
    }
    sum += grad_bias * weight;
    dot += grad_weight * weight;
    const int64_t channel = film + first + c;
    to.weight[channel] = static_cast<A>(grad_weight), to.bias[channel] = static_cast<A>(grad_bias);
    to.scale[channel] = static_cast<A>(grad_scale), to.shift[channel] = static_cast<A>(grad_shift);
  }
  if (!to.input) return;
  const A mean = static_cast<A>(sum / n), slant = static_cast<A>(dot / n);
  for (int64_t i = 0; i < n; ++i) to.input[task * n + i] = static_cast<T>(rstd * (u[i] - mean - x[i] * slant));
}

template <class F>
void for_each_task(int64_t tasks, int64_t group_size, const F& f) {
  at::parallel_for(0, tasks, std::max<int64_t>(1, 8192 / std::max<int64_t>(1, group_size)), f);
}

NormGradients group_norm_mish_backward_cpu(const Tensor& grad_, const Tensor& input, int64_t num_groups,
                                           const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                           const OptionalTensor& scale, const OptionalTensor& shift, NormMask mask) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift);
  check_same("group_norm_mish_backward", "grad", grad_, "input", input);
  const Contiguous in(input, weight, bias, scale, shift, std::nullopt);
  const auto grad = grad_.contiguous();
  const auto type = input.scalar_type();
  auto grad_input = mask[0] ? at::empty_like(in.input) : Tensor();
  auto sums = at::empty({4, input.size(0), input.size(1)}, input.options().dtype(accumulate_type(type)));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "group_norm_mish_backward", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto args = in.arguments<scalar_t>(num_groups, eps);
    A* sum = sums.template mutable_data_ptr<A>();
    const int64_t pairs = args.batch * args.channels;
    const Gradients<scalar_t, A> to{mask[0] ? grad_input.template mutable_data_ptr<scalar_t>() : nullptr, sum,
                                    sum + pairs, sum + 2 * pairs, sum + 3 * pairs};
    const auto* g = grad.const_data_ptr<scalar_t>();
    for_each_task(args.tasks(), args.group_size, [&](int64_t begin, int64_t end) {
      std::vector<A> scratch(4 * args.group_size);
      for (int64_t task = begin; task < end; ++task) backward_task(args, task, g, scratch.data(), to);
    });
  });
  const auto over_batch = [&](int i, int slot, const OptionalTensor& parameter) {
    return mask[slot] ? sums.select(0, i).sum(0).to(parameter->scalar_type()) : Tensor();
  };
  const auto per_sample = [&](int i, int slot) {
    return mask[slot] ? sums.select(0, i).to(type, /*non_blocking=*/false, /*copy=*/true) : Tensor();
  };
  return {mask[0] ? in_order(grad_input, is_channels_last(input)) : Tensor(), over_batch(0, 1, weight),
          over_batch(1, 2, bias), per_sample(2, 3), per_sample(3, 4)};
}

Tensor checked_group_norm_mish_cpu(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                   const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                                   const OptionalTensor& shift, const OptionalTensor& residual) {
  check_group_norm_mish("group_norm_mish", input, num_groups, weight, bias, eps, scale, shift, residual);
  return group_norm_mish_cpu(input, num_groups, weight, bias, eps, scale, shift, residual);
}

}  // namespace

Tensor group_norm_mish_cpu(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale,
                           const OptionalTensor& shift, const OptionalTensor& residual) {
  const Contiguous in(input, weight, bias, scale, shift, residual);
  auto out = at::empty(input.sizes(), input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "group_norm_mish", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const auto args = in.arguments<scalar_t>(num_groups, eps);
    auto* result = out.mutable_data_ptr<scalar_t>();
    for_each_task(args.tasks(), args.group_size, [&](int64_t begin, int64_t end) {
      std::vector<A> x(args.group_size);
      for (int64_t task = begin; task < end; ++task) forward_task(args, task, x.data(), result);
    });
  });
  return in_order(out, is_channels_last(input));
}

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("group_norm_mish", &checked_group_norm_mish_cpu);
  m.impl("group_norm_mish_backward", &group_norm_mish_backward_cpu);
}

}  // namespace dpa
