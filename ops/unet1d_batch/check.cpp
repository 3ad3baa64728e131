#include <map>
#include <mutex>

#include "kernels/plans/conv1d/changes.h"
#include "kernels/plans/conv1d/shape.h"
#include "ops/unet1d/unet1d.h"
#include "ops/unet1d_batch/unet1d_batch.h"

namespace dpa {
namespace {

/// Walks the network once, by the original's names.
class BatchBuilder {
 public:
  explicit BatchBuilder(const Plan& unet) {
    for (const auto& weight : unet.weights) {
      places_[weight.name] = static_cast<int>(plan_.names.size());
      plan_.names.push_back(weight.name);
      plan_.shapes.emplace_back(weight.shape.begin(), weight.shape.end());
    }
    const auto& c = config_ = unet.config;
    plan_.action_dim = c.action_dim, plan_.step_dim = c.step_dim, plan_.cond_dim = c.cond_dim;
    plan_.num_groups = c.num_groups, plan_.levels = c.levels, plan_.film_scale = c.film_scale;
  }

  /// In the order in which the GEMMs run.
  BatchPlan build() {
    for (int i = 0; i < 2; ++i) plan_.time[i] = layer("diffusion_step_encoder." + std::to_string(2 * i + 1) + ".");
    film();
    const auto names = block_names();
    const int levels = plan_.levels;
    for (int i = 0; i < static_cast<int>(names.size()); ++i) {
      plan_.blocks.push_back(block(names[i]));
      const int level = i / 2, up = level - levels - 1;
      if (i % 2 == 0) continue;
      if (level + 1 < levels) plan_.down.push_back(layer("down_modules." + std::to_string(level) + ".2.conv."));
      if (up >= 0) plan_.up.push_back(layer("up_modules." + std::to_string(up) + ".2.conv."));
    }
    plan_.final_conv = layer("final_conv.0.block.0.");
    plan_.final_norm[0] = place("final_conv.0.block.1.weight");
    plan_.final_norm[1] = place("final_conv.0.block.1.bias");
    plan_.last = layer("final_conv.1.", /*multiplied=*/plan_.action_dim > kMostActions);
    plan_.weights = next_;
    plan_.elements = next_ + unet1d_fingerprint(config_, /*variant=*/-1);
    int64_t row = 0;
    for (auto& b : plan_.blocks) {
      b.film = row;
      row += plan_.shapes[b.parameters[0]][0] * (plan_.film_scale ? 2 : 1);
    }
    return std::move(plan_);
  }

 private:
  std::vector<std::string> block_names() const {
    std::vector<std::string> names;
    const auto level = [&](const char* part, int i) {
      for (const char* which : {".0.", ".1."}) names.push_back(part + std::to_string(i) + which);
    };
    for (int i = 0; i < plan_.levels; ++i) level("down_modules.", i);
    for (int i = 0; i < 2; ++i) names.push_back("mid_modules." + std::to_string(i) + ".");
    for (int i = 0; i + 1 < plan_.levels; ++i) level("up_modules.", i);
    return names;
  }
  int place(const std::string& name) const {
    const auto found = places_.find(name);
    return found == places_.end() ? -1 : found->second;
  }
  /// Gives a weight, or a bias as a row, its place among the packed.
  int64_t pack(int parameter, bool whole_lines = false, bool multiplied = true) {
    const auto& shape = plan_.shapes[parameter];
    const bool row = shape.size() == 1;
    const int64_t d0 = row ? 1 : shape[0], d1 = row ? shape[0] : shape[1];
    const int taps = shape.size() == 3 ? static_cast<int>(shape[2]) : 1;
    const int64_t offset = next_;
    const int64_t width = whole_lines ? kernels::conv1d::padded_to_lines(d1) : kernels::conv1d::padded(d1);
    const int64_t size = taps * d0 * width;
    plan_.items.push_back({parameter, offset, d0, d1, taps, width, offset, multiplied && !row ? size : 0});
    next_ += size;
    return offset;
  }
  BatchPlan::Layer layer(const std::string& name, bool multiplied = true) {
    const int weight = place(name + "weight");
    return {weight, place(name + "bias"), pack(weight, /*whole_lines=*/false, multiplied)};
  }
  void film() {
    plan_.film_packed = next_;
    plan_.film_rows = 0;
    for (const auto& name : block_names()) {
      const int weight = place(name + "cond_encoder.1.weight");
      pack(weight, /*whole_lines=*/true);
      plan_.film_rows += plan_.shapes[weight][0];
    }
    plan_.film_bias = next_;
    for (auto& item : plan_.items)  // of one GEMM
      if (item.offset >= plan_.film_packed)
        item.operand = plan_.film_packed, item.operand_size = plan_.film_bias - plan_.film_packed;
    for (const auto& name : block_names()) pack(place(name + "cond_encoder.1.bias"));
  }
  BatchPlan::Block block(const std::string& name) {
    BatchPlan::Block b{};
    int next = 0;
    for (const char* half : {"blocks.0.block.", "blocks.1.block."})
      for (const char* part : {"0.weight", "0.bias", "1.weight", "1.bias"})
        b.parameters[next++] = place(name + half + part);
    for (const char* part : {"residual_conv.weight", "residual_conv.bias"}) b.parameters[next++] = place(name + part);
    b.packed = pack(b.parameters[0]);
    pack(b.parameters[4]);
    if (b.parameters[8] >= 0) pack(b.parameters[8]);
    b.size = next_ - b.packed;
    return b;
  }

