"""The networks that are measured, in the sizes that policies are trained with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import dpa

HORIZON = 16  # of the networks that are trained


@dataclass(frozen=True)
class Network:
    """The sizes of a U-Net.

    Attributes:
        name: as the tables have it.
        down_dims: channels of the levels.
        step_dim: of the timestep's embedding.
        cond_dim: of ``global_cond``.
        action_dim: channels of a sample.
        horizon: times of a sample.
        kernel_size: of the convolutions.
        scale: FiLM multiplies too.
        many: the batch, beside 1, at which its loop is measured.

    """

    name: str
    down_dims: tuple[int, ...]
    step_dim: int
    cond_dim: int = 132
    action_dim: int = 2
    horizon: int = HORIZON
    kernel_size: int = 5
    scale: bool = True
    many: int = 16

    def build(self, device: torch.device | str = "cuda") -> dpa.nn.ConditionalUnet1D:
        """Return the network with random weights."""
        with torch.device(device):
            return dpa.nn.ConditionalUnet1D(
                self.action_dim,
                global_cond_dim=self.cond_dim,
                diffusion_step_embed_dim=self.step_dim,
                down_dims=self.down_dims,
                kernel_size=self.kernel_size,
                cond_predict_scale=self.scale,
            )

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noisy actions, timesteps, conditions, and the noise to predict."""
        new = lambda *shape: torch.randn(size, *shape, device=device)  # noqa: E731
        actions, noise = (new(self.horizon, self.action_dim) for _ in range(2))
        return actions, torch.randint(100, (size,), device=device), new(self.cond_dim), noise


NET_80M = Network("80 M", (256, 512, 1024), 256, 1028)
NET_252M = Network("252 M", (512, 1024, 2048), 128)
# The loops that are measured: the published sizes, and the policies that have them.
LOOPS = (
    NET_80M,
    Network("80 M, kernel 3", (256, 512, 1024), 256, 1028, kernel_size=3),
    Network("LeRobot, T 64", (512, 1024, 2048), 128, 268, 6, 64, many=8),
    Network("DP3", (512, 1024, 2048), 128, 256, 24),
    Network("ALOHA, T 48", (256, 512, 1024), 256, 206, 16, 48),
    Network("Simple DP3's widths", (128, 256, 384), 128, 256, 24),
    Network("ManiSkill", (64, 128, 256), 64, 84, 8),
    Network("NoMaD", (64, 128, 256), 256, 256, horizon=8, kernel_size=3, scale=False),
)
