"""Pictures of the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpa.demo.draw import FAINT, INK, MUTED, figure, headline

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


def _bare(ax: Axes) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)


def draw_steps(rows: list[Row], device: str, path: Path) -> Path:
    """One step at the smallest batch: a line from the weights' read time to the step's time."""
    rows = [row for row in rows if row["batch"] == min(r["batch"] for r in rows)]
    groups = list(dict.fromkeys((row["network"], row["weights"]) for row in rows))
    with figure(path, (9, 1.7 + 0.25 * (len(rows) + len(groups)))) as fig:
        line = f"{device}; microseconds. Black: the time to read the weights once"
        headline(fig, "One step of the U-Net", line)
        ax = _axes(fig, left=0.42)
        labels, y = [], 0.0
        for network, weights in groups:
            mine = [row for row in rows if (row["network"], row["weights"]) == (network, weights)]
            for i, row in enumerate(mine):
                us, floor = row["us"], row["floor us"]
                ax.plot([floor, us], [y, y], color=_color(row["how"]), lw=5, solid_capstyle="butt")
                ax.plot([floor] * 2, [y - 0.4, y + 0.4], color=INK, lw=1.6)
                ax.text(us * 1.06, y, f"{us:.0f}  ({us / floor:.1f} x)", va="center", size=8.5)
                group = f"{network}, {weights}:   " if i == 0 else ""
                labels.append((y, group + row["how"]))
                y += 1
            y += 0.9
        ax.set_yticks([at for at, _ in labels], [label for _, label in labels], size=8.5)
        ax.set_xscale("log")
        ax.set_xlim(min(row["floor us"] for row in rows) / 1.3, max(row["us"] for row in rows) * 3)
        ax.set_ylim(y - 0.9, -0.9)
        ax.xaxis.set_major_formatter("{x:g}")
    return path


def draw_loops(rows: list[Row], device: str, path: Path) -> Path:
    """Whole loops of one sample: a bar each."""
    rows = [row for row in rows if row["batch"] == 1]
    groups = list(dict.fromkeys((row["network"], row["loop"]) for row in rows))
    with figure(path, (9, 1.7 + 0.25 * (len(rows) + len(groups)))) as fig:
        headline(fig, "The denoising loop", f"{device}; from the call to the result, milliseconds")
        ax = _axes(fig, left=0.5)
        labels, y = [], 0.0
        for network, loop in groups:
            for i, row in enumerate(
                r for r in rows if (r["network"], r["loop"]) == (network, loop)
            ):
                ms = row["us"] / 1e3
                ax.barh(y, ms, color=_color(row["how"]), height=0.78)
                ax.text(ms * 1.06, y, f"{ms:.3g}", va="center", size=8.5)
                group = f"{network}, {loop}:   " if i == 0 else ""
                labels.append((y, f"{group}{row['how']}, {row['weights']}"))
                y += 1
            y += 0.9
        ax.set_yticks([at for at, _ in labels], [label for _, label in labels], size=8.5)
        ax.set_xscale("log")
        ax.set_xlim(min(row["us"] for row in rows) / 2e3, max(row["us"] for row in rows) / 1e3 * 3)
        ax.set_ylim(y - 0.9, -0.9)
        ax.xaxis.set_major_formatter("{x:g}")
    return path


def draw_profile(profile: Any, path: Path) -> Path:
    """Stacked bars of a :class:`dpa.StepProfile`, a layer each, in the network's order."""
    layers = profile.layers
    with figure(path, (9, 1.6 + 0.22 * len(layers))) as fig:
        dtype = str(profile.dtype).removeprefix("torch.")
        line = f"{profile.device}, {dtype}: {profile.step:.1f} us a step"
        line += f", {profile.actions:.1f} of them the actions and the scheduler's step"
        headline(fig, "Where a step's time goes", line)
        ax = _axes(fig, left=0.3)
        left = np.zeros(len(layers))
        for phase, color in COLORS.items():
            widths = np.array([getattr(layer, phase) for layer in layers])
            ax.barh(range(len(layers)), widths, left=left, color=color, height=0.78, label=phase)
            left += widths
        for y, total in enumerate(left):
            ax.text(total + 0.04, y, f"{total:.1f}", va="center", size=8)
        names = [f"{layer.name}   {layer.channels} x {layer.times}" for layer in layers]
        ax.set_yticks(range(len(layers)), names, size=8)
        ax.invert_yaxis()
        ax.set_xlim(0, left.max() * 1.15)
        ax.set_xlabel("microseconds, the mean of the blocks")
        ax.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8.5)
    return path


