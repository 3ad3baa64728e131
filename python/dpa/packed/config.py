"""What can be packed: which networks, and on which devices."""

from __future__ import annotations

import functools

import torch
from torch import nn

from dpa.library.checks import require
from dpa.nn.family import Network, recognise
from dpa.nn.parts import ATTENTION

_MAX_LEVELS, _MAX_SIZE = 5, 65536  # of what the ops run


def runs_packed(device: torch.device) -> bool:
    """Whether this build can run networks on packed weights on such a device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if key == "CUDA" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return key is not None and has_kernel("dpa::diffusion_sample", key)


@functools.lru_cache(maxsize=1024)
def path_of(
    config: tuple[int, ...],
    dtype: torch.dtype,
    batch: int,
    horizon: int,
    device: torch.device,
    layers: bool = True,
) -> str:
    """Return which kernel runs such calls on a GPU, as kernels/plans/unet1d/call.h names them.

    "layers" where they may run layer by layer, and that is faster.
    """
    with torch.cuda.device(device):
        return torch.ops.dpa.unet1d_path(config, dtype, batch, horizon, layers)


@functools.lru_cache(maxsize=1024)
def packing_for(
    config: tuple[int, ...],
    dtype: torch.dtype,
    batch: int,
    horizon: int,
    device: torch.device,
    layers: bool,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the config and the type to pack a network by for calls of (batch, horizon) samples.

    On a GPU the network's own config, or ``[*its sizes, *wider widths, 0, *its widths]``, as
    ``unet1d_pack`` takes it: some kernels take powers of two alone, others groups of a multiple of
    four channels. Each GroupNorm group is filled up with channels whose weights are zero, which the
    norms do not count; the network computes what it did, in less time where that is chosen
    (``kernels/plans/unet1d/widths.h``). ``layers``: whether calls may run layer by layer.
    """
    if device.type != "cuda":
        return config, dtype
    call = dtype, batch, horizon
    with torch.cuda.device(device):
        layout = tuple(torch.ops.dpa.unet1d_layout(config, *call, layers))
    if dtype.itemsize == 1 and path_of(layout, *call, device, layers) == "phases":
        # Phases widen e4m3 in every block, which takes longer than reading half as much saves.
        return packing_for(config, torch.float16, batch, horizon, device, layers)
    return layout, dtype


def unet_config(unet: nn.Module) -> list[int]:
    """Read the architecture off a U-Net of the family.

    Returns:
        ``[action_dim, kernel_size, n_groups, step_dim, cond_dim, flags, *down_dims]``;
        of the flags 1 is FiLM with a scale, 2 ReLU in place of Mish.

    Raises:
        ValueError: the module is not such a network, has attention, more than 5 levels or a size
            above 65536. What encodes local conditions is no part of it.

    """
    return config_of(recognise(unet))


def config_of(network: Network) -> list[int]:
    """The same of a network that was recognised already."""
    device = next(iter(network.parameters().values())).device
    arguments = network.packed_arguments
    free, dims = arguments.get("local_cond_dim") is None, list(arguments["down_dims"])
    apart = network.film_apart or bool(network.unconditioned)
    rule = "have no local conditioning where PyTorch makes its FiLM or a block has none"
    require(free or not apart, "unet", rule, "one that has")
    rule = f"have 1 to {_MAX_LEVELS} down_dims to be packed"
    require(len(dims) <= _MAX_LEVELS, "unet", rule, dims)
    layers = [path for path in network.parts if path.endswith(ATTENTION)]
    require(not layers, "unet", "have no attention to be packed", ", ".join(layers))
    if network.film_apart:
        bare = ", ".join(network.unconditioned)
        require(not bare, "unet", "condition all blocks to be packed", f"none in {bare}")
        on_gpu = device.type == "cuda"
        require(on_gpu, "unet", "be on a GPU where PyTorch makes its FiLM", device)
    config = [
        arguments["input_dim"],
        arguments["kernel_size"],
        arguments["n_groups"],
        arguments["diffusion_step_embed_dim"],
        arguments["global_cond_dim"] or 0,
        int(arguments["cond_predict_scale"]) + 2 * int(network.relu),
        *dims,
    ]
    rule = f"have sizes up to {_MAX_SIZE} to be packed"
    require(max(config) <= _MAX_SIZE, "unet", rule, config)
    return config
