"""An image encoder on packed weights, on the CPU."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from dpa import ops
from dpa.nn.image_encoder import Convolution, Encoder, Keypoints, Preparation, Residual, folded
from dpa.tracking import WeightTracker


class PackedEncoder:
    """Runs an encoder's layers by dpa's ops, channels-last, on weights that are kept packed.

    A BatchNorm is folded into the convolution before it; float32 weights lie in oneDNN's order. The
    weights are packed at the first call, and again when a parameter or a statistic was replaced or
    written (:class:`dpa.tracking.WeightTracker`), as the option ``weights`` of
    :func:`dpa.accelerate` says. No gradient flows through any of it.
    """

    def __init__(self, encoder: Encoder, weights: str = "tracked"):
        self.encoder = encoder
        self._lock = threading.Lock()
        self._packed: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self._tracker = WeightTracker(encoder.slots(), weights)

    def _follow(self) -> dict[int, tuple[Tensor, dict[str, Any]]]:
        """Return the weights by convolution; a call keeps those that it began with."""
        with self._lock:
            if self._tracker.changed() or self._tracker.values_changed():
                self._tracker.remember()  # first: a write while this packs counts as a later one
                self._packed = {}
            return self._packed

    @torch.inference_mode(False)
    @torch.no_grad()
    def _pack(self, layer: Convolution, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        weight, rest = folded(layer)
        conv = layer.conv
        rest |= {"stride": conv.stride[0], "padding": conv.padding[0]}
        if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            reorder = torch.ops.mkldnn._reorder_convolution_weight
            weight = reorder(weight, conv.padding, conv.stride, (1, 1), 1, list(x.shape))
        return weight, rest

    def run(self, images: Tensor) -> Tensor:
        """Return the encoder's output, or raise as :meth:`Keypoints.check` does."""
        x, convolve = images, functools.partial(self._convolve, self._follow())
        for layer in self.encoder.layers:
            if isinstance(layer, Preparation):
                x = _prepared(layer, x)
            elif isinstance(layer, Convolution):
                x = convolve(layer, x)
            elif isinstance(layer, Residual):
                shortcut = x if layer.shortcut is None else convolve(layer.shortcut, x)
                for inner in layer.layers[:-1]:
                    x = convolve(inner, x)
                x = convolve(layer.layers[-1], x, shortcut)
            elif isinstance(layer, Keypoints):
                layer.check(tuple(x.shape[2:]))
                x = x if layer.conv is None else convolve(layer.conv, x)
                x = ops.spatial_softmax(x, getattr(layer.pool, "temperature", None))
                layer.keep(x)
            else:
                x = layer(x)
        return x

    def _convolve(
        self,
        packed: dict[int, tuple[Tensor, dict[str, Any]]],
        layer: Convolution,
        x: Tensor,
        residual: Tensor | None = None,
    ) -> Tensor:
        held = packed.get(id(layer))
        if held is None:
            held = packed[id(layer)] = self._pack(layer, x)
        weight, rest = held
        if not x.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous(memory_format=torch.channels_last)
        return ops.conv2d_norm_act(x, weight, residual=residual, relu=layer.relu, **rest)


Sizes = tuple[int, ...]


def crop_of(layer: Preparation, extent: Sizes) -> tuple[Sizes | None, Sizes | None] | None:
    """Return what an image of this height and width is resized to, and its crop.

    Each may be None, as :func:`dpa.ops.resize_crop_normalize` takes them. None altogether where the
    crop is larger than the image, which is padded then.
    """
    size = None if layer.resize is None else tuple(layer.resize.size)
    if layer.crop is None:
        return size, None
    (height, width), (h, w) = size or extent, layer.crop.size
    if h > height or w > width:
        return None
    return size, (round((height - h) / 2.0), round((width - w) / 2.0), h, w)


def padded(layer: Preparation, x: Tensor) -> Tensor:
    """Resize, and crop to more than there is."""
    return layer.crop(x if layer.resize is None else layer.resize(x))


def _prepared(layer: Preparation, x: Tensor) -> Tensor:
    """Resize and crop in one pass."""
    sizes = crop_of(layer, tuple(x.shape[2:]))
    return padded(layer, x) if sizes is None else ops.resize_crop_normalize(x, *sizes)


def why_not(
    dtype: torch.dtype, device: torch.device, compute: torch.dtype | None = None
) -> str | None:
    """Return why an encoder with such weights runs as it is, or None.

    ``compute`` is the wanted dtype; None for that of the weights.
    """
    if device.type == "cuda":
        return _why_not_on_gpu(dtype, device, compute or dtype)
    if device.type != "cpu":
        return f"on {device.type} it runs as it is"
    if dtype not in (torch.float32, torch.float64):
        return f"its weights are {dtype}, and packed ones float32 or float64"
    return None


def _why_not_on_gpu(dtype: torch.dtype, device: torch.device, compute: torch.dtype) -> str | None:
    held = "; a whole call's graph holds it as it is"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("dpa::image_encoder", "CUDA"):
        return "the library is built for the CPU" + held
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU's compute capability is below 8.0" + held
    if dtype not in (torch.float32, torch.bfloat16):
        return f"its weights are {dtype}, and packed ones float32 or bfloat16" + held
    if compute == torch.float32 and not torch.backends.cudnn.allow_tf32:
        return "torch.backends.cudnn allows no TF32" + held
    return None
