"""Typed wrappers of ``torch.ops.dpa.*``, with their formulas.

Each function calls the registered op of the same name and nothing else; :mod:`dpa.reference` has
the same formulas in plain PyTorch. Where an op does not say otherwise, tensors may have any strides
and any size, empty ones included, and floating tensors may be float64, float32, float16 or
bfloat16, on the CPU or a CUDA device. 16-bit types accumulate in float32. NaN and infinity go
through as they do in PyTorch. An invalid argument raises a ``RuntimeError`` that begins with
``dpa::<op>:`` and names the argument, the rule and the value received.
"""

from dpa.ops import (
    batching,  # noqa: F401  (registers the rules of torch.vmap)
    denoising,
    elementwise,
    images,
    layers,
)
from dpa.ops.denoising import *  # noqa: F403
from dpa.ops.elementwise import *  # noqa: F403
from dpa.ops.images import *  # noqa: F403
from dpa.ops.layers import *  # noqa: F403

__all__ = [*denoising.__all__, *elementwise.__all__, *images.__all__, *layers.__all__]