def draw_training(rows: list[Row], device: str, path: Path) -> Path:
    """Bars of every network and batch, a bar a way, a panel each for time and memory."""
    columns = [c for c in ("graph", "called", "peak MiB") if any(row[c] for row in rows)]
    cases = list(dict.fromkeys((r["network"], r["batch"], r["what"]) for r in rows))
    ways = list(dict.fromkeys(row["how"] for row in rows))
    with figure(path, (4.0 * len(columns) + 2.4, 1.9 + 0.24 * (len(rows) + len(cases)))) as fig:
        line = f"{device}; milliseconds in a CUDA graph and called, and MiB"
        headline(fig, "A training step", line)
        height = fig.get_figheight()
        place = {"left": 0.2, "right": 0.96, "top": 1 - 1.6 / height, "bottom": 0.3 / height}
        grid = fig.add_gridspec(1, len(columns), wspace=0.22, **place)
        for ax, column in zip(grid.subplots(squeeze=False)[0], columns, strict=True):
            for row in rows:
                case = cases.index((row["network"], row["batch"], row["what"]))
                y, value = case + 0.8 * ways.index(row["how"]) / len(ways), row[column]
                if value is None:
                    continue
                value /= 1 if column == "peak MiB" else 1e3
                ax.barh(y, value, 0.7 / len(ways), color=_color(row["how"]))
                text = f" {value:.3g}" if value < 1000 else f" {value:.0f}"
                ax.text(value, y, text, va="center", size=7.5)
            labels = [f"{network}, batch {batch}\n{what}" for network, batch, what in cases]
            shown = labels if ax.get_subplotspec().colspan.start == 0 else [""] * len(labels)
            ax.set_yticks([i + 0.4 * (1 - 1 / len(ways)) for i in range(len(cases))], shown, size=8)
            ax.invert_yaxis()
            ax.set_title(column, size=9.5, loc="left")
            _bare(ax)
        handles = [Patch(color=_color(way), label=way) for way in ways]
        corner = {"loc": "upper left", "bbox_to_anchor": (0.02, 1 - 0.75 / height)}
        fig.legend(handles=handles, frameon=False, ncols=4, fontsize=8.5, **corner)
    return path


def draw_curves(rows: list[Row], device: str, path: Path) -> Path:
    """Loss curves, a panel for each network and dtype: every seed on PyTorch and on dpa."""
    cases = list(dict.fromkeys((row["network"], row["dtype"]) for row in rows))
    with figure(path, (3.1 * len(cases) + 0.6, 3.6)) as fig:
        line = (
            f"{device}; the demo's policy, means over a 20th of the steps, a pair of lines a seed"
        )
        headline(fig, "The same loss curve", line)
        place = {"left": 0.06, "right": 0.98, "top": 0.64, "bottom": 0.12}
        grid = fig.add_gridspec(1, len(cases), wspace=0.2, **place)
        for ax, case in zip(grid.subplots(squeeze=False, sharey=True)[0], cases, strict=True):
            for row in rows:
                if (row["network"], row["dtype"]) != case:
                    continue
                for how, style in (("eager", "-"), ("dpa", ":")):
                    label = how if row["seed"] == rows[0]["seed"] else None
                    width = 1.0 if how == "eager" else 2.0
                    ax.plot(row[how], style, color=_color(how), lw=width, label=label)
            ax.set_title(", ".join(case), size=9.5, loc="left")
            ax.set_yscale("log")
            ax.set_xticks([])
            ax.grid(color=FAINT, lw=0.6)
            ax.spines[["top", "right"]].set_visible(False)
        place = {"loc": "upper left", "bbox_to_anchor": (0.05, 0.8)}
        fig.legend(*ax.get_legend_handles_labels(), frameon=False, ncols=2, fontsize=8.5, **place)
    return path


