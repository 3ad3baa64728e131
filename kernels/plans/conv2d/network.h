// An image encoder as a list of steps, and the launches that it makes for images of a size: pure functions.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/plans/conv2d/plan.h"

namespace dpa::kernels::conv2d {

enum class StepKind : int { kConv, kMaxPool, kAveragePool, kSpatialSoftmax };

/// What one step computes. Its output is the feature map of the step's number plus one; number 0 is the prepared image.
/// A convolution: relu(norm(conv(input) + bias) scale + shift + residual). `together`: in one launch with the step before,
/// on which it does not depend.
struct Step {
  StepKind kind;
  int from, residual;  // feature maps; residual -1 for none
  int out_channels, kernel, stride, padding, groups;
  bool bias, relu, together;
};
constexpr int kStepFields = 11;  // integers of a step, in the order above

struct Network {
  int channels = 0;    // of the images
  bool cells = false;  // whether the first layer takes cells of 2 x 2 pixels (`shape_of_cells`)
  std::vector<Step> steps;
};
/// Reads the images' channels and the steps; what is wrong with them, or an empty string.
std::string read_network(const int64_t* config, size_t count, Network& network);

/// A feature map: (batch, height, width, channels).
struct Extent {
  int height = 0, width = 0, channels = 0;
};
/// The extents of the feature maps for images of this size; what is wrong, or an empty string.
std::string extents_of(const Network& network, int height, int width, std::vector<Extent>& extents);
/// The convolution of step `i`.
Shape shape_of_step(const Network& network, size_t i, DType dtype, int batch, const std::vector<Extent>& extents);

/// Where a convolution's packed weights lie, and behind them its parameters: bias, scale, shift, in float32. Bytes.
struct PackedOffsets {
  size_t weights = 0, parameters = 0;
};
/// The place of each step's, where it is a convolution, and the bytes of all.
size_t places_of(const Network& network, DType dtype, std::vector<PackedOffsets>& places);

/// Steps [first, first + plans.size()) in one launch.
struct StepPlan {
  int tiling = -1, blocks = 0;
  bool deferred = false;  // a second pass normalises
  bool waits = false;     // blocks wait for one another, and are resident at once
  std::vector<ConvPlan> plans;
};
/// The launch that is expected to be fastest; without plans where none is possible.
/// `networks`: how many networks of these shapes share the launch; `blocks` counts those of all, and their convolutions
/// follow one another in it.
StepPlan plan_step(const std::vector<Shape>& shapes, const Device& device, int networks = 1);
/// Networks that a launch of so many convolutions a network can have.
inline int most_networks(size_t convs) {
  const int most = kMaxConvs / static_cast<int>(convs);
  return most < kMaxNetworks ? most : kMaxNetworks;
}
/// Whether step `i` is a convolution and step `i` + 1 a max pooling of 3 x 3, which alone reads it: where a second pass would
/// normalise the convolution, the pooling does (`RawMaps`).
bool is_pooled(const Network& network, size_t i);
/// Whether step `i` is a first layer and step `i` + 1 the max pooling that alone reads it: one launch (`Stem`), where
/// `serves_stem` agrees.
bool is_stem(const Network& network, size_t i);

}  // namespace dpa::kernels::conv2d
