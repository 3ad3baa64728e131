"""Image encoders as they are published, read as a list of layers that dpa's ops run.

Convolutions take what follows them along: a norm, ReLU, a residual sum. What remains, pooling and
linear layers, runs as it is, on the encoder's own modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dpa.library.checks import require
from dpa.nn.image_variants import (
    AS_THEY_ARE,
    BLOCKS,
    CHAINS,
    ENCODERS,
    KEYPOINTS,
    BlockVariant,
    EncoderVariant,
)
from dpa.tracking import Tracker
from dpa.tracking.replacing import class_of, has_own_forward
from dpa.tracking.weights import version_of
from dpa.tracking.wrappers import does_more

Slot = tuple[nn.Module, str]
_GRIDS = ("pos_grid", "pos_x", "pos_y")  # of keypoints
_NORMS = ("BatchNorm2d", "FrozenBatchNorm2d", "GroupNorm", "Identity")


class NotAnEncoder(Exception):
    """A module is no image encoder that dpa knows; the message says why."""


@dataclass(frozen=True)
class Convolution:
    """A convolution, the norm behind it, and whether ReLU ends it."""

    conv: nn.Conv2d
    norm: nn.Module | None = None
    relu: bool = False

    def slots(self) -> Iterator[Slot]:
        """Yield (module, name) of all tensors that are packed."""
        for module in (self.conv, self.norm):
            if module is not None:
                held = itertools.chain(module._parameters.items(), module._buffers.items())
                yield from ((module, n) for n, t in held if t is not None and t.dim() > 0)

    def present(self) -> list[bool]:
        """Return which tensors there are."""
        held = [module for module in (self.conv, self.norm) if module is not None]
        tensors = [t for m in held for t in (*m._parameters.values(), *m._buffers.values())]
        return [tensor is not None for tensor in tensors]


@dataclass(frozen=True)
class Residual:
    """A residual block: the last convolution ends with the sum, then ReLU."""

    layers: tuple[Convolution, ...]
    shortcut: Convolution | None


@dataclass(frozen=True)
class Preparation:
    """Resizing and the crop in the middle, each by torchvision's transform, or None."""

    resize: nn.Module | None
    crop: nn.Module | None


@dataclass(frozen=True)
class Keypoints:
    """A spatial softmax and the convolution in front of it."""

    pool: nn.Module
    conv: Convolution | None

    def check(self, maps: tuple[int, ...]) -> None:
        """Raise RuntimeError for feature maps of another height or width than it is made for."""
        expected = self.pool._in_h, self.pool._in_w
        if maps != expected:
            raise RuntimeError(
                "dpa: images must have the size that the encoder was made for: its feature maps "
                f"are {maps}, and its keypoints want {expected}"
            )

    def keep(self, keypoints: Tensor) -> None:
        """Keep keypoints where robomimic's layer does, to be drawn."""
        if "kps" in vars(self.pool):
            self.pool.kps = keypoints.detach()


Layer = Convolution | Residual | Preparation | Keypoints | Callable[[Tensor], Tensor]


@dataclass
class Encoder:
    """An encoder as a list of layers.

    Attributes:
        module: the encoder itself.
        variant: which one it is.
        layers: what runs, one after the other.
        tracker: of the modules inside.

    """

    module: nn.Module
    variant: EncoderVariant
    layers: list[Layer]
    tracker: Tracker = field(init=False)

    def __post_init__(self) -> None:
        self.tracker = Tracker(self.module)
        self._present = [layer.present() for layer in self.convolutions()]
        self._grids = [(t, version_of(t), t.clone()) for t in self._read_grids()]

    def changed(self) -> bool:
        """Whether modules inside were replaced or set up otherwise."""
        present = [layer.present() for layer in self.convolutions()]
        return not self.tracker.unchanged() or present != self._present or self._regridded()

    def grids(self) -> list[Slot]:
        """Return (module, name) of the places of pixels; dpa's ops have places of their own."""
        pools = [layer.pool for layer in self.layers if isinstance(layer, Keypoints)]
        return [
            (pool, name) for pool in pools for name in _GRIDS if pool._buffers.get(name) is not None
        ]

    def _read_grids(self) -> list[Tensor]:
        return [pool._buffers[name] for pool, name in self.grids()]

    def _regridded(self) -> bool:
        """Whether places of pixels were written; on a GPU, where the host waits, by versions."""
        grids = self._read_grids()
        if len(grids) != len(self._grids):
            return True
        for i, (now, (held, version, values)) in enumerate(zip(grids, self._grids, strict=True)):
            if now is held and now.is_cuda and version_of(now) == version:
                continue
            same = now.device == values.device and now.dtype == values.dtype
            if not same or now.shape != values.shape or not torch.equal(now, values):
                return True
            self._grids[i] = now, version_of(now), values
        return False

    def convolutions(self) -> list[Convolution]:
        """Return every convolution, in the order in which they run."""
        found: list[Convolution] = []
        for layer in self.layers:
            if isinstance(layer, Convolution):
                found.append(layer)
            elif isinstance(layer, Residual):
                found += layer.layers if layer.shortcut is None else (*layer.layers, layer.shortcut)
            elif isinstance(layer, Keypoints) and layer.conv is not None:
                found.append(layer.conv)
        return found

    def slots(self) -> list[Slot]:
        """Return (module, name) of every tensor that is packed, once each."""
        slots = [slot for layer in self.convolutions() for slot in layer.slots()]
        return list({(id(module), name): (module, name) for module, name in slots}.values())

    @property
    def first(self) -> nn.Conv2d:
        """The convolution that meets the images."""
        return self.convolutions()[0].conv


