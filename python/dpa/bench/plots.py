"""Pictures of the measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpa.demo.draw import FAINT, INK, MUTED, figure

COLORS = {"multiply": "#1f7a8c", "publish": "#f2b134", "wait": "#d9d8d3", "normalise": "#e0782f"}
_PARTS = {
    "preprocessing": "#f2b134",
    "encoder": "#7fb8c4",
    "loop": "#1f7a8c",
    "host": "#d9d8d3",
}
_WAYS = {
    "dpa.accelerate": "#7fb8c4",
    "dpa": "#1f7a8c",
    "torch.compile, bfloat16 weights": "#f0bb97",
    "torch.compile": "#e0782f",
    "eager": MUTED,
}
Row = dict[str, Any]


def _color(how: str) -> str:
    return next((color for name, color in _WAYS.items() if how.startswith(name)), MUTED)


def draw_steps(rows: list[Row], device: str, path: Path) -> Path:
    """One step at the smallest batch: a line from the weights' read time to the step's time."""
    rows = [row for row in rows if row["batch"] == min(r["batch"] for r in rows)]

    def draw(ax: Axes, y: float, row: Row) -> str:
        us, floor = row["us"], row["floor us"]
        ax.plot([floor, us], [y, y], color=_color(row["how"]), lw=5, solid_capstyle="butt")
        ax.plot([floor] * 2, [y - 0.4, y + 0.4], color=INK, lw=1.6)
        ax.text(us * 1.06, y, f"{us:.0f}  ({us / floor:.1f} x)", va="center", size=8.5)
        return row["how"]

    line = f"{device}; microseconds. Black: the time to read the weights once"
    limits = min(row["floor us"] for row in rows) / 1.3, max(row["us"] for row in rows) * 3
    return _draw_groups(rows, "weights", draw, path, "One step of the U-Net", line, limits)


def draw_loops(rows: list[Row], device: str, path: Path) -> Path:
    """Whole loops of one sample: a bar each."""
    rows = [row for row in rows if row["batch"] == 1]

    def draw(ax: Axes, y: float, row: Row) -> str:
        bar = ax.barh(y, row["us"] / 1e3, color=_color(row["how"]), height=0.78)
        ax.bar_label(bar, fmt="{:.3g}", padding=3, size=8.5)
        return f"{row['how']}, {row['weights']}"

    line = f"{device}; from the call to the result, milliseconds"
    limits = min(row["us"] for row in rows) / 2e3, max(row["us"] for row in rows) / 1e3 * 3
    return _draw_groups(rows, "loop", draw, path, "The denoising loop", line, limits)


def _draw_groups(
    rows: list[Row],
    kind: str,
    draw: Callable[[Axes, float, Row], str],
    path: Path,
    title: str,
    line: str,
    limits: tuple[float, float],
) -> Path:
    """Rows one below the other on a logarithmic axis, in groups of a network and a ``kind``.

    ``draw`` puts a row at a height, and returns its label.
    """
    groups = list(dict.fromkeys((row["network"], row[kind]) for row in rows))
    size = (9, 1.7 + 0.25 * (len(rows) + len(groups)))
    with figure(path, size, title, line) as fig:
        ax, labels, y = _panels(fig)[0], {}, 0.0
        for group in groups:
            name = f"{', '.join(group)}:   "
            for row in rows:
                if (row["network"], row[kind]) == group:
                    labels[y], name = name + draw(ax, y, row), ""
                    y += 1
            y += 0.9
        ax.set(xscale="log", xlim=limits, ylim=(y - 0.9, -0.9))
        ax.set_yticks(list(labels), list(labels.values()), size=8.5)
        ax.xaxis.set_major_formatter("{x:g}")
    return path


def draw_profile(profile: Any, path: Path) -> Path:
    """Stacked bars of a :class:`dpa.StepProfile`, a layer each, in the network's order."""
    layers = profile.layers
    dtype = str(profile.dtype).removeprefix("torch.")
    line = f"{profile.device}, {dtype}: {profile.step:.1f} us a step"
    line += f", {profile.actions:.1f} of them the actions and the scheduler's step"
    size = (9, 1.6 + 0.22 * len(layers))
    with figure(path, size, "Where a step's time goes", line) as fig:
        ax = _panels(fig, legend=COLORS)[0]
        *_, bars = _stack(ax, [vars(layer) for layer in layers], COLORS, 0.78)
        ax.bar_label(bars, fmt="{:.1f}", padding=2, size=8)
        names = [f"{layer.name}   {layer.channels} x {layer.times}" for layer in layers]
        ax.set_yticks(range(len(layers)), names, size=8)
        ax.invert_yaxis()
        ax.set_xlabel("microseconds, the mean of the blocks")
    return path


