"""The options that several commands have, and what they take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dpa.library.checks import first_line

if TYPE_CHECKING:
    import torch

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint file, a LeRobot folder, or user/repo on the Hub."
    ),
]
Prefix = Annotated[
    str | None, typer.Option(help="Where the file has several U-Nets: what one's names begin with.")
]
Ema = Annotated[bool, typer.Option(help="Averaged weights, where the file has them.")]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Unpickle in full, running the file's code.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda or cuda:N.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Denoising steps; by default the checkpoint's.")
]

Dtype = Literal["float32", "float16", "bfloat16"]
Mode = Literal["loop", "step", "chain"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    """The dtype of that name; None of none."""
    import torch

    return None if dtype is None else getattr(torch, dtype)


def located(checkpoint: str, only: str | None = None) -> Path:
    """The path of a CHECKPOINT; one of the Hub, ``user/repo``, is downloaded.

    Args:
        checkpoint: a path, or the repository.
        only: the one file of a repository to download; its folder is returned, whether the
            repository has it or not. None downloads weights and configurations.

    Raises:
        FileNotFoundError: there is no such file, and no such repository.
        RuntimeError: it seems to be on the Hub, which cannot be reached.

    """
    path = Path(checkpoint)
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(checkpoint):
        raise FileNotFoundError(f"{checkpoint}: there is no such file")
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise FileNotFoundError(
            f"{checkpoint}: there is no such file; to take it from the Hub, "
            "pip install huggingface_hub"
        ) from None
    try:
        patterns = ["*.safetensors", "*.json"] if only is None else [only]
        return Path(huggingface_hub.snapshot_download(checkpoint, allow_patterns=patterns))
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise FileNotFoundError(
            f"{checkpoint}: there is no such file here and no such repository on the Hub (one that "
            "is private or gated needs `hf auth login`)",
        ) from None
    except Exception as error:  # no network, a proxy's refusal, a full disk: of many types
        raise RuntimeError(
            f"{checkpoint}: there is no such file here, and the Hub cannot be reached "
            f"({first_line(error)}): give the path of a folder that is here"
        ) from None