def name_of(module: nn.Module) -> str:
    """Return the name of a module's class, whether or not its forward is replaced."""
    return class_of(module).__name__


def _variant_of(module: nn.Module) -> EncoderVariant | None:
    return next((variant for variant in ENCODERS if name_of(module) in variant.classes), None)


def resembles(module: nn.Module) -> bool:
    """Whether a module has the class of a known encoder."""
    return _variant_of(module) is not None


def backbone_of(module: nn.Module) -> nn.Module | None:
    """Return the residual network of a known encoder; None where it is not in its place."""
    variant = _variant_of(module)
    try:
        return None if variant is None else module.get_submodule(variant.backbone)
    except AttributeError:
        return None


def recognise(module: nn.Module) -> Encoder:
    """Read an encoder, or raise NotAnEncoder with the reason."""
    for path, inner in module.named_modules():
        if path and has_own_forward(inner):
            raise NotAnEncoder(f"its {path} has a forward of its own")
    variant = _variant_of(module)
    if variant is None:
        raise NotAnEncoder(f"{name_of(module)} is no image encoder that dpa knows")
    why = does_more(class_of(module), "forward", variant.names, variant.branches)
    if why is not None:
        raise NotAnEncoder(why)
    try:
        layers = _joined(list(_parts(module, variant)))
    except AttributeError as error:  # a class of a known name, built otherwise
        raise NotAnEncoder(f"it is built otherwise: {error}") from None
    if not any(isinstance(layer, Convolution) for layer in layers):
        raise NotAnEncoder(f"{name_of(module)} holds no convolution")
    return Encoder(module, variant, layers)


def _parts(module: nn.Module, variant: EncoderVariant) -> Iterator[Layer | nn.Module]:
    resize, crop = (getattr(module, name, None) for name in ("resize", "center_crop"))
    if "center_crop" in variant.parts and (resize is not None or crop is not None):
        if resize is not None:
            bilinear = getattr(resize.interpolation, "value", None) == "bilinear"
            sizes = isinstance(resize.size, (list, tuple)) and len(resize.size) == 2
            if not bilinear or not sizes or not resize.antialias:
                raise NotAnEncoder("it resizes otherwise than bilinearly, smoothed, to two sizes")
        yield Preparation(resize, crop)
    for name in variant.parts:
        if name == "(flatten)":
            yield nn.Flatten()
        elif name not in ("resize", "center_crop"):
            part = getattr(module, name, None)
            if part is not None:
                yield from _read(part)


def _read(module: nn.Module) -> Iterator[Layer | nn.Module]:
    """Yield the layers of a module, its norms and activations apart."""
    name = name_of(module)
    blocks = [block for block in BLOCKS if name in block.classes]
    if blocks:
        yield _block(module, blocks[0])
    elif name in CHAINS:
        if name == "Sequential" and class_of(module).forward is not nn.Sequential.forward:
            raise NotAnEncoder("a Sequential of it has a forward of its own")
        nets = getattr(module, "nets", None)
        # One that is there twice runs twice.
        for child in [nets] if isinstance(nets, nn.Module) else module._modules.values():
            yield from _read(child)
    elif name in KEYPOINTS:
        yield _keypoints(module)
    elif name == "Conv2d":
        yield _convolution(module)
    elif name in AS_THEY_ARE or name in _NORMS:
        yield module
    else:
        raise NotAnEncoder(f"it holds a {name}, which dpa does not know")


