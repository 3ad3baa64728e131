"""The ``dpa bench`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dpa.cli.options import (
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

# Of what is measured without a checkpoint; those from networks on belong to --train.
Part = Literal["all", "ops", "sampler", "images", "networks", "norm", "optimizer", "ddp", "curves"]
# What belongs to a run with a checkpoint alone.
_OF_CHECKPOINT = {"device", "dtype", "steps", "seconds", "prefix", "ema", "trust_pickle"}


def bench(
    context: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(metavar="CHECKPOINT", help="As of dpa explain; without it this machine."),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the accelerated checkpoint's weights.")
    ] = None,
    steps: Steps = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Of measuring the checkpoint, after it is loaded.")
    ] = 20.0,
    prefix: Prefix = None,
    ema: Ema = True,
    trust_pickle: TrustPickle = False,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the JSON file and the plots.")
    ] = Path("out/bench"),
    only: Annotated[
        Part,
        typer.Option(help="A part alone: ops, sampler or images; with --train one of the others."),
    ] = "all",
    networks: Annotated[
        str | None, typer.Option(help="Of the sampler, with commas; by default all.")
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help="Of the sampler's steps; by default 1 and the policy's many, 16 or 8."),
    ] = None,
    plain: Annotated[bool, typer.Option(help="Measure PyTorch beside the sampler.")] = True,
    train_steps: Annotated[
        int, typer.Option(help="Of the policy that is sampled in parallel; 0 leaves that out.")
    ] = 1000,
    profile: Annotated[
        bool, typer.Option("--profile", help="Where a step's time goes, layer by layer, alone.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One network, one sample, fewer rounds: a minute.")
    ] = False,
    training: Annotated[
        bool, typer.Option("--train", help="Training steps and what they must reach, alone.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the parts that OUT's file does not have.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a checkpoint, or this machine, beside eager PyTorch.

    With CHECKPOINT: the plain policy against the accelerated one, and where the call goes
    (preparation, network, rest), in half a minute. A LeRobot folder is measured from observation to
    action where LeRobot is installed, the denoising loop of any other checkpoint.

    Without: beside torch.compile and the physical floor too. On a GPU the small ops, and the
    U-Net's step and the whole denoising loop in eight policies' sizes, with what the sampler is
    held to and whether it holds: some ten minutes, which --resume spends in parts; where LeRobot is
    installed, its policy from images to actions, its training steps and its encoders too. On the
    CPU every op, and the U-Net beside ONNX Runtime and OpenVINO too, where they are installed.
    Writes OUT/results.json, after each part what there is by then, and plots. With --train:
    training steps eager, compiled and on dpa, called and in a CUDA graph, their peak memory, steps
    and sampling on several GPUs where there are some, and what is required of them; OUT/train.json
    and a plot.

    Examples:

      dpa bench outputs/train/checkpoints/last/pretrained_model

      dpa bench latest.ckpt --trust-pickle --steps 16 --dtype bfloat16

      dpa bench --quick

      dpa bench --only sampler --networks "80 M,DP3" --batches 1,16

      dpa bench --profile

      dpa bench --train --only curves
    """
    from rich.console import Console

    _check_given(context, checkpoint is not None)
    if checkpoint is not None:
        from dpa.bench.checkpoint import PARTS, Options, measure, show

        path, weights = located(checkpoint), torch_dtype(dtype)
        reading = {"prefix": prefix, "ema": ema, "trust_pickle": trust_pickle}
        with Console(stderr=True).status("measuring plain and accelerated calls in turns"):
            found = measure(Options(path, device, weights, steps, seconds, reading))
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            ms = found["first call ms"]
            note = f"dpa's network includes the scheduler's steps; its first call took {ms:.0f} ms"
            show(found, PARTS, [note, *found["how"]])
        return
    from dpa.bench import command

    names = networks and [part.strip() for part in networks.split(",")]
    what = out, only, names or command.NETWORKS, batches and _sizes(batches)
    try:
        options = command.Options(*what, plain, train_steps, profile, quick, training, resume)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    results, files = command.bench(options)
    if as_json:
        print(json.dumps(results, indent=2))
        return
    command.show(results)
    for path in files:
        print(f"written: {path}")


def _check_given(context: typer.Context, with_checkpoint: bool) -> None:
    """Refuse options that this kind of run would leave unread."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in ("checkpoint", "as_json") or (name in _OF_CHECKPOINT) == with_checkpoint:
            continue
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            which = "with" if with_checkpoint else "without"
            option = max(parameter.opts, key=len)
            raise typer.BadParameter(f"{option} must be left out {which} a checkpoint")


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"--batches must be positive integers with commas, got {text!r}")
    return [int(part) for part in parts]
