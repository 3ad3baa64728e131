// Running a program: FiLM once, then for every step of the loop the first layer, the GEMMs, the last layer with the
// scheduler's step. Every thread executes this code; `share` gives it its part of each list of tasks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/unet1d.h"
#include "kernels/math/diffusion_step.h"
#include "kernels/math/mish.h"

namespace dpa::kernels::cpu {
namespace {

/// e_i = sin(t f_i), e_{D/2 + i} = cos(t f_i), f_i = exp(-i log(10000) / (D/2 - 1)), rounded as in float32.
void sinusoid(const Program& p, int64_t begin, int64_t end) {
  const int dim = p.plan->config.step_dim, half = dim / 2;
  for (int64_t e = begin; e < end; e++) {
    const int i = static_cast<int>(e % dim);
    const float exponent = static_cast<float>(i % half) * -(9.210340371976184f / static_cast<float>(half - 1));
    const float angle = p.call.timesteps[e / dim] * static_cast<float>(std::exp(static_cast<double>(exponent)));
    p.sinusoid[e] = i < half ? std::sin(angle) : std::cos(angle);
  }
}

/// scale and shift of every block: W Mish(cat(t, g)) + b = W_t Mish(t) + (W_g Mish(g) + b), each term a table.
void film(const Program& p, Team& team, int thread) {
  const Plan& plan = *p.plan;
  const Call& call = p.call;
  const int dim = plan.config.step_dim, cond = plan.config.cond_dim;
  const int count = call.per_sample_timesteps ? call.batch : call.steps;
  const char* packed = static_cast<const char*>(call.packed);
  const auto dense = [&](int64_t weights, const float* bias, const float* in, float* out, int samples, int rows,
                         int columns, bool mish) {
    const Dense d = {plan.dtype, packed + weights, bias, in, out, samples, rows, columns, mish};
    team.share(thread, dense_tasks(d), [&](int64_t begin, int64_t end) { p.kernels->dense(d, begin, end); });
  };
  team.share(thread, int64_t{1} * count * dim, [&](int64_t begin, int64_t end) { sinusoid(p, begin, end); });
  team.share(thread, int64_t{1} * call.batch * cond, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) p.mish_cond[i] = math::mish(call.global_cond[i]);
  });
  team.barrier();
  dense(plan.step_weights[0], p.floats + plan.step_bias[0], p.sinusoid, p.hidden, count, 4 * dim, dim, true);
  dense(plan.film_cond, p.floats + plan.film_bias, p.mish_cond, p.film_cond, call.batch, plan.film_rows, cond, false);
  team.barrier();
  dense(plan.step_weights[1], p.floats + plan.step_bias[1], p.hidden, p.embedding, count, dim, 4 * dim, true);
  team.barrier();
  dense(plan.film_step, nullptr, p.embedding, p.film_step, count, plan.film_rows, dim, false);
}

float* sample_row(const Program& p, int64_t row) {
  const int64_t b = row / p.call.horizon, t = row % p.call.horizon;
  return p.sample + b * p.sample_stride + (t + p.halo) * p.plan->config.action_dim;
}

/// The first convolution and its residual, to which encoded local conditions are added, row by row.
void head(const Program& p, int step, int64_t begin, int64_t end) {
  const auto& config = p.plan->config;
  const int channels = config.down_dims[0], actions = config.action_dim;
  for (int64_t row = begin; row < end; row++) {
    const float* in = sample_row(p, row);
    const int64_t out = row * padded(channels);
    p.kernels->narrow({p.floats + p.plan->head.weights, in - config.kernel_size / 2 * actions, p.raw + out,
                       config.kernel_size * actions, channels});
    p.kernels->narrow({p.floats + p.plan->head.residual, in, p.residual + out, actions, channels});
    if (!p.call.local) continue;
    const float* local = p.call.local + (step * int64_t{1} * p.call.batch * p.call.horizon + row) * channels;
    for (int c = 0; c < channels; c++) p.residual[out + c] += local[c];
  }
}

/// Inpainting of a row: `to` = condition_data where condition_mask is set, else `from`.
void apply_condition(const Program& p, int64_t row, const float* from, float* to) {
  const int actions = p.plan->config.action_dim;
  for (int a = 0; a < actions; a++) {
    const int64_t i = row * actions + a;
    to[a] = p.call.condition_data && p.call.condition_mask[i] ? p.call.condition_data[i] : from[a];
  }
}

