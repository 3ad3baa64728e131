"""The stages of ``dpa bench --train``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from dpa.bench import train, train_bars

_TABLES = ("training", "GroupNorm + Mish + FiLM", "optimizers", "several GPUs")
Tables = dict[str, Any]


def stages(part: str) -> dict[str, Callable[[], Tables]]:
    """Stages by name; each returns tables. On the CPU one small network, to see that it works."""
    if part == "curves":  # no requirement depends on them, and they take long
        return {"loss curves": _curves}
    if not torch.cuda.is_available():
        return {case.name: _network(case, (train.EAGER, train.DPA)) for case in train.SMALL}
    found: dict[str, Callable[[], Tables]] = {}
    if part in ("all", "networks"):
        others = (train.EAGER, train.DPA)
        found["torch.compile"] = lambda: {_TABLES[0]: train.measure_compiled()}
        calls = {case: (train.CALLS,) if case.backward else () for case in train.CASES}
        found |= {case.name: _network(case, others + calls[case]) for case in train.CASES}
    if part in ("all", "norm"):
        found["GroupNorm"] = partial(_table, _TABLES[1], "train_norm")
    if part in ("all", "optimizer"):
        found["AdamW and EMA"] = partial(_table, _TABLES[2], "train_optimizer")
    if part in ("all", "ddp") and torch.cuda.device_count() > 1:
        found["several GPUs"] = partial(_table, _TABLES[3], "train_ranks")
    return found


def finished(results: dict[str, Any]) -> dict[str, Any]:
    """The tables, and one of the requirements and whether they hold."""
    if "curves" in results or not torch.cuda.is_available():
        return results
    return results | {"required": train_bars.bars(*(results.get(name, []) for name in _TABLES))}


def _network(case: train.Case, ways: tuple[str, ...]) -> Callable[[], dict[str, Any]]:
    return lambda: {_TABLES[0]: [train.measure(case, way) for way in ways]}


def _table(title: str, module: str) -> Tables:
    return {title: import_module(f"dpa.bench.{module}").run()}


def _curves() -> dict[str, Any]:
    from dpa.bench import loss_curves

    curves = loss_curves.run()
    return {"curves": curves, "loss curves": loss_curves.summary(curves)}