def draw_training(rows: list[Row], device: str, path: Path) -> Path:
    """Bars of every network and batch, a bar a way, a panel each for time and memory."""
    columns = [c for c in ("graph", "called", "peak MiB") if any(row[c] for row in rows)]
    cases = list(dict.fromkeys((r["network"], r["batch"], r["what"]) for r in rows))
    ways = list(dict.fromkeys(row["how"] for row in rows))
    line = f"{device}; milliseconds in a CUDA graph and called, and MiB"
    size = (4.0 * len(columns) + 2.4, 1.9 + 0.24 * (len(rows) + len(cases)))
    with figure(path, size, "A training step", line) as fig:
        panels = _panels(fig, len(columns), {way: _color(way) for way in ways}, sharey=True)
        for ax, column in zip(panels, columns, strict=True):
            for row in rows:
                case = cases.index((row["network"], row["batch"], row["what"]))
                y, value = case + 0.8 * ways.index(row["how"]) / len(ways), row[column]
                if value is None:
                    continue
                value /= 1 if column == "peak MiB" else 1e3
                bar = ax.barh(y, value, 0.7 / len(ways), color=_color(row["how"]))
                ax.bar_label(bar, fmt="{:.3g}" if value < 1000 else "{:.0f}", padding=2, size=7.5)
            ax.set_title(column, size=9.5, loc="left")
        labels = [f"{network}, batch {batch}\n{what}" for network, batch, what in cases]
        places = [i + 0.4 * (1 - 1 / len(ways)) for i in range(len(cases))]
        panels[0].set_yticks(places, labels, size=8)
        panels[0].invert_yaxis()
    return path


def draw_curves(rows: list[Row], device: str, path: Path) -> Path:
    """Loss curves, a panel for each network and dtype: every seed on PyTorch and on dpa."""
    cases = list(dict.fromkeys((row["network"], row["dtype"]) for row in rows))
    line = f"{device}; the demo's policy, means over a 20th of the steps, a pair of lines a seed"
    ways = {how: _color(how) for how in ("eager", "dpa")}
    with figure(path, (3.1 * len(cases) + 0.6, 3.6), "The same loss curve", line) as fig:
        for ax, case in zip(_panels(fig, len(cases), ways, sharey=True), cases, strict=True):
            for row in rows:
                if (row["network"], row["dtype"]) == case:
                    ax.plot(row["eager"], "-", color=ways["eager"], lw=1.0)
                    ax.plot(row["dpa"], ":", color=ways["dpa"], lw=2.0)
            ax.set_title(", ".join(case), size=9.5, loc="left")
            ax.set_yscale("log")
            ax.set_xticks([])
            ax.grid(color=FAINT, lw=0.6)
    return path


