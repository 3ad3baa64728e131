"""The ``dpa bench`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dpa.bench import cpu, small_ops


def bench(
    out: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("out/bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the ops beside eager PyTorch and torch.compile: medians, in microseconds.

    On a GPU the small ops, on the CPU the fused ops and a U-Net. Writes OUT/results.json.
    """
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    results: dict[str, Any] = {"device": name, "torch": torch.__version__}
    results |= small_ops.run() if gpu else cpu.run()
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=2))
    if as_json:
        print(json.dumps(results, indent=2))
        return
    console = Console()
    console.print(f"{results['device']}, torch {results['torch']}; median microseconds")
    for title, rows in results.items():
        if isinstance(rows, list):
            console.print(_table(title, rows))
        elif isinstance(rows, dict):
            console.print(_table(title, [rows]))


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """A table whose columns are the keys of the rows."""
    table = Table(*rows[0], title=title, title_justify="left", box=None, header_style="bold")
    for row in rows:
        cells = (
            f"{v:.2f}" if isinstance(v, float) else "" if v is None else str(v)
            for v in row.values()
        )
        table.add_row(*cells)
    return table
