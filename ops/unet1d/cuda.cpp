#include "ops/common/cuda.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "kernels/cuda/unet1d/unet1d.h"
#include "kernels/plans/unet1d/widths.h"
#include "ops/unet1d/unet1d.h"

namespace dpa {
namespace {

// A weight with zeros where a widened network has channels that only fill its groups up.
Tensor filled(Tensor weight, const kernels::unet1d::WeightInfo& info) {
  for (int64_t d = 0; d < 2; ++d) {
    const auto& fill = info.fill[d];
    if (fill.own == fill.width) continue;
    std::vector<int64_t> zeros(2 * (weight.dim() - d), 0);  // (before, after) of the last dimension first
    zeros.back() = fill.width - fill.own;
    weight = at::constant_pad_nd(weight.unflatten(d, {fill.groups, fill.own}), zeros).flatten(d, d + 1);
  }
  return weight;
}

Tensor unet1d_pack_cuda(at::TensorList weights, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = unet1d_plan("unet1d_pack", config, dtype);
  check_unet1d_pack(*plan, weights);
  const c10::cuda::CUDAGuard guard(weights[0].device());
  // The packer reads float32 and 16-bit sources; others are rounded to float32 first.
  const auto source = weights[0].scalar_type() == at::kDouble ? at::kFloat : weights[0].scalar_type();
  std::vector<Tensor> kept;
  std::vector<const void*> pointers;
  for (size_t i = 0; i < weights.size(); ++i) {
    kept.push_back(filled(weights[i].to(source), plan->weights[i]).contiguous());
    pointers.push_back(kept.back().const_data_ptr());
  }
  // What lies between two weights goes into files and must not be what the memory held before.
  auto packed = at::zeros({unet1d_packed_bytes(*plan)}, weights[0].options().dtype(at::kByte));
  C10_CUDA_CHECK(kernels::unet1d::pack(*plan, pointers.data(), kernel_dtype(source), packed.mutable_data_ptr(),
                                       c10::cuda::getCurrentCUDAStream()));
  return packed;
}

// `record`: takes the kernel's clocks, or is undefined.
Tensor run_unet1d(const char* op, const Plan& plan, UnetCall in, const Tensor& record = {}) {
  check_unet1d(op, plan, in);
  const c10::cuda::CUDAGuard guard(in.sample.device());
  int major = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, in.sample.device().index()));
  DPA_CHECK(major >= 8, op, "sample must be on a GPU of compute capability 8.0 or later", major);
  for (Tensor* t : {&in.sample, &in.packed, &in.timesteps, &in.table, &in.global_cond, &in.noise, &in.known,
                    &in.known_mask, &in.film, &in.step_film, &in.local})
    if (t->defined()) *t = aligned(t->contiguous());
  const auto floats = [](const Tensor& t) { return static_cast<const float*>(data_or_null(t)); };
  kernels::unet1d::Call call = {};
  call.batch = static_cast<int>(in.sample.size(0));
  call.horizon = static_cast<int>(in.sample.size(1));
  call.per_sample_timesteps = !in.table.defined();
  call.steps = call.per_sample_timesteps ? 1 : static_cast<int>(in.table.size(0));
  const auto refused = kernels::unet1d::reject(plan, call.batch, call.horizon, call.steps);
  TORCH_CHECK(refused.empty(), "dpa::", op, ": sample is refused: ", refused);

  auto out = at::empty(in.sample.sizes(), in.sample.options());
  if (call.steps == 0) {
    out.copy_(in.sample);
    return out;
  }
  kernels::unet1d::Device device;
  C10_CUDA_CHECK(kernels::unet1d::current_device(device));
  call.path = kernels::unet1d::choose_path(plan, call.batch, call.horizon, device);
  const auto bytes = kernels::unet1d::workspace_bytes(plan, call.batch, call.horizon, call.steps, call.path, device);
  auto workspace = at::empty({static_cast<int64_t>(bytes)}, in.packed.options());
  call.packed = in.packed.const_data_ptr();
  call.workspace = workspace.mutable_data_ptr();
  call.timesteps = floats(in.timesteps);
  call.global_cond = floats(in.global_cond);
  call.initial = floats(in.sample);
  call.table = floats(in.table);
  call.clip = static_cast<float>(in.clip);
  call.noise = floats(in.noise);
  call.film = floats(in.film);
  call.step_film = floats(in.step_film);
  call.local = floats(in.local);
  call.condition_data = floats(in.known);
  call.condition_mask = static_cast<const uint8_t*>(data_or_null(in.known_mask));
  call.output = out.mutable_data_ptr<float>();
  if (record.defined()) call.record = reinterpret_cast<uint32_t*>(record.mutable_data_ptr<int32_t>());
  C10_CUDA_CHECK(kernels::unet1d::sample(plan, call, device, c10::cuda::getCurrentCUDAStream()));
  return out;
}

