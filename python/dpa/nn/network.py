"""A live module that is a U-Net of the family, and the network of dpa's that computes the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpa.nn.parts import ATTENTION, ENCODER, FILM, place
from dpa.nn.unet1d import ConditionalUnet1D
from dpa.nn.variants import Variant
from dpa.tracking import Tracker

_EPS = 1e-5  # of the norms of what runs packed


class NotInFamily(ValueError):
    """The network is not a conditional U-Net of the family; the message says what differs."""


def template(arguments: Mapping[str, Any]) -> ConditionalUnet1D:
    """Return the network of these arguments on the meta device: all shapes, no memory.

    NotInFamily is raised for arguments that the constructor refuses.
    """
    try:
        with torch.device("meta"):
            return ConditionalUnet1D(**arguments)
    except (ValueError, RuntimeError) as error:
        raise NotInFamily(str(error)) from None


@dataclass(frozen=True, eq=False)
class Network:
    """A live module that was recognised as a U-Net of the family.

    Attributes:
        variant: which of the published networks it is like.
        arguments: those of :class:`dpa.nn.ConditionalUnet1D`.
        inputs: the names of the arguments of its forward, in order.
        slots: where each parameter lives: (module, name in it), by the original's names.
        tracker: of its modules and parameters, as they were when it was recognised.
        twin: dpa's network of these arguments and blocks, on the meta device.
        parts: the modules that PyTorch runs, by the original's path.
        unconditioned: beginnings of the names of residual blocks that run without FiLM (DP3).

    """

    variant: Variant
    arguments: dict[str, Any]
    inputs: tuple[str, ...]
    slots: dict[str, tuple[nn.Module, str]] = field(repr=False)
    tracker: Tracker = field(repr=False)
    twin: ConditionalUnet1D = field(repr=False)
    parts: dict[str, nn.Module] = field(repr=False)
    unconditioned: tuple[str, ...] = ()

    @property
    def local_cond_dim(self) -> int | None:
        """Width of the local conditioning; None of a network without it."""
        return self.arguments.get("local_cond_dim")

    @property
    def eps(self) -> float:
        """What its norms add to a variance."""
        return self.twin.final_conv[0].block[1].eps

    @property
    def relu(self) -> bool:
        """Whether ReLU follows its norms, in place of Mish."""
        return isinstance(self.twin.final_conv[0].block[2], nn.ReLU)

    @functools.cached_property
    def film_apart(self) -> bool:
        """Whether PyTorch computes FiLM's parameters, or what they are computed of."""
        return any(path.endswith((ENCODER, FILM)) for path in self.parts)

    @property
    def packed_arguments(self) -> dict[str, Any]:
        """The arguments of the network that is packed, which computes only what it has to."""
        if not self.film_apart:
            return self.arguments
        return self.arguments | {"diffusion_step_embed_dim": 4, "global_cond_dim": None}

    def parts_in_words(self) -> list[str]:
        """Name the kinds of parts that PyTorch runs."""
        kinds = {
            "the timestep's embedding": ENCODER,
            "the layers that make FiLM's parameters": FILM,
            "attention": ATTENTION,
        }
        found = [n for n, end in kinds.items() if any(path.endswith(end) for path in self.parts)]
        return ["the conditioning"] * (self.variant.condition is not None) + found

    def changed_in_trace(self, module: nn.Module) -> bool:
        """Whether modules changed, in what compilers trace; what they read here they watch."""
        layers, eps = list(module.modules()), self.eps
        pairs = zip(layers[1:], list(self.tracker.modules.values())[1:], strict=True)
        if any(layer is not then or _is_odd(layer, eps) for layer, then in pairs):
            return True
        return any(getattr(layers[i], n) != then for i, n, then in self.tracker.settings_read)

    @property
    def called_alike(self) -> bool:
        """Whether its forward takes the original's arguments, in the original's order."""
        standard = all(name == self.variant.inputs[name] for name in self.inputs[1:])
        alike = standard and self.variant.condition is None and self.inputs[1] == "timestep"
        return alike and not self.variant.each_action

    @functools.cached_property
    def _packed_shapes(self) -> dict[str, torch.Size]:
        return shapes(template(self.packed_arguments))

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters that the module has now, by the original's names."""
        return {key: module._parameters[name] for key, (module, name) in self.slots.items()}

    def layers(self) -> ConditionalUnet1D | None:
        """Return dpa's layers on the same parameters, whatever replaces one later.

        None where blocks are unconditioned, which dpa's are not.
        """
        if self.unconditioned:
            return None
        layers = copy.deepcopy(self.twin).eval()
        ours = dict(layers.named_modules())
        for key, (module, _) in self.slots.items():
            path = key.rpartition(".")[0]
            if path in ours and not path.startswith(tuple(self.parts)):
                vars(ours[path])["_parameters"] = module._parameters
        for path, part in self.parts.items():
            place(layers, path, part)
        return layers

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that give the original's network the mathematics of this one.

        A residual block that the network lacks adds zero, and so does FiLM, with what it is made
        of, where PyTorch computes its parameters. A convolution before a norm of another ``eps``
        is scaled, as the norm's input may be when its ``eps`` is.
        """
        found = {key: value.detach() for key, value in self.parameters().items()}
        like, eps, apart = next(iter(found.values())), self.eps, self.film_apart
        weights = {}
        for name, shape in self._packed_shapes.items():
            made = apart and (FILM in name or name.startswith(ENCODER))  # by PyTorch
            value = None if made else found.get(name)
            inner = name.startswith(tuple(self.parts))
            if value is not None and value.shape != shape and not inner:
                want, have = tuple(shape), tuple(value.shape)
                raise NotInFamily(f"{name} must be {want}, got {have}: it was replaced")
            if value is None or value.shape != shape:
                value = torch.zeros(shape, dtype=like.dtype, device=like.device)
            elif eps != _EPS and ".block.0." in name:
                value = value * (_EPS / eps) ** 0.5
            weights[name] = value
        return without_film(weights, self.unconditioned, self.arguments["cond_predict_scale"])


def shapes(unet: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a module's parameters by name."""
    return {name: value.shape for name, value in unet.named_parameters()}


def _is_odd(layer: nn.Module, eps: float) -> bool:
    """Whether something is set that no layer of the family has; reads all that may be set."""
    if layer.forward is None:
        return True
    if isinstance(layer, nn.GroupNorm):
        return layer.eps != eps or layer.num_groups < 1
    if isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d)):
        usual = layer.padding_mode == "zeros" and layer.dilation == (1,) and layer.groups == 1
        lengths = (layer.padding, layer.output_padding, layer.stride)
        return not usual or any(length < (0,) for length in lengths)
    return False


def without_film(
    weights: Mapping[str, Tensor], begins: tuple[str, ...], scale: bool
) -> dict[str, Tensor]:
    """Return the weights with a constant FiLM, scale 1 and shift 0, where names begin so."""
    changed = dict(weights)
    for key, value in weights.items():
        if key.startswith(begins) and ".cond_encoder." in key:
            changed[key] = torch.zeros_like(value)
            if key.endswith(".bias") and scale:
                changed[key][: value.shape[0] // 2] = 1
    return changed
