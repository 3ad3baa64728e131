"""Where dpa's files lie; writing so that an interrupted run leaves whole files or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def checkout() -> Path | None:
    """The folder of the sources around this package, or None where it was installed."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "ops" / "library.cpp").is_file() else None


def sources() -> Path | None:
    """The folder of the library's sources: the checkout's, or those that an installation holds."""
    installed = Path(__file__).resolve().parents[1] / "sources"
    return checkout() or (installed if installed.is_dir() else None)


def text_of(path: Path) -> str | None:
    """The text of a file, or None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def cache_folder() -> Path:
    """Where libraries that are built at run time are kept."""
    try:
        home = Path.home()
    except RuntimeError:  # a user whom the system does not know, as in a container
        home = Path(os.devnull)  # nothing can be written there
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "dpa"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which becomes ``path`` when the block ends well.

    The suffix is kept, as writers choose their format by it. When the block raises (an interrupt
    included) the temporary file is removed and whatever was at ``path`` stays; an OSError that
    names no file names ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None:  # of a full disk, for one
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
