"""The benchmark of a machine without a GPU: every op, and the U-Net in the installed engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpa.bench import cpu_ops, cpu_rivals, cpu_unet
from dpa.bench.networks import LOOPS


def stages(quick: bool = False) -> dict[str, Callable[[], dict[str, Any]]]:
    """The stages by their names in the progress bar; each call returns its tables.

    Args:
        quick: fewer rounds, float32 ops alone, one sample, no torch.compile: half a minute.

    """
    few = tuple(name for name in cpu_rivals.ENGINES if name != "torch.compile")
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    dtypes = (torch.float32,) if quick else (torch.float32, torch.bfloat16)
    found["ops"] = lambda: {"ops": cpu_ops.rows(3 if quick else 25, dtypes)}
    for batch in (1,) if quick else (1, 16):
        found[f"U-Net, batch {batch}"] = lambda batch=batch: {
            "U-Net, forward pass": cpu_unet.forward_rows(
                cpu_unet.NETWORK,
                batch,
                rounds=2 if quick else 6,
                wanted=few if quick else cpu_rivals.ENGINES,
            )
        }
    for network in LOOPS[:1] if quick else LOOPS:
        for batch in (1,) if quick else (1, 16):
            found[f"{network.name}, batch {batch}"] = lambda network=network, batch=batch: {
                "a step of the sampler": cpu_unet.loop_rows(
                    network, batch, rounds=1 if quick else 4
                )
            }
    return found
