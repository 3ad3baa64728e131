"""The benchmark of a machine without a GPU: every op, and the U-Net in the installed engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dpa
from dpa.bench import cpu_ops, cpu_unet


def stages(quick: bool = False) -> dict[str, Callable[[], dict[str, Any]]]:
    """The stages by their names in the progress bar; each call returns its tables.

    Args:
        quick: fewer rounds, float32 ops alone, one sample, no torch.compile: half a minute.

    """
    unet = dpa.nn.ConditionalUnet1D(**cpu_unet.NETWORK).eval()
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    dtypes = (torch.float32,) if quick else (torch.float32, torch.bfloat16)
    found["ops"] = lambda: {"ops": cpu_ops.rows(3 if quick else 25, dtypes)}
    for batch in (1,) if quick else (1, 16):
        found[f"U-Net, batch {batch}"] = lambda batch=batch: {
            "U-Net, forward pass": cpu_unet.forward_rows(
                unet, batch, rounds=2 if quick else 6, compiled=not quick
            )
        }
    found["denoising loop"] = lambda: {
        "U-Net, denoising loop": cpu_unet.loop_rows(unet, rounds=1 if quick else 4)
    }
    return found