def _joined(layers: list[Layer | nn.Module]) -> list[Layer]:
    """Join convolutions with the norm and the ReLU behind them."""
    joined: list[Layer] = []
    for layer in layers:
        name = name_of(layer) if isinstance(layer, nn.Module) else ""
        before = joined[-1] if joined and isinstance(joined[-1], Convolution) else None
        if before is not None and name in _NORMS and before.norm is None and not before.relu:
            joined[-1] = _convolution(before.conv, layer)
        elif before is not None and name == "ReLU" and not before.relu:
            joined[-1] = replace(before, relu=True)
        elif name in _NORMS[:3]:
            raise NotAnEncoder(f"a {name} stands behind no convolution")
        else:
            joined.append(layer)
    return joined


def _convolution(conv: nn.Module, norm: nn.Module | None = None, relu: bool = False) -> Convolution:
    if name_of(conv) != "Conv2d":
        raise NotAnEncoder(f"it holds a {name_of(conv)} for a convolution")
    square = len({*conv.stride}) == 1 and conv.dilation == (1, 1) and conv.groups == 1
    if not square or isinstance(conv.padding, str) or len({*conv.padding}) != 1:
        raise NotAnEncoder("a convolution has dilation, groups, or differs by direction")
    if conv.padding_mode != "zeros":
        raise NotAnEncoder(f"a convolution pads by {conv.padding_mode}")
    if norm is None or name_of(norm) == "Identity":
        return Convolution(conv, None, relu)
    if name_of(norm) not in _NORMS:
        raise NotAnEncoder(f"a {name_of(norm)} stands behind a convolution")
    if name_of(norm) != "GroupNorm" and norm.running_var is None:
        raise NotAnEncoder("a BatchNorm2d keeps no statistics")
    if getattr(norm, "eps", None) is None:
        raise NotAnEncoder(f"a {name_of(norm)} has no eps")
    return Convolution(conv, norm, relu)


def _block(module: nn.Module, block: BlockVariant) -> Residual:
    why = does_more(class_of(module), "forward", block.names, branches=True)
    if why is not None:
        raise NotAnEncoder(f"a {name_of(module)} of it: {why}")
    pairs = [[getattr(module, name) for name in names] for names in block.layers]
    if name_of(module.relu) != "ReLU":
        raise NotAnEncoder(f"a block has {name_of(module.relu)} for ReLU")
    layers = tuple(_convolution(*pair, relu=True) for pair in pairs)
    shortcut = getattr(module, block.shortcut)
    if shortcut is None:
        return Residual(layers, None)
    joined = _joined(list(_read(shortcut)))
    if len(joined) != 1 or not isinstance(joined[0], Convolution) or joined[0].relu:
        raise NotAnEncoder("a block's shortcut is more than a convolution and a norm")
    return Residual(layers, joined[0])


def _keypoints(pool: nn.Module) -> Keypoints:
    if getattr(pool, "output_variance", False):
        raise NotAnEncoder("its keypoints come with variances")
    return Keypoints(pool, None if pool.nets is None else _convolution(pool.nets))


@torch.no_grad()
def folded(layer: Convolution) -> tuple[Tensor, dict[str, Tensor | int | float | None]]:
    """Return a convolution's weight with a BatchNorm in it, and the op's other arguments."""
    conv, norm = layer.conv, layer.norm
    weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
    if norm is None:
        return weight, {"shift": bias}
    if name_of(norm) == "GroupNorm":
        affine = {"scale": norm.weight, "shift": norm.bias}
        affine = {name: None if t is None else t.detach() for name, t in affine.items()}
        return weight, {"bias": bias, "num_groups": norm.num_groups, "eps": norm.eps, **affine}
    wide = lambda t, otherwise: otherwise if t is None else t.double()  # noqa: E731
    allowed = (weight.dtype, torch.float32 if weight.itemsize == 2 else weight.dtype)
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    for kind in (tensor.dtype for tensor in tensors if tensor is not None):
        rule = f"be {weight.dtype}, as its convolution"  # as PyTorch refuses it
        require(kind in allowed, "dpa: a norm", rule, kind, RuntimeError)
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    scale = wide(norm.weight, torch.ones_like(mean)) * (variance + norm.eps).rsqrt()
    shift = wide(norm.bias, torch.zeros_like(mean)) + (wide(bias, 0.0) - mean) * scale
    weight = (weight.double() * scale[:, None, None, None]).to(weight.dtype)
    return weight, {"shift": shift.to(weight.dtype)}
