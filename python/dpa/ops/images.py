"""Images: what comes before an encoder, a layer of it, and the keypoints at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "batch_norm_act",
    "conv2d",
    "conv2d_norm_act",
    "group_norm_act",
    "max_pool2d",
    "resize_crop_normalize",
    "spatial_softmax",
]


def conv2d_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    num_groups: int = 0,
    eps: float = 1e-5,
    stride: int = 1,
    padding: int = 0,
    relu: bool = True,
) -> Tensor:
    """Convolve an image, normalise, add the residual and apply ReLU.

    With ``num_groups``::

        relu(group_norm(conv2d(input, weight, bias), num_groups, scale, shift, eps) + residual)

    and without, for a BatchNorm in evaluation, ``scale`` being ``gamma / sqrt(variance + eps)`` and
    ``shift`` being ``beta - mean * scale``::

        relu(conv2d(input, weight, bias) * scale + shift + residual)

    Args:
        input: (B, C_in, H, W), contiguous or channels-last.
        weight: (C_out, C_in, kh, kw); in the input's dtype, or float32 beside a 16-bit input. On
            the CPU also in oneDNN's order, beside a float32 input, which spares reordering it.
        bias: (C_out,) of the convolution, or None; likewise.
        scale: (C_out,) or None for 1; likewise.
        shift: (C_out,) or None for 0; likewise.
        residual: (B, C_out, H_out, W_out) in the dtype of ``input``, or None.
        num_groups: of the GroupNorm, a positive divisor of C_out; 0 for none.
        eps: added to the GroupNorm's variance, at least 0.
        stride: in both directions, at least 1.
        padding: zeros at each border.
        relu: whether ReLU comes last.

    Returns:
        (B, C_out, H_out, W_out) in the dtype of ``input``, channels-last where ``input`` is.
        Differentiable in every tensor to any order, on strided weights. Under autocast the input
        and the residual alone are cast.

    Sources: He et al., Deep Residual Learning for Image Recognition (2015); Wu and He, Group
    Normalization (2018).

    """
    return torch.ops.dpa.conv2d_norm_act(
        input, weight, bias, scale, shift, residual, num_groups, eps, stride, padding, relu
    )


def group_norm_act(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    """Normalise groups of channels, add the residual and apply ReLU.

    ``relu(group_norm(input, num_groups, weight, bias, eps) + residual)``, what follows a
    convolution in the encoders of diffusion policies. On CUDA one kernel each way for channels-last
    images of 16 bits or float32 whose groups are a power of two of 16-byte vectors (8 or 4
    channels); PyTorch's ops elsewhere.

    Args:
        input: (B, C, ...), contiguous or a channels-last image.
        num_groups: a positive divisor of C.
        weight: (C,) or None for 1; in the input's dtype, or float32 beside a 16-bit input.
        bias: (C,) or None for 0; likewise.
        eps: added to the variance, at least 0.
        residual: shaped like ``input`` and of its dtype, or None.
        relu: whether ReLU comes last.

    Returns:
        The shape, dtype and order of ``input``. Differentiable in every tensor to any order. Under
        autocast the input and the residual alone are cast.

    Sources: He et al., Deep Residual Learning for Image Recognition (2015); Wu and He, Group
    Normalization (2018).

    """
    return torch.ops.dpa.group_norm_act(input, num_groups, weight, bias, eps, residual, relu)


def batch_norm_act(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    """Normalise channels over the batch, add the residual and apply ReLU.

    ``relu(batch_norm(input, weight, bias, eps) + residual)`` with the statistics of the batch, as
    BatchNorm trains. On CUDA two kernels each way for channels-last images of 16 bits or float32
    whose channels are whole 16-byte vectors (8 or 4 channels); PyTorch's ops elsewhere. Running
    statistics are the caller's: ``torch.ops.dpa.batch_norm_act_forward`` returns (output, mean,
    biased variance).

    Args:
        input: (B, C, ...), contiguous or a channels-last image.
        weight: (C,) or None for 1; in the input's dtype, or float32 beside a 16-bit input.
        bias: (C,) or None for 0; likewise.
        eps: added to the variance, at least 0.
        residual: shaped like ``input`` and of its dtype, or None.
        relu: whether ReLU comes last.

    Returns:
        The shape, dtype and order of ``input``. Differentiable in every tensor to any order. Under
        autocast the input and the residual alone are cast.

    Sources: He et al., Deep Residual Learning for Image Recognition (2015); Ioffe and Szegedy,
    Batch Normalization (2015).

    """
    return torch.ops.dpa.batch_norm_act(input, weight, bias, eps, residual, relu)


def conv2d(input: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve an image, without bias: an encoder's layer in training, where a norm follows.

    ``torch.nn.functional.conv2d``. On CUDA, with a channels-last output, the forward and the
    weight's gradient of an encoder's first layer have kernels: at most four channels at a stride
    of 2, square filters of 5 to 8 taps each way (28 rows of all channels at most), padding less
    than that, C_out a multiple of 8, in 16 bits or in float32 where PyTorch's convolutions
    multiply in TF32; the image may be contiguous. In TF32, on Hopper, so has the weight's gradient
    of filters of 3 x 3 at strides 1 and 2: C_in a multiple of 32, C_out of 64 (stride 2: 128),
    about 256 x 256 channels at most. Elsewhere it is PyTorch's convolution.

    Args:
        input: (B, C_in, H, W), in any order.
        weight: (C_out, C_in, kh, kw); in the input's dtype, or float32 beside a 16-bit input, in
            whose dtype it is read.
        stride: in both directions, at least 1.
        padding: zeros at each border.

    Returns:
        (B, C_out, H_out, W_out) in the dtype of ``input``, channels-last where ``input`` or
        ``weight`` is. Differentiable in both to any order; gradients have the order of what they
        are of. Under autocast the input alone is cast.

    Source: He et al., Deep Residual Learning for Image Recognition (2015).

    """
    return torch.ops.dpa.conv2d(input, weight, stride, padding)


