"""The ``dpa doctor`` and ``dpa info`` commands, which work whatever is broken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpa.cli.options import Json

if TYPE_CHECKING:
    from dpa.diagnostics.doctor import Finding

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "wrong": "[red]wrong[/]"}


def doctor(as_json: Json = False) -> None:
    """Find what is wrong with the installation, and the command that mends it.

    Checks torch, its CUDA, the driver, every GPU and the kernels that run there, the library,
    diffusers, LeRobot and the compiler. Fails if something is wrong; notes do not count.

    Examples:

      dpa doctor

      dpa doctor --json
    """
    from dpa.diagnostics.doctor import examine, is_healthy

    found = examine()
    healthy = is_healthy(found)
    if as_json:
        findings = [vars(finding) for finding in found]
        print(json.dumps({"healthy": healthy, "findings": findings}, indent=2))
    else:
        _print_findings(found)
    if not healthy:
        raise typer.Exit(1)


def info(
    ops: Annotated[bool, typer.Option("--ops", help="List every op with its kernels.")] = False,
    as_json: Json = False,
) -> None:
    """Show versions, devices, what the library is built for, and a smoke test.

    Begins with what should be mended. Fails if the library does not load, or if the smoke test
    fails on any device.

    Examples:

      dpa info

      dpa info --ops

      dpa info --json
    """
    from dpa.diagnostics.doctor import advice, examine
    from dpa.diagnostics.host import look

    host = look()
    if host.library_error is not None or host.torch is None:
        found = examine(host)
        facts: dict[str, Any] = {"dpa": host.dpa, "torch": host.torch, "library": host.library}
        if as_json:
            print(json.dumps(facts | {"advice": advice(found)}, indent=2))
        else:
            _print_findings(found)
        raise typer.Exit(1)
    from dpa.diagnostics.info import info_of

    facts = info_of(host)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_info(facts, ops)
    if any(result != "ok" for result in facts["smoke test"].values()):
        raise typer.Exit(1)


def _print_findings(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in found:
        table.add_row(_MARKS[finding.state], f"[bold]{finding.name}[/]", escape(finding.says))
    console.print(table)
    wanting = [finding for finding in found if finding.mend]
    for finding in wanting:
        console.print(f"\n{_MARKS[finding.state]} {finding.name}: do this")
        console.print(f"  {finding.mend}", markup=False, soft_wrap=True)
    if not wanting:
        console.print("\nnothing to mend")


def _print_info(facts: dict[str, Any], ops: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for line in facts["advice"]:
        console.print(f"[yellow]to do[/yellow]  {escape(line)}")
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key in ("dpa", "torch", "python", "cuda", "library", "built for"):
        summary.add_row(f"[bold]{key}[/bold]", str(facts[key] or "not available"))
    for device, name in facts["devices"].items():
        result = facts["smoke test"][device]
        mark = "[green]works[/green]" if result == "ok" else f"[red]{escape(result)}[/red]"
        summary.add_row(f"[bold]{device}[/bold]", f"{name}: {mark}")
    summary.add_row("[bold]ops[/bold]", f"{len(facts['ops'])} (dpa info --ops lists them)")
    console.print(summary)
    if ops:
        table = Table("op", "kernels", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name, keys in facts["ops"].items():
            table.add_row(name, " ".join(keys))
        console.print(table)
