"""What a machine without a GPU can measure: every op, and the U-Net in the engines it has."""

from __future__ import annotations

from typing import Any

import torch

from dpa.bench import cpu_ops, cpu_unet


def run() -> dict[str, Any]:
    """Every table."""
    dtypes = (torch.float32, torch.bfloat16)
    return {"ops": cpu_ops.rows(dtypes=dtypes)} | cpu_unet.run()
