"""Where an exported file may be written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from dpa.library.checks import require


def manifest_of(path: Path) -> Path:
    """Return where the manifest of an exported file lies."""
    return path.with_name(path.name + ".json")


def folder_of(checkpoint: Path) -> Path:
    """Return the folder of a LeRobot checkpoint, which its file of weights may stand for."""
    return checkpoint.parent if checkpoint.suffix == ".safetensors" else checkpoint


def files_of(checkpoint: Path) -> Iterator[Path]:
    """Yield the files that are read of a checkpoint, a file or a folder."""
    folder = folder_of(checkpoint)
    if folder.is_dir():
        for pattern in ("config.json", "*.safetensors", "policy_*processor.json"):
            yield from folder.glob(pattern)
    else:
        yield checkpoint


def check_places(path: Path, argument: str, inputs: Iterable[Path] = ()) -> None:
    """Refuse to replace an input, or what is no regular file, by an artefact or its manifest.

    Args:
        path: of the artefact.
        argument: what the caller named it by.
        inputs: the files that are read.

    Raises:
        ValueError: a symbolic link is no regular file either: to replace it would leave its target
            as it was.

    """
    inputs = [file for file in inputs if file.exists()]
    for name, place in {argument: path, f"the manifest of {argument}": manifest_of(path)}.items():
        is_link, exists = place.is_symlink(), place.exists()
        same = exists and any(place.samefile(file) for file in inputs)
        require(not same, name, "be another file than those that are read", place)
        regular = not is_link and (place.is_file() or not exists)
        got = f"a symbolic link, {place}" if is_link else place
        require(regular, name, "be a regular file or a new one", got)
