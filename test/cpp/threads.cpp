// Every op from many threads at once, for ThreadSanitizer to watch: threads LIBRARY ROUNDS. The library is opened as
// any program opens it; what is shared is what users share: parameters, a graph that several threads go back through,
// packed weights, and more networks than the library keeps plans of.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "kernels/plans/unet1d/plan.h"

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kThreads = 8;
constexpr int kNetworks = 70;  // of more than 64 the plans are forgotten, while other threads use them

/// Calls dpa::name; arguments that are left out have their defaults.
torch::jit::Stack call(const char* name, torch::jit::Stack stack, const char* overload = "") {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("dpa::") + name).c_str(), overload);
  const auto& arguments = op.schema().arguments();
  for (size_t i = stack.size(); i < arguments.size(); ++i) stack.push_back(arguments[i].default_value().value());
  op.callBoxed(stack);
  return stack;
}

Tensor first(const char* name, torch::jit::Stack stack) { return call(name, std::move(stack))[0].toTensor(); }

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("wrong: %s\n", what);
  std::abort();
}

bool same(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i], b[i])) return false;
  return a.size() == b.size();
}

/// What all threads share.
struct Shared {
  Tensor x = at::randn({3, 4, 6}), h = at::randn({3, 5}), table = at::rand({4, 6}), constants = at::rand({4, 5}) + 0.5;
  Tensor index = at::tensor(int64_t{2}), features = at::randn({3, 7});
  Tensors parameters;

  Shared() {
    const std::vector<std::vector<int64_t>> shapes = {{4, 4, 3}, {4}, {4},      {4},  {4, 4, 3}, {4},
                                                      {4},       {4}, {15, 12}, {15}, {5, 24},   {5}};
    for (const auto& shape : shapes) parameters.push_back(at::randn(shape).set_requires_grad(true));
  }

  /// Every differentiable op in a row.
  Tensor loss() const {
    const auto& p = parameters;
    Tensor y = first("conv1d", {x, p[0], p[1], 1, 1, false});
    y = first("conv1d_gnm", {y, p[0], p[1], p[2], p[3], 2});
    y = first("residual_block1d", {y, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], c10::IValue(), c10::IValue(), 2});
    y = first("group_norm_mish", {y, 2, p[2], p[3]});
    y = first("fused_relu_add", {first("elementwise_mult", {y, y}), y, 0.5});
    y = first("denoise", {y, x, constants, index, x});
    y = first("scheduler_step", {y, x, table, index});
    y = y + first("normal_draws", {x, 1, 2, at::detail::createCPUGenerator(7)})[0];
    const auto state = call("lltm", {features, p[8], p[9], h, h});
    const auto joint = first("joint_linear", {y.flatten(1), Tensors{p[10], p[10]}, Tensors{p[11], p[11]}});
    return y.sum() + joint.square().sum() + (state[0].toTensor() * state[1].toTensor()).sum();
  }
};

/// A network of the family with packed weights, and what it answers.
struct Network {
  std::vector<int64_t> config;
  Tensors weights;
  Tensor packed, sample = at::randn({2, 8, 3}), cond = at::randn({2, 4}), steps = at::arange(3.0),
                 table = at::rand({3, 6});
  Tensors answers;

  explicit Network(int i) : config{3, 3, 2, 8, 4, i % 2, 8, 10 + 2 * (i / 2)} {
    dpa::kernels::unet1d::Config sizes;
    sizes.action_dim = 3, sizes.kernel_size = 3, sizes.num_groups = 2, sizes.step_dim = 8, sizes.cond_dim = 4;
    sizes.film_scale = i % 2, sizes.levels = 2, sizes.down_dims[0] = 8,
    sizes.down_dims[1] = static_cast<int>(config[7]);
    for (const auto& weight : make_plan(sizes, dpa::kernels::DType::kFloat32).weights)
      weights.push_back(at::randn(std::vector<int64_t>(weight.shape.begin(), weight.shape.end())) / 8);
    packed = pack();
    answers = run();
  }

  Tensor pack() const { return first("unet1d_pack", {weights, config, at::kFloat}); }
  Tensors run() const {
    return {first("unet1d", {sample, steps.slice(0, 0, 2), cond, packed, config, at::kFloat}),
            first("diffusion_sample", {sample, steps, cond, packed, config, at::kFloat, table, 1.0})};
  }
};

bool refused(const char* name, torch::jit::Stack stack) {
  try {
    call(name, std::move(stack));
  } catch (const c10::Error& error) {
    return std::string(error.what()).find(std::string("dpa::") + name + ": ") != std::string::npos;
  }
  return false;
}

}  // namespace

int main(int count, char** arguments) {
  expect(count == 3, "arguments must be LIBRARY ROUNDS");
  at::set_num_threads(1);  // each thread works alone: ThreadSanitizer does not see how OpenMP's threads wait
  if (!dlopen(arguments[1], RTLD_NOW)) {
    std::printf("%s\n", dlerror());
    return 1;
  }
  const int rounds = std::atoi(arguments[2]);
  at::manual_seed(0);
  const Shared shared;
  std::barrier start(kThreads + 1);

  // Ops first: their first calls, which look up one another, meet.
  std::vector<Tensors> gradients(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      start.arrive_and_wait();
      for (int round = 0; round < rounds; ++round) {
        auto got = torch::autograd::grad({shared.loss()}, shared.parameters);
        expect(round == 0 || same(got, gradients[t]), "gradients of one thread");
        gradients[t] = got;
        const Tensor out = at::empty_like(shared.x);
        call("elementwise_mult", {shared.x, shared.x, out}, "out");
        expect(at::equal(out, shared.x * shared.x), "the out variant");
        expect(refused("conv1d", {shared.x, shared.h}), "a refusal");
        expect(first("group_norm_mish", {shared.x.to(at::kMeta), 2}).sizes() == shared.x.sizes(), "meta");
      }
    });
  start.arrive_and_wait();
  for (auto& thread : threads) thread.join();
  for (const auto& one : gradients) expect(same(one, gradients[0]), "gradients of all threads");
  threads.clear();

  // One graph, which all go back through.
  const Tensor loss = shared.loss();
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      start.arrive_and_wait();
      for (int round = 0; round < rounds; ++round)
        expect(same(torch::autograd::grad({loss}, shared.parameters, {}, true), gradients[0]), "a shared graph");
    });
  start.arrive_and_wait();
  for (auto& thread : threads) thread.join();
  threads.clear();

  // More networks than plans are kept of; each thread in its own order.
  std::vector<Network> networks;
  for (int i = 0; i < kNetworks; ++i) networks.emplace_back(i);
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      start.arrive_and_wait();
      for (int i = 0; i < rounds * kNetworks; ++i) {
        const auto& network = networks[(i * (2 * t + 1) + 7 * t) % kNetworks];
        expect(same(network.run(), network.answers), "packed weights");
        if (i % 8 == 0) expect(at::equal(network.pack(), network.packed), "packing");
      }
    });
  start.arrive_and_wait();
  for (auto& thread : threads) thread.join();
  std::printf("%d threads, %d rounds: every answer is right\n", kThreads, rounds);
  return 0;
}
