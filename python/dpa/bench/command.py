"""The ``dpa bench`` command."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dpa.bench import cpu, small_ops
from dpa.bench.ahead import Process
from dpa.library.files import replacing

HELP = """Measure beside eager PyTorch, torch.compile and the physical floor.

On a GPU the small ops, the U-Net's step and the whole denoising loop, with what the sampler is
held to and whether it holds: two to three minutes; on the CPU every op, and the U-Net beside ONNX
Runtime and OpenVINO too, where they are installed. Writes OUT/results.json, after each part what
there is by then, and plots. With --train: training steps eager, compiled and on dpa, called and in
a CUDA graph, their peak memory, steps on two GPUs where there are two, and what is required of
them; OUT/train.json and a plot.

Examples:

  dpa bench --quick

  dpa bench --only sampler --networks "67 M" --batches 1,16

  dpa bench --profile

  dpa bench --train --only curves
"""
_PARTS = ("all", "ops", "sampler")
_TRAIN_PARTS = ("all", "networks", "norm", "ddp", "curves")
_NETWORKS = ("67 M", "252 M")  # the names of dpa.bench.sampler.SIZES
Tables = dict[str, Any]
Stages = dict[str, Callable[[], Tables]]


def _quoted(names: Sequence[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def bench(
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the JSON file and the plots.")
    ] = Path("out/bench"),
    only: Annotated[
        str,
        typer.Option(help=f"On a GPU: {_quoted(_PARTS)}; of --train: {_quoted(_TRAIN_PARTS)}."),
    ] = "all",
    networks: Annotated[str, typer.Option(help="Of the sampler, with commas.")] = "67 M,252 M",
    batches: Annotated[
        str, typer.Option(help="Of the sampler's steps; PyTorch's at 1 and 16.")
    ] = "1,2,4,8,16,32,64",
    autotune: Annotated[
        bool, typer.Option(help="torch.compile's max-autotune too: minutes to compile.")
    ] = True,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure beside eager PyTorch, torch.compile and the physical floor."""
    gpu = torch.cuda.is_available()
    parts = _TRAIN_PARTS if training else _PARTS
    if only not in parts:
        raise typer.BadParameter(f"must be {_quoted(parts)}, got {only!r}")
    if profile and not gpu:
        raise typer.BadParameter("--profile needs a GPU")
    chosen = _networks(networks)
    sizes = _batches(batches)
    out.mkdir(parents=True, exist_ok=True)  # fails before the measurements
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    results: Tables = {"device": name, "torch": torch.__version__}
    if not gpu and (busy := _busy()):
        Console(stderr=True).print(f"[yellow]{busy}[/]", highlight=False)
    pictures: list[Path] = []
    file = out / f"{'profile' if profile else 'train' if training else 'results'}.json"
    if profile:
        tables, pictures = _profiles(chosen, out)
        results |= tables
        _write(results, file)
    else:
        if quick:
            chosen, sizes, autotune, train_steps = ["67 M"], [1], False, 0
        finish: Callable[[Tables], Tables] = dict
        if training:
            from dpa.bench import train_stages

            stages, finish = train_stages.stages(only), train_stages.finished
        elif gpu:
            stages, finish = _on_gpu(only, chosen, sizes, autotune, plain, train_steps)
        else:
            stages = cpu.stages(quick)
        results = _measured(stages, results, finish, partial(_write, file=file))
    pictures += _pictures(results, out)
    if as_json:
        print(json.dumps(results, indent=2))
        return
    console = Console()
    unit = "us" if gpu else "us or ms as named"
    console.print(f"{results['device']}, torch {results['torch']}; medians, in {unit}")
    for title, rows in results.items():
        if isinstance(rows, list) and title != "curves":
            console.print(_table(title, rows))
        elif isinstance(rows, dict) and title != "seconds":
            console.print(_table(title, [rows]))
    if "read TB/s" in results:
        console.print(f"weights read at {results['read TB/s']:.2f} TB/s")
    for path in (file, *pictures):
        console.print(f"written: {path}")


