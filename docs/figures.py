"""Plots the bar charts of docs/benchmarks.md from docs/figures.json: python docs/figures.py.

Plain SVG with colours that read on white and on black, and narrow enough for a telephone.
"""

import json
from html import escape
from pathlib import Path

_DOCS = Path(__file__).parent
_TEXT, _OURS, _THEIRS = "#808890", "#1f9e89", "#8a94a6"
_LIGHT = "<style>@media (prefers-color-scheme: light) {svg {fill: #57606a}}</style>"
_WIDTH, _LABEL, _BAR, _GAP = 590, 275, 20, 8


def chart(title: str, unit: str, rows: list[list]) -> str:
    """Return an SVG of horizontal bars; a row is label, value, and whether it is dpa's."""
    head, _, rest = title.partition(", ")
    top = 54
    height = top + len(rows) * (_BAR + _GAP) + 4
    scale = (_WIDTH - _LABEL - 60) / max(value for _, value, _ in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="16" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        _LIGHT,
        f'<text x="0" y="18" font-weight="600">{escape(head)}</text>',
        f'<text x="0" y="40">{escape(rest)}; {escape(unit)}</text>',
    ]
    for i, (label, value, ours) in enumerate(rows):
        y = top + i * (_BAR + _GAP)
        width = max(2.0, value * scale)
        colour = _OURS if ours else _THEIRS
        middle = y + _BAR - 5
        parts += [
            f'<text x="{_LABEL - 10}" y="{middle}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3" '
            f'fill="{colour}"/>',
            f'<text x="{_LABEL + width + 8:.1f}" y="{middle}">{value:g}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write each chart to docs/images."""
    for name, figure in json.loads((_DOCS / "figures.json").read_text()).items():
        (_DOCS / "images" / f"{name}.svg").write_text(chart(**figure))


if __name__ == "__main__":
    main()
