"""What a captured forward packs ahead: the weights of its layers, in the order of its calls.

Annotations stay real objects, which TorchScript needs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpa.nn.blocks1d import BLOCK_LAYERS, ConditionalResidualBlock1D, Conv1d, Conv1dBlock


def begin(
    linear: Sequence[list[Tensor]], layers: Sequence[tuple[nn.Module, int]], sample: Tensor
) -> None:
    """Let the graph pack the weights of each layer while the residual block before it runs.

    Args:
        linear: the weights of each ``dpa::joint_linear`` that comes before the layers.
        layers: residual blocks and convolutions in the order of their calls, each with the length
            that it reads; others are left out.
        sample: the network's input.

    """
    keeps = (ConditionalResidualBlock1D, Conv1dBlock)  # its input's length
    found = [(layer, 0) for layer in linear]
    found += [(_weights(of), length if isinstance(of, keeps) else 0) for of, length in layers]
    found = [(layer, length) for layer, length in found if layer]
    weights = [weight for layer, _ in found for weight in layer]
    if len({(weight.device, weight.dtype) for weight in weights}) == 1:
        lower = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if lower else sample.dtype
        counts, lengths = [len(layer) for layer, _ in found], [length for _, length in found]
        torch.ops.dpa.pack_ahead(weights, counts, dtype, sample.size(0), lengths)


@torch.jit.unused
def join(sample: Tensor) -> None:
    """Let the capture wait for what was packed and no layer read, such as one of the user's own."""
    torch.ops.dpa.pack_ahead([sample.new_empty(0, 0)], [1], sample.dtype)


def _weights(layer: nn.Module) -> list[Tensor]:
    """Return the weights of the convolutions of a layer that one op runs, or nothing."""
    if isinstance(layer, ConditionalResidualBlock1D):
        found = BLOCK_LAYERS.of(layer) or []
        return [weight for weight in found[0:9:4] if weight is not None]
    if isinstance(layer, Conv1dBlock):
        conv = None if layer.is_changed_inside() else layer.block[0]
    elif isinstance(layer, Conv1d):
        conv = layer
    else:
        conv = getattr(layer, "conv", None)
    weight = None if conv is None else conv._parameters.get("weight")
    return [] if weight is None else [weight]
