// The schema of every op: the library's table of contents. docs/ops has a page for each, ops/<op>/ its code.
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <limits>
#include <utility>

namespace {

/// The schema with infinity, which the schema language cannot spell, as the default of `argument`.
c10::FunctionSchema with_infinite_default(const std::string& text, const std::string& argument) {
  const auto schema = torch::jit::parseSchema(text);
  auto arguments = schema.arguments();
  for (auto& a : arguments)
    if (a.name() == argument)
      a = c10::Argument(a.name(), a.type(), a.N(), std::numeric_limits<double>::infinity(), a.kwarg_only());
  return schema.cloneWithArguments(std::move(arguments));
}

/// The tags of an out variant; torch 2.9 has no name for it.
template <class Tag>
std::vector<Tag> out_variant_tags() {
  if constexpr (requires { Tag::out_variant; }) return {Tag::pt2_compliant_tag, Tag::out_variant};
  return {Tag::pt2_compliant_tag};
}

}  // namespace

TORCH_LIBRARY(dpa, m) {
  const std::vector<at::Tag> functional{at::Tag::pt2_compliant_tag}, out_variant = out_variant_tags<at::Tag>();

  m.def("elementwise_mult(Tensor a, Tensor b) -> Tensor", functional);
  m.def("elementwise_mult.out(Tensor a, Tensor b, *, Tensor(a!) out) -> ()", out_variant);

  m.def("fused_relu_add(Tensor x, Tensor y, float bias=0.0) -> Tensor", functional);

  m.def("sinusoidal_embedding(Tensor timesteps, SymInt dim, ScalarType? dtype=None) -> Tensor", functional);

  m.def(
      "lltm(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) -> "
      "(Tensor new_h, Tensor new_cell)",
      functional);
  m.def(
      "lltm_forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) -> "
      "(Tensor new_h, Tensor new_cell, Tensor gates)",
      functional);
  m.def(
      "lltm_backward(Tensor grad_h, Tensor grad_cell, Tensor input, Tensor weights, Tensor bias, Tensor old_h, "
      "Tensor old_cell, Tensor gates, bool[5] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      functional);

  m.def(
      "denoise(Tensor model_output, Tensor sample, Tensor diffusion_constants, Tensor timestep, "
      "Tensor diffusion_noise) -> Tensor",
      functional);
  m.def(
      "denoise_backward(Tensor grad, Tensor model_output, Tensor sample, Tensor diffusion_constants, Tensor timestep, "
      "Tensor diffusion_noise, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      functional);

  m.def(with_infinite_default("scheduler_step(Tensor model_output, Tensor sample, Tensor table, Tensor index, "
                              "Tensor? noise=None, float clip=0) -> Tensor",
                              "clip"),
        functional);
  m.def(
      "scheduler_step_backward(Tensor grad, Tensor model_output, Tensor sample, Tensor table, Tensor index, "
      "Tensor? noise, float clip, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      functional);

  m.def(
      "group_norm_mish(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, "
      "Tensor? scale=None, Tensor? shift=None, Tensor? residual=None) -> Tensor",
      functional);
  m.def(
      "group_norm_mish_backward(Tensor grad, Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, "
      "Tensor? scale, Tensor? shift, bool[5] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      functional);

  m.def(
      "group_norm_act(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, "
      "Tensor? residual=None, bool relu=True) -> Tensor",
      functional);
  m.def(
      "group_norm_act_backward(Tensor grad, Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, "
      "Tensor? residual, bool relu, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      functional);

  m.def(
      "batch_norm_act(Tensor input, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, Tensor? residual=None, "
      "bool relu=True) -> Tensor",
      functional);
  m.def(
      "batch_norm_act_forward(Tensor input, Tensor? weight, Tensor? bias, float eps, Tensor? residual, bool relu) -> "
      "(Tensor out, Tensor mean, Tensor var)",
      functional);
  m.def(
      "batch_norm_act_backward(Tensor grad, Tensor input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, "
      "float eps, Tensor? residual, bool relu, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      functional);

  m.def("conv2d(Tensor input, Tensor weight, int stride=1, int padding=0) -> Tensor", functional);
  m.def(
      "conv2d_backward(Tensor grad, Tensor input, Tensor weight, int stride, int padding, bool[2] output_mask) -> "
      "(Tensor, Tensor)",
      functional);
  m.def("max_pool2d(Tensor input, int kernel_size, int stride, int padding=0) -> Tensor", functional);
  m.def("max_pool2d_forward(Tensor input, int kernel_size, int stride, int padding) -> (Tensor out, Tensor taps)",
        functional);
  m.def(
      "max_pool2d_backward(Tensor grad, Tensor taps, Tensor input, int kernel_size, int stride, int padding) -> Tensor",
      functional);

  // Copies of weights channels-last in a dtype, or of their gradients back; see ops/weights_in_order.
  m.def("weights_in_order(Tensor[] weights, ScalarType dtype, bool channels_last) -> Tensor[]", functional);

  m.def(
      "conv1d(Tensor input, Tensor weight, Tensor? bias=None, int stride=1, int padding=0, bool transposed=False) -> "
      "Tensor",
      functional);
  m.def(
      "conv1d_forward(Tensor input, Tensor weight, Tensor? bias, int stride, int padding, bool transposed) -> "
      "(Tensor out, Tensor packed)",
      functional);
  m.def(
      "conv1d_backward(Tensor grad, Tensor input, Tensor weight, Tensor? bias, Tensor packed, int stride, int padding, "
      "bool transposed, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      functional);
  m.def(
      "conv1d_gnm(Tensor input, Tensor conv_weight, Tensor? conv_bias, Tensor? gn_weight, Tensor? gn_bias, "
      "int num_groups, float eps=1e-5, Tensor? scale=None, Tensor? shift=None, Tensor? residual=None) -> Tensor",
      functional);

  m.def(
      "residual_block1d(Tensor input, Tensor conv1_weight, Tensor conv1_bias, Tensor gn1_weight, Tensor gn1_bias, "
      "Tensor conv2_weight, Tensor conv2_bias, Tensor gn2_weight, Tensor gn2_bias, Tensor? residual_weight, "
      "Tensor? residual_bias, int num_groups, float eps=1e-5, Tensor? scale=None, Tensor? shift=None, "
      "Tensor? skip=None) -> Tensor",
      functional);
  m.def(
      "residual_block1d_forward(Tensor input, Tensor conv1_weight, Tensor conv1_bias, Tensor gn1_weight, "
      "Tensor gn1_bias, Tensor conv2_weight, Tensor conv2_bias, Tensor gn2_weight, Tensor gn2_bias, "
      "Tensor? residual_weight, Tensor? residual_bias, int num_groups, float eps, Tensor? scale, Tensor? shift, "
      "Tensor? skip) -> "
      "(Tensor out, Tensor conv1, Tensor activation, Tensor conv2, Tensor packed1, Tensor packed2)",
      functional);
  m.def(
      "residual_block1d_backward(Tensor grad, Tensor input, Tensor conv1_weight, Tensor conv1_bias, Tensor gn1_weight, "
      "Tensor gn1_bias, Tensor conv2_weight, Tensor conv2_bias, Tensor gn2_weight, Tensor gn2_bias, "
      "Tensor? residual_weight, Tensor? residual_bias, int num_groups, float eps, Tensor? scale, Tensor? shift, "
      "Tensor? skip, Tensor conv1, Tensor activation, Tensor conv2, Tensor packed1, Tensor packed2, bool[14] "
      "output_mask) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor)",
      functional);

  // The weights that a captured forward will read, layer by layer; see ops/pack_ahead/pack_ahead.h.
  m.def("pack_ahead(Tensor[] weights, int[] counts, ScalarType dtype, SymInt batch=0, SymInt[] lengths=[]) -> ()",
        functional);

  // Images: a layer of an encoder, the keypoints at its end, and what comes before it.
  m.def(
      "conv2d_norm_act(Tensor input, Tensor weight, Tensor? bias=None, Tensor? scale=None, Tensor? shift=None, "
      "Tensor? residual=None, int num_groups=0, float eps=1e-5, int stride=1, int padding=0, bool relu=True) -> Tensor",
      functional);
  m.def("spatial_softmax(Tensor input, Tensor? temperature=None) -> Tensor", functional);
  m.def(
      "resize_crop_normalize(Tensor image, SymInt[]? size=None, SymInt[]? crop=None, Tensor? mean=None, "
      "Tensor? std=None, bool antialias=True, bool hwc=False, ScalarType? dtype=None) -> Tensor",
      functional);

  // Whole encoders that are alike, on packed weights; see ops/image_encoder/image_encoder.h for `config`.
  m.def("image_encoder_pack(Tensor[] parameters, int[] config, ScalarType dtype) -> Tensor", functional);
  m.def(
      "image_encoder(Tensor[] images, Tensor[] packed, int[] config, float[] constants, ScalarType dtype, "
      "SymInt[]? size=None, SymInt[]? crop=None) -> Tensor[]",
      functional);

  m.def("joint_linear(Tensor input, Tensor[] weights, Tensor[] biases, Tensor? rest=None, bool mish=False) -> Tensor",
        functional);
  m.def(
      "joint_linear_backward(Tensor grad, Tensor input, Tensor[] weights, Tensor[] biases, Tensor? rest, "
      "bool[4] output_mask, bool mish=False) -> (Tensor, Tensor, Tensor, Tensor)",
      functional);

  // Inference for many samples; see ops/unet1d_batch/unet1d_batch.h. `local`, (B, T, down_dims[0]), is added to the first
  // block's output. The out variant packs into the memory of before,
  // with `seen` the weights alone of which some elements differ from what the last such call saw.
  m.def(
      "unet1d_batch(Tensor sample, Tensor timesteps, Tensor? global_cond, Tensor[] parameters, Tensor packed, "
      "int[] config, Tensor? local=None) -> Tensor",
      functional);
  // The two halves of unet1d_batch for a loop: FiLM's parameters as parts of the timesteps, (S, R), and of the samples,
  // (B, R), or (0, R) without global_cond; and the network on a row of the first and all of the second, in
  // float32.
  m.def(
      "unet1d_batch_film(Tensor timesteps, Tensor? global_cond, Tensor[] parameters, Tensor packed, int[] config) "
      "-> (Tensor steps, Tensor conds)",
      functional);
  m.def(
      "unet1d_batch_on_film(Tensor sample, Tensor step, Tensor cond, Tensor[] parameters, Tensor packed, int[] config, "
      "Tensor? local=None) -> Tensor",
      functional);
  m.def("unet1d_batch_pack(Tensor[] parameters, int[] config, ScalarType dtype) -> Tensor", functional);
  m.def(
      "unet1d_batch_pack.out(Tensor[] parameters, int[] config, ScalarType dtype, Tensor(a!)? seen=None, *, "
      "Tensor(b!) out) -> ()",
      out_variant);

  // A denoising loop's random numbers, in the order and the pieces in which a loop of steps generates them.
  m.def("normal_draws(Tensor like, SymInt draws, SymInt rows, Generator? generator=None) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  auto seeded_out = out_variant;
  seeded_out.push_back(at::Tag::nondeterministic_seeded);
  m.def("normal_draws.out(SymInt draws, Generator? generator=None, *, Tensor(a!) out) -> ()",
        std::as_const(seeded_out));

  // What a captured loop reads: those numbers, and copies of what the call is given.
  m.def(
      "loop_inputs_(Tensor(a!)[] kept, Tensor[] given, Tensor(b!)? out=None, SymInt draws=0, "
      "Generator? generator=None) -> ()",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});

  // A sweep of parallel sampling, but for the network: the states it begins with, and what becomes of its output.
  m.def("parallel_window(Tensor states, Tensor table, Tensor position, SymInt window) -> (Tensor, Tensor)", functional);
  m.def(
      "parallel_move_(Tensor(a!) states, Tensor(b!) position, Tensor(c!) residual, Tensor output, Tensor coefficients, "
      "Tensor? noise, Tensor? known, Tensor? known_mask, SymInt steps, float clip, float tolerance) -> ()",
      functional);

  // Whether bytes of values are others than those kept; see ops/values_differ/values_differ.h.
  m.def("values_differ(Tensor[] values, Tensor kept) -> Tensor", functional);

  // What follows a backward; see ops/adamw_ema/adamw_ema.h and dpa.training.AdamW.
  m.def(
      "adamw_ema_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
      "Tensor(e!)[] averages, Tensor(f!)[] state_steps, *, float lr, float beta1, float beta2, float weight_decay, "
      "float eps, bool decoupled_weight_decay=True, bool maximize=False, bool clear_grads=False, "
      "Tensor? tensor_lr=None, Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? clip_coef=None, "
      "Tensor? updates=None, float[] ema_schedule=[]) -> ()",
      functional);

  // Inference on packed weights; see ops/unet1d/unet1d.h for `config`.
  m.def("unet1d_weight_names(int[] config) -> str[]", functional);
  // Which kernel runs a batch of such a network fastest on the current GPU, as kernels/plans/unet1d/call.h names them;
  // "layers" is unet1d_batch, if it may be; "none" that no op takes the sizes.
  m.def("unet1d_path(int[] config, ScalarType dtype, SymInt batch, SymInt horizon, bool layers=True) -> str",
        functional);
  // The config to pack such a network by for it: the same, or with wider levels (kernels/plans/unet1d/widths.h).
  m.def("unet1d_layout(int[] config, ScalarType dtype, SymInt batch, SymInt horizon, bool layers=True) -> int[]",
        functional);
  m.def("unet1d_pack(Tensor[] weights, int[] config, ScalarType dtype) -> Tensor", functional);
  m.def(
      "unet1d(Tensor sample, Tensor timesteps, Tensor? global_cond, Tensor packed, int[] config, ScalarType dtype, "
      "Tensor? local=None) -> Tensor",
      functional);
  m.def(
      "diffusion_sample(Tensor sample, Tensor timesteps, Tensor? global_cond, Tensor packed, int[] config, "
      "ScalarType dtype, Tensor table, float clip, Tensor? noise=None, Tensor? known=None, Tensor? known_mask=None, "
      "Tensor? local=None) -> Tensor",
      functional);
  // The two halves of unet1d for one observation at many timesteps: FiLM's parameters, (S, R), and the network on rows
  // of them, one a sample.
  m.def("unet1d_film(Tensor timesteps, Tensor? global_cond, Tensor packed, int[] config, ScalarType dtype) -> Tensor",
        functional);
  m.def("unet1d_on_film(Tensor sample, Tensor film, Tensor packed, int[] config, ScalarType dtype) -> Tensor",
        functional);
  // The timesteps' part of FiLM's parameters, (S, R), which no observation changes, and the loop on it.
  m.def("unet1d_step_film(Tensor timesteps, Tensor packed, int[] config, ScalarType dtype) -> Tensor", functional);
  m.def(
      "diffusion_sample_on_film(Tensor sample, Tensor step_film, Tensor? global_cond, Tensor packed, int[] config, "
      "ScalarType dtype, Tensor table, float clip, Tensor? noise=None, Tensor? known=None, Tensor? known_mask=None) "
      "-> Tensor",
      functional);
  // Where a step's time goes: the clocks of every block of the one-sample kernel, (blocks, layers, 7) int32.
  m.def(
      "diffusion_sample_clocks(Tensor sample, Tensor timesteps, Tensor? global_cond, Tensor packed, int[] config, "
      "ScalarType dtype, Tensor table, float clip, Tensor? noise=None) -> Tensor",
      functional);
  // The two for exported programs: AOTInductor of torch 2.11 passes a ScalarType by another number.
  m.def(
      "unet1d_by_name(Tensor sample, Tensor timesteps, Tensor? global_cond, Tensor packed, int[] config, str dtype) "
      "-> Tensor",
      functional);
  m.def(
      "diffusion_sample_by_name(Tensor sample, Tensor timesteps, Tensor? global_cond, Tensor packed, int[] config, "
      "str dtype, Tensor table, float clip, Tensor? noise=None) -> Tensor",
      functional);
}
