"""Whether this process is the ``dpa`` command."""

from __future__ import annotations

import sys
from pathlib import PurePath

SCRIPT = b"from dpa.cli import main"  # the line that installers write into the command's script


def is_command() -> bool:
    """Whether the process was started as ``dpa ...`` or as ``python -m dpa ...``.

    Processes that it starts are not: their own arguments name another program.
    """
    started, given = sys.argv[0] if sys.argv else "", sys.orig_argv[1:]
    if started not in given:
        return False
    if started == "-m":
        return given[given.index("-m") + 1 :][:1] == ["dpa"]
    if PurePath(started).name != "dpa":
        return False
    try:
        with open(started, "rb") as script:
            return SCRIPT in script.read(4096)
    except OSError:
        return False
