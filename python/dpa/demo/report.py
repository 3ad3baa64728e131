"""The output of the demo: the table, the verdict."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

MIN_SUCCESS = 0.95
MIN_SIDE = 0.20
MIN_EPISODES = 50  # with fewer, the shares are too coarse to judge


def judge(rollouts: dict[str, dict]) -> list[str]:
    """The requirements that are missed, a sentence each."""
    misses = []
    for name, row in rollouts.items():
        if row["success"] < MIN_SUCCESS:
            misses.append(f"{name}: success {row['success']:.0%} is below {MIN_SUCCESS:.0%}")
        for side in ("left", "right"):
            if row[side] < MIN_SIDE:
                misses.append(f"{name}: {side} {row[side]:.0%} is below {MIN_SIDE:.0%}")
    return misses


def table(results: dict) -> Table:
    """The results of each scheduler: how the episodes went, and the speed beside plain PyTorch."""
    out = Table(box=SIMPLE_HEAD, title_justify="left", header_style="bold", pad_edge=False)
    out.title = (
        f"{results['episodes']} episodes each; ms for an action chunk at batch 1, "
        f"{results['options']['dtype']}"
    )
    out.add_column("sampling", no_wrap=True)
    for name in ("success", "left", "right", "plain ms", "dpa ms", "ratio", "difference"):
        out.add_column(name, justify="right", no_wrap=True)
    for name, row in results["rollout"].items():
        speed = results["compare"][name]
        out.add_row(
            f"{name} {row['steps']}",
            f"{row['success']:.1%}",
            f"{row['left']:.1%}",
            f"{row['right']:.1%}",
            f"{speed['plain_ms']:.2f}",
            f"{speed['dpa_ms']:.2f}",
            f"{speed['ratio']:.2f}",
            f"{speed['max_difference']:.1e}",
        )
    out.caption = (
        "plain: PyTorch's own modules in a diffusers loop, the same weights\n"
        "difference: the largest, given the same noise, in actions of range [-1, 1]"
    )
    out.caption_justify = "left"
    return out


def verdict(results: dict) -> str:
    """The last line: passed, missed and by what, or not judged."""
    took = f"{results['seconds']:.0f} s, of which CPU time {results['cpu_seconds']:.0f} s"
    if results["passed"] is None:
        return f"done (not judged) in {took}"
    if results["passed"]:
        return f"[bold green]passed[/]: success, and both sides, in {took}"
    return f"[bold red]missed[/]: {'; '.join(results['misses'])} ({took})"
