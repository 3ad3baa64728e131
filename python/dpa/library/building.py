"""Runs the CMake build on this machine: of the whole library, or of a wheel's ops."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dpa.library import by_torch
from dpa.library.files import sources
from dpa.library.torches import install, lerobot_bound

_COUNT = re.compile(r"\[\d+/\d+\]")
_SECONDS = 20.0  # between lines of progress where no terminal is


def build_ops(missing: by_torch.NoOpsForTorch) -> Path:
    """Build a wheel's ops for this torch, beside the wheel's kernels; return the library.

    ImportError says which compiler or tool is not here, or how the build has failed.
    """
    lib = missing.lib
    other = install(missing.has, torch.__version__, lerobot_bound())
    packages = [tool for tool in ("cmake", "ninja") if not _tool(tool)]
    wants = [f"pip install {' '.join(packages)}"] if packages else []
    if not _tool(os.environ.get("CXX", "c++")):
        wants.append("sudo apt install g++ (or conda install gxx)")
    if wants:
        raise ImportError(
            f"dpa: {missing}: {', '.join(wants)}, and the next import builds them, once, in "
            f"minutes; or {other}"
        )
    print(f"dpa: {missing}: building them, once, in minutes", file=sys.stderr)
    definitions = {
        "DPA_KERNELS": str(lib / by_torch.KERNELS),
        "DPA_CUDA": "off" if by_torch.kinds(lib) == ("cpu",) else "auto",
    }
    try:
        return build(source(), by_torch.built_here(lib).parent, definitions, verbose=False)
    except (RuntimeError, FileNotFoundError) as error:
        raise ImportError(
            f"dpa: {missing}, and they cannot be built: {error}\nOr {other}"
        ) from None


def source() -> Path:
    """The folder with CMakeLists.txt."""
    found = sources()
    if found is None:
        raise FileNotFoundError("dpa.jit.load: this installation does not hold dpa's sources")
    return found


def build(source: Path, folder: Path, definitions: dict[str, str], verbose: bool) -> Path:
    """Build in the folder, one process at a time; return the library."""
    for tool in ("cmake", "ninja"):
        if not _tool(tool):
            raise FileNotFoundError(f"dpa.jit.load: needs {tool}: pip install {tool}")
    configure = ["cmake", "-S", source, "-B", folder, "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    library = folder / by_torch.NAME
    with _locked(folder):
        say = not verbose and not library.exists()
        if say:
            print(f"dpa.jit.load: building the library in {folder}, for minutes", file=sys.stderr)
        for command in (configure, ["cmake", "--build", folder]):
            environment = {**os.environ, "PATH": _path()}
            status, output = _run([str(part) for part in command], environment, verbose, say)
            if status != 0:
                raise RuntimeError(f"dpa.jit.load: the build in {folder} failed\n{output}")
    return library


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and hold it: other processes wait."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise RuntimeError(
            f"dpa.jit.load: {folder} cannot be written ({error.strerror}): give another folder=, "
            "or set XDG_CACHE_HOME to one that can be"
        ) from None
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _path() -> str:
    """Where programs are looked for: those of this environment first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _tool(name: str) -> str | None:
    return shutil.which(name, path=_path())


def _run(
    command: list[str], environment: dict[str, str], verbose: bool, say: bool
) -> tuple[int, str]:
    """Run a command; return its status and output, which ``verbose`` shows instead.

    With ``say`` the files that Ninja has compiled are counted, ``[12/80]``: on a terminal in one
    line, elsewhere in a line now and then.
    """
    if verbose:
        return subprocess.run(command, env=environment).returncode, ""
    lines = []
    terminal, said = say and sys.stderr.isatty(), time.monotonic()
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            lines.append(line)
            done = _COUNT.match(line) if say else None
            if done and terminal:
                print(f"\rdpa.jit.load: {done[0]}", end="", file=sys.stderr, flush=True)
            elif done and time.monotonic() - said >= _SECONDS:
                print(f"dpa.jit.load: {done[0]}", file=sys.stderr, flush=True)
                said = time.monotonic()
    if terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return process.returncode, "".join(lines)