Tensor unet1d_cuda(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                   const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype, const OptionalTensor& local) {
  return run_unet1d("unet1d", *unet1d_plan("unet1d", config, dtype),
                    step_call(sample, timesteps, global_cond, packed, local));
}

Tensor unet1d_film_cuda(const Tensor& timesteps, const OptionalTensor& global_cond_, const Tensor& packed_,
                        at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = unet1d_plan("unet1d_film", config, dtype);
  Tensor global_cond = value_or_undefined(global_cond_);
  check_unet1d_film(*plan, timesteps, global_cond, packed_);
  const c10::cuda::CUDAGuard guard(timesteps.device());
  const auto steps = static_cast<int>(timesteps.size(0));
  const auto times = timesteps.contiguous(), packed = aligned(packed_.contiguous());
  if (global_cond.defined()) global_cond = aligned(global_cond.contiguous());
  auto table = at::empty({steps, plan->film_rows}, timesteps.options());
  const auto bytes = static_cast<int64_t>(kernels::unet1d::film_workspace_bytes(*plan, steps));
  auto workspace = at::empty({bytes}, packed.options());
  C10_CUDA_CHECK(kernels::unet1d::film_table(*plan, packed.const_data_ptr(), times.const_data_ptr<float>(), steps,
                                             static_cast<const float*>(data_or_null(global_cond)),
                                             workspace.mutable_data_ptr(), table.mutable_data_ptr<float>(),
                                             c10::cuda::getCurrentCUDAStream()));
  return table;
}

Tensor unet1d_step_film_cuda(const Tensor& timesteps, const Tensor& packed_, at::IntArrayRef config,
                             at::ScalarType dtype) {
  constexpr const char* op = "unet1d_step_film";
  const auto plan = unet1d_plan(op, config, dtype);
  check_unet1d_step_film(op, *plan, timesteps, packed_);
  const c10::cuda::CUDAGuard guard(timesteps.device());
  const auto steps = static_cast<int>(timesteps.size(0));
  const auto times = timesteps.contiguous(), packed = aligned(packed_.contiguous());
  auto table = at::empty({steps, plan->film_rows}, timesteps.options());
  auto workspace =
      at::empty({static_cast<int64_t>(kernels::unet1d::film_workspace_bytes(*plan, steps))}, packed.options());
  C10_CUDA_CHECK(kernels::unet1d::step_film_table(*plan, packed.const_data_ptr(), times.const_data_ptr<float>(), steps,
                                                  workspace.mutable_data_ptr(), table.mutable_data_ptr<float>(),
                                                  c10::cuda::getCurrentCUDAStream()));
  return table;
}

Tensor unet1d_on_film_cuda(const Tensor& sample, const Tensor& film, const Tensor& packed, at::IntArrayRef config,
                           at::ScalarType dtype) {
  return run_unet1d("unet1d_on_film", *unet1d_plan("unet1d_on_film", config, dtype), film_call(sample, film, packed));
}

Tensor diffusion_sample_cuda(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                             const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype, const Tensor& table,
                             double clip, const OptionalTensor& noise, const OptionalTensor& known,
                             const OptionalTensor& known_mask, const OptionalTensor& local) {
  return run_unet1d("diffusion_sample", *unet1d_plan("diffusion_sample", config, dtype),
                    loop_call(sample, timesteps, global_cond, packed, table, clip, noise, known, known_mask, local));
}

Tensor diffusion_sample_on_film_cuda(const Tensor& sample, const Tensor& step_film, const OptionalTensor& global_cond,
                                     const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype,
                                     const Tensor& table, double clip, const OptionalTensor& noise,
                                     const OptionalTensor& known, const OptionalTensor& known_mask) {
  constexpr const char* op = "diffusion_sample_on_film";
  return run_unet1d(op, *unet1d_plan(op, config, dtype),
                    loop_on_film_call(sample, step_film, global_cond, packed, table, clip, noise, known, known_mask));
}

