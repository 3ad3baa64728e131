"""The ``dpa run`` command."""

from __future__ import annotations

import runpy
import sys
import traceback
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dpa.cli.options import Dtype, Mode, torch_dtype


def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM ...", help="A script and its arguments.", show_default=False
        ),
    ] = None,
    module: Annotated[
        bool,
        typer.Option("-m", help="PROGRAM is a module, as in `python -m`.", show_default=False),
    ] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Of packed weights.")] = None,
    mode: Annotated[Mode | None, typer.Option(help="As dpa.accelerate takes it.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Largest relative error.")] = None,
    graphs: Annotated[bool | None, typer.Option(help="CUDA graphs of calls.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A further policy, as module:Class; may be given several times."),
    ] = None,
) -> None:
    """Run a program of others with its policies accelerated, as `python` would run it.

    Every policy of LeRobot, diffusion_policy (and projects made of it) and robomimic that the
    program makes is accelerated as it leaves its constructor; a line on standard error says so.
    Options of dpa stand before the program. The environment's DPA_ACCELERATE=0 runs the program as
    it is.

    Examples:

      dpa run eval.py --checkpoint latest.ckpt -o out

      dpa run --dtype bfloat16 -m lerobot.async_inference.policy_server

      dpa run --policy my_robot.policy:MyPolicy -m my_robot.main
    """
    import os

    from dpa.acceleration.construction import accelerate_new, options_from

    if not program:
        raise ValueError("PROGRAM must be a script, or with -m a module, got nothing")
    name, *arguments = program
    where = os.getcwd() if module else str(Path(name).resolve().parent)
    if not module and Path(name).is_dir():
        raise FileNotFoundError(f"{name}: is a folder, and PROGRAM must be a script")
    if not module and not Path(name).is_file():
        raise FileNotFoundError(f"{name}: there is no such file")
    package = name.partition(".")[0]
    if module and not (PathFinder.find_spec(package, [where]) or find_spec(package)):
        raise FileNotFoundError(f"{name}: there is no such module")
    options = options_from(os.environ)
    wanted = {"mode": mode, "tolerance": tolerance, "graphs": graphs}
    wanted["dtype"] = torch_dtype(dtype)
    if options is not None:
        options |= {name: value for name, value in wanted.items() if value is not None}
        accelerate_new(_say, tuple(policy or ()), **options)
    sys.argv = [name, *arguments]
    sys.path.insert(0, where)
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except Exception:  # the program's own: as Python shows it
        traceback.print_exc()
        raise typer.Exit(1) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr)
