#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/unet1d_batch/unet1d_batch.h"

namespace dpa {
namespace {

Tensor unet1d_batch_pack_meta(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype) {
  const auto plan = unet1d_batch_plan("unet1d_batch_pack", config);
  check_unet1d_batch_parameters("unet1d_batch_pack", *plan, parameters, dtype);
  return at::empty({plan->elements}, parameters[0].options().dtype(dtype));
}

void unet1d_batch_pack_out_meta(at::TensorList parameters, at::IntArrayRef config, at::ScalarType dtype,
                                const OptionalTensor& seen, Tensor& out) {
  check_unet1d_batch_pack_out(*unet1d_batch_plan("unet1d_batch_pack", config), parameters, dtype, seen, out);
}

Tensor unet1d_batch_meta(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                         at::TensorList parameters, const Tensor& packed, at::IntArrayRef config,
                         const OptionalTensor& local) {
  check_unet1d_batch(*unet1d_batch_plan("unet1d_batch", config), sample, timesteps, global_cond, parameters, packed,
                     local);
  return at::empty_symint(sample.sym_sizes(), packed.options());
}

std::tuple<Tensor, Tensor> unet1d_batch_film_meta(const Tensor& timesteps, const OptionalTensor& global_cond,
                                                  at::TensorList parameters, const Tensor& packed,
                                                  at::IntArrayRef config) {
  const auto plan = unet1d_batch_plan("unet1d_batch_film", config);
  check_unet1d_batch_film(*plan, timesteps, global_cond, parameters, packed);
  const auto batch = global_cond.has_value() ? global_cond->sym_size(0) : c10::SymInt(0);
  const c10::SymInt rows = plan->film_rows;
  return {at::empty_symint({timesteps.sym_size(0), rows}, packed.options()),
          at::empty_symint({batch, rows}, packed.options())};
}

Tensor unet1d_batch_on_film_meta(const Tensor& sample, const Tensor& step, const Tensor& cond,
                                 at::TensorList parameters, const Tensor& packed, at::IntArrayRef config,
                                 const OptionalTensor& local) {
  check_unet1d_batch_on_film(*unet1d_batch_plan("unet1d_batch_on_film", config), sample, step, cond, parameters, packed,
                             local);
  return at::empty_symint(sample.sym_sizes(), packed.options().dtype(at::kFloat));
}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("unet1d_batch", &unet1d_batch_meta);
  m.impl("unet1d_batch_film", &unet1d_batch_film_meta);
  m.impl("unet1d_batch_on_film", &unet1d_batch_on_film_meta);
  m.impl("unet1d_batch_pack", &unet1d_batch_pack_meta);
  m.impl("unet1d_batch_pack.out", &unet1d_batch_pack_out_meta);
}

}  // namespace dpa
