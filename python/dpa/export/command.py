"""The ``dpa export`` command."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpa.checkpoints.options import Checkpoint, Ema, Prefix, TrustPickle

if TYPE_CHECKING:
    from rich.console import Console

HELP = """Write a policy's denoising loop into one file for Python or C++.

CHECKPOINT is what `dpa explain` understands: of LeRobot (a folder), of diffusion_policy, of
`dpa demo`, or a bare U-Net. Missing values can be given as options; assumed ones are listed.
Beside the file goes a manifest, FILE.json: shapes, dtypes, normalisation, steps.

Examples:

  dpa export out/demo/checkpoint.pt --to torchscript

  dpa export pretrained_model --to aoti --scheduler DDIM --steps 10

  dpa export latest.ckpt --trust-pickle --to torchscript --dtype bfloat16

  dpa export latest.ckpt --trust-pickle --to torchscript --device cuda
"""
DTYPES = ("float32", "bfloat16")
SCHEDULERS = ("DDIM", "DDPM")
PARTS = ("loop", "step")


def export(
    checkpoint: Checkpoint,
    to: Annotated[str, typer.Option(help="aoti, torchscript or exported-program.")],
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="The file; by default policy.pt or .pt2 beside CHECKPOINT."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N: where it shall run.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the network: float32 or bfloat16.")] = "float32",
    part: Annotated[str, typer.Option(help="loop, or step: one step of it.")] = "loop",
    layers: Annotated[
        bool, typer.Option("--layers", help="Layer by layer, not as one op on packed weights.")
    ] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="DDIM or DDPM; by default the checkpoint's.")
    ] = None,
    scheduler_config: Annotated[
        Path | None, typer.Option(help="A scheduler_config.json of diffusers, for a bare U-Net.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps; by default the checkpoint's.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(min=1, help="Actions in a chunk; by default the checkpoint's.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Observations of a call.")] = 1,
    prefix: Prefix = None,
    ema: Ema = True,
    trust_pickle: TrustPickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Write a policy's denoising loop into one file."""
    from rich.console import Console

    from dpa.export import FORMATS
    from dpa.export.checkpoint import read, read_scheduler_config
    from dpa.export.making import Choice, make

    choices = {"to": (to, FORMATS), "dtype": (dtype, DTYPES), "part": (part, PARTS)}
    if scheduler is not None:
        choices["scheduler"] = (scheduler, SCHEDULERS)
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value}")
    if layers and part == "step":
        raise ValueError("layers must be left out with --part step, got both")
    named = checkpoint if checkpoint.name.strip(".") else checkpoint.resolve()
    path = out or named.with_name(f"policy{FORMATS[to]}")
    choice = Choice(to, device, dtype, part, layers, scheduler, steps, horizon, batch)
    console = Console(stderr=as_json)
    with _stages(console, to) as report:
        report("reading")
        source = read(checkpoint, prefix=prefix, ema=ema, trust_pickle=trust_pickle)
        if scheduler_config is not None:
            source.scheduler = read_scheduler_config(scheduler_config)
            source.assumed = [line for line in source.assumed if "scheduler" not in line]
        manifest = make(source, path, choice, report)
    for line in manifest["assumed"]:
        console.print(f"[yellow]note[/yellow] {line}", highlight=False)
    if as_json:
        print(json.dumps(manifest))
        return
    shapes = ", ".join(f"{entry['name']} {tuple(entry['shape'])}" for entry in manifest["inputs"])
    what = f"{manifest['steps']} steps of {manifest['scheduler']}, {dtype} on {device}"
    console.print(f"{manifest['checkpoint']}: {what}\ninputs: {shapes}", highlight=False)
    console.print(f"wrote {path} and {path}.json", highlight=False)


@contextmanager
def _stages(console: Console, to: str) -> Iterator[Callable[[str], None]]:
    """Show a bar of the stages; give what is to be called with the name of each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dpa.export import STAGES

    notes = {"compiling": "compiling (half a minute)"} if to == "aoti" else {}
    bar = Progress(
        TextColumn("{task.description:<36}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar, warnings.catch_warnings():
        # PyTorch's exporter warns of its deprecation, which the user cannot act on.
        warnings.simplefilter("ignore", FutureWarning)
        # And on a machine without a GPU of the CUDA that it finds.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        task = bar.add_task("", total=len(STAGES))

        def report(stage: str) -> None:
            text = notes.get(stage, stage)
            bar.update(task, description=text, completed=STAGES.index(stage))

        yield report
