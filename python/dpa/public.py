"""Every public name of ``dpa``. The import of this module loads the library."""

from dpa.library.loader import library_path, load, wants_jit

if not wants_jit():
    load()

from dpa import jit, nn, ops, reference, schedulers
from dpa.acceleration.api import accelerate, explain, repack, restore
from dpa.acceleration.loops import Loop, LoopCall
from dpa.acceleration.real_time import continuing
from dpa.bench.profiling import StepProfile, profile
from dpa.checkpoints.loading import Checkpoint, load_checkpoint
from dpa.diagnostics.info import info
from dpa.nn.inference import fixed_weights
from dpa.packed.unet import PackedUnet
from dpa.sampling.parallel import Parallel, ParallelReport
from dpa.sampling.sampler import DiffusionSampler
from dpa.schedulers.inpainting import prefix_weights

__all__ = [
    "Checkpoint",
    "DiffusionSampler",
    "Loop",
    "LoopCall",
    "PackedUnet",
    "Parallel",
    "ParallelReport",
    "StepProfile",
    "accelerate",
    "continuing",
    "explain",
    "fixed_weights",
    "info",
    "jit",
    "library_path",
    "load_checkpoint",
    "nn",
    "ops",
    "prefix_weights",
    "profile",
    "reference",
    "repack",
    "restore",
    "schedulers",
]
