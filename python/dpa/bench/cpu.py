"""What a machine without a GPU can measure: the fused ops and the U-Net beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import dpa
from dpa.bench.timing import device_us


def group_norm_mish(shape: tuple[int, int, int]) -> dict[str, Any]:
    """GroupNorm and Mish in one op, against libtorch's two."""
    x, weight, bias = (torch.randn(s) for s in (shape, shape[1:2], shape[1:2]))
    with torch.no_grad():
        plain = device_us(lambda: F.mish(F.group_norm(x, 8, weight, bias)), 30)
        ours = device_us(lambda: torch.ops.dpa.group_norm_mish(x, 8, weight, bias), 30)
    return {
        "what": f"group_norm_mish {shape}",
        "PyTorch": plain,
        "dpa": ours,
        "ratio": plain / ours,
    }


def unet_step(batch: int) -> dict[str, Any]:
    """One forward pass of a U-Net of ManiSkill's size, float32."""
    unet = dpa.nn.ConditionalUnet1D(
        8,
        global_cond_dim=84,
        diffusion_step_embed_dim=64,
        down_dims=(64, 128, 256),
        kernel_size=5,
        cond_predict_scale=True,
    ).eval()
    reference = dpa.reference.plain(unet)
    sample, cond, t = torch.randn(batch, 16, 8), torch.randn(batch, 84), torch.zeros(batch)
    with torch.no_grad():
        plain = device_us(lambda: reference(sample, t, None, cond), 30)
        ours = device_us(lambda: unet(sample, t, None, cond), 30)
    what = f"U-Net step, 64/128/256, batch {batch}"
    return {"what": what, "PyTorch": plain, "dpa": ours, "ratio": plain / ours}


def run() -> dict[str, Any]:
    """Every table."""
    rows = [group_norm_mish(shape) for shape in ((1, 256, 16), (64, 256, 16), (256, 64, 16))]
    return {"CPU": rows + [unet_step(batch) for batch in (1, 16)]}
