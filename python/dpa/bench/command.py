"""What ``dpa bench`` runs without a checkpoint: every stage for this machine, tables, plots."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dpa.bench import cpu, small_ops
from dpa.bench.ahead import Process
from dpa.bench.networks import LOOPS
from dpa.library.devices import choose_device, device_name
from dpa.library.files import replacing
from dpa.library.progress import progress

PARTS = ("all", "ops", "sampler", "images")
TRAIN_PARTS = ("all", "networks", "norm", "optimizer", "ddp", "curves")
NETWORKS = tuple(size.name for size in LOOPS)
Tables = dict[str, Any]
Stages = dict[str, Callable[[], Tables]]


def quoted(names: Sequence[str]) -> str:
    """The names as a sentence has them."""
    return " or ".join(f"'{name}'" for name in names)


@dataclass(frozen=True)
class Options:
    """The options of ``dpa bench`` without a checkpoint; its ``--help`` explains each."""

    out: Path = Path("out/bench")
    only: str = "all"
    networks: Sequence[str] = NETWORKS
    batches: Sequence[int] | None = None
    plain: bool = True
    train_steps: int = 1000
    profile: bool = False
    quick: bool = False
    training: bool = False
    resume: bool = False

    def __post_init__(self):
        parts = TRAIN_PARTS if self.training else PARTS
        if self.only not in parts:
            raise ValueError(f"--only must be {quoted(parts)}, got {self.only!r}")
        if unknown := [name for name in self.networks if name not in NETWORKS]:
            raise ValueError(f"--networks must be of {quoted(NETWORKS)}, got {unknown[0]!r}")
        if self.profile and not torch.cuda.is_available():
            raise ValueError("--profile needs a GPU")
        if self.only == "images" and not (torch.cuda.is_available() and find_spec("lerobot")):
            raise ValueError("--only images needs a GPU, and LeRobot installed")


def bench(options: Options) -> tuple[Tables, list[Path]]:
    """Measure this machine, with a progress bar; return the tables and the files written."""
    gpu = torch.cuda.is_available()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)  # fails before the measurements
    results: Tables = {"device": device_name(choose_device("auto")), "torch": torch.__version__}
    if not gpu and (busy := _busy()):
        Console(stderr=True).print(f"[yellow]{busy}[/]", highlight=False)
    kind = "profile" if options.profile else "train" if options.training else "results"
    file = out / f"{kind}.json"
    pictures: list[Path] = []
    if options.profile:
        tables, pictures = _profiles(options.networks, out)
        results |= tables
        _write(results, file)
    else:
        if options.resume and file.exists():
            results = json.loads(file.read_text())
        stages, finish = _stages(options, gpu)
        results = _measured(stages, results, finish, partial(_write, file=file))
    return results, [file, *pictures, *_pictures(results, out)]


def _stages(options: Options, gpu: bool) -> tuple[Stages, Callable[[Tables], Tables]]:
    if options.training:
        from dpa.bench import train_stages

        return train_stages.stages(options.only), train_stages.finished
    if not gpu:
        return cpu.stages(options.quick), dict
    if options.quick:
        options = replace(options, networks=NETWORKS[:1], batches=[1], train_steps=0)
    return _on_gpu(options)


def show(results: Tables) -> None:
    """Print the tables."""
    console = Console()
    unit = "us" if torch.cuda.is_available() else "us or ms as named"
    console.print(f"{results['device']}, torch {results['torch']}; medians, in {unit}")
    for title, rows in results.items():
        if isinstance(rows, list) and title != "curves":
            console.print(_table(title, rows))
        elif isinstance(rows, dict) and title != "seconds":
            console.print(_table(title, [rows]))
    if "read TB/s" in results:
        console.print(f"weights read at {results['read TB/s']:.2f} TB/s")


def _busy() -> str:
    """A warning if other programs occupy the cores, else an empty string."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < cores / 2:
        return ""
    return (
        f"this machine is busy (load {load:.1f} on {cores} cores): threads that wait for one "
        "another take many times as long then, PyTorch's and dpa's"
    )


def _on_gpu(options: Options) -> tuple[Stages, Callable[[Tables], Tables]]:
    """The stages on a GPU, and the function that adds the last tables."""
    if options.only == "ops":
        return {"small ops": small_ops.run}, dict
    from dpa.bench import image_policies, sampler

    settings = (options.networks, options.batches, options.plain, options.train_steps)
    if options.only == "sampler":
        return sampler.stages(*settings), _finished
    if options.only == "images":
        return image_policies.stages(), _finished
    ops = Process(small_ops.__name__)
    found = sampler.stages(*settings, [ops]) | {"small ops": ops.answer}
    if find_spec("lerobot") and not options.quick:
        found |= image_policies.stages()
    return found, _finished


def _finished(results: Tables) -> Tables:
    """The tables in their order, with the bars of all that they have."""
    from dpa.bench import image_policies, sampler

    tables = sampler.finished(results)
    return tables | {"bars": tables["bars"] + image_policies.bars(tables)}


def _measured(
    stages: Stages,
    results: Tables,
    finish: Callable[[Tables], Tables],
    keep: Callable[[Tables], None],
) -> Tables:
    """Every stage's tables, rows of the same table one after the other; a bar on stderr.

    Args:
        stages: by name; those that ``results`` has the "seconds" of are left out.
        results: what there is besides.
        finish: makes of all tables so far what follows from them.
        keep: receives the finished tables after every stage, with the names of those "to come".

    """
    bar = progress(Console(stderr=True), 22, transient=True)
    results.pop("to come", None)
    seconds: dict[str, float] = results.get("seconds", {})
    stages = {name: stage for name, stage in stages.items() if name not in seconds}
    done = results
    with bar:
        task = bar.add_task("", total=len(stages))
        for i, (name, stage) in enumerate(stages.items(), 1):
            bar.update(task, description=name)
            begin = time.perf_counter()
            for title, rows in stage().items():
                results[title] = results[title] + rows if title in results else rows
            seconds[name] = time.perf_counter() - begin
            left = list(stages)[i:]
            done = finish(results) | {"seconds": seconds}
            keep(done | {"to come": left} if left else done)
            bar.advance(task)
    return done


def _write(results: Tables, file: Path) -> None:
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(results, indent=2))


def _profiles(networks: Sequence[str], out: Path) -> tuple[Tables, list[Path]]:
    """Profile every network with every kind of weights."""
    from dpa.bench import sampler

    tables: Tables = {}
    pictures = []
    for size in LOOPS:
        if size.name not in networks:
            continue
        unet = size.build().eval()
        for label, dtype in sampler.DTYPES.items():
            try:
                found = sampler.profile(size, unet, dtype)
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
    drawn = {
        "steps": (plots.draw_steps, "steps.png"),
        "loops": (plots.draw_loops, "loops.png"),
        "training": (plots.draw_training, "train.png"),
        "curves": (plots.draw_curves, "loss-curves.png"),
        "U-Net, forward pass": (plots.draw_engines, "cpu.png"),
    }
    return [
        draw(results[title], results["device"], out / name)
        for title, (draw, name) in drawn.items()
        if title in results
    ]


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