/// The 1x1 convolution to the actions and the scheduler's step, row by row; the last step's rows are the output.
void tail(const Program& p, int step, int64_t begin, int64_t end) {
  const auto& config = p.plan->config;
  const Call& call = p.call;
  const int channels = config.down_dims[0], actions = config.action_dim;
  const int64_t elements = int64_t{1} * call.batch * call.horizon * actions;
  for (int64_t row = begin; row < end; row++) {
    float* sample = sample_row(p, row);
    float* output = call.output + row * actions;
    for (int a = 0; a < actions; a++) {
      const float predicted = p.kernels->dot(p.value + row * padded(channels),
                                             p.floats + p.plan->tail.weights + int64_t{1} * a * channels, channels) +
                              p.floats[p.plan->tail.bias + a];
      if (!call.table) {
        output[a] = predicted;
        continue;
      }
      const math::SchedulerStep<float> scheduler(call.table, step, call.clip, call.noise != nullptr);
      const float noise = call.noise ? call.noise[step * elements + row * actions + a] : 0.0f;
      sample[a] = scheduler.step(predicted, sample[a], noise);
    }
    if (!call.table) continue;
    apply_condition(p, row, sample, step + 1 == call.steps ? output : sample);
  }
}

void set_film(const Program& p, Epilogue& f, int64_t offset, int step) {
  f.film[0] = p.film_step + offset + (p.call.per_sample_timesteps ? 0 : int64_t{1} * step * p.film_rows);
  f.film[1] = p.film_cond + offset;
}

void one_step(const Program& p, Team& team, int thread, int step) {
  const int64_t rows = int64_t{1} * p.call.batch * p.call.horizon;
  team.share(thread, rows, [&](int64_t begin, int64_t end) { head(p, step, begin, end); });
  team.barrier();
  Epilogue epilogue = p.head;
  set_film(p, epilogue, p.plan->head.film, step);
  const auto run_epilogue = [&] {
    team.share(thread, epilogue_tasks(epilogue),
               [&](int64_t begin, int64_t end) { p.kernels->epilogue(epilogue, begin, end); });
    team.barrier();
  };
  run_epilogue();
  for (const Layer& layer : p.layers) {
    for (int s = 0; s < layer.num_gemms; s++) {
      team.share_stealing(thread, s, layer.tasks[s].count, [&](int64_t begin, int64_t end) {
        p.kernels->gemm(layer.gemms[s], layer.tasks[s], begin, end);
      });
    }
    team.barrier();
    epilogue = layer.epilogue;
    if (layer.film >= 0) set_film(p, epilogue, layer.film, step);
    run_epilogue();
  }
  team.share(thread, rows, [&](int64_t begin, int64_t end) { tail(p, step, begin, end); });
  team.barrier();
}

}  // namespace

std::string reject(const Plan& plan, int64_t batch, int64_t horizon) {
  if (!packs(plan.dtype)) return "packed weights must be float32, float16 or bfloat16 on the CPU, got float8_e4m3fn";
  int64_t widest = 0;
  for (const auto& conv : plan.convs) widest = std::max<int64_t>(widest, batch * horizon * padded(conv.channels_out));
  if (widest >= int64_t{1} << 31) return "batch * horizon * channels must be below 2^31, got " + std::to_string(widest);
  return "";
}

int64_t useful_threads(const Plan& plan, int batch, int horizon) {
  return std::max<int64_t>({1, multiply_adds(plan, batch, horizon) / 8'000'000, plan.tile_bytes / 4'000'000});
}

void run(const Program& p, Team& team, int thread) {
  team.share(thread, static_cast<int64_t>(p.zeroed_bytes),
             [&](int64_t begin, int64_t end) { std::memset(p.zeroed + begin, 0, end - begin); });
  team.barrier();
  team.share(thread, int64_t{1} * p.call.batch * p.call.horizon, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      apply_condition(p, row, p.call.initial + row * p.plan->config.action_dim, sample_row(p, row));
  });
  film(p, team, thread);
  team.barrier();
  for (int step = 0; step < p.call.steps; step++) one_step(p, team, thread, step);
}

}  // namespace dpa::kernels::cpu
