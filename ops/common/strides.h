// The two orders in which ops keep a (B, C, T) tensor: contiguous, or channels-last, which is (B, T, C) in memory; and an
// image, (B, C, H, W), likewise.
//
// An op's output has the order of its input, on Meta too, as with PyTorch's own channels_last.
// Strides are taken literally, so that a tensor with one channel or one time step, which is contiguous as well, keeps
// what it is.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "ops/common/check.h"

namespace dpa {

/// Whether `tensor` is (B, C, T) with strides (T C, 1, C).
inline bool is_channels_last(const Tensor& tensor) {
  if (tensor.dim() != 3) return false;
  const auto sizes = tensor.sym_sizes(), strides = tensor.sym_strides();
  if (strides[1] != 1 || strides[2] != sizes[1]) return false;
  return strides[0] == sizes[1] * sizes[2] || sizes[0] == 1;
}

/// An empty (batch, channels, length) tensor, channels-last or contiguous. The sizes may be symbolic.
inline Tensor empty_in_order(const c10::SymInt& batch, const c10::SymInt& channels, const c10::SymInt& length,
                             bool channels_last, const at::TensorOptions& options) {
  if (!channels_last) return at::empty_symint({batch, channels, length}, options);
  return at::empty_strided_symint({batch, channels, length}, {length * channels, 1, channels}, options);
}

/// The tensor itself where it is in that order, else a copy.
inline Tensor in_order(const Tensor& tensor, bool channels_last) {
  if (!channels_last) return tensor.contiguous();
  if (is_channels_last(tensor)) return tensor;
  auto copy = empty_in_order(tensor.sym_size(0), tensor.sym_size(1), tensor.sym_size(2), true, tensor.options());
  return copy.copy_(tensor);
}

/// Whether `image` is (B, C, H, W) with strides (H W C, 1, W C, C).
inline bool is_channels_last_image(const Tensor& image) {
  if (image.dim() != 4) return false;
  const auto sizes = image.sym_sizes(), strides = image.sym_strides();
  if (strides[1] != 1 || strides[3] != sizes[1] || strides[2] != sizes[3] * sizes[1]) return false;
  return strides[0] == sizes[2] * sizes[3] * sizes[1] || sizes[0] == 1;
}

/// An empty (batch, channels, height, width) image, channels-last or contiguous. The sizes may be symbolic.
inline Tensor empty_image(const c10::SymInt& batch, const c10::SymInt& channels, const c10::SymInt& height,
                          const c10::SymInt& width, bool channels_last, const at::TensorOptions& options) {
  if (!channels_last) return at::empty_symint({batch, channels, height, width}, options);
  return at::empty_strided_symint({batch, channels, height, width},
                                  {height * width * channels, 1, width * channels, channels}, options);
}

/// The same of the sizes of another, or of a weight's.
inline Tensor empty_image_like(const Tensor& image, bool channels_last, const at::TensorOptions& options) {
  const auto sizes = image.sym_sizes();
  return empty_image(sizes[0], sizes[1], sizes[2], sizes[3], channels_last, options);
}

/// The image itself where it is in that order, else a copy.
inline Tensor image_in_order(const Tensor& image, bool channels_last) {
  if (!channels_last) return image.contiguous();
  if (is_channels_last_image(image)) return image;
  return empty_image_like(image, true, image.options()).copy_(image);
}

/// The values of `tensor` in the shape, order and dtype of `like`. Views, without a memory format, for vmap takes none.
inline Tensor values_like(const Tensor& tensor, const Tensor& like) {
  const auto shaped = tensor.reshape_symint(like.sym_sizes()).to(like.scalar_type());
  if (is_channels_last_image(like)) return shaped.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
  return shaped.contiguous();
}

}  // namespace dpa
