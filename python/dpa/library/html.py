"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return an HTML table; every cell is escaped, and aligned to the left."""

    def row(tag: str, cells: Sequence[object]) -> str:
        style = ' style="text-align: left"'
        return "<tr>" + "".join(f"<{tag}{style}>{escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    head = row("th", heads) if heads else ""
    return f"<table>{head}{''.join(row('td', cells) for cells in rows)}</table>"
