"""Modules that run on dpa's ops and load the weights of the projects they stand in for."""

from .lltm import LLTM
from .unet1d import ConditionalResidualBlock1D, ConditionalUnet1D, Conv1dBlock

__all__ = ["LLTM", "ConditionalResidualBlock1D", "ConditionalUnet1D", "Conv1dBlock"]