def max_pool2d(input: Tensor, kernel_size: int, stride: int, padding: int = 0) -> Tensor:
    """Take the maximum over windows of an image.

    ``torch.nn.functional.max_pool2d``, the first of equal maxima getting the gradient. On CUDA
    kernels of their own for channels-last images of 16 bits or float32 whose channels are whole
    16-byte vectors (8 or 4 channels): one byte a maximum is kept for the backward, and no input.

    Args:
        input: (B, C, H, W), contiguous or channels-last.
        kernel_size: side of a window, 1 to 16.
        stride: from a window to the next, at least 1.
        padding: pixels of minus infinity on each side, at most half of ``kernel_size``.

    Returns:
        (B, C, OH, OW) in the dtype and order of ``input``, with ``OH = (H + 2 padding -
        kernel_size) // stride + 1``. Differentiable to any order.

    """
    return torch.ops.dpa.max_pool2d(input, kernel_size, stride, padding)


def spatial_softmax(input: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Find the keypoint of each feature map: the mean place under a softmax over its pixels.

    ``sum over pixels of softmax(input / temperature) * (x, y)``, where x goes from -1 in the first
    column to 1 in the last, and y from the first row to the last; one row or column is at -1.

    Args:
        input: (B, K, H, W), of at least one pixel.
        temperature: one element, in the input's dtype or float32 beside a 16-bit input; None for 1.

    Returns:
        (B, K, 2), x before y, in the dtype of ``input``. Differentiable in both tensors to any
        order. Under autocast it runs in float32.

    Source: Finn et al., Deep Spatial Autoencoders for Visuomotor Learning (2015), as robomimic and
    LeRobot have it.

    """
    return torch.ops.dpa.spatial_softmax(input, temperature)


def resize_crop_normalize(
    image: Tensor,
    size: Sequence[int] | None = None,
    crop: Sequence[int] | None = None,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    antialias: bool = True,
    hwc: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Turn camera images into an encoder's input, in one pass.

    uint8 images are divided by 255 first. Then they are resized bilinearly, as
    ``torchvision.transforms.Resize`` resizes floating tensors, cropped, and normalised:
    ``(image - mean) / std``.

    Args:
        image: (B, C, H, W), or (B, H, W, C) where ``hwc``; uint8 or floating.
        size: (height, width) to resize to, or None.
        crop: (top, left, height, width) in the resized image, or None.
        mean: (C,), of any floating dtype, or None for 0.
        std: (C,), likewise, or None for 1.
        antialias: whether a smaller image is smoothed, as torchvision does by default.
        hwc: whether the channels come last in the shape of ``image``.
        dtype: of the result; None is the image's, and float32 for uint8 and under autocast.

    Returns:
        (B, C, height, width), channels-last in memory. Differentiable in ``image``, where that is
        floating, ``mean`` and ``std``. Arithmetic is float32, or float64 where an image or the
        result is.

    """
    return torch.ops.dpa.resize_crop_normalize(image, size, crop, mean, std, antialias, hwc, dtype)