  BatchPlan plan_{};
  kernels::unet1d::Config config_;
  std::map<std::string, int> places_;
  int64_t next_ = 0;
};

}  // namespace

std::shared_ptr<const BatchPlan> unet1d_batch_plan(const char* op, at::IntArrayRef config) {
  constexpr size_t kMaxPlans = 64;
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, std::shared_ptr<const BatchPlan>> plans;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = plans.find(config.vec()); found != plans.end()) return found->second;
  const auto unet = unet1d_plan(op, config, at::kBFloat16);
  DPA_CHECK(!unet->config.relu, op, "config must have Mish behind the norms, got the flag of ReLU", config);
  for (int i = 0; i < unet->config.levels; ++i)
    DPA_CHECK(unet->config.down_dims[i] % 8 == 0, op, "config must have down_dims that are multiples of 8", config);
  auto plan = std::make_shared<const BatchPlan>(BatchBuilder(*unet).build());
  if (plans.size() >= kMaxPlans) plans.clear();
  return plans[config.vec()] = plan;
}

void check_unet1d_batch_parameters(const char* op, const BatchPlan& plan, at::TensorList parameters,
                                   at::ScalarType dtype) {
  DPA_CHECK(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, op,
            "dtype must be float32, float16 or bfloat16", dtype);
  const int64_t taps = plan.shapes[plan.final_conv.weight][2];
  DPA_CHECK(dtype != at::kFloat || taps <= kernels::conv1d::kMaxTaps, op,
            c10::str("config must have a kernel_size of at most ", kernels::conv1d::kMaxTaps, " for float32"), taps);
  DPA_CHECK(parameters.size() == plan.names.size(), op,
            c10::str("parameters must be the ", plan.names.size(), " tensors that unet1d_weight_names lists"),
            parameters.size());
  const auto type = parameters[0].scalar_type();
  DPA_CHECK(type == at::kFloat || type == dtype, op, c10::str("parameters must be float32 or ", dtype), type);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const char* name = plan.names[i].c_str();
    check_same_type(op, name, parameters[i], "the first parameter", parameters[0]);
    check_same_device(op, name, parameters[i], "the first parameter", parameters[0]);
    DPA_CHECK(parameters[i].sizes() == at::IntArrayRef(plan.shapes[i]), op,
              c10::str(name, " must have shape ", plan.shapes[i]), parameters[i].sizes());
  }
}

namespace {

void check_weights(const char* op, const BatchPlan& plan, at::TensorList parameters, const Tensor& packed) {
  check_unet1d_batch_parameters(op, plan, parameters, packed.scalar_type());
  DPA_CHECK(packed.dim() == 1 && packed.sym_size(0) == plan.elements && packed.is_contiguous(), op,
            c10::str("packed must be the ", plan.elements, " elements that unet1d_batch_pack makes for this config"),
            packed.sym_sizes());
  check_same_device(op, "packed", packed, "parameters", parameters[0]);
}

void check_sample(const char* op, const BatchPlan& plan, const Tensor& sample, const Tensor& packed) {
  check_same_device(op, "sample", sample, "packed", packed);
  check_floating(op, "sample", sample);
  DPA_CHECK(sample.dim() == 3 && sample.sym_size(2) == plan.action_dim, op,
            c10::str("sample must have shape (B, T, ", plan.action_dim, ")"), sample.sym_sizes());
  const int64_t multiple = int64_t{1} << (plan.levels - 1);
  DPA_CHECK(sample.sym_size(1) > 0 && sample.sym_size(1) % multiple == 0, op,
            c10::str("sample must have a horizon that is a positive multiple of ", multiple), sample.sym_size(1));
}

void check_local(const char* op, const BatchPlan& plan, const OptionalTensor& local, const Tensor& sample,
                 const Tensor& packed) {
  if (!local.has_value()) return;
  const int64_t channels = plan.shapes[plan.blocks[0].parameters[0]][0];
  check_same_device(op, "local", *local, "sample", sample);
  const auto type = local->scalar_type();
  DPA_CHECK(type == at::kFloat || type == packed.scalar_type(), op, "local must be float32 or of packed's dtype", type);
  DPA_CHECK(local->dim() == 3 && local->sym_size(0) == sample.sym_size(0) && local->sym_size(1) == sample.sym_size(1) &&
                local->sym_size(2) == channels,
            op, c10::str("local must have shape (B, T, ", channels, ")"), local->sym_sizes());
}

void check_conditions(const char* op, const BatchPlan& plan, const Tensor& timesteps, const OptionalTensor& global_cond,
                      const Tensor& packed) {
  check_same_device(op, "timesteps", timesteps, "packed", packed);
  const auto type = timesteps.scalar_type();
  DPA_CHECK(at::isFloatingType(type) || at::isIntegralType(type, /*includeBool=*/false), op,
            "timesteps must be numbers, whole or floating", type);
  DPA_CHECK(global_cond.has_value() == (plan.cond_dim > 0), op,
            "global_cond must be given to a network that has one, and no other",
            global_cond.has_value() ? "a tensor" : "none");
  if (!global_cond.has_value()) return;
  check_same_device(op, "global_cond", *global_cond, "packed", packed);
  check_floating(op, "global_cond", *global_cond);
  DPA_CHECK(global_cond->dim() == 2 && global_cond->sym_size(1) == plan.cond_dim, op,
            c10::str("global_cond must have shape (B, ", plan.cond_dim, ")"), global_cond->sym_sizes());
}

}  // namespace

