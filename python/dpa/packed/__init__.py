"""Weights packed for the ops that run a whole network, or a whole loop, at once."""

from .unet import PackedUnet, runs_packed, unet_config

__all__ = ["PackedUnet", "runs_packed", "unet_config"]
