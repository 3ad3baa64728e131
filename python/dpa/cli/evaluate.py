"""The ``dpa eval`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpa.cli.options import Checkpoint, Device, Dtype, Json, Mode, located, torch_dtype


def evaluate(
    checkpoint: Checkpoint,
    env: Annotated[str, typer.Option(help="Of gymnasium: PushT, FetchReach-v4, module:Name-v0.")],
    episodes: Annotated[int, typer.Option(min=1, help="To run.")] = 20,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the first episode; each next one adds 1.")
    ] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Do not accelerate.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Plain too, same episodes.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Of accelerated weights.")] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="As dpa.accelerate takes it; by default loop.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps; by default the policy's.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Of an episode; by default the environment's.")
    ] = None,
    device: Device = "auto",
    video: Annotated[
        Path | None, typer.Option(help="A film of the first episodes: .gif or .mp4.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a LeRobot checkpoint in closed loop in a simulator.

    CHECKPOINT is a folder that LeRobot's save_pretrained wrote, or user/repo on the Hub. Prints the
    success rate and how long the policy takes to plan; --compare runs the unaccelerated policy
    through the same episodes too.

    Examples:

      dpa eval pretrained_model --env PushT --episodes 50

      dpa eval pretrained_model --env FetchReach-v4 --compare --video episodes.mp4
    """
    from rich.console import Console

    from dpa.eval.pipeline import Options
    from dpa.eval.pipeline import evaluate as run

    if plain and compare:
        raise typer.BadParameter("--plain and --compare exclude each other")
    for name, given in (("--dtype", dtype), ("--mode", mode)):
        if plain and given is not None:
            raise typer.BadParameter(f"{name} must be left out with --plain")
    path = located(checkpoint)
    kinds = ("plain", "accelerated") if compare else ("plain" if plain else "accelerated",)
    console = Console(stderr=as_json)
    limits = steps, max_steps, device, video
    kind = kinds, torch_dtype(dtype), mode or "loop"
    options = Options(path, env, episodes, seed, *kind, *limits)
    results = run(options, console)
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        _print(results, console)


def _print(results: dict[str, Any], console: Any) -> None:
    from rich.table import Table

    from dpa.acceleration.survey import Finding
    from dpa.eval.episodes import PERCENTILES

    names = [f"p{p}" for p in PERCENTILES]
    table = Table("", "success", "plans", *(f"{name} ms" for name in names), "first ms")
    for kind, run in results["runs"].items():
        times = [f"{run['plan_ms'][name]:.2f}" for name in names]
        table.add_row(
            kind, f"{run['success']:.0%}", str(run["plans"]), *times, f"{run['first_plan_ms']:.0f}"
        )
    console.print(
        f"{results['env']}, {results['episodes']} episodes, on {results['device']}",
        highlight=False,
    )
    console.print(table)
    if "same_outcomes" in results:
        same = "the same" if results["same_outcomes"] else "[red]not[/red] the same"
        difference = results["largest_action_difference"]
        console.print(f"{same} episodes succeed; the actions differ by at most {difference:.1e}")
    for finding in results["acceleration"]:
        console.print(
            f"{finding['path']} ({finding['part']}): {Finding(**finding).state}: {finding['how']}",
            highlight=False,
            markup=False,
        )
    if "video" in results:
        console.print(f"wrote {results['video']}", highlight=False)