void check_unet1d_batch(const BatchPlan& plan, const Tensor& sample, const Tensor& timesteps,
                        const OptionalTensor& global_cond, at::TensorList parameters, const Tensor& packed,
                        const OptionalTensor& local) {
  constexpr const char* op = "unet1d_batch";
  check_weights(op, plan, parameters, packed);
  check_sample(op, plan, sample, packed);
  check_local(op, plan, local, sample, packed);
  DPA_CHECK(timesteps.dim() == 1 && (timesteps.sym_size(0) == 1 || timesteps.sym_size(0) == sample.sym_size(0)), op,
            "timesteps must have shape (1) or (B)", timesteps.sym_sizes());
  check_conditions(op, plan, timesteps, global_cond, packed);
  DPA_CHECK(!global_cond.has_value() || global_cond->sym_size(0) == sample.sym_size(0), op,
            c10::str("global_cond must have shape (B, ", plan.cond_dim, ")"), global_cond->sym_sizes());
}

void check_unet1d_batch_film(const BatchPlan& plan, const Tensor& timesteps, const OptionalTensor& global_cond,
                             at::TensorList parameters, const Tensor& packed) {
  constexpr const char* op = "unet1d_batch_film";
  check_weights(op, plan, parameters, packed);
  DPA_CHECK(timesteps.dim() == 1, op, "timesteps must have shape (S)", timesteps.sym_sizes());
  check_conditions(op, plan, timesteps, global_cond, packed);
}

void check_unet1d_batch_on_film(const BatchPlan& plan, const Tensor& sample, const Tensor& step, const Tensor& cond,
                                at::TensorList parameters, const Tensor& packed, const OptionalTensor& local) {
  constexpr const char* op = "unet1d_batch_on_film";
  check_weights(op, plan, parameters, packed);
  check_sample(op, plan, sample, packed);
  check_local(op, plan, local, sample, packed);
  check_same_type(op, "step", step, "packed", packed);
  check_same_device(op, "step", step, "packed", packed);
  DPA_CHECK(step.dim() == 1 && step.sym_size(0) == plan.film_rows, op,
            c10::str("step must have shape (", plan.film_rows, ")"), step.sym_sizes());
  check_same_type(op, "cond", cond, "packed", packed);
  check_same_device(op, "cond", cond, "packed", packed);
  const auto rows = plan.cond_dim > 0 ? sample.sym_size(0) : c10::SymInt(0);
  DPA_CHECK(cond.dim() == 2 && cond.sym_size(0) == rows && cond.sym_size(1) == plan.film_rows, op,
            c10::str("cond must have shape (B, ", plan.film_rows, "), or no rows where the network has no global_cond"),
            cond.sym_sizes());
}

void check_unet1d_batch_pack_out(const BatchPlan& plan, at::TensorList parameters, at::ScalarType dtype,
                                 const OptionalTensor& seen, const Tensor& out) {
  constexpr const char* op = "unet1d_batch_pack";
  check_unet1d_batch_parameters(op, plan, parameters, dtype);
  check_same_device(op, "out", out, "parameters", parameters[0]);
  DPA_CHECK(out.scalar_type() == dtype && out.dim() == 1 && out.sym_size(0) == plan.elements && out.is_contiguous(), op,
            c10::str("out must be ", plan.elements, " contiguous elements of ", dtype), out.scalar_type(), " ",
            out.sym_sizes());
  if (!seen.has_value()) return;
  DPA_CHECK(dtype != at::kFloat, op, "seen must be left out for weights in float32", "a tensor");
  check_same_device(op, "seen", *seen, "parameters", parameters[0]);
  const int64_t items = static_cast<int64_t>(plan.items.size()), elements = kernels::conv1d::ComparedElements::kMost;
  DPA_CHECK(seen->scalar_type() == at::kInt && seen->dim() == 2 && seen->sym_size(0) == items &&
                seen->sym_size(1) == elements && seen->is_contiguous(),
            op, c10::str("seen must be contiguous int32 of shape (", items, ", ", elements, ")"), seen->scalar_type(),
            " ", seen->sym_sizes());
}

}  // namespace dpa
