"""The denoising loop: from noise and an observation to an action sequence."""

from .parallel import Parallel, ParallelReport
from .sampler import DiffusionSampler

__all__ = ["DiffusionSampler", "Parallel", "ParallelReport"]
