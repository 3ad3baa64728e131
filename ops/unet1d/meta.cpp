#include "ops/common/meta.h"

#include <torch/library.h>

#include "ops/unet1d/unet1d.h"

namespace dpa {
namespace {

Tensor unet1d_pack_meta(at::TensorList weights, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = unet1d_plan("unet1d_pack", config, dtype);
  check_unet1d_pack(*plan, weights);
  return at::empty({unet1d_packed_bytes(*plan)}, weights[0].options().dtype(at::kByte));
}

Tensor unet1d_meta(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                   const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype, const OptionalTensor& local) {
  check_unet1d("unet1d", *unet1d_plan("unet1d", config, dtype),
               step_call(sample, timesteps, global_cond, packed, local));
  return meta_like(sample);
}

Tensor unet1d_film_meta(const Tensor& timesteps, const OptionalTensor& global_cond, const Tensor& packed,
                        at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = unet1d_plan("unet1d_film", config, dtype);
  check_unet1d_film(*plan, timesteps, value_or_undefined(global_cond), packed);
  return at::empty_symint({timesteps.sym_size(0), plan->film_rows}, timesteps.options());
}

Tensor unet1d_step_film_meta(const Tensor& timesteps, const Tensor& packed, at::IntArrayRef config,
                             at::ScalarType dtype) {
  constexpr const char* op = "unet1d_step_film";
  const auto plan = unet1d_plan(op, config, dtype);
  check_unet1d_step_film(op, *plan, timesteps, packed);
  return at::empty_symint({timesteps.sym_size(0), plan->film_rows}, timesteps.options());
}

Tensor unet1d_on_film_meta(const Tensor& sample, const Tensor& film, const Tensor& packed, at::IntArrayRef config,
                           at::ScalarType dtype) {
  check_unet1d("unet1d_on_film", *unet1d_plan("unet1d_on_film", config, dtype), film_call(sample, film, packed));
  return meta_like(sample);
}

Tensor diffusion_sample_meta(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                             const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype, const Tensor& table,
                             double clip, const OptionalTensor& noise, const OptionalTensor& known,
                             const OptionalTensor& known_mask, const OptionalTensor& local) {
  check_unet1d("diffusion_sample", *unet1d_plan("diffusion_sample", config, dtype),
               loop_call(sample, timesteps, global_cond, packed, table, clip, noise, known, known_mask, local));
  return meta_like(sample);
}

Tensor diffusion_sample_on_film_meta(const Tensor& sample, const Tensor& step_film, const OptionalTensor& global_cond,
                                     const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype,
                                     const Tensor& table, double clip, const OptionalTensor& noise,
                                     const OptionalTensor& known, const OptionalTensor& known_mask) {
  constexpr const char* op = "diffusion_sample_on_film";
  check_unet1d(op, *unet1d_plan(op, config, dtype),
               loop_on_film_call(sample, step_film, global_cond, packed, table, clip, noise, known, known_mask));
  return meta_like(sample);
}

Tensor diffusion_sample_clocks_meta(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                                    const Tensor& packed, at::IntArrayRef config, at::ScalarType dtype,
                                    const Tensor& table, double clip, const OptionalTensor& noise) {
  constexpr const char* op = "diffusion_sample_clocks";
  const auto plan = unet1d_plan(op, config, dtype);
  check_unet1d(op, *plan, loop_call(sample, timesteps, global_cond, packed, table, clip, noise));
  return at::empty({int64_t{plan->slices_out} * plan->slices_in, static_cast<int64_t>(plan->convs.size()) + 1,
                    int64_t{kernels::unet1d::kMarks}},
                   sample.options().dtype(at::kInt));
}

std::vector<std::string> unet1d_weight_names(at::IntArrayRef config) {
  std::vector<std::string> names;
  for (const auto& weight : unet1d_plan("unet1d_weight_names", config, at::kFloat)->weights)
    names.push_back(weight.name);
  return names;
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("unet1d_pack", &unet1d_pack_meta);
  m.impl("unet1d", &unet1d_meta);
  m.impl("unet1d_film", &unet1d_film_meta);
  m.impl("unet1d_step_film", &unet1d_step_film_meta);
  m.impl("unet1d_on_film", &unet1d_on_film_meta);
  m.impl("diffusion_sample", &diffusion_sample_meta);
  m.impl("diffusion_sample_on_film", &diffusion_sample_on_film_meta);
  m.impl("diffusion_sample_clocks", &diffusion_sample_clocks_meta);
}

// No tensor among its arguments, so no backend's key finds it.
TORCH_LIBRARY_IMPL(dpa, CompositeExplicitAutograd, m) {
  m.impl("unet1d_weight_names", [](at::IntArrayRef config) { return unet1d_weight_names(config); });
}

}  // namespace dpa
