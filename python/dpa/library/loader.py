"""Finds the shared library and loads it once."""

from __future__ import annotations

import os
import struct
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

from dpa.library import building, by_torch
from dpa.library.checks import first_line
from dpa.library.files import checkout

_loaded: Path | None = None
_waiting: list[Callable[[], None]] = []


def library_path() -> Path:
    """The shared library that registers ``torch.ops.dpa.*``, for ``torch.ops.load_library``.

    ``DPA_LIBRARY`` in the environment names another one, such as a build that is not installed.

    Raises:
        FileNotFoundError: there is no library, because the package was not built, or none for this
            torch.

    """
    if _loaded:
        return _loaded
    if wants_jit():
        raise FileNotFoundError("DPA_LIBRARY is jit: call dpa.jit.load(), which builds the library")
    if chosen := os.environ.get("DPA_LIBRARY"):
        if Path(chosen).is_file():
            return Path(chosen)
        mend = "correct or unset DPA_LIBRARY"
        raise FileNotFoundError(f"DPA_LIBRARY names {chosen}, which does not exist: {mend}")
    for lib in folders():
        if path := by_torch.fitting(lib):
            return path
    for lib in folders():
        if has := by_torch.torches(lib):
            raise by_torch.NoOpsForTorch(lib, has)
    raise FileNotFoundError(
        f"dpa expects its library in {folders()[0]}, which does not hold it: {_rebuild()}"
    )


def folders() -> list[Path]:
    """Where libraries may lie: in the package around this file; an editable install leaves that in
    the checkout and puts libraries where packages are installed."""
    return [Path(__file__).parents[1] / "lib", Path(sysconfig.get_path("platlib")) / "dpa" / "lib"]


def wants_jit() -> bool:
    """Whether the environment leaves the library to :func:`dpa.jit.load`."""
    return os.environ.get("DPA_LIBRARY") == "jit"


def is_loaded() -> bool:
    """Whether ``torch.ops.dpa.*`` is registered."""
    return torch._C._dispatch_has_kernel("dpa::denoise")


def _rebuild() -> str:
    """What brings a whole library: in a checkout, and as a package was installed."""
    if os.environ.get("DPA_LIBRARY") and not wants_jit():
        return "correct or unset DPA_LIBRARY"
    return "run `make build`" if checkout() else "reinstall dpa's wheel"


def _refuse_other_torch(path: Path) -> None:
    """Raise ImportError where the library was built against another minor version of torch."""
    built = path.with_name("torch-version.txt")
    if not built.is_file():
        return
    theirs, ours = built.read_text().strip(), torch.__version__
    if (minor := by_torch.minor(theirs)) != by_torch.minor(ours):
        mend = "run `make build`, or" if checkout() else "reinstall dpa for this torch, or"
        raise ImportError(
            f"dpa: the library was built against torch {theirs}, and this is torch {ours}: {mend} "
            f'pip install "torch=={minor}.*"'
        )


def _refuse_cut_short(path: Path) -> None:
    """Raise ImportError where an ELF file ends before its parts do: to map it ends the process."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":  # of 64 bits, little-endian; others dlopen refuses
            return
        ends = [64]
        if len(head) == 64:
            segments, sections = struct.unpack_from("<QQ", head, 32)
            segment_size, segment_count, section_size, section_count = struct.unpack_from(
                "<4H", head, 54
            )
            ends += [segments + segment_size * segment_count]
            ends += [sections + section_size * section_count]
            file.seek(min(segments, size))
            table = file.read(segment_size * segment_count)
            for at in range(0, len(table) - 55, max(segment_size, 56)):
                offset, length = struct.unpack_from("<8xQ16xQ", table, at)
                ends.append(offset + length)
    if max(ends) > size:
        raise ImportError(
            f"dpa: {path} is damaged or cut short, it has {size} bytes of {max(ends)}: {_rebuild()}"
        )


def load(path: Path | None = None) -> None:
    """Load the library at ``path``, or the installed one, unless the ops are registered already.

    Two libraries that both define the ops would abort the process, so whoever came first stays.

    Raises:
        FileNotFoundError: there is no library.
        ImportError: it was built against another torch or another CUDA, is cut short, or is another
            library; or a wheel has none for this torch, and none can be built here.

    """
    global _loaded
    if not is_loaded():
        try:
            path = path or library_path()
        except by_torch.NoOpsForTorch as error:
            path = building.build_ops(error)
        _refuse_other_torch(path)
        # The kernels of a wheel, which its ops open.
        beside = [folder / by_torch.KERNELS for folder in path.resolve().parents[:2]]
        for file in (path, *filter(Path.is_file, beside)):
            _refuse_cut_short(file)
        try:
            torch.ops.load_library(str(path))
        except OSError as error:  # a symbol or a shared library that this torch does not have
            reason = first_line(error.__cause__ or error)
            raise ImportError(
                f"dpa: {path} does not load with torch {torch.__version__}, built with CUDA "
                f"{torch.version.cuda or 'none'}: {_rebuild()} ({reason})"
            ) from None
        if not is_loaded():
            why = "is another library: it registers no torch.ops.dpa.*"
            raise ImportError(f"dpa: {path} {why}: {_rebuild()}")
        _loaded = path
    while _waiting:
        _waiting.pop()()


def when_loaded(register: Callable[[], None]) -> None:
    """Call ``register`` once the ops are there: now, or when :func:`load` has loaded them."""
    if is_loaded():
        register()
    else:
        _waiting.append(register)
