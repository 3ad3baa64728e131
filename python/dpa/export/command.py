"""The ``dpa export`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

HELP = """Write a policy's whole denoising loop into one file for Python or C++.

CHECKPOINT is a file that `dpa demo` wrote. Beside the file goes a manifest, FILE.json: shapes,
dtypes, normalisation, steps. The policy maps an observation and noise to actions.

Examples:

  dpa export out/demo/checkpoint.pt --to torchscript

  dpa export out/demo/checkpoint.pt --to aoti --scheduler DDIM --steps 8 --out robot.pt2
"""
DTYPES = ("float32", "bfloat16")
SCHEDULERS = ("DDIM", "DDPM")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `dpa demo`.")],
    to: Annotated[str, typer.Option(help="aoti, torchscript or exported-program.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; by default policy.pt or .pt2 beside CHECKPOINT.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N: where it shall run.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the network: float32 or bfloat16.")] = "float32",
    scheduler: Annotated[str, typer.Option(help="DDIM or DDPM.")] = "DDIM",
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Observations of a call.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Write a policy's whole denoising loop into one file."""
    from rich.console import Console

    from . import FORMATS

    choices = {"to": (to, FORMATS), "dtype": (dtype, DTYPES), "scheduler": (scheduler, SCHEDULERS)}
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value}")
    path = out or checkpoint.with_name(f"policy{FORMATS[to]}")
    console = Console(stderr=as_json)
    with console.status(f"exporting {checkpoint} to {to} (a package takes minutes to compile)"):
        manifest = _export(checkpoint, path, to, device, dtype, scheduler, steps, batch)
    if as_json:
        print(json.dumps(manifest))
    else:
        console.print(f"wrote {path} and {path}.json", highlight=False)


def _export(
    checkpoint: Path,
    path: Path,
    to: str,
    device_name: str,
    dtype: str,
    scheduler_name: str,
    steps: int,
    batch: int,
) -> dict:
    import torch

    from ..devices import choose_device
    from . import ExportedPolicy, export_policy

    try:
        from ..demo import train, world
        from ..demo.rollout import make_scheduler
        from ..schedulers import from_diffusers
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"reading this checkpoint needs the package {error.name}: pip install 'dpa[demo]'"
        ) from error
    device = choose_device(device_name)
    policy = train.load(checkpoint, device)
    table = from_diffusers(make_scheduler(scheduler_name, policy), steps)
    policy.network.unet.to(getattr(torch, dtype))
    exported = ExportedPolicy(policy.network.unet, table, policy.network.encoder).to(device)
    shape = (1 + sum(table.draws_noise), batch, world.HORIZON, world.ACTION_DIM)
    observation = torch.zeros(batch, world.OBSERVATION_DIM, device=device)
    return export_policy(exported, path, to, observation, torch.randn(shape, device=device))
