"""The requirements of the sampler on a GPU, and whether the tables of one run meet them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpa.bench.compiled import COMPILED
from dpa.bench.networks import LOOPS, Network

Row = dict[str, Any]
Steps = dict[tuple[str, int, str, str], float]

_BF16, _FP32, _E4M3 = "bfloat16", "float32", "float8_e4m3fn"
# Microseconds of a step on an H200, at most, and what is aimed at: bfloat16, float32 and e4m3 at
# batch 1, bfloat16 at the network's batch.
_LIMITS = {
    "80 M": ((66, 108, 54, 135), (45, 90, 40, 100)),
    "80 M, kernel 3": ((58, 90, 50, 125), (38, 70, 35, 90)),
    "LeRobot, T 64": ((220, 460, 170, 450), (150, 360, 110, 300)),
    "DP3": ((150, 300, 100, 320), (130, 270, 75, 240)),
    "ALOHA, T 48": ((95, 160, 85, 330), (65, 120, 60, 220)),
    "Simple DP3's widths": ((65, 75, 65, 130), (38, 45, 38, 80)),
    "ManiSkill": ((60, 65, 60, 100), (33, 36, 33, 60)),
    "NoMaD": ((55, 60, 55, 90), (30, 33, 30, 55)),
}


def bars(results: dict[str, Any]) -> list[Row]:
    """The bars, from the tables ``steps``, ``loops`` and ``parallel`` of a run of the benchmark.

    Every value is at most its requirement, but of the bars that say "faster": at least. One whose
    measurements are missing has no row.
    """
    steps: Steps = {
        (row["network"], row["batch"], row["weights"], row["how"]): row["us"]
        for row in results.get("steps", [])
    }
    rows = [row for size in LOOPS for row in _steps(size, steps)]
    firsts = [row["first call s"] for row in results.get("loops", []) if row["how"] == "dpa"]
    if firsts:
        rows.append(bar_of("a first call, packing and capture included, s", max(firsts), 1.0, 1.0))
    for row in results.get("parallel", []):
        if row.get("faster") is not None:
            bar = (
                f"{row['weights']}, parallel, tolerance {row['tolerance']:g}: faster than the loop"
            )
            rows.append(bar_of(bar, row["faster"], 1.5, 3.0))
    return rows


def _steps(size: Network, steps: Steps) -> Iterator[Row]:
    """The bars of one network."""
    kinds = ((_BF16, 1), (_FP32, 1), (_E4M3, 1), (_BF16, size.many))
    for (weights, batch), required, aim in zip(kinds, *_LIMITS[size.name], strict=True):
        us = steps.get((size.name, batch, weights, "dpa"))
        about = f"{size.name}, {weights}" + (f", batch {batch}" if batch > 1 else "")
        if us is None:
            continue
        yield bar_of(f"{about}, us", us, required, aim)
        theirs = steps.get((size.name, batch, weights, COMPILED))
        if theirs is not None:
            yield bar_of(f"{about}: faster than torch.compile", theirs / us, 1.0, 10.0)
    for batch in (1, size.many):
        e4m3, bf16 = (steps.get((size.name, batch, w, "dpa")) for w in (_E4M3, _BF16))
        if e4m3 and bf16:
            bar = f"{size.name}, batch {batch}: e4m3's time of bfloat16's"
            yield bar_of(bar, e4m3 / bf16, 1.02, 0.8)
    one, many = (steps.get((size.name, batch, _BF16, "dpa")) for batch in (1, size.many))
    if one and many:
        bar = f"{size.name}, batch {size.many}: time of batch 1's"
        yield bar_of(bar, many / one, 2.5 if size.horizon <= 24 else 3.5, 1.5)


def bar_of(bar: str, value: float, required: float, aim: float) -> Row:
    """One bar: at most what is required, or at least where it says "faster"."""
    holds = [value >= limit if "faster" in bar else value <= limit for limit in (required, aim)]
    values = {"bar": bar, "value": value, "required": float(required), "holds": holds[0]}
    return values | {"aim": float(aim), "reached": holds[1]}
