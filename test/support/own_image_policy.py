"""A policy as diffusion_policy's configuration names it: a ``_target_`` with an ``obs_encoder``."""

import torch
from torch import nn


class ObsEncoder(nn.Module):
    """Of frames by name: features of the images, and the state."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, 2), nn.Mish(), nn.AdaptiveAvgPool2d(1))

    def forward(self, frames):
        return torch.cat([self.layers(frames["camera"]).flatten(1), frames["state"]], dim=1)


class ImagePolicy(nn.Module):
    """Holds the encoder; its network and loop are of no business here."""

    def __init__(self, shape_meta, n_obs_steps, obs_encoder, horizon, noise_scheduler=None):
        super().__init__()
        self.obs_encoder = obs_encoder
