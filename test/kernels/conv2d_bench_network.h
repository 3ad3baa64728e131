// ResNet-18 as the launches of conv2d_bench, the feature maps between them, and the plans of a launch.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/conv2d/launch.h"
#include "kernels/plans/conv2d/network.h"

namespace dpa::test {

using namespace dpa::kernels;
using namespace dpa::kernels::conv2d;

struct Layer {
  Shape shape;
  int in = 0, out = 0, residual = -1;  // buffers
  bool relu = false;
  const char* name = "";
};
struct Stage {  // layers of a launch, or a pool
  bool conv = true;
  PoolKind kind = PoolKind::kMax;
  std::vector<Layer> layers;
  Pool pool = {};
  int in = 0, out = 0;
  std::string name;
};
struct Net {
  std::vector<Stage> steps;
  std::vector<size_t> buffers;  // bytes, per network
};

inline Net resnet18(DType dtype, int batch, int height, int width, bool group_norm) {
  Net net;
  const auto buffer = [&](int n, int h, int w, int c) {
    net.buffers.push_back(static_cast<size_t>(n) * h * w * pieces_of(dtype, c) * kPieceBytes);
    return static_cast<int>(net.buffers.size()) - 1;
  };
  const auto groups = [&](int c) { return group_norm ? c / 16 : 0; };
  const int h2 = (height + 1) / 2, w2 = (width + 1) / 2;
  int h = h2, w = w2;
  int x = buffer(batch, h, w, 12);
  {  // 7 x 7, stride 2, of 3 channels as 4 x 4 of 2 x 2 pixels
    Stage s;
    s.name = "conv1";
    s.layers.push_back(
        {{dtype, batch, h, w, 12, h, w, 64, 4, 4, 1, 2, 2, groups(64)}, x, buffer(batch, h, w, 64), -1, true});
    x = s.layers[0].out;
    net.steps.push_back(s);
  }
  {
    Stage s;
    s.conv = false, s.kind = PoolKind::kMax, s.name = "maxpool", s.in = x;
    const int ph = (h - 1) / 2 + 1, pw = (w - 1) / 2 + 1;
    s.out = buffer(batch, ph, pw, 64);
    s.pool = {nullptr, nullptr, batch, h, w, 64, pieces_of(dtype, 64), ph, pw, 3, 2, 1, 1.0f};
    h = ph, w = pw, x = s.out;
    net.steps.push_back(s);
  }
  int channels = 64;
  for (int stage = 0; stage < 4; stage++)
    for (int block = 0; block < 2; block++) {
      const int out = 64 << stage, stride = stage && !block ? 2 : 1;
      Stage a, b;
      const Shape first = shape_of(dtype, batch, h, w, channels, out, 3, stride, 1, groups(out));
      const int mid = buffer(batch, first.out_height, first.out_width, out);
      a.layers.push_back({first, x, mid, -1, true});
      int identity = x;
      if (stride == 2) {
        identity = buffer(batch, first.out_height, first.out_width, out);
        a.layers.push_back(
            {shape_of(dtype, batch, h, w, channels, out, 1, stride, 0, groups(out)), x, identity, -1, false});
      }
      h = first.out_height, w = first.out_width;
      const int end = buffer(batch, h, w, out);
      b.layers.push_back({shape_of(dtype, batch, h, w, out, out, 3, 1, 1, groups(out)), mid, end, identity, true});
      const std::string at = std::to_string(stage + 1) + "." + std::to_string(block);
      a.name = "layer" + at + (stride == 2 ? ".conv1+shortcut" : ".conv1"), b.name = "layer" + at + ".conv2";
      net.steps.push_back(a), net.steps.push_back(b);
      x = end, channels = out;
    }
  Stage s;
  s.conv = false, s.kind = PoolKind::kAverage, s.name = "average", s.in = x;
  s.out = buffer(batch, 1, 1, 2 * 512);
  s.pool = {nullptr, nullptr, batch, h, w, 512, pieces_of(dtype, 512), 1, 1, 0, 0, 0, 1.0f};
  net.steps.push_back(s);
  return net;
}

inline std::vector<Shape> shapes_of(const Stage& step) {
  std::vector<Shape> shapes;
  for (const Layer& l : step.layers) shapes.push_back(l.shape);
  return shapes;
}
// Plans worth a measurement, at most `most`: those that the model likes best. `hopper`: the tilings by warpgroups alone.
inline std::vector<std::pair<StepPlan, double>> plans_of(const Stage& step, const Device& device, int networks,
                                                         size_t most, bool hopper) {
  std::vector<std::pair<StepPlan, double>> made;
  std::vector<int> seen(kNumTilings, 0);
  const auto all = candidates(step.layers[0].shape, device, networks);
  for (const Choice& c : all) {
    if (hopper && !kTilings[c.plan.tiling].wgmma) continue;
    if (c.clocks > 4 * all[0].clocks || seen[c.plan.tiling] >= 3 || made.size() >= most) continue;
    StepPlan p = {c.plan.tiling, 0, c.deferred, false, {c.plan}};
    p.waits = c.plan.waits(c.deferred);
    for (size_t i = 1; i < step.layers.size(); i++) {
      ConvPlan other;
      if (!make_plan(step.layers[i].shape, c.plan.tiling, 1, other)) break;
      p.plans.push_back(other);
      p.waits |= other.waits(c.deferred);
    }
    if (p.plans.size() != step.layers.size()) continue;
    for (const ConvPlan& plan : p.plans) p.blocks += plan.blocks() * networks;
    if (p.waits && p.blocks > resident_blocks(p.tiling, device)) {
      if (!step.layers[0].shape.groups || c.plan.splits > 1) continue;
      p.deferred = true, p.waits = false;
    }
    seen[c.plan.tiling]++;
    made.emplace_back(p, c.clocks);
  }
  return made;
}

}  // namespace dpa::test
