"""An image encoder as the list of steps that the op ``image_encoder`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.image_encoder import (
    Convolution,
    Encoder,
    Keypoints,
    NotAnEncoder,
    Preparation,
    Residual,
    Slot,
    folded,
    name_of,
)
from dpa.nn.plain import is_changed

_CONV, _MAX_POOL, _AVERAGE_POOL, _KEYPOINTS = range(4)  # StepKind of kernels/plans/conv2d/network.h
_MOST_CHANNELS, _MOST_TAPS = 4, 15
_SKIPPED = ("Identity", "Dropout")  # in evaluation


@dataclass
class EncoderProgram:
    """What the op runs of an encoder, and what follows it.

    Attributes:
        config: of the op: the images' channels, then the integers of each step.
        convolutions: in the order of their steps.
        preparation: resizing and cropping, or None.
        keypoints: the layer at the op's end whose keypoints it gives, or None.
        tail: layers after the op, which PyTorch runs.

    """

    config: list[int]
    convolutions: list[Convolution] = field(default_factory=list)
    preparation: Preparation | None = None
    keypoints: Keypoints | None = None
    tail: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    _constants: list[float] = field(default_factory=list)
    _pooled: bool = False
    _served: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, encoder: Encoder) -> EncoderProgram:
        """Read an encoder's layers, or raise NotAnEncoder: the op has no such step."""
        program = cls([encoder.first.in_channels])
        if encoder.first.in_channels > _MOST_CHANNELS:
            raise NotAnEncoder(f"its images have {encoder.first.in_channels} channels")
        layers, at = list(encoder.layers), 0
        if isinstance(layers[0], Preparation):
            program.preparation = layers.pop(0)
        while layers and (made := program._step(layers[0], at)) is not None:
            at = made
            layers.pop(0)
        if any(isinstance(x, (Preparation, Convolution, Residual, Keypoints)) for x in layers):
            raise NotAnEncoder(f"a {name_of(layers[0])} stands between its convolutions")
        program.tail = layers
        return program

    def convolves_images(self) -> bool:
        """Whether convolutions alone read the images."""
        kinds, sources, residuals = (self.config[i::11] for i in (1, 2, 3))
        reads = [kind for kind, source in zip(kinds, sources, strict=True) if source == 0]
        return set(reads) == {_CONV} and 0 not in residuals

    def check_extent(self, height: int, width: int) -> None:
        """Raise RuntimeError for prepared images whose feature maps no keypoints are made for."""
        if self.keypoints is None or (height, width) in self._served:
            return
        maps = [(height, width)]
        for at in range(1, len(self.config), 11):
            _, source, _, _, kernel, stride, padding = self.config[at : at + 7]
            maps.append(tuple((n + 2 * padding - kernel) // stride + 1 for n in maps[source]))
        self.keypoints.check(maps[self.config[-10]])
        self._served.add((height, width))

    def slots(self) -> list[Slot]:
        """Return (module, name) of what :meth:`constants` reads that may be written."""
        pool = None if self.keypoints is None else self.keypoints.pool
        held = pool is not None and "temperature" in {**pool._parameters, **pool._buffers}
        return [(pool, "temperature")] if held else []

    def constants(self) -> list[float]:
        """Return one number a step: eps of a norm, the temperature of keypoints."""
        temperature = getattr(self.keypoints and self.keypoints.pool, "temperature", None)
        found = list(self._constants)
        if temperature is not None:
            found[-1] = float(temperature)
        return found

    @torch.no_grad()
    def parameters(self) -> list[Tensor]:
        """Return what the op packs: weight, bias, scale and shift of each convolution."""
        found: list[Tensor] = []
        for layer in self.convolutions:
            weight, rest = folded(layer)
            channels = weight.shape[0]
            bias, scale, shift = (rest.get(name) for name in ("bias", "scale", "shift"))
            found.append(weight)
            found += [] if bias is None else [bias]
            found.append(weight.new_ones(channels) if scale is None else scale)
            found.append(weight.new_zeros(channels) if shift is None else shift)
        return [tensor.detach().float().contiguous() for tensor in found]

    def result(self, x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the encoder's features from the op's result, in ``out`` where it is given."""
        x = x.to(dtype)
        if self.keypoints is not None:
            self.keypoints.keep(x)
        if self._pooled:
            x = x[:, :, None, None]
        writes = out is not None and not torch.is_grad_enabled()
        for i, layer in enumerate(self.tail, 1):
            is_relu = type(layer) is nn.ReLU and not is_changed(layer)
            if writes and is_relu and i == len(self.tail):
                return torch.clamp_min(x, 0.0, out=out)  # a kernel less
            x = layer(x)
        return x if out is None else out.copy_(x)

    def _step(self, layer: Any, at: int) -> int | None:
        """Add a layer that reads feature map ``at``; return its output's number, or None."""
        if self._pooled or self.keypoints is not None:
            return None
        if isinstance(layer, Convolution):
            return self._convolve(layer, at)
        if isinstance(layer, Residual):
            return self._residual(layer, at)
        if isinstance(layer, Keypoints):
            at = at if layer.conv is None else self._convolve(layer.conv, at)
            self.keypoints = layer
            return self._pool(_KEYPOINTS, at, constant=1.0)
        name = name_of(layer) if isinstance(layer, nn.Module) else ""
        if name in _SKIPPED:
            return at
        if name == "MaxPool2d" and _is_plain(layer):
            sizes = (_one(layer.kernel_size), _one(layer.stride), _one(layer.padding))
            return self._pool(_MAX_POOL, at, sizes)
        if name == "AdaptiveAvgPool2d" and layer.output_size in (1, (1, 1)):
            self._pooled = True
            return self._pool(_AVERAGE_POOL, at)
        return None

    def _pool(
        self, kind: int, at: int, sizes: tuple[int, int, int] = (1, 1, 0), constant: float = 0.0
    ) -> int:
        return self._add([kind, at, -1, 0, *sizes, 0, 0, 0, 0], constant)

    def _add(self, fields: list[int], constant: float) -> int:
        self.config += fields
        self._constants.append(constant)
        return len(self._constants)

    def _convolve(
        self, layer: Convolution, at: int, residual: int = -1, together: bool = False
    ) -> int:
        conv, norm = layer.conv, layer.norm
        if len({*conv.kernel_size}) != 1 or conv.kernel_size[0] > _MOST_TAPS:
            raise NotAnEncoder(f"a convolution has {tuple(conv.kernel_size)} taps")
        grouped = norm is not None and name_of(norm) == "GroupNorm"
        biased = grouped and conv.bias is not None
        fields = [conv.out_channels, conv.kernel_size[0], conv.stride[0], conv.padding[0]]
        fields += [norm.num_groups if grouped else 0, int(biased), int(layer.relu), int(together)]
        self.convolutions.append(layer)
        return self._add([_CONV, at, residual, *fields], norm.eps if grouped else 0.0)

    def _residual(self, block: Residual, at: int) -> int:
        last = self._convolve(block.layers[0], at)
        shortcut = at
        if block.shortcut is not None:
            shortcut = self._convolve(block.shortcut, at, together=True)
        for layer in block.layers[1:-1]:
            last = self._convolve(layer, last)
        return self._convolve(block.layers[-1], last, shortcut)


def _one(size: int | tuple[int, int]) -> int:
    return size if isinstance(size, int) else size[0]


def _is_plain(pool: nn.MaxPool2d) -> bool:
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    square = all(isinstance(size, int) or len({*size}) == 1 for size in sizes)
    return square and _one(pool.dilation) == 1 and not pool.ceil_mode and not pool.return_indices
