// An image encoder as steps: what is refused, sizes of feature maps, places of packed weights, launches.
#include <gtest/gtest.h>

#include "kernels/plans/conv2d/network.h"

namespace dpa::kernels::conv2d {
namespace {

using Steps = std::vector<std::vector<int64_t>>;

std::vector<int64_t> config_of(const Steps& steps, int64_t channels = 3) {
  std::vector<int64_t> config = {channels};
  for (const auto& step : steps) config.insert(config.end(), step.begin(), step.end());
  return config;
}
Network network_of(const Steps& steps) {
  Network network;
  const auto config = config_of(steps);
  EXPECT_EQ(read_network(config.data(), config.size(), network), "");
  return network;
}

// kind, from, residual, out channels, kernel, stride, padding, groups, bias, relu, together
const std::vector<int64_t> kStem = {0, 0, -1, 64, 7, 2, 3, 4, 0, 1, 0}, kPool = {1, 1, -1, 0, 3, 2, 1, 0, 0, 0, 0},
                           kConv = {0, 2, -1, 128, 3, 2, 1, 8, 0, 1, 0},
                           kShortcut = {0, 2, -1, 128, 1, 2, 0, 8, 0, 0, 1},
                           kLast = {0, 3, 4, 128, 3, 1, 1, 8, 0, 1, 0}, kAverage = {2, 5, -1, 0, 1, 1, 0, 0, 0, 0, 0};
const Steps kBlock = {kStem, kPool, kConv, kShortcut, kLast, kAverage};

TEST(Conv2dNetwork, FeatureMapsHaveTheSizesOfTheLayers) {
  const auto network = network_of(kBlock);
  EXPECT_TRUE(network.cells);
  std::vector<Extent> extents;
  for (const int height : {84, 85}) {
    ASSERT_EQ(extents_of(network, height, 101, extents), "");
    ASSERT_EQ(extents.size(), 7u);
    const Shape stem = shape_of_step(network, 0, DType::kBFloat16, 2, extents);
    EXPECT_EQ(stem.out_height, extents[1].height);
    EXPECT_EQ(stem.out_width, extents[1].width);
    EXPECT_EQ(extents[1].height, (height - 1) / 2 + 1);
    EXPECT_EQ(extents[5].channels, 128);
    EXPECT_EQ(extents[6].height, 1);
  }
  EXPECT_NE(extents_of(network, 0, 5, extents), "");
}

TEST(Conv2dNetwork, PackedWeightsDoNotOverlap) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const auto network = network_of(kBlock);
    std::vector<PackedOffsets> places;
    std::vector<Extent> extents;
    const size_t bytes = places_of(network, dtype, places);
    ASSERT_EQ(extents_of(network, 84, 84, extents), "");
    size_t end = 0;
    for (size_t i = 0; i < network.steps.size(); i++) {
      if (network.steps[i].kind != StepKind::kConv) continue;
      EXPECT_EQ(places[i].weights % 128, 0u);
      EXPECT_GE(places[i].weights, end);
      EXPECT_GE(places[i].parameters, places[i].weights + weight_bytes(shape_of_step(network, i, dtype, 2, extents)));
      end = places[i].parameters + size_t{12} * network.steps[i].out_channels;
    }
    EXPECT_LE(end, bytes);
  }
}

TEST(Conv2dNetwork, ALaunchHasAPlanOfEachAndWaitsOnlyWhereItIsResident) {
  const auto network = network_of(kBlock);
  std::vector<Extent> extents;
  // An H100, an A100, an RTX 4090, a 3090, an Orin and less than any: multiprocessors, and shared memory of each.
  constexpr Device kDevices[] = {{132, 228 << 10, 2, true}, {108, 164 << 10}, {128, 100 << 10},
                                 {82, 100 << 10},           {16, 164 << 10},  {8, 100 << 10}};
  for (const Device& device : kDevices)
    for (const int size : {33, 84, 216, 640})
      for (const int batch : {1, 4, 64}) {
        ASSERT_EQ(extents_of(network, size, size, extents), "");
        for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
          std::vector<Shape> shapes;
          for (const size_t i : {2, 3}) shapes.push_back(shape_of_step(network, i, dtype, batch, extents));
          const StepPlan p = plan_step(shapes, device);
          ASSERT_EQ(p.plans.size(), 2u) << size << " " << batch;
          int blocks = 0;
          bool waits = false;
          for (const auto& plan : p.plans) blocks += plan.blocks(), waits |= plan.waits(p.deferred);
          EXPECT_EQ(blocks, p.blocks);
          EXPECT_EQ(waits, p.waits);
          EXPECT_GT(resident_blocks(p.tiling, device), 0);
          EXPECT_TRUE(!waits || blocks <= resident_blocks(p.tiling, device)) << device.multiprocessors << " " << size;
        }
      }
}

