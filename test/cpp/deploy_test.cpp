// A program without Python opens what Python wrote: models that call dpa's ops, which the linked library registers.
// Of PyTorch's headers it takes those that it needs: all of torch/script.h take half as long again to compile.
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

namespace {

const std::string kModels = DPA_MODELS;

class Deploy : public testing::Test {
 protected:
  torch::jit::Module data = torch::jit::load(kModels + "/data.pt");
  at::Tensor tensor(const std::string& name) const { return data.attr(name).toTensor(); }
  void expect_close(const at::Tensor& got, const std::string& name) const {
    EXPECT_TRUE(at::allclose(got, tensor(name), /*rtol=*/1e-4, /*atol=*/1e-5)) << got << tensor(name);
  }
};

TEST_F(Deploy, TorchScriptGivesTheSameValues) {
  auto module = torch::jit::load(kModels + "/script.pt");
  at::NoGradGuard no_grad;
  for (int run = 0; run < 3; ++run) expect_close(module.forward({tensor("input")}).toTensor(), "output");
}

TEST_F(Deploy, TorchScriptGivesTheSameGradients) {
  for (int run = 0; run < 3; ++run) {
    auto module = torch::jit::load(kModels + "/script.pt");
    module.forward({tensor("input")}).toTensor().sum().backward();
    for (const auto& parameter : module.named_parameters())
      if (parameter.name == "block.block.0.weight") expect_close(parameter.value.grad(), "gradient");
  }
}

TEST_F(Deploy, AotInductorPackageGivesTheSameValues) {
  torch::inductor::AOTIModelPackageLoader package(kModels + "/package.pt2");
  const auto out = package.run({tensor("input")});
  ASSERT_EQ(out.size(), 1u);
  expect_close(out[0], "output");
}

TEST_F(Deploy, ErrorsTeachHereToo) {
  auto module = torch::jit::load(kModels + "/script.pt");
  at::NoGradGuard no_grad;
  try {
    module.forward({at::randn({3, 4, 12})});
    FAIL() << "four channels into a block of three";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("dpa::conv1d_gnm: conv_weight must have shape"), std::string::npos)
        << error.what();
  }
}

}  // namespace
