// `dpa::unet1d_batch`: one forward pass of the whole U-Net for many samples, without gradients, on the kernels that
// training runs: GEMMs over (B, T, C) activations of 16 bits, or of float32 as pairs of float16 numbers.
// Where `dpa::unet1d` is for few samples and reads weights as fast as memory gives them, here each weight serves many.
//
// `parameters` are the original's tensors in the order of `unet1d_weight_names`, float32 or of the activations' dtype:
// biases and normalisations are read where they are. `packed` is what `unet1d_batch_pack` makes of the weights; its
// dtype is that of the activations and of the result. `config` is that of unet1d.h.
#pragma once
#include <memory>

#include "ops/common/check.h"

namespace dpa {

/// Beyond so many actions the network's last layer is a GEMM.
constexpr int kMostActions = 32;

/// Where everything is: parameters by their place in the list, packed weights by their first element.
struct BatchPlan {
  struct Item {  // a weight (d0, d1, taps), and where its packed form begins
    int parameter;
    int64_t offset, d0, d1;
    int taps;
    int64_t width;  // of a packed row
    // Of the GEMM's operand that it is, or is a part of: where that begins, and its elements, which in float32 are two
    // planes of halves (kernels/math/two_halves.h). 0: no GEMM multiplies it.
    int64_t operand = 0, operand_size = 0;
  };
  struct Layer {
    int weight, bias;
    int64_t packed;
  };
  struct Block {
    int parameters[10];    // in the order of residual_block1d's, -1 for what is absent
    int64_t packed, size;  // its convolutions' weights, one after the other
    int64_t film;          // its first row of FiLM's GEMM
  };
  std::vector<std::vector<int64_t>> shapes;  // of the parameters
  std::vector<std::string> names;
  int action_dim, step_dim, cond_dim, num_groups, levels;
  bool film_scale;
  std::vector<Item> items;
  int64_t weights;   // elements of all that is packed
  int64_t elements;  // of all that is packed, and as many more as the architecture's fingerprint says

  Layer time[2];
  int64_t film_rows, film_packed, film_bias;  // FiLM of all blocks is one GEMM; its bias is packed too
  std::vector<Block> blocks;                  // down, middle, up
  std::vector<Layer> down, up;
  Layer final_conv, last;
  int final_norm[2];
};

std::shared_ptr<const BatchPlan> unet1d_batch_plan(const char* op, at::IntArrayRef config);

void check_unet1d_batch_parameters(const char* op, const BatchPlan& plan, at::TensorList parameters,
                                   at::ScalarType dtype);
void check_unet1d_batch(const BatchPlan& plan, const Tensor& sample, const Tensor& timesteps,
                        const OptionalTensor& global_cond, at::TensorList parameters, const Tensor& packed,
                        const OptionalTensor& local);
void check_unet1d_batch_film(const BatchPlan& plan, const Tensor& timesteps, const OptionalTensor& global_cond,
                             at::TensorList parameters, const Tensor& packed);
void check_unet1d_batch_on_film(const BatchPlan& plan, const Tensor& sample, const Tensor& step, const Tensor& cond,
                                at::TensorList parameters, const Tensor& packed, const OptionalTensor& local);
/// `seen`: what the last change detection found, see unet1d_batch_pack.out. Of weights of 16 bits alone.
void check_unet1d_batch_pack_out(const BatchPlan& plan, at::TensorList parameters, at::ScalarType dtype,
                                 const OptionalTensor& seen, const Tensor& out);

}  // namespace dpa
