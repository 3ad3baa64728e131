"""The ``dpa profile`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpa.cli.options import (
    Checkpoint,
    Device,
    Dtype,
    Ema,
    Json,
    Prefix,
    Steps,
    TrustPickle,
    located,
    torch_dtype,
)


def profile(
    checkpoint: Checkpoint,
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="The picture: .png, .svg or .pdf.")
    ] = Path("out/profile.svg"),
    device: Device = "auto",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the accelerated policy's weights.")
    ] = None,
    steps: Steps = None,
    seconds: Annotated[float, typer.Option(min=0, help="Of measuring.")] = 20.0,
    prefix: Prefix = None,
    ema: Ema = True,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Show where a call of a policy goes, before and after acceleration.

    Measures the plain policy and the accelerated one in turns, and splits each call into
    preprocessing (to the device, normalisation), encoder (images to features), loop (denoising) and
    host (queues, postprocessing, the way between the parts). Prints a table and writes the picture
    OUT.

    A LeRobot folder is profiled whole where LeRobot is installed; of any other checkpoint the loop
    is.

    Examples:

      dpa profile outputs/train/checkpoints/last/pretrained_model --dtype bfloat16

      dpa profile latest.ckpt --trust-pickle --steps 16 --out profile.png
    """
    from rich.console import Console

    from dpa.bench.call_profile import PARTS
    from dpa.bench.call_profile import profile as measure
    from dpa.bench.checkpoint import Options, show
    from dpa.bench.plots import draw_call

    if out.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"--out must end in .png, .svg or .pdf, got {out.name}")
    path, weights = located(checkpoint), torch_dtype(dtype)
    reading = {"prefix": prefix, "ema": ema, "trust_pickle": trust_pickle}
    with Console(stderr=True).status("measuring the parts of plain and accelerated calls in turns"):
        found = measure(Options(path, device, weights, steps, seconds, reading))
    draw_call(found, out)
    if as_json:
        print(json.dumps(found | {"picture": str(out)}, indent=2))
        return
    show(found, ("whole call", *PARTS), found["how"], shares=True)
    print(f"written: {out}")
