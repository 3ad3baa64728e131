"""The networks that are measured, in the sizes that policies are trained with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import dpa

ACTION_DIM, COND_DIM, HORIZON = 2, 132, 16


@dataclass(frozen=True)
class Network:
    """The sizes of a U-Net, under its number of parameters."""

    name: str
    down_dims: tuple[int, ...]
    step_dim: int
    cond_dim: int = COND_DIM

    def build(self, device: torch.device | str = "cuda") -> dpa.nn.ConditionalUnet1D:
        """Return the network with random weights."""
        with torch.device(device):
            return dpa.nn.ConditionalUnet1D(
                ACTION_DIM,
                global_cond_dim=self.cond_dim,
                diffusion_step_embed_dim=self.step_dim,
                down_dims=self.down_dims,
                kernel_size=5,
                cond_predict_scale=True,
            )

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noisy actions, timesteps, conditions, and the noise to predict."""
        new = lambda *shape: torch.randn(size, *shape, device=device)  # noqa: E731
        actions, noise = new(HORIZON, ACTION_DIM), new(HORIZON, ACTION_DIM)
        return actions, torch.randint(100, (size,), device=device), new(self.cond_dim), noise


NET_67M = Network("67 M", (256, 512, 1024), 256)
NET_80M = Network("80 M", (256, 512, 1024), 256, 1028)
NET_252M = Network("252 M", (512, 1024, 2048), 128)
SIZES = (NET_67M, NET_252M)  # of the sampler
