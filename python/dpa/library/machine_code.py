"""What GPUs a library has machine code for; for the others the driver compiles its PTX."""

from __future__ import annotations

import re
from pathlib import Path

from dpa.library.files import text_of

_TEGRA = {(7, 2), (8, 7)}  # Jetson's, which run no other GPU's machine code


def built_for(folder: Path) -> str | None:
    """What the library in a folder was built for, as the build wrote it, if it did."""
    return text_of(folder / "built-for.txt")


def code_of(built_for: str) -> tuple[list[str], list[int]]:
    """The architectures that a library has machine code for, and those of its PTX."""
    listed, _, with_ptx = built_for.partition("(")[0].partition("architectures")[2].partition("PTX")
    return re.findall(r"\d+[af]?", listed), [int(base) for base in re.findall(r"\d+", with_ptx)]


def runs(archs: list[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU runs machine code of one of these: its own, or one of the same major version
    that is older, but for what is of one architecture alone (90a)."""
    major, minor = capability
    for arch in archs:
        of, than = divmod(int(arch.rstrip("af")), 10)
        own = (of, than) == capability
        if own or (of == major and than < minor and arch[-1] != "a" and capability not in _TEGRA):
            return True
    return False
