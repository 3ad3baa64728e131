#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>

#include "kernels/cpu/unet1d.h"
#include "ops/common/streaming.h"
#include "ops/common/team.h"
#include "ops/unet1d/unet1d.h"

namespace dpa {
namespace {

namespace cpu = kernels::cpu;

Tensor unet1d_pack_cpu(at::TensorList weights, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = unet1d_plan("unet1d_pack", config, dtype);
  check_unet1d_pack(*plan, weights);
  DPA_CHECK(!plan->config.widened(), "unet1d_pack", "config must have the network's own widths on the CPU", config);
  DPA_CHECK(cpu::packs(plan->dtype), "unet1d_pack", "dtype must be float32, float16 or bfloat16 on the CPU", dtype);
  auto sources = cpu::pack_sources(*plan);
  std::vector<Tensor> kept;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (sources.needs_float[i]) {
      kept.push_back(weights[i].to(at::kFloat).contiguous());
      sources.floats[i] = kept.back().const_data_ptr<float>();
    }
    if (sources.needs_typed[i]) {
      kept.push_back(weights[i].to(dtype).contiguous());
      sources.typed[i] = kept.back().const_data_ptr();
    }
  }
  auto packed = zeros_for_streaming(unet1d_packed_bytes(*plan), weights[0].options());
  void* data = packed.mutable_data_ptr();
  at::parallel_for(0, cpu::pack_tasks(*plan), 1,
                   [&](int64_t begin, int64_t end) { cpu::pack(*plan, sources, data, begin, end); });
  return packed;
}

void run_call(const Plan& plan, const cpu::Kernels& kernels, const cpu::Call& call, const at::TensorOptions& options) {
  cpu::Program program;
  const auto bytes = static_cast<int64_t>(cpu::make_program(plan, kernels, call, 1, nullptr, program));
  auto workspace = at::empty({bytes}, options);
  run_as_team(
      cpu::useful_threads(plan, call.batch, call.horizon),
      [&](int team) { cpu::make_program(plan, kernels, call, team, workspace.mutable_data_ptr(), program); },
      [&](cpu::Team& team, int thread) { cpu::run(program, team, thread); });
}

Tensor run_unet1d(const char* op, const Plan& plan, UnetCall in) {
  check_unet1d(op, plan, in);
  for (Tensor* t : {&in.sample, &in.packed, &in.timesteps, &in.table, &in.global_cond, &in.noise, &in.known,
                    &in.known_mask, &in.local})
    if (t->defined()) *t = t->contiguous();
  // Bytes may begin anywhere; the kernels read numbers.
  if (reinterpret_cast<uintptr_t>(in.packed.const_data_ptr()) % alignof(float) != 0) in.packed = in.packed.clone();
  const auto floats = [](const Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
  const auto refused = cpu::reject(plan, in.sample.size(0), in.sample.size(1));
  TORCH_CHECK(refused.empty(), "dpa::", op, ": sample is refused: ", refused);
  TORCH_CHECK(cpu::packed_here(plan, in.packed.const_data_ptr()), "dpa::", op,
              ": packed must be what unet1d_pack made on the CPU for this config and dtype, got other bytes");
  std::string error;
  const auto& kernels = cpu::choose_kernels(error);
  TORCH_CHECK(error.empty(), "dpa::", op, ": ", error);

  cpu::Call call = {};
  call.batch = static_cast<int>(in.sample.size(0));
  call.horizon = static_cast<int>(in.sample.size(1));
  call.per_sample_timesteps = !in.table.defined();
  call.steps = call.per_sample_timesteps ? 1 : static_cast<int>(in.timesteps.size(0));
  auto out = at::empty(in.sample.sizes(), in.sample.options());
  if (call.steps == 0 || call.batch == 0) return out.copy_(in.sample);
  call.packed = in.packed.const_data_ptr();
  call.timesteps = floats(in.timesteps);
  call.global_cond = floats(in.global_cond);
  call.initial = floats(in.sample);
  call.table = floats(in.table);
  call.clip = static_cast<float>(in.clip);
  call.noise = floats(in.noise);
  call.condition_data = floats(in.known);
  call.condition_mask = in.known_mask.defined() ? static_cast<const uint8_t*>(in.known_mask.const_data_ptr()) : nullptr;
  call.local = floats(in.local);
  call.output = out.mutable_data_ptr<float>();

  std::atomic<bool> overflow{false};
  call.overflow = &overflow;
  run_call(plan, kernels, call, in.packed.options());
  if (overflow.load()) {
    call.overflow = nullptr;
    run_call(plan, kernels, call, in.packed.options());
  }
  return out;
}

Tensor unet1d_cpu(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                  const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype, const OptionalTensor& local) {
  return run_unet1d("unet1d", *unet1d_plan("unet1d", config, dtype),
                    step_call(sample, timesteps, global_cond, packed, local));
}

Tensor diffusion_sample_cpu(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                            const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype, const Tensor& table,
                            double clip, const OptionalTensor& noise, const OptionalTensor& known,
                            const OptionalTensor& known_mask, const OptionalTensor& local) {
  return run_unet1d("diffusion_sample", *unet1d_plan("diffusion_sample", config, dtype),
                    loop_call(sample, timesteps, global_cond, packed, table, clip, noise, known, known_mask, local));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("unet1d_pack", &unet1d_pack_cpu);
  m.impl("unet1d", &unet1d_cpu);
  m.impl("diffusion_sample", &diffusion_sample_cpu);
}

}  // namespace dpa
