"""The order of activations in memory.

Annotations stay real objects, which TorchScript needs.
"""

import os

import torch
from torch import Tensor

from dpa.nn.plain import is_exporting

# The order of activations that is fastest on tensor cores; for comparisons it can be refused.
_CHANNELS_LAST = os.environ.get("DPA_CHANNELS_LAST", "1") != "0"
HALVES = (torch.float16, torch.bfloat16)


def channels_last(sample: Tensor, weight: Tensor) -> bool:
    """Whether activations are (B, T, C) in memory: in 16 bits, or trained in TF32, on a GPU.

    From compute capability 8.0 on that is the order of its fast convolutions, under autocast, in
    16-bit modules, and in float32 where ``torch.backends.cudnn`` allows TF32 and gradients are
    wanted. Modules map (B, C, T) either way; the order is in the strides, and each op answers in
    the order of its input. Exported programs have the usual order, for they may run anywhere.
    ``DPA_CHANNELS_LAST=0`` in the environment refuses it.
    """
    if not torch.jit.is_scripting():
        possible = _CHANNELS_LAST and sample.is_cuda and not is_exporting()
        if possible:
            same, half = sample.dtype == weight.dtype, weight.dtype in HALVES
            mixed = weight.dtype == torch.float32 and torch.is_autocast_enabled("cuda")
            if same and (half or mixed or _trains_in_tf32(weight)):
                return torch.cuda.get_device_properties(sample.device).major >= 8
    return False


@torch.jit.unused
def _trains_in_tf32(weight: Tensor) -> bool:
    if weight.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    cudnn = torch.backends.cudnn
    allowed = cudnn.enabled and cudnn.conv.fp32_precision == "tf32"
    return bool(allowed and torch.is_grad_enabled())


def join(x: Tensor, skip: Tensor) -> Tensor:
    """Concatenate the channels of two tensors, in their order in memory."""
    if x.stride(1) == 1:
        return torch.cat([x.transpose(1, 2), skip.transpose(1, 2)], dim=2).transpose(1, 2)
    return torch.cat([x, skip], dim=1)
