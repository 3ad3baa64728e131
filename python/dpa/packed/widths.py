"""Widths that kernels like: a network of other ones is packed among zeros."""

from __future__ import annotations

import torch

from dpa.nn.family import Network
from dpa.packed.config import path_of

# Widths of a first level; the most weights for each of the network's own, and of those where a last
# level is so narrow that reading them takes no time.
_FIRST, _MOST, _NARROW, _MOST_NARROW = (128, 256, 512), 2.6, 512, 4


def layout_for(
    network: Network, config: list[int], dtype: torch.dtype, size: tuple[int, int] | None
) -> list[int]:
    """Return the config to pack a network by for calls of a size, (B, T); None is any."""
    if size is None or network.film_apart:
        return config
    device = next(iter(network.parameters().values())).device
    return widened(config, dtype, *size, device)


def widened(
    config: list[int], dtype: torch.dtype, batch: int, horizon: int, device: torch.device
) -> list[int]:
    """Return the config to pack such a network by: with the next powers of two, where that pays.

    The kernels of one sample and those in clusters take powers of two alone, 128 at least. Each
    GroupNorm group is filled up with channels whose weights are zero, which the norms do not count:
    the network computes what it did, and reads up to 2.6 times the weights (narrow ones 4 times) in
    0.4 to 0.9 of the time.

    Returns:
        ``config``, or ``[*its sizes, *wider widths, 0, *its widths]`` as ``unet1d_pack`` takes it.

    """
    own = config[6:]
    wide = [1 << (width - 1).bit_length() for width in own]
    if wide[0] == 64 and batch == 1 and horizon >= (16 if dtype == torch.float32 else 48):
        wide = [2 * width for width in wide]  # slower below, where a cluster has the whole network
    if own == wide or not _may_widen(config, own, wide):
        return config
    if device.type != "cuda" or not _pays(wide, dtype, batch, horizon):
        return config
    wider = [*config[:6], *wide, 0, *own]
    of = lambda layout: path_of(tuple(layout), dtype, batch, horizon, device)  # noqa: E731
    if of(wider) not in ("resident", "clusters"):
        return config
    return wider if _doubling(wide) or batch == 1 or of(config) in ("phases", "layers") else config


def _doubling(wide: list[int]) -> bool:
    return all(width == wide[0] << level for level, width in enumerate(wide))


def _pays(wide: list[int], dtype: torch.dtype, batch: int, horizon: int) -> bool:
    """Whether the wider network is faster, as measured on Hopper: docs/sampler-log.md."""
    if wide[0] == 128:
        return batch == 1 and horizon <= 64
    if dtype == torch.float32:
        return batch == 1 and wide[0] == 256 and horizon <= 64
    if batch == 1:
        return horizon <= (64 if _doubling(wide) or wide[0] == 256 else 32)
    return batch <= 16 and horizon <= 64 and batch * horizon <= 512


def _may_widen(config: list[int], own: list[int], wide: list[int]) -> bool:
    """Whether the kernels have code for the widths, and the network keeps its structure."""
    actions, kernel, groups = config[:3]
    if groups != 8 or not 3 <= kernel <= 7 or wide[0] not in _FIRST or len(own) > 3:
        return False
    if own != sorted(own) or actions == own[0] or any(n % 16 for n in own):
        return False
    most = _MOST if wide[-1] > _NARROW else _MOST_NARROW
    return sum(n * n for n in wide) <= most * sum(n * n for n in own)
