"""The ``dpa demo`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpa.cli.options import Device
from dpa.demo import Dtype, Options, run

DEFAULTS = Options()


def demo(
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = DEFAULTS.seed,
    episodes: Annotated[
        int, typer.Option(min=1, help="Closed-loop episodes for each scheduler.")
    ] = DEFAULTS.episodes,
    train_steps: Annotated[
        int, typer.Option(min=1, help="Batches to train on.")
    ] = DEFAULTS.train_steps,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the results and pictures.")
    ] = DEFAULTS.out,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Take the policy from this file, do not train."
        ),
    ] = None,
    device: Device = DEFAULTS.device,
    dtype: Annotated[Dtype, typer.Option(help="Of sampling.")] = DEFAULTS.dtype,
    train_only: Annotated[
        bool, typer.Option("--train-only", help="Stop once the policy is trained and saved.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A little of everything, not judged.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = DEFAULTS.threads,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON; all else to stderr.")
    ] = False,
) -> None:
    """Train a small Diffusion Policy and run it in closed loop, with DDPM and with DDIM.

    An agent must get past an obstacle, on either side, to its goal. Fails unless both schedulers
    succeed in at least 95 % of the episodes and pass each side in at least 20 %.

    Examples:

      dpa demo

      dpa demo --quick

      dpa demo --checkpoint out/demo/checkpoint.pt --episodes 200
    """
    from rich.console import Console

    options = Options(
        seed,
        episodes,
        train_steps,
        out,
        checkpoint,
        device,
        dtype,
        train_only,
        quick,
        threads,
    )
    try:
        results = run(options, Console(stderr=as_json))
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"the demo needs the package {error.name}: pip install diffusers matplotlib pillow"
        ) from error
    if as_json and "rank" not in results:  # under torchrun the first process alone has results
        print(json.dumps(results))
    if results["passed"] is False:
        raise typer.Exit(1)