def draw_engines(rows: list[Row], device: str, path: Path) -> Path:
    """One forward pass of the U-Net in every engine: bars, a panel a batch, the slowest on top."""
    batches = sorted({row["batch"] for row in rows})
    most = max(sum(row["batch"] == batch for row in rows) for batch in batches)
    line = f"{device}; milliseconds, median. Reading: every packed weight, once"
    size = (max(6.4, 5.2 * len(batches)), 1.7 + 0.3 * most)
    with figure(path, size, "One forward pass of the U-Net", line) as fig:
        for ax, batch in zip(_panels(fig, len(batches)), batches, strict=True):
            found = [row for row in rows if row["batch"] == batch]
            found.sort(key=lambda row: -row["median ms"])
            colors = [
                FAINT if row["engine"] == "reading" else _color(row["engine"]) for row in found
            ]
            names = [f"{row['engine']}, {row['precision']}" for row in found]
            times = [row["median ms"] for row in found]
            bars = ax.barh(range(len(found)), times, color=colors, height=0.7)
            ax.bar_label(bars, fmt="{:.1f}", padding=3, size=8.5)
            ax.set_yticks(range(len(found)), names, size=8.5)
            ax.invert_yaxis()
            ax.set_title(f"batch {batch}", size=9.5, loc="left")
    return path


def draw_call(found: Row, path: Path) -> Path:
    """Where a call goes: a bar of the plain policy, one of the accelerated, and that one enlarged.

    Args:
        found: of :func:`dpa.bench.call_profile.profile`.
        path: of the picture.

    """
    title = f"Where a call goes: {found['times faster']:.1f} x"
    line = f"{found['what']}; {found['device']}; milliseconds, median"
    with figure(path, (9, 3.6), title, line) as fig:
        panels = _panels(fig, legend=_PARTS, height_ratios=(2, 1))
        for ax, names in zip(panels, (("plain", "dpa"), ("dpa",)), strict=True):
            rows = [found[name] for name in names]
            longest = max(row["whole call"] for row in rows)
            for part, bars in zip(_PARTS, _stack(ax, rows, _PARTS, 0.62), strict=True):
                shown = [f"{row[part]:.3g}" if row[part] > longest / 24 else "" for row in rows]
                color = "white" if part == "loop" else INK
                ax.bar_label(bars, shown, label_type="center", size=8.5, color=color)
            wholes = [f"{row['whole call']:.3g}" for row in rows]
            ax.bar_label(bars, wholes, padding=4, size=8.5, weight="bold")
            labels = names if len(names) > 1 else ["dpa, enlarged"]
            ax.set_yticks(range(len(rows)), labels, size=8.5)
            ax.set(xlim=(0, longest * 1.02), ylim=(len(rows) - 0.5, -0.5))
            ax.tick_params(axis="x", labelsize=8)
    return path


def _stack(
    ax: Axes, rows: Sequence[Row], colors: Mapping[str, str], height: float
) -> list[BarContainer]:
    """A bar a row, of the parts that ``colors`` names; return the bars of each part."""
    widths = np.array([[row[part] for part in colors] for row in rows])
    left = widths.cumsum(1) - widths
    y = range(len(rows))
    return [
        ax.barh(y, widths[:, i], left=left[:, i], color=color, height=height)
        for i, color in enumerate(colors.values())
    ]


def _panels(
    fig: Figure, count: int = 1, legend: Mapping[str, str] | None = None, **options: Any
) -> list[Axes]:
    """Axes below the headline, and below the legend of these colours where there is one."""
    height = fig.get_figheight()
    top = 1 - (1.15 if legend else 0.8) / height
    fig.set_layout_engine("constrained", rect=(0.02, 0.02, 0.94, top - 0.02), wspace=0.06)
    if legend:
        handles = [Patch(color=color, label=name) for name, color in legend.items()]
        place = {"loc": "upper left", "bbox_to_anchor": (0.02, 1 - 0.75 / height)}
        fig.legend(handles=handles, frameon=False, ncols=len(legend), fontsize=8.5, **place)
    rows = len(options.get("height_ratios", (1,)))
    panels = list(fig.subplots(rows, count, squeeze=False, **options).flat)
    for ax in panels:
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    return panels
