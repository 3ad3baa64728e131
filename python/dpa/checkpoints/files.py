"""Read the files of checkpoints, whatever they hold, and refuse damaged ones.

Nothing in a file is executed unless the caller asks: safetensors hold tensors alone, and pickles
are read with ``weights_only``. A diffusion_policy ``.ckpt`` also pickles its configuration
(omegaconf), which ``weights_only`` refuses; ``trust_pickle=True`` unpickles it in full.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch

from dpa.library.checks import first_line


class CheckpointError(ValueError):
    """The file cannot be read, or lacks the requested U-Net; the message gives the reason."""


def read_config(path: Path) -> dict[str, Any]:
    """Return what a file of JSON says, and nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON object: {error}") from None
    if not isinstance(read, dict):
        raise CheckpointError(f"{path}: is no JSON object: it holds a {type(read).__name__}")
    return read


def _refuse_altered_archive(path: Path) -> None:
    """Check the checksums, which torch.load does not, and that no entry is compressed."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            packed = not stored or sum(e.file_size for e in entries) > path.stat().st_size
            damaged = None if packed else archive.testzip()
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: is damaged or cut short: {error}") from None
    if packed:
        raise CheckpointError(f"{path}: holds packed entries, which torch.save never writes")
    if damaged:
        raise CheckpointError(f"{path}: is damaged: the checksum of {damaged} does not fit")


def read_file(path: Path, trust_pickle: bool = False) -> Any:
    """Read a file of safetensors or of ``torch.save``, whatever it holds, to the CPU."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            return load_file(path)
        except ImportError:
            raise CheckpointError(f"{path}: reading it needs `pip install safetensors`") from None
        except SafetensorError as error:
            raise CheckpointError(f"{path}: is damaged or cut short: {error}") from None
    _refuse_altered_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path}: unpickling it needs the package {error.name}") from None
    except Exception as error:  # a damaged file makes pickle raise any exception
        reason = first_line(error)
        with path.open("rb") as file:
            begins = file.read(4)
        # A pickle, or the archive of torch.save.
        if begins[:1] != b"\x80" and begins != b"PK\x03\x04":
            other = "it begins as neither torch.save's files nor pickles do"
            reason = other if begins else "it is empty"
            raise CheckpointError(f"{path}: is damaged or no checkpoint: {reason}") from None
        if "Unsupported" in str(error) or "weights_only" in str(error):
            raise CheckpointError(
                f"{path}: holds pickled objects besides tensors, as diffusion_policy's .ckpt files "
                "do. Where you trust its origin, trust_pickle=True (--trust-pickle) reads it, and "
                "runs whatever code it holds"
            ) from None
        raise CheckpointError(f"{path}: is damaged or no checkpoint: {reason}") from None
