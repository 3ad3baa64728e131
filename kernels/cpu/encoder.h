// A whole image encoder on packed weights, on the CPU: the steps of kernels/plans/conv2d/network.h in their order. Every
// thread of a team calls `run_encoder` at once; a barrier follows each step. One thread computes each sum in full, so
// results do not depend on the number of threads.
//
// Packed weights of a convolution: panels of 16 outputs; in each, for each tap in order and each input channel, padded to
// 16, a word of each output (kernels/cpu/panels.h). Behind them bias, scale and shift, padded by zeros. A convolution of
// the image itself keeps its channels as they are, and float32 weights.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/team.h"
#include "kernels/plans/conv2d/network.h"

namespace dpa::kernels::cpu {

/// The place of each step's weights, where it is a convolution, and the bytes of all.
size_t encoder_places(const conv2d::Network& network, DType dtype, std::vector<conv2d::PackedOffsets>& places);

/// Whether nothing but convolutions reads the image, which alone is not padded to 16 channels. The others need this.
bool reads_image_by_convolutions(const conv2d::Network& network);

/// The type of a convolution's packed weights.
DType packed_dtype(const conv2d::Step& step, DType dtype);
/// Packs a convolution. `weight` is (out, in, kernel, kernel), contiguous, in its packed type; `parameters` are bias (or
/// null), scale and shift. What is not written must be zero before.
void pack_convolution(const conv2d::Step& step, int in_channels, DType dtype, const void* weight,
                      const float* const parameters[3], const conv2d::PackedOffsets& place, void* packed);

/// One call.
struct EncoderRun {
  const conv2d::Network* network;
  const std::vector<conv2d::Extent>* extents;
  const std::vector<conv2d::PackedOffsets>* places;
  const Kernels* kernels;
  DType dtype;
  int batch;
  const void* packed;
  const double* constants;
  const float* images;       // float32, of the first feature map's size
  int64_t image_strides[4];  // (sample, channel, row, pixel)
  float* result;             // of a pool at the end; a feature map stays in `maps.back()`

  std::vector<Map> maps;
  float* scratch;
};

/// The number of threads that a call can use: one for every 8 million multiply-adds.
int64_t useful_threads(const EncoderRun& run);

/// Sets the feature maps in the workspace, aligned to 64; returns its bytes. With a null workspace it counts only.
size_t place_maps(EncoderRun& run, void* workspace);

/// One thread's part.
void run_encoder(const EncoderRun& run, Team& team, int thread);

}  // namespace dpa::kernels::cpu