def draw_engines(rows: list[Row], device: str, path: Path) -> Path:
    """One forward pass of the U-Net in every engine: bars, a panel a batch, the slowest on top."""
    batches = sorted({row["batch"] for row in rows})
    most = max(sum(row["batch"] == batch for row in rows) for batch in batches)
    width = max(6.4, 5.2 * len(batches))
    with figure(path, (width, 1.7 + 0.3 * most)) as fig:
        line = f"{device}; milliseconds, median. Reading: every packed weight, once"
        headline(fig, "One forward pass of the U-Net", line)
        height = fig.get_figheight()
        place = {
            "left": 1.66 / width,
            "right": 0.95,
            "top": 1 - 1.35 / height,
            "bottom": 0.4 / height,
        }
        grid = fig.add_gridspec(1, len(batches), wspace=0.75, **place)
        for ax, batch in zip(grid.subplots(squeeze=False)[0], batches, strict=True):
            found = [row for row in rows if row["batch"] == batch]
            found.sort(key=lambda row: -row["median ms"])
            for y, row in enumerate(found):
                color = FAINT if row["engine"] == "reading" else _color(row["engine"])
                ax.barh(y, row["median ms"], color=color, height=0.7)
                ax.text(row["median ms"], y, f" {row['median ms']:.1f}", va="center", size=8.5)
            names = [f"{row['engine']}, {row['precision']}" for row in found]
            ax.set_yticks(range(len(found)), names, size=8.5)
            ax.invert_yaxis()
            ax.set_title(f"batch {batch}", size=9.5, loc="left")
            _bare(ax)
    return path


def draw_call(found: Row, parts: Sequence[str], path: Path) -> Path:
    """Where a call goes: a bar of the plain policy, one of the accelerated, and that one enlarged.

    Args:
        found: of :func:`dpa.bench.call_profile.profile`.
        parts: in their order.
        path: of the picture.

    """
    plain, fast = found["plain"], found["dpa"]
    with figure(path, (9, 3.6)) as fig:
        line = f"{found['what']}; {found['device']}; milliseconds, median"
        headline(fig, f"Where a call goes: {found['times faster']:.1f} x", line)
        for bottom, rows in ((0.46, (("plain", plain), ("dpa", fast))), (0.14, (("dpa", fast),))):
            ax = fig.add_axes((0.13, bottom, 0.8, 0.13 * len(rows)))
            longest = max(row["whole call"] for _, row in rows)
            for y, (_, row) in enumerate(rows):
                _call_bar(ax, y, row, parts, longest)
            names = [name if len(rows) > 1 else f"{name}, enlarged" for name, _ in rows]
            ax.set_yticks(range(len(rows)), names, size=8.5)
            ax.set(xlim=(0, longest * 1.02), ylim=(len(rows) - 0.5, -0.5))
            ax.tick_params(axis="x", labelsize=8)
            _bare(ax)
        handles = [Patch(color=_PARTS[part], label=part) for part in parts]
        corner = {"loc": "upper left", "bbox_to_anchor": (0.12, 0.8)}
        fig.legend(handles=handles, frameon=False, ncols=len(parts), fontsize=8.5, **corner)
    return path


def _call_bar(ax: Axes, y: int, row: Row, parts: Sequence[str], longest: float) -> None:
    begin = 0.0
    for part in parts:
        ax.barh(y, row[part], left=begin, color=_PARTS[part], height=0.62)
        if row[part] > longest / 24:
            middle, color = begin + row[part] / 2, "white" if part == "loop" else INK
            text = {"ha": "center", "va": "center", "size": 8.5, "color": color}
            ax.text(middle, y, f"{row[part]:.3g}", **text)
        begin += row[part]
    ax.text(
        begin + longest * 0.01, y, f"{row['whole call']:.3g}", va="center", size=8.5, weight="bold"
    )


def _axes(fig: Figure, left: float) -> Axes:
    height = fig.get_figheight()
    ax = fig.add_axes((left, 0.55 / height, 0.97 - left, 1 - 1.6 / height))
    _bare(ax)
    return ax
