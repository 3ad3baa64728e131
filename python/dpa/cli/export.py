"""The ``dpa export`` command."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dpa.cli.options import Checkpoint, Ema, Prefix, Steps, TrustPickle, located

if TYPE_CHECKING:
    from rich.console import Console


def export(
    checkpoint: Checkpoint,
    to: Annotated[
        Literal["aoti", "torchscript", "exported-program", "onnx"],
        typer.Option(help="What kind of file."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="The file; by default policy.pt, .pt2 or .onnx beside CHECKPOINT."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N: where it shall run.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the network.")
    ] = "float32",
    part: Annotated[
        Literal["loop", "step", "continuing"],
        typer.Option(help="The loop, one step of it, or the loop that continues the last chunk."),
    ] = "loop",
    first_step: Annotated[
        int,
        typer.Option(min=0, help="The step that begins with the last chunk (--part continuing)."),
    ] = 0,
    layers: Annotated[
        bool, typer.Option("--layers", help="Layer by layer, not as one op on packed weights.")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="From camera images: the encoders too.")
    ] = False,
    scheduler: Annotated[
        Literal["DDIM", "DDPM"] | None, typer.Option(help="By default the checkpoint's.")
    ] = None,
    scheduler_config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A scheduler_config.json of diffusers, for a bare U-Net.",
        ),
    ] = None,
    steps: Steps = None,
    horizon: Annotated[
        int | None, typer.Option(min=1, help="Actions in a chunk; by default the checkpoint's.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Observations of a call.")] = 1,
    prefix: Prefix = None,
    ema: Ema = True,
    trust_pickle: TrustPickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Write a policy's denoising loop into one file for Python, C++ or ONNX runtimes (TensorRT).

    CHECKPOINT is what `dpa explain` understands: of LeRobot (a folder, or user/repo on the Hub), of
    diffusion_policy, of `dpa demo`, or a bare U-Net. Missing values can be given as options;
    assumed ones are listed. Beside the file goes a manifest, FILE.json: shapes, dtypes,
    normalisation, steps.

    Examples:

      dpa export out/demo/checkpoint.pt --to torchscript

      dpa export pretrained_model --to aoti --scheduler DDIM --steps 10

      dpa export latest.ckpt --trust-pickle --to torchscript --dtype bfloat16

      dpa export latest.ckpt --trust-pickle --to torchscript --device cuda

      dpa export pretrained_model --to torchscript --images --steps 10

      dpa export pretrained_model --to onnx --scheduler DDIM --steps 10
    """
    from rich.console import Console
    from rich.text import Text

    from dpa.export import FORMATS
    from dpa.export.checkpoint import read
    from dpa.export.making import Choice, make
    from dpa.export.places import check_places, files_of
    from dpa.export.schedulers import read_scheduler_config

    if layers and part != "loop":
        raise typer.BadParameter(f"--layers must be left out with --part {part}")
    if first_step and part != "continuing":
        raise typer.BadParameter("--first-step must be left out without --part continuing")
    given = located(checkpoint)
    named = given if given.name.strip(".") else given.resolve()
    if not Path(checkpoint).exists():  # of the Hub: not into its cache
        named = Path(named.name)
    path = out or named.with_name(f"policy{FORMATS[to]}")
    configs = [] if scheduler_config is None else [scheduler_config]
    check_places(path, "out", [*files_of(given), *configs])
    what = (to, device, dtype, part, layers, scheduler)
    choice = Choice(*what, steps, horizon, batch, first_step, images, trust_pickle)
    console = Console(stderr=as_json)
    with _stages(console, to) as report:
        report("reading")
        source = read(given, prefix=prefix, ema=ema, trust_pickle=trust_pickle)
        if scheduler_config is not None:
            source.scheduler = read_scheduler_config(scheduler_config)
            source.assumed = [line for line in source.assumed if "scheduler" not in line]
        manifest = make(source, path, choice, report, given)
    for line in manifest["assumed"]:
        console.print(Text.assemble(("note", "yellow"), f" {line}"))
    if as_json:
        print(json.dumps(manifest))
    else:
        _show(manifest, f"{dtype} on {device}", path, console)


def _show(manifest: dict[str, Any], runs: str, path: Path, console: Console) -> None:
    from rich.text import Text

    shapes = ", ".join(f"{entry['name']} {tuple(entry['shape'])}" for entry in manifest["inputs"])
    what = f"{manifest['steps']} steps of {manifest['scheduler']}, {runs}"
    console.print(Text(f"{manifest['checkpoint']}: {what}\ninputs: {shapes}"))
    if "checked" in manifest:
        console.print(_verdict(manifest["checked"]), highlight=False)
    console.print(Text(f"wrote {path} and {path}.json"))


def _verdict(checked: dict[str, Any] | None) -> str:
    """Say what the comparison with another runtime gave."""
    if checked is None:
        return "[yellow]note[/yellow] not compared: pip install onnxruntime, and export again"
    error = f"relative error {checked['error']:.1e}, at most {checked['limit']:g} passes"
    return f"compared with {checked['by']}: {error}"


@contextmanager
def _stages(console: Console, to: str) -> Iterator[Callable[[str], None]]:
    """Show a bar of the stages; give what is to be called with the name of each."""
    from dpa.export import STAGES
    from dpa.library.progress import progress

    notes = {"compiling": "compiling (half a minute)"} if to == "aoti" else {}
    bar = progress(console, 36, transient=True, disable=not console.is_terminal)
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