Tensor diffusion_sample_clocks_cuda(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                                    const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype,
                                    const Tensor& table, double clip, const OptionalTensor& noise) {
  constexpr const char* op = "diffusion_sample_clocks";
  const auto plan = unet1d_plan(op, config, dtype);
  UnetCall call = loop_call(sample, timesteps, global_cond, packed, table, clip, noise);
  check_unet1d(op, *plan, call);
  DPA_CHECK(timesteps.size(0) > 0, op, "timesteps must hold one step or more", timesteps.size(0));
  const c10::cuda::CUDAGuard guard(sample.device());
  const auto shape =
      kernels::unet1d::record_shape(*plan, static_cast<int>(sample.size(0)), static_cast<int>(sample.size(1)));
  DPA_CHECK(shape.blocks > 0, op, "sample must be of sizes that the one-sample kernel runs on this device",
            sample.sizes());
  auto record = at::zeros({shape.blocks, shape.layers, kernels::unet1d::kMarks}, sample.options().dtype(at::kInt));
  run_unet1d(op, *plan, std::move(call), record);
  return record;
}

// Whether a call of such sizes is one that the kernels run.
bool runs(const Plan& plan, int64_t batch, int64_t horizon) {
  const auto most = std::numeric_limits<int>::max();
  return batch >= 1 && batch <= most && horizon >= 1 && horizon <= most &&
         kernels::unet1d::reject(plan, static_cast<int>(batch), static_cast<int>(horizon), /*steps=*/1).empty();
}

kernels::unet1d::Device current_device() {
  kernels::unet1d::Device device;
  C10_CUDA_CHECK(kernels::unet1d::current_device(device));
  return device;
}

std::string unet1d_path(at::IntArrayRef config, at::ScalarType dtype, int64_t batch, int64_t horizon, bool layers) {
  const auto plan = unet1d_plan("unet1d_path", config, dtype);
  if (!runs(*plan, batch, horizon)) return "none";
  const int samples = static_cast<int>(batch), times = static_cast<int>(horizon);
  const auto device = current_device();
  if (layers && kernels::unet1d::layers_pay(*plan, samples, times, device)) return "layers";
  return name_of(kernels::unet1d::choose_path(*plan, samples, times, device));
}

std::vector<int64_t> unet1d_layout(at::IntArrayRef config, at::ScalarType dtype, int64_t batch, int64_t horizon,
                                   bool layers) {
  const auto plan = unet1d_plan("unet1d_layout", config, dtype);
  if (plan->config.widened() || !runs(*plan, batch, horizon)) return config.vec();
  const auto best = kernels::unet1d::widths_for(plan->config, plan->dtype, static_cast<int>(batch),
                                                static_cast<int>(horizon), layers, current_device());
  if (!best.widened()) return config.vec();
  std::vector<int64_t> layout(config.begin(), config.end() - best.levels);
  layout.insert(layout.end(), best.down_dims, best.down_dims + best.levels);
  layout.push_back(0);
  layout.insert(layout.end(), best.own_dims, best.own_dims + best.levels);
  return layout;
}

}  // namespace

// No tensor among its arguments, so no backend's key finds it.
TORCH_LIBRARY_IMPL(dpa, CompositeExplicitAutograd, m) {
  m.impl("unet1d_path", &unet1d_path);
  m.impl("unet1d_layout", &unet1d_layout);
}

TORCH_LIBRARY_IMPL(dpa, CUDA, m) {
  m.impl("unet1d_pack", &unet1d_pack_cuda);
  m.impl("unet1d", &unet1d_cuda);
  m.impl("unet1d_film", &unet1d_film_cuda);
  m.impl("unet1d_step_film", &unet1d_step_film_cuda);
  m.impl("unet1d_on_film", &unet1d_on_film_cuda);
  m.impl("diffusion_sample", &diffusion_sample_cuda);
  m.impl("diffusion_sample_on_film", &diffusion_sample_on_film_cuda);
  m.impl("diffusion_sample_clocks", &diffusion_sample_clocks_cuda);
  m.impl("unet1d_by_name", &unet1d_by_name);
  m.impl("diffusion_sample_by_name", &diffusion_sample_by_name);
}

}  // namespace dpa
