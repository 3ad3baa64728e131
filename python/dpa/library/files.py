"""Writing files so that an interrupted run leaves whole files or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
