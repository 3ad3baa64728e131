"""The benchmark of a machine without a GPU: every op, and the U-Net in the installed engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    engines, rounds = (few, 2) if quick else (cpu_rivals.ENGINES, 6)
    batches = (1,) if quick else (1, 16)
    dtypes = (torch.float32,) if quick else (torch.float32, torch.bfloat16)
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "ops": lambda: {"ops": cpu_ops.rows(3 if quick else 25, dtypes)}
    }
    for batch in batches:
        forward = partial(cpu_unet.forward_rows, cpu_unet.NETWORK, batch, rounds, engines)
        found[f"U-Net, batch {batch}"] = lambda rows=forward: {"U-Net, forward pass": rows()}
    for network in LOOPS[:1] if quick else LOOPS:
        for batch in batches:
            steps = partial(cpu_unet.loop_rows, network, batch, 1 if quick else 4)
            found[f"{network.name}, batch {batch}"] = lambda rows=steps: {
                "a step of the sampler": rows()
            }
    return found
