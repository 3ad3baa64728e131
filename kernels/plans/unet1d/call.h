// A call as sizes: whether it can run, which path it takes, and where its intermediate values lie in its workspace. The
// paths share the buffer: it is as large as the largest of them needs. No CUDA here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/plans/unet1d/plan.h"

namespace dpa::kernels::unet1d {

/// How a call is run: one resident kernel for the whole loop, or one made for several samples, or a chain of kernels,
/// two a layer.
enum class Path { kAutomatic, kResident, kClustered, kLayered };

/// Bytes of workspace for a call of these sizes; enough for either path.
size_t workspace_bytes(const Plan& plan, int batch, int horizon, int steps);

/// Columns (sample, time) of a block of the layered path's convolution, and how many its grid's y dimension covers.
constexpr int kLayeredColumns = 32;
constexpr int64_t kMaxColumns = int64_t{65535} * kLayeredColumns;

/// Why a call of these sizes cannot run (empty when it can): the rule and the values.
std::string reject(const Plan& plan, int batch, int horizon, int steps);

/// The path that kAutomatic takes on a device with these many multiprocessors and this much shared memory a block;
/// `clusters`: whether the clusters of the kernel for several samples fit it.
Path choose_path(const Plan& plan, int batch, int horizon, int multiprocessors, int shared_bytes, bool clusters);

/// Byte offsets.
struct Workspace {
  size_t hidden, embedding, step, cond;            // FilmBuffers
  size_t sample;                                   // (B, T, A)
  size_t value, raw, residual, skips[kMaxLevels];  // layered: activations (B, time, C)
  size_t messages, message_bytes;                  // resident: partial sums
  size_t bytes;
};
Workspace workspace(const Plan& plan, int batch, int horizon, int steps);

/// Bytes of the workspace of `film_table` and `step_film_table`.
size_t film_workspace_bytes(const Plan& plan, int steps);

/// Words of the resident path's messages: every GEMM's partial sums, and the tail's.
size_t message_words(const Plan& plan, int batch, int horizon);

/// Whether the resident kernel can run a call of these sizes on such a device.
bool resident_fits(const Plan& plan, int batch, int horizon, int multiprocessors, int shared_bytes);
/// Whether it would be the one-sample kernel, which keeps records.
bool records(const Plan& plan, int batch, int horizon, int shared_bytes);

}  // namespace dpa::kernels::unet1d
