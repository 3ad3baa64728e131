"""The requirements of the sampler on a GPU, and whether the tables of one run meet them."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

_TUNED = "torch.compile max-autotune, graph"
_REDUCED = "torch.compile reduce-overhead"
_DEFAULT = "torch.compile, graph"
_SMALL, _LARGE = "67 M", "252 M"
_BF16, _FP32, _FP8 = "bfloat16", "float32", "float8_e4m3fn"


class _Table:
    """Requirements as rows; one whose measurements are missing has no row."""

    def __init__(self, results: dict[str, Any]):
        self._results = results
        self.rows: list[Row] = []

    def step(self, network: str, weights: str, how: str = "dpa", batch: int = 1) -> float | None:
        """Microseconds of a step; for torch.compile, of its fastest mode."""
        ways = (_TUNED, _REDUCED, _DEFAULT) if how == "torch.compile" else (how,)
        found = [
            row["us"]
            for row in self._results.get("steps", [])
            if (row["network"], row["weights"], row["batch"]) == (network, weights, batch)
            and row["how"] in ways
        ]
        return min(found, default=None)

    def floor(self, network: str, weights: str) -> float | None:
        """Microseconds to read the convolutions' weights once."""
        for row in self._results.get("steps", []):
            if (row["network"], row["weights"]) == (network, weights):
                return row["floor us"]
        return None

    def add(
        self, bar: str, over: float | None, under: float | None, required: float, aim: float | None
    ) -> None:
        """Add ``over / under``: at least ``required``, or at most where ``bar`` ends so."""
        if over is None or under is None:
            return
        ratio, most = over / under, bar.endswith("at most")
        holds = [
            None if limit is None else bool(ratio <= limit if most else ratio >= limit)
            for limit in (required, aim)
        ]
        values = {"bar": bar, "ratio": ratio, "required": required, "holds": holds[0]}
        self.rows.append(values | {"aim": aim, "reached": holds[1]})


def bars(results: dict[str, Any]) -> list[Row]:
    """The bars, from the tables ``steps``, ``loops`` and ``parallel`` of a run of the benchmark."""
    table = _Table(results)
    step, floor, add = table.step, table.floor, table.add
    compiled = "torch.compile"
    for weights, times, aim, most, least in ((_BF16, 13, 18, 3.2, 2.3), (_FP32, 27, 38, 2.2, 1.6)):
        ours, theirs = step(_SMALL, weights), step(_SMALL, weights, compiled)
        add(f"{_SMALL} {weights}: faster than torch.compile", theirs, ours, times, aim)
        add(f"{_SMALL} {weights}: of the floor, at most", ours, floor(_SMALL, weights), most, least)
    for weights, most in ((_BF16, 1.7), (_FP32, 1.5)):
        ours = step(_LARGE, weights)
        add(f"{_LARGE} {weights}: of the floor, at most", ours, floor(_LARGE, weights), most, 1.3)
    for network, times, aim in ((_SMALL, 1.1, 1.4), (_LARGE, 1.3, 1.7)):
        ours = step(network, _FP8)
        add(f"{network} {_FP8}: faster than {_BF16}", step(network, _BF16), ours, times, aim)
    one, many = step(_SMALL, _BF16), step(_SMALL, _BF16, batch=16)
    theirs = step(_SMALL, _BF16, compiled, 16)
    add(f"{_SMALL} {_BF16}, batch 16: of the step of batch 1, at most", many, one, 2.5, 1.5)
    add(f"{_SMALL} {_BF16}, batch 16: faster than torch.compile", theirs, many, 5, None)
    for row in results.get("loops", []):
        bar = f"{row['network']} {row['weights']}, {row['loop']}: of a step, at most"
        if row["how"] == "dpa" and row["batch"] == 1:
            add(bar, row["us"], row["step us"], 105 if "100" in row["loop"] else 11.5, None)
    firsts = [row["first call s"] for row in results.get("loops", []) if row["how"] == "dpa"]
    add(
        "a first call, packing and capture included: seconds, at most",
        max(firsts, default=None),
        1.0,
        1.0,
        None,
    )
    fast = [row for row in results.get("parallel", []) if row.get("faster") is not None]
    for row in fast:
        bar = f"{row['weights']}, parallel, tolerance {row['tolerance']:g}: faster than the loop"
        add(bar, row["faster"], 1.0, 1.5, 3.0)
    return table.rows
