"""The requirements of a training step, and whether they hold."""

from __future__ import annotations

from dpa.bench.train import CALLS, COMPILED, DPA, HALVES, Row


def bars(
    training: list[Row], norm: list[Row], optimizers: list[Row], several_gpus: list[Row]
) -> list[Row]:
    """Each measured requirement with its aim, the ratio reached and whether it holds.

    Ratios are of times (dpa's below), but of peak memory that is dpa's over torch.compile's.
    """
    speed = [*_speed(training), *_memory(training), *_norm(norm)]
    return [*speed, *_optimizers(optimizers), *_scaling(several_gpus)]


def _bar(what: str, ratio: float, required: float, aim: float, upper: bool = False) -> Row:
    holds = ratio <= required if upper else ratio >= required
    reached = ratio <= aim if upper else ratio >= aim
    row: Row = {"what": what, "ratio": ratio, "required": required, "aim": aim}
    return row | {"holds": "aim" if reached else "yes" if holds else "NO"}


# network, batch, what, dpa's way, column, and the ratio of torch.compile's: required and aim
_BOTH = "forward + backward"
_TF32 = _BOTH + ", float32 (TF32)"
_SPEED = (
    ("80 M", 256, _TF32, DPA, "graph", 2.2, 3.0),
    ("80 M", 64, _TF32, DPA, "graph", 2.2, 3.0),
    ("80 M", 256, _TF32, CALLS, "called", 3.5, 5.0),
    ("80 M", 64, _TF32, CALLS, "called", 3.5, 5.0),
    ("252 M", 64, _TF32, DPA, "graph", 2.5, 3.5),
    ("80 M", 128, _BOTH, DPA, "graph", 4.5, 5.5),
    ("252 M", 96, _BOTH, DPA, "graph", 5.0, 6.0),
    ("80 M, T 32", 64, _BOTH, DPA, "graph", 4.0, 5.0),
    ("Simple DP3's widths", 128, _BOTH, DPA, "graph", 4.0, 5.0),
    ("LeRobot, T 64", 64, _BOTH, DPA, "graph", 4.0, 5.0),
    ("LeRobot, T 64", 64, _TF32, DPA, "graph", 2.5, 3.5),
    ("80 M", 128, _BOTH, DPA, "step", 3.8, 4.5),
    ("252 M", 96, _BOTH, DPA, "step", 3.8, 4.5),
    ("80 M", 64, "forward", DPA, "graph", 4.0, 6.0),
    ("80 M", 256, "forward", DPA, "graph", 3.5, 5.0),
    ("80 M", 1024, "forward", DPA, "graph", 2.5, 3.5),
)


def _speed(rows: list[Row]) -> list[Row]:
    us = {(r["network"], r["batch"], r["what"], r["how"]): r for r in rows}
    found = []
    for network, batch, what, way, column, required, aim in _SPEED:
        ours, theirs = (us.get((network, batch, what, how)) for how in (way, COMPILED))
        if ours and theirs and ours[column] and theirs[column]:
            # Forward alone the rival may have its weights in 16 bits; the better counts.
            halves = us.get((network, batch, what, HALVES))
            best = min(row[column] for row in (theirs, halves) if row)
            name = f"{network}, batch {batch}, {what}, {way} against {COMPILED}, {column}"
            found.append(_bar(name, best / ours[column], required, aim))
    return found


def _memory(rows: list[Row]) -> list[Row]:
    """Called against called, and replays (those of accelerated calls too) against replays."""
    steps = {(r["network"], r["batch"], r["what"], r["how"]): r for r in rows if r["peak MiB"]}
    found = []
    for (network, batch, what, how), row in steps.items():
        rival = steps.get((network, batch, what, COMPILED))
        if how in (DPA, CALLS) and rival:
            kind, column = ("called", "peak MiB") if how == DPA else ("replayed", "replayed MiB")
            name = f"{network}, batch {batch}, {what}, peak memory of a step, {how}, {kind}"
            found.append(_bar(name, row[column] / rival[column], 1.0, 0.8, True))
    return found


def _norm(rows: list[Row]) -> list[Row]:
    """The aim is given as a time, 1.3 times the floor; here it is the ratio that this makes."""
    found = []
    for row in rows:
        best = min(us for how, us in row.items() if how.startswith(COMPILED))
        name = f"GroupNorm + Mish + FiLM, ({row['B, C, T']}), forward + backward, graph"
        found.append(_bar(name, best / row["dpa"], 2.0, best / (1.3 * row["floor"])))
    return found


def _optimizers(rows: list[Row]) -> list[Row]:
    """Time over that of the bytes at the device's read-write bandwidth."""
    return [
        _bar(f"{row['what']}, time over its bytes'", row["dpa"] / row["floor"], 1.15, 1.05, True)
        for row in rows
    ]


# A part of the case's name, the most GPUs; required and aim, of the number of GPUs
_SCALING = (
    ("samples", 1 << 30, 0.95, 0.98),
    ("images", 1 << 30, 0.9, 0.95),
    ("", 2, 0.925, 0.975),
    ("", 1 << 30, 0.9, 0.95),
)


def _scaling(rows: list[Row]) -> list[Row]:
    """Of each case a row on one GPU, then those on several; the fastest of these counts."""
    found = []
    for one in (row for row in rows if row["GPUs"] == 1):
        others = [row for row in rows if row["GPUs"] > 1 and row["case"] == one["case"]]
        best = max(others, key=lambda row: row["samples a second"])
        required, aim = next(
            bar for part, most, *bar in _SCALING if part in one["case"] and best["GPUs"] <= most
        )
        name = f"{one['case']}, {best['GPUs']} GPUs ({best['how']}) against one"
        ratio = best["samples a second"] / one["samples a second"]
        found.append(_bar(name, ratio, best["GPUs"] * required, best["GPUs"] * aim))
    return found
