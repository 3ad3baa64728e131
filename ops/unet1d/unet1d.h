// `dpa::unet1d` and `dpa::diffusion_sample`: the whole conditional U-Net, and the whole denoising loop, on packed
// weights.
//
// An architecture is a list of integers: action_dim, kernel_size, n_groups, diffusion_step_embed_dim, global_cond_dim,
// whether FiLM has a scale, then down_dims. Where those are wider than the network's widths, so that faster kernels
// serve, a 0 and the network's own follow (Config::own_dims); on a GPU. Packed weights are bytes: what `unet1d_pack`
// makes of the original tensors, which `unet1d_weight_names` names in the order it wants them.
#pragma once
#include <memory>
#include <string_view>

#include "kernels/plans/unet1d/plan.h"
#include "ops/common/check.h"

namespace dpa {

using kernels::unet1d::Plan;

/// The plan of an architecture; raises what is wrong with it. Plans are kept, for they are few.
std::shared_ptr<const Plan> unet1d_plan(const char* op, at::IntArrayRef config, at::ScalarType dtype);

/// Bytes of packed weights: the plan's, and as many more as the fingerprint says. The CPU's bytes end in a
/// stamp as well, but to read one on a GPU would stop the host.
int64_t unet1d_packed_bytes(const Plan& plan);

/// A number below 2^16 for an architecture and a variant of its packed weights, such as their dtype. Added to a length,
/// it tells apart weights that happen to need the same memory, on every device and without a read.
int64_t unet1d_fingerprint(const kernels::unet1d::Config& config, int64_t variant);

/// The tensors of one call; absent ones are undefined.
struct UnetCall {
  Tensor sample{}, packed{}, timesteps{}, table{}, global_cond{}, noise{}, known{}, known_mask{}, film{};
  double clip = 0;
  Tensor step_film{}, local{};
};

/// The call that `unet1d`'s arguments make.
inline UnetCall step_call(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                          const Tensor& packed, const OptionalTensor& local = {}) {
  UnetCall call{sample, packed, timesteps, {}, value_or_undefined(global_cond)};
  call.local = value_or_undefined(local);
  return call;
}

/// The call that `diffusion_sample`'s arguments make.
inline UnetCall loop_call(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                          const Tensor& packed, const Tensor& table, double clip, const OptionalTensor& noise,
                          const OptionalTensor& known = {}, const OptionalTensor& known_mask = {},
                          const OptionalTensor& local = {}) {
  return {sample,
          packed,
          timesteps,
          table,
          value_or_undefined(global_cond),
          value_or_undefined(noise),
          value_or_undefined(known),
          value_or_undefined(known_mask),
          {},
          clip,
          {},
          value_or_undefined(local)};
}

/// The check of both ops. One forward pass has no table; the loop has one, and a timestep a step.
void check_unet1d(const char* op, const Plan& plan, const UnetCall& call);

/// The call that `diffusion_sample_on_film`'s arguments make.
inline UnetCall loop_on_film_call(const Tensor& sample, const Tensor& step_film, const OptionalTensor& global_cond,
                                  const Tensor& packed, const Tensor& table, double clip, const OptionalTensor& noise,
                                  const OptionalTensor& known, const OptionalTensor& known_mask) {
  auto call = loop_call(sample, {}, global_cond, packed, table, clip, noise, known, known_mask);
  call.step_film = step_film;
  return call;
}

/// Of unet1d_film: global_cond is of one sample.
void check_unet1d_film(const Plan& plan, const Tensor& timesteps, const Tensor& global_cond, const Tensor& packed);
/// Of unet1d_step_film.
void check_unet1d_step_film(const char* op, const Plan& plan, const Tensor& timesteps, const Tensor& packed);

/// The call that `unet1d_on_film`'s arguments make.
inline UnetCall film_call(const Tensor& sample, const Tensor& film, const Tensor& packed) {
  UnetCall call{sample, packed};
  call.film = film;
  return call;
}

void check_unet1d_pack(const Plan& plan, at::TensorList weights);

/// The ops of the same names, one code for every device.
Tensor unet1d_by_name(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                      const Tensor& packed, at::IntArrayRef config, std::string_view dtype);
Tensor diffusion_sample_by_name(const Tensor& sample, const Tensor& timesteps, const OptionalTensor& global_cond,
                                const Tensor& packed, at::IntArrayRef config, std::string_view dtype,
                                const Tensor& table, double clip, const OptionalTensor& noise);

}  // namespace dpa
