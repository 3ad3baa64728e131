"""Fast registered operators for Diffusion Policy in PyTorch.

Importing the package loads the library and registers ``torch.ops.dpa.*``, unless
``DPA_LIBRARY=jit`` in the environment leaves that to :func:`dpa.jit.load`.
"""

from dpa._library import library_path, load, wants_jit

if not wants_jit():
    load()

from dpa import jit, nn, ops, reference, schedulers
from dpa.acceleration import accelerate, explain, repack, restore
from dpa.info import info
from dpa.kept import fixed_weights
from dpa.loading import Checkpoint, load_checkpoint
from dpa.packed import PackedUnet
from dpa.parallel import Parallel, ParallelReport
from dpa.profiling import StepProfile, profile
from dpa.sampler import DiffusionSampler

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "DiffusionSampler",
    "PackedUnet",
    "Parallel",
    "ParallelReport",
    "StepProfile",
    "accelerate",
    "explain",
    "fixed_weights",
    "info",
    "jit",
    "library_path",
    "load_checkpoint",
    "nn",
    "ops",
    "profile",
    "reference",
    "repack",
    "restore",
    "schedulers",
]
