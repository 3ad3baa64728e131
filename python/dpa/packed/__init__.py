"""Weights packed for the ops that run a whole network, or a whole loop, at once."""

from .config import runs_packed, unet_config
from .unet import PackedUnet

__all__ = ["PackedUnet", "runs_packed", "unet_config"]
