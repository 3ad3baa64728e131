"""The ``dpa`` command.

Exit status: 0 on success alone; 2 for wrong usage, such as a missing file or a checkpoint that is
refused; 1 where something fails. Errors are of one clear line.

Nothing here, nor in the modules of the commands, imports PyTorch before a command runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

import dpa
from dpa.cli import bench, demo, evaluate, explain, export, profile, report, run

app = typer.Typer(
    help="Fast registered operators for Diffusion Policy in PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dpa {dpa.__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Keep the commands as subcommands, even a single one."""


def _with_library(command: Callable[..., None]) -> Callable[..., None]:
    """Load the library before the command runs."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            import_module("dpa.public")
        except FileNotFoundError as error:  # no file that the command line names
            raise ImportError(error) from None
        command(*args, **kwargs)

    return run


def _add(command: Callable[..., None], name: str | None = None, **options: Any) -> None:
    """Add a command; its help is the docstring.

    The lines of each paragraph are joined, which the terminal's width shall break; examples stay.
    """
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    text = "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)
    app.command(name, help=text, **options)(command)


_add(report.doctor)
_add(report.info)
for each in (explain.explain, demo.demo, bench.bench, profile.profile, export.export):
    _add(_with_library(each))
_add(_with_library(evaluate.evaluate), "eval")
# What stands behind the program's name is the program's.
_BEHIND = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_add(_with_library(run.run), context_settings=_BEHIND)


def main() -> None:
    """Run the command line; an expected failure is one line on standard error."""
    try:
        app()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"dpa: {str(error).removeprefix('dpa: ')}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (ValueError, FileNotFoundError)) else 1)


if __name__ == "__main__":
    main()
