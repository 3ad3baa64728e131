"""The demo's pictures: plain ink on paper, one colour a side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import LogLocator
from PIL import Image
from torch import Tensor

from dpa.demo import world as W
from dpa.demo.rollout import Rollout
from dpa.library.files import replacing

PAPER, INK, MUTED, FAINT = "#fcfbf8", "#22272e", "#7b8490", "#d9d8d3"
OBSTACLE, BAD = "#3c4654", "#b3261e"
SIDE_COLORS = {W.LEFT: "#1f7a8c", W.RIGHT: "#e0782f", W.NEITHER: MUTED}
HORIZON_COLORS = LinearSegmentedColormap.from_list("horizon", ["#1b4965", "#1f9e8f", "#f2b134"])
STYLE = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.edgecolor": FAINT,
}
EXTENT = (-1.08, 1.08, -0.66, 0.66)


@contextmanager
def figure(
    path: Path, size: tuple[float, float], title: str, subtitle: str, left: float = 0.03
) -> Iterator[Figure]:
    """A figure in the demo's style, saved to ``path`` when the block ends.

    The title and a quieter line below it are flush left, placed in inches from the top.
    """
    with matplotlib.rc_context(STYLE):
        fig = Figure(size, dpi=150)
        fig.text(left, 1 - 0.34 / size[1], title, size=14, weight="bold", va="center")
        fig.text(left, 1 - 0.62 / size[1], subtitle, size=10, color=MUTED, va="center")
        yield fig
        with replacing(path) as temporary:
            FigureCanvasAgg(fig).print_figure(temporary, dpi="figure")


def scene(ax: Axes, world: W.World, labels: bool = False, goal: bool = True) -> None:
    """The first world: its obstacle, start and goal, without axes."""
    start, end, centre = (field[0].tolist() for field in (world.start, world.goal, world.centre))
    ax.add_patch(Circle(centre, world.radius[0].item(), color=OBSTACLE, lw=0, zorder=2))
    if goal:
        ax.add_patch(Circle(end, W.GOAL_RADIUS, fill=False, ec=INK, lw=1.4, zorder=4))
    ax.plot(*start, "o", ms=6, mfc=PAPER, mec=INK, mew=1.4, zorder=5)
    if labels:
        for (x, y), name in ((start, "start"), (end, "goal")):
            ax.text(x, y - 0.1, name, ha="center", va="top", size=9, color=MUTED)
    ax.set(xlim=EXTENT[:2], ylim=EXTENT[2:], aspect="equal")
    ax.axis("off")


def fan(path: Path, world: W.World, panels: Sequence[tuple[str, Rollout]]) -> None:
    """Every path taken in one world, a panel a source, coloured by the side it passed."""
    line = "Every path through the same world. Left and right are as seen from the start."
    with figure(path, (12.6, 3.9), "Two right answers", line, 0.02) as fig:
        for column, (name, result) in enumerate(panels):
            ax = fig.add_axes((0.01 + 0.33 * column, 0.0, 0.32, 0.66))
            scene(ax, world, labels=column == 0)
            draw_paths(ax, result)
            left, right = ((result.side == side).sum().item() for side in (W.LEFT, W.RIGHT))
            ax.text(0.03, 1.12, name, transform=ax.transAxes, size=11, weight="bold")
            reached = f"{result.success.sum()} of {len(result.success)} arrive"
            ax.text(0.03, 1.03, f"{left} left, {right} right; {reached}",
                    transform=ax.transAxes, size=9.5, color=MUTED)  # fmt: skip


def draw_paths(ax: Axes, result: Rollout) -> None:
    """The paths of a rollout; a cross where one ended badly."""
    for index in range(len(result.world)):
        points = result.path[index, : int(result.length[index]) + 1].numpy()
        color = SIDE_COLORS[int(result.side[index])]
        ax.plot(*points.T, color=color, lw=1.1, alpha=0.45, zorder=3, solid_capstyle="round")
        if not result.success[index]:
            ax.plot(*points[-1], "x", color=BAD, ms=6, mew=1.6, zorder=6)


def denoising(
    path: Path, world: W.World, steps_left: Sequence[int], chunks: Sequence[Tensor]
) -> None:
    """Small multiples, noise to path: ``chunks`` are (N, HORIZON, 2) positions, each with so many
    steps left.

    The first chunk is drawn in full, its colour running along the horizon; the others are the
    cloud that it belongs to.
    """
    columns = len(chunks)
    line = (
        "One action chunk, and in grey others for the same observation, as the denoising goes on."
    )
    with figure(path, (2.35 * columns, 2.75), "From noise to a plan", line, 0.012) as fig:
        for column, (left, chunk) in enumerate(zip(steps_left, chunks, strict=True)):
            width = 1 / columns
            ax = fig.add_axes((column * width + 0.004, 0.02, width - 0.008, 0.62))
            scene(ax, world, goal=False)
            cloud = chunk[1:].reshape(-1, 2).numpy()
            ax.plot(*cloud.T, ".", color=MUTED, ms=2.2, alpha=0.35, mew=0, zorder=3)
            draw_chunk(ax, chunk[0].numpy(), alpha=0.45 if left else 1.0)
            label = f"{left} steps to go" if left else "the plan"
            ax.set_title(label, loc="left", size=9.5, color=MUTED, pad=2, x=0.03)
            ax.set(xlim=(-1.16, 0.54), ylim=(-0.62, 0.62))


def draw_chunk(ax: Axes, chunk: np.ndarray, alpha: float) -> None:
    """A chunk as dots on a line (of opacity ``alpha``), coloured along the horizon."""
    order = np.linspace(0, 1, len(chunk))
    segments = np.stack([chunk[:-1], chunk[1:]], 1)
    lines = LineCollection(
        segments, colors=HORIZON_COLORS(order[1:]), lw=1.1, alpha=alpha, zorder=5
    )
    ax.add_collection(lines)
    ax.scatter(*chunk.T, c=HORIZON_COLORS(order), s=13, lw=0, zorder=6)


def training(path: Path, history: Sequence[dict], losses: Sequence, bar: float) -> None:
    """Success of the EMA weights and the training loss, over the training steps."""
    steps = [row["step"] for row in history]
    success = [100 * row["success"] for row in history]
    line = "Closed-loop episodes that reach the goal, with the EMA weights and DDIM."
    with figure(path, (8.4, 4.6), "Success over training", line, 0.05) as fig:
        top = fig.add_axes((0.09, 0.36, 0.80, 0.43))
        below = fig.add_axes((0.09, 0.11, 0.80, 0.17), sharex=top)
        top.axhline(100 * bar, color=MUTED, lw=0.9, ls=(0, (4, 3)))
        top.text(steps[-1] * 0.005, 100 * bar - 2, f"the bar, {100 * bar:.0f} %", va="top", size=9,
                 color=MUTED)  # fmt: skip
        color = SIDE_COLORS[W.LEFT]
        top.plot(steps, success, color=color, lw=2, marker="o", ms=5, clip_on=False, zorder=3)
        top.annotate(f"{success[-1]:.0f} %", (steps[-1], success[-1]), (9, 0), weight="bold",
                     textcoords="offset points", color=color, va="center", size=11)  # fmt: skip
        top.set(ylim=(0, 103), yticks=[0, 25, 50, 75, 100], xlim=(0, steps[-1]))
        top.set_ylabel("success, %")
        top.tick_params(labelbottom=False)
        if losses:
            below.plot(*zip(*losses, strict=True), color=MUTED, lw=1.2)
            below.annotate(f"{losses[-1][1]:.3f}", losses[-1], (9, 0), textcoords="offset points",
                           color=MUTED, va="center", size=9)  # fmt: skip
            below.set_yscale("log")
            below.yaxis.set_major_locator(LogLocator(numticks=3))
            below.yaxis.set_major_formatter("{x:g}")
            below.minorticks_off()
        below.set_xlabel("training step")
        below.set_ylabel("loss")
        for ax in (top, below):
            ax.spines[["top", "right"]].set_visible(False)
            ax.tick_params(length=0)
            ax.grid(axis="y", color=FAINT, lw=0.6)


class EpisodeFilm:
    """An animation of one episode: each plan as it is denoised, then its execution."""

    def __init__(self, world: W.World, size: tuple[float, float] = (7.2, 4.9), dpi: int = 100):
        self.world = world
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []
        with matplotlib.rc_context(STYLE):
            self.fig = Figure(size, dpi=dpi)
            self.canvas = FigureCanvasAgg(self.fig)
            self.ax = self.fig.add_axes((0.01, 0.01, 0.98, 0.86))
            scene(self.ax, world, labels=True)
            self.title = self.fig.text(0.03, 0.94, "", size=13, weight="bold", va="center")
            self.cloud = self.ax.plot([], [], ".", ms=4.5, mew=0, color=MUTED, zorder=3)[0]
            self.ghosts = LineCollection([], lw=0.9, alpha=0.45, zorder=3)
            self.ax.add_collection(self.ghosts)
            self.plan = self.ax.plot([], [], "o-", ms=3.6, lw=1.4, zorder=6)[0]
            self.trail = self.ax.plot([], [], color=INK, lw=2.2, zorder=7)[0]
            self.agent = self.ax.plot([], [], "o", ms=9, color=INK, zorder=8)[0]

    def show_noise(self, caption: str, trail: Tensor, samples: Tensor, milliseconds: int) -> None:
        """Add a frame of chunks that are being denoised, as a cloud of points."""
        self.cloud.set_data(*samples.reshape(-1, 2).numpy().T)
        self.ghosts.set_segments([])
        self.plan.set_data([], [])
        self._snap(caption, trail, milliseconds)

    def show_plan(self, caption: str, trail: Tensor, chunks: Tensor, milliseconds: int) -> None:
        """Add a frame of chunks as lines; the first is the plan that is carried out."""
        colors = [SIDE_COLORS[side] for side in self.sides(chunks)]
        self.cloud.set_data([], [])
        self.ghosts.set_segments(list(chunks[1:].numpy()))
        self.ghosts.set_color(colors[1:])
        self.plan.set_data(*chunks[0].numpy().T)
        self.plan.set_color(colors[0])
        self._snap(caption, trail, milliseconds)

    def _snap(self, caption: str, trail: Tensor, milliseconds: int) -> None:
        self.title.set_text(caption)
        self.trail.set_data(*trail.numpy().T)
        self.agent.set_data(*trail[-1:].numpy().T)
        self.canvas.draw()
        self.frames.append(Image.fromarray(np.asarray(self.canvas.buffer_rgba())[..., :3]))
        self.durations.append(milliseconds)

    def sides(self, chunks: Tensor) -> list[int]:
        """The side on which each chunk passes the obstacle, or is about to."""
        centre, axis = self.world.centre[0], self.world.goal[0] - self.world.start[0]
        offset = chunks - centre
        nearest = offset.norm(dim=-1).argmin(1)
        point = offset[range(len(chunks)), nearest]
        return [W.LEFT if value > 0 else W.RIGHT for value in W.cross(axis, point).tolist()]

    def save(self, path: Path) -> None:
        """Write the GIF, all frames on one palette so that nothing flickers."""
        every = np.concatenate([np.asarray(frame)[::2, ::2] for frame in self.frames[::4]])
        palette = Image.fromarray(every).quantize(64, dither=Image.Dither.NONE)
        frames = [
            frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames
        ]
        with replacing(path) as temporary:
            frames[0].save(temporary, save_all=True, append_images=frames[1:],
                           duration=self.durations, loop=0, optimize=False)  # fmt: skip
