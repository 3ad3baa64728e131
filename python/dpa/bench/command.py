"""The ``dpa bench`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dpa.bench import small_ops


def bench(
    out: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("out/bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the small ops beside eager PyTorch and torch.compile: medians, in microseconds.

    Needs a CUDA device. Writes OUT/small_ops.json.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA device, and there is none here")
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results |= small_ops.run()
    out.mkdir(parents=True, exist_ok=True)
    (out / "small_ops.json").write_text(json.dumps(results, indent=2))
    if as_json:
        print(json.dumps(results, indent=2))
        return
    console = Console()
    console.print(f"{results['device']}, torch {results['torch']}; median microseconds")
    for title in ("elementwise", "lltm"):
        console.print(_table(title, results[title]))
    console.print(_table("host microseconds a call", [results["host us a call"]]))


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