TEST(Conv2dNetwork, ALaunchOfSeveralNetworksWaitsOnlyWhereItIsResident) {
  Device device;
  const auto network = network_of(kBlock);
  std::vector<Extent> extents;
  for (const bool wgmma : {false, true})
    for (const int size : {33, 84, 216, 640})
      for (int networks = 1; networks <= most_networks(2); networks++) {
        device.wgmma = wgmma;
        ASSERT_EQ(extents_of(network, size, size, extents), "");
        std::vector<Shape> shapes;
        for (const size_t i : {2, 3}) shapes.push_back(shape_of_step(network, i, DType::kBFloat16, 2, extents));
        const StepPlan p = plan_step(shapes, device, networks);
        ASSERT_EQ(p.plans.size(), 2u) << size << " " << networks;
        int blocks = 0;
        for (const auto& plan : p.plans) blocks += plan.blocks() * networks;
        EXPECT_EQ(blocks, p.blocks);
        EXPECT_TRUE(!p.waits || blocks <= resident_blocks(p.tiling, device));
        EXPECT_TRUE(wgmma || !kTilings[p.tiling].wgmma);
      }
}

TEST(Conv2dNetwork, AStemIsAFirstLayerThatOnlyItsPoolReads) {
  auto plain = kBlock;
  plain[0][7] = 0;
  EXPECT_TRUE(is_stem(network_of(plain), 0));
  EXPECT_FALSE(is_stem(network_of(plain), 1));
  EXPECT_FALSE(is_stem(network_of(kBlock), 0));  // its GroupNorm wants the whole image first
  auto steps = plain;
  steps[3] = {0, 1, -1, 128, 1, 4, 0, 8, 0, 0, 1};  // reads the first layer too
  EXPECT_FALSE(is_stem(network_of(steps), 0));
  steps = plain;
  steps[1][4] = 2;
  EXPECT_FALSE(is_stem(network_of(steps), 0));
  const Shape stem = shape_of_cells(DType::kBFloat16, 2, 480, 640, 64),
              grouped = shape_of_cells(DType::kBFloat16, 2, 480, 640, 64, 4);
  Device device;
  EXPECT_TRUE(serves_stem(stem, device));
  EXPECT_FALSE(serves_stem(grouped, device));
  EXPECT_EQ(stem_blocks(stem, device, 2), 132);
  device.shared = 64 << 10;
  EXPECT_FALSE(serves_stem(stem, device));
}

TEST(Conv2dNetwork, WrongStepsAreRefused) {
  const auto wrong = [](Steps steps, size_t step, size_t field, int64_t value) {
    steps[step][field] = value;
    Network network;
    const auto config = config_of(steps);
    return read_network(config.data(), config.size(), network);
  };
  EXPECT_NE(wrong(kBlock, 0, 0, 4), "");
  EXPECT_NE(wrong(kBlock, 1, 1, 2), "");   // reads itself
  EXPECT_NE(wrong(kBlock, 3, 1, 3), "");   // together with what it reads
  EXPECT_NE(wrong(kBlock, 3, 2, 3), "");   // or adds
  EXPECT_NE(wrong(kBlock, 1, 10, 1), "");  // a pool together
  EXPECT_NE(wrong(kBlock, 0, 10, 1), "");  // the first together
  EXPECT_NE(wrong(kBlock, 4, 4, 16), "");  // taps
  EXPECT_NE(wrong(kBlock, 4, 5, 0), "");   // stride
  EXPECT_NE(wrong(kBlock, 4, 7, 3), "");   // groups
  EXPECT_NE(wrong(kBlock, 1, 6, 2), "");   // padding of a pool
  auto longer = kBlock;
  longer.push_back({0, 6, -1, 8, 1, 1, 0, 0, 0, 0, 0});  // reads features
  Network network;
  const auto config = config_of(longer);
  EXPECT_NE(read_network(config.data(), config.size(), network), "");
  EXPECT_NE(read_network(config.data(), config.size() - 1, network), "");
  EXPECT_NE(read_network(config.data(), 1, network), "");
}

}  // namespace
}  // namespace dpa::kernels::conv2d
