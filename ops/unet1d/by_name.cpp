// The packed ops as exported programs call them: the dtype of the weights by its name.
#include <torch/library.h>

#include "ops/common/op.h"
#include "ops/unet1d/unet1d.h"

namespace dpa {
namespace {

constexpr Op<"unet1d", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, at::IntArrayRef,
                              at::ScalarType, const OptionalTensor&)>
    unet1d;
constexpr Op<"diffusion_sample", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                                        at::IntArrayRef, at::ScalarType, const Tensor&, double, const OptionalTensor&,
                                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&)>
    diffusion_sample;

at::ScalarType named_dtype(const char* op, std::string_view name) {
  if (name == "float32") return at::kFloat;
  if (name == "float16") return at::kHalf;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float8_e4m3fn") return at::kFloat8_e4m3fn;
  DPA_CHECK(false, op, "dtype must be float32, float16, bfloat16 or float8_e4m3fn", name);
}

}  // namespace

Tensor unet1d_by_name(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                      const Tensor& packed, at::IntArrayRef config, std::string_view dtype) {
  return unet1d(sample, timesteps, global_cond, packed, config, named_dtype("unet1d_by_name", dtype), std::nullopt);
}

Tensor diffusion_sample_by_name(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                                const Tensor& packed, at::IntArrayRef config, std::string_view dtype,
                                const Tensor& table, double clip, const OptionalTensor& noise) {
  return diffusion_sample(sample, timesteps, global_cond, packed, config,
                          named_dtype("diffusion_sample_by_name", dtype), table, clip, noise, std::nullopt,
                          std::nullopt, std::nullopt);
}

TORCH_LIBRARY_IMPL(dpa, CPU, m) {
  m.impl("unet1d_by_name", &unet1d_by_name);
  m.impl("diffusion_sample_by_name", &diffusion_sample_by_name);
}
TORCH_LIBRARY_IMPL(dpa, Meta, m) {
  m.impl("unet1d_by_name", &unet1d_by_name);
  m.impl("diffusion_sample_by_name", &diffusion_sample_by_name);
}

}  // namespace dpa
