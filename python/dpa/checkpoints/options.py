"""The options of every command that reads a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint file or a LeRobot folder.")
]
Prefix = Annotated[
    str | None, typer.Option(help="Where the file has several U-Nets: what one's names begin with.")
]
Ema = Annotated[bool, typer.Option(help="Averaged weights, where the file has them.")]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Unpickle in full, running the file's code.")
]