def _networks(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if unknown := [name for name in names if name not in _NETWORKS]:
        raise typer.BadParameter(f"--networks must be of {_quoted(_NETWORKS)}, got {unknown[0]!r}")
    return names


def _batches(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"--batches must be positive integers with commas, got {text!r}")
    return [int(part) for part in parts]


def _busy() -> str:
    """A warning if other programs occupy the cores, else an empty string."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < cores / 2:
        return ""
    return (
        f"this machine is busy (load {load:.1f} on {cores} cores): threads that wait for one "
        "another take many times as long then, PyTorch's and dpa's"
    )


def _on_gpu(
    only: str,
    networks: list[str],
    batches: list[int],
    autotune: bool,
    plain: bool,
    train_steps: int,
) -> tuple[Stages, Callable[[Tables], Tables]]:
    """The stages on a GPU, and the function that adds the last tables."""
    if only == "ops":
        return {"small ops": small_ops.run}, dict
    from dpa.bench import sampler

    if only == "sampler":
        run = sampler.Run(networks, batches, autotune, plain, train_steps)
        return run.stages(), sampler.finished
    ops = Process(small_ops.__name__)
    run = sampler.Run(networks, batches, autotune, plain, train_steps, [ops])
    return run.stages() | {"small ops": ops.answer}, sampler.finished


def _measured(
    stages: Stages,
    results: Tables,
    finish: Callable[[Tables], Tables],
    keep: Callable[[Tables], None],
) -> Tables:
    """Every stage's tables, rows of the same table one after the other; a bar on stderr.

    Args:
        stages: by name.
        results: what there is besides.
        finish: makes of all tables so far what follows from them.
        keep: receives the finished tables after every stage, with the names of those "to come".

    """
    bar = Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    seconds: dict[str, float] = {}
    done = results
    with bar:
        task = bar.add_task("", total=len(stages))
        for name, stage in stages.items():
            bar.update(task, description=name)
            begin = time.perf_counter()
            for title, rows in stage().items():
                results[title] = results[title] + rows if title in results else rows
            seconds[name] = time.perf_counter() - begin
            left = list(stages)[len(seconds) :]
            done = finish(results) | {"seconds": seconds}
            keep(done | {"to come": left} if left else done)
            bar.advance(task)
    return done


def _write(results: Tables, file: Path) -> None:
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(results, indent=2))


def _profiles(networks: list[str], out: Path) -> tuple[Tables, list[Path]]:
    """Profile every network with every kind of weights."""
    from dpa.bench import sampler

    tables: Tables = {}
    pictures = []
    for size in sampler.SIZES:
        if size.name not in networks:
            continue
        unet = size.build()
        for label, dtype in sampler.DTYPES.items():
            try:
                found = sampler.profile(unet, dtype)
            except RuntimeError as reason:  # these sizes keep no record
                tables[f"{size.name}, {label}"] = {"not recorded": str(reason).splitlines()[0]}
                continue
            tables[f"{size.name}, {label}: {found.step:.1f} us a step"] = found.rows()
            path = out / f"profile-{size.name.replace(' ', '')}-{label}.png"
            pictures.append(found.draw(path))
    return tables, pictures


def _pictures(results: Tables, out: Path) -> list[Path]:
    """Plot the tables that have a plot."""
    try:
        from dpa.bench import plots
    except ImportError:  # the command line alone does not need matplotlib
        return []
    device = results["device"]
    found = []
    if "steps" in results:
        found.append(plots.draw_steps(results["steps"], device, out / "steps.png"))
        found.append(plots.draw_batches(results["steps"], device, out / "batches.png"))
    if "loops" in results:
        found.append(plots.draw_loops(results["loops"], device, out / "loops.png"))
    if "training" in results:
        found.append(plots.draw_training(results["training"], device, out / "train.png"))
    if "curves" in results:
        found.append(plots.draw_curves(results["curves"], device, out / "loss-curves.png"))
    if "U-Net, forward pass" in results:
        found.append(plots.draw_engines(results["U-Net, forward pass"], device, out / "cpu.png"))
    return found


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """A table whose columns are the keys of the rows, in the order they first come."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    """Two decimals, or scientific notation for smaller values."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.005 else f"{value:.2f}"
    return "" if value is None else str(value)
