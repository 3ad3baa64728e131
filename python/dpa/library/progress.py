"""The progress bars of the commands."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress(console: Console, width: int, *fields: Any, **options: Any) -> Progress:
    """A bar behind a name of that width, with counts, further columns and the time taken."""
    columns = TextColumn(f"{{task.description:<{width}}}"), BarColumn(bar_width=28)
    columns += MofNCompleteColumn(), TimeElapsedColumn(), *fields
    return Progress(*columns, console=console, **options)
