// A call as sizes: whether it can run, which path it takes, and where its intermediate values lie in its workspace. The
// paths share the buffer: it is as large as the largest of them needs. No CUDA here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

/// How a call is run. One kernel for the whole loop: a resident one for one sample of common sizes, on Hopper one in
/// clusters for several samples of wide networks, in teams for narrow networks, in phases for every other size. Or,
/// where no tile of a phase fits into shared memory, a chain of kernels, two a layer.
enum class Path { kAutomatic, kResident, kClustered, kTeams, kPhases, kLayered };
const char* name_of(Path path);

/// Bytes of workspace for a call of these sizes that takes `path`.
size_t workspace_bytes(const Plan& plan, int batch, int horizon, int steps, Path path, const Device& device);

/// Columns (sample, time) of a block of the layered path's convolution, and how many its grid's y dimension covers.
constexpr int kLayeredColumns = 32;
constexpr int64_t kMaxColumns = int64_t{65535} * kLayeredColumns;

/// Why a call of these sizes cannot run (empty when it can): the rule and the values.
std::string reject(const Plan& plan, int batch, int horizon, int steps);

/// The path that kAutomatic takes.
Path choose_path(const Plan& plan, int batch, int horizon, const Device& device);

/// Whether a step of `dpa::unet1d_batch`, an op a layer, is to take the place of that path.
bool layers_pay(const Plan& plan, int batch, int horizon, const Device& device);

/// Microseconds of a step, as a model fitted to an H200 has it, most within a fifth: on `path`, infinite where it does
/// not serve the sizes; by layers. Without Hopper's instructions as fitted to code for 8.0 on that GPU.
double path_time(const Plan& plan, int batch, int horizon, Path path, const Device& device);
double layers_time(const Plan& plan, int batch, int horizon, const Device& device);

/// Samples of a launch of the loop in phases, which takes a larger batch in parts; 0 where they do not fit.
int phase_samples(const Plan& plan, int batch, int horizon, const Device& device);

/// Byte offsets.
struct Workspace {
  size_t hidden, embedding, step, cond;            // FilmBuffers
  size_t sample;                                   // (B, T, A)
  size_t value, raw, residual, skips[kMaxLevels];  // layered: activations (B, time, C)
  size_t messages, message_bytes;                  // partial sums; resident: those to clear
  size_t bytes;
};
Workspace workspace(const Plan& plan, int batch, int horizon, int steps, Path path, const Device& device);

/// Bytes of the workspace of `film_table` and `step_film_table`.
size_t film_workspace_bytes(const Plan& plan, int steps);

/// Whether the resident kernel can run a call of one sample on such a device.
bool resident_fits(const Plan& plan, int horizon, const Device& device);

}  // namespace dpa::kernels::unet1d
