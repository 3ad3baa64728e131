"""The demo: a Diffusion Policy trained and run in closed loop on dpa's ops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from rich.console import Console

Dtype = Literal["float32", "float64", "float16", "bfloat16"]


@dataclass
class Options:
    """What to run. The defaults meet the bar in two minutes on one CPU core.

    Attributes:
        seed: of everything random.
        episodes: closed-loop episodes a scheduler.
        train_steps: batches to train on.
        out: the folder for the checkpoint, the pictures and ``results.json``.
        checkpoint: a file to take the policy from, instead of training one.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: of sampling; training is in float32.
        train_only: stop once the policy is trained and saved.
        quick: a little of everything, to see that it runs; the result is not judged.
        threads: of the CPU. At the demo's sizes a second one gains little, and where another
            program runs beside it each waits for the other: ten times slower.

    Raises:
        ValueError: naming the option, the rule and the value received.

    """

    seed: int = 0
    episodes: int = 100
    train_steps: int = 2000
    out: Path = Path("out/demo")
    checkpoint: Path | None = None
    device: str = "auto"
    dtype: Dtype = "float32"
    train_only: bool = False
    quick: bool = False
    threads: int = 1

    def __post_init__(self):
        for name in ("episodes", "train_steps", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {', '.join(get_args(Dtype))}, got {self.dtype}")
        if self.train_only and self.checkpoint:
            raise ValueError("train_only must not be set with a checkpoint: nothing is left to do")
        if self.quick:
            self.episodes, self.train_steps = min(self.episodes, 8), min(self.train_steps, 20)


def run(options: Options | None = None, console: Console | None = None) -> dict:
    """Train or load a policy, run it, compare, draw, and return what was found (JSON-able).

    The result is also written to ``results.json`` beside the pictures and the checkpoint. Its
    ``passed`` is None where the run is not judged: ``quick``, ``train_only``, too few episodes.

    Raises:
        ValueError: for options that cannot be met.
        ModuleNotFoundError: where a package of the demo is not installed.

    """
    # Imported here, so that the command line starts quickly and works without the demo's packages.
    from rich.console import Console

    from dpa.demo import pipeline

    return pipeline.run(options or Options(), console or Console())
