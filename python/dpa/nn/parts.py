"""The places of dpa's network in which a live one's own modules run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpa.nn.blocks1d import Conv1dBlock
from dpa.nn.unet1d import ConditionalUnet1D

ENCODER, FILM, ATTENTION = "diffusion_step_encoder", ".cond_encoder", ".attention"


class NoBlock(nn.Module):
    """Stands where a network has no second residual block, whose FiLM would have that width."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """Return (B, C, T) as it is."""
        return x


class _Embedding(nn.Sequential):
    """A network's own layers from timesteps to their embedding, in whatever dtype these have."""

    def forward(self, timestep: Tensor) -> Tensor:
        weight = next(self.parameters(), None)
        if weight is None or weight.dtype not in (torch.float16, torch.bfloat16):
            return super().forward(timestep)
        with torch.autocast(weight.device.type, weight.dtype):  # sines are float32
            return super().forward(timestep).to(weight.dtype)


class _Followed(nn.Module):
    """A residual block, and a layer behind it."""

    def __init__(self, block: nn.Module, layer: nn.Module):
        super().__init__()
        self.block, self.layer = block, layer

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return self.layer(self.block(x, cond))


def reduce_to(
    unet: ConditionalUnet1D, blocks: int, eps: float, activation: type[nn.Module] = nn.Mish
) -> None:
    """Leave as many residual blocks in each level and in the middle, as those given are.

    Their norms have that ``eps``, and that activation follows them.
    """
    for level in (*unet.down_modules, unet.mid_modules, *unet.up_modules):
        for spare in range(blocks, 2):
            level[spare] = NoBlock(level[spare].cond_encoder[1].out_features)
    for layer in unet.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.eps = eps
        elif isinstance(layer, Conv1dBlock) and activation is not nn.Mish:
            layer.block[2] = activation()


def place(unet: ConditionalUnet1D, path: str, part: nn.Module) -> None:
    """Put a live network's part in its place in dpa's, by its path in the original.

    It is a whole embedding, the layers of one block's FiLM, or an attention: behind the last block
    of a down or up level, or the first in the middle.
    """
    if path == ENCODER:
        unet.diffusion_step_encoder = _Embedding(part)
    elif path.endswith(FILM):
        film = nn.Sequential(part, nn.Flatten())  # (B, R)
        unet.get_submodule(path.removesuffix(FILM)).cond_encoder = film
    else:
        blocks = unet.get_submodule(path.removesuffix(ATTENTION))
        last = 0 if blocks is unet.mid_modules else 1
        blocks[last] = _Followed(blocks[last], part)


def film_rows(unet: ConditionalUnet1D, timesteps: Tensor, global_cond: Tensor | None) -> Tensor:
    """Return FiLM's parameters of all blocks, (B, R), as the packed network takes them.

    Timesteps are (B,), or as the network's embedding takes them.
    """
    cond = unet.embed(timesteps, timesteps)
    if global_cond is not None:
        cond = torch.cat([cond, global_cond.to(cond.dtype)], dim=-1)
    levels = (*unet.down_modules, unet.mid_modules, *unet.up_modules)
    blocks = [getattr(block, "block", block) for level in levels for block in level[:2]]
    films = [getattr(block, "cond_encoder", None) for block in blocks]
    if all(film is not None and type(film[-1]) is nn.Linear for film in films):
        weights, biases = zip(*((film[-1].weight, film[-1].bias) for film in films), strict=True)
        return torch.ops.dpa.joint_linear(cond, weights, biases, mish=True)
    return torch.cat(
        [
            cond.new_zeros(len(cond), block.width) if film is None else film(cond)
            for block, film in zip(blocks, films, strict=True)
        ],
        dim=1,
    )
