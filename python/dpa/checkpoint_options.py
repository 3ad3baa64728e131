"""The options of every command that reads a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint file or a LeRobot folder.")
]
Prefix = Annotated[
    str | None, typer.Option(help="Of the U-Net's parameters, where there are several.")
]
Ema = Annotated[bool, typer.Option(help="Prefer averaged weights.")]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Unpickle in full, running the file's code.")
]
