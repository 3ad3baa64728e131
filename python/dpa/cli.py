"""The ``dpa`` command: exit status 0 on success alone, errors of one clear line."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import dpa
from dpa.bench.command import bench
from dpa.demo.command import demo

app = typer.Typer(
    help="Fast registered operators for Diffusion Policy in PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(bench)


@app.callback()
def _group() -> None:
    """Keep the commands named, however few there are."""


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Versions, device, architectures, every op with its keys, and a smoke test.

    Fails if the smoke test fails on any device.
    """
    facts = dpa.info()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_info(facts)
    if any(result != "ok" for result in facts["smoke test"].values()):
        raise typer.Exit(1)


def _print_info(facts: dict) -> None:
    console = Console()
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key in ("dpa", "torch", "python", "cuda", "library", "built for"):
        summary.add_row(f"[bold]{key}[/bold]", str(facts[key] or "not available"))
    for device, name in facts["devices"].items():
        result = facts["smoke test"][device]
        mark = "[green]works[/green]" if result == "ok" else f"[red]{result}[/red]"
        summary.add_row(f"[bold]{device}[/bold]", f"{name}: {mark}")
    console.print(summary)
    ops = Table("op", "kernels", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, keys in facts["ops"].items():
        ops.add_row(name, " ".join(keys))
    console.print(ops)


def main() -> None:
    """Run the command line; an expected failure is one line on standard error."""
    try:
        app()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"dpa: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
