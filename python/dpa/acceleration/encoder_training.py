"""Image encoders in training: calls of what is the same in every step replay, channels-last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.image_encoder import backbone_of
from dpa.tracking.replacing import class_of, replace_method
from dpa.training.channels_last import ChannelsLast, value_of
from dpa.training.graphed_calls import GraphedForward, ungraph_calls


def graph_encoder(encoder: nn.Module) -> None:
    """Let the calls of an encoder, or of its residual network, replay while it trains."""
    ungraph_encoder(encoder)
    # LeRobot's own forward adds crops and resizing alone; others' may hold any augmentation.
    whole = class_of(encoder).__module__.startswith("lerobot.") and not _prepares(encoder)
    module = encoder if whole else backbone_of(encoder)
    if module is not None:
        replace_method(module, "forward", GraphedEncoder(module, 3, 2))


def ungraph_encoder(encoder: nn.Module) -> None:
    """Undo :func:`graph_encoder`."""
    for module in {encoder, backbone_of(encoder)} - {None}:
        ungraph_calls(module)


def _prepares(module: nn.Module) -> bool:
    """Whether its forward crops at random, or resizes."""
    return getattr(module, "do_crop", False) or getattr(module, "resize", None) is not None


class GraphedEncoder(GraphedForward):
    """Captures record an encoder's channels-last form, in 16 bits or with TF32.

    Without TF32, cuDNN's convolutions of float32 are no faster channels-last.
    """

    def forget(self) -> None:
        """Drop every capture, and what calls have shown."""
        super().forget()
        self._dtypes: dict[torch.dtype | None, torch.dtype] = {}

    def _key(self, names: tuple[Any, ...], values: tuple[Any, ...]) -> Hashable | None:
        return None if _prepares(self.module) else super()._key(names, values)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that this one replaces, and learn in which dtype it answers."""
        out = super().original(*args, **kwargs)
        if isinstance(out, Tensor):
            self._dtypes[_autocast()] = out.dtype
        return out

    def recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Run it channels-last; the output is in the order and dtype of the original's."""
        dtype, images = self._dtypes.get(_autocast()), args[0] if args else None
        if dtype is None or not isinstance(images, Tensor) or not _gains(images):
            return self.original(*args, **kwargs)
        weights = [m.weight for m in self.module.modules() if isinstance(m, nn.Conv2d)]
        with ChannelsLast(weights):
            out = value_of(super().original(*args, **kwargs))
        return out.to(dtype).contiguous() if isinstance(out, Tensor) else out


def _gains(images: Tensor) -> bool:
    narrow = images.itemsize == 2 or _autocast() is not None
    tf32 = images.dtype == torch.float32 and torch.backends.cudnn.allow_tf32
    return images.dim() == 4 and (narrow or tf32)


def _autocast() -> torch.dtype | None:
    """What autocast makes of float32 on a GPU, or None."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
