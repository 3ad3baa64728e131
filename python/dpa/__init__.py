"""Fast registered operators for Diffusion Policy in PyTorch.

Importing the package loads the library and registers ``torch.ops.dpa.*``.
"""

from dpa._library import library_path, load

load()

from dpa import nn, ops, reference, schedulers  # noqa: E402  (they need the ops)
from dpa.info import info  # noqa: E402
from dpa.packed import PackedUnet  # noqa: E402
from dpa.sampler import DiffusionSampler  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "DiffusionSampler",
    "PackedUnet",
    "info",
    "library_path",
    "nn",
    "ops",
    "reference",
    "schedulers",
]
