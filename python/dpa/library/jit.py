"""Builds the library at run time, for the GPU at hand, or for the CPU alone.

A process holds one library, and ``import dpa`` loads the installed one. So say beforehand that it
shall not::

    import os
    os.environ["DPA_LIBRARY"] = "jit"
    import dpa
    dpa.jit.load()

or start Python with ``DPA_LIBRARY=jit`` in the environment. It needs a C++ compiler, CMake and
Ninja, and CUDA's compiler for GPU kernels; the first build takes minutes, later ones a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from dpa.library import loader
from dpa.library.files import cache_folder, checkout

_COUNT = re.compile(r"\[\d+/\d+\]")
_built: Path | None = None


def load(
    cuda: str = "auto", archs: str = "auto", folder: str | Path | None = None, verbose: bool = False
) -> Path:
    """Compile the library's sources and register ``torch.ops.dpa.*``.

    Args:
        cuda: "auto" (GPU kernels where there is an nvcc), "on" or "off".
        archs: CUDA architectures such as "90a"; "auto" is the GPU here.
        folder: where to build; by default a folder under ``~/.cache/dpa`` (or ``XDG_CACHE_HOME``)
            for each torch, architecture and set of sources. Processes that share it wait for one
            another.
        verbose: show the compiler's output.

    Returns:
        The library. Called again, it returns the library that it has loaded.

    Raises:
        RuntimeError: another library has registered the ops already, or the build has failed.
        FileNotFoundError: the sources, CMake or Ninja are not here.

    """
    global _built
    if loader.is_loaded():
        if _built:
            return _built
        raise RuntimeError(
            "dpa.jit.load: the ops are registered already, by a library built ahead of time, and a "
            "process takes one library: set DPA_LIBRARY=jit in the environment before `import dpa`"
        )
    source = _source()
    folder = Path(folder) if folder else _cache(source, cuda, archs)
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
        _build(source, folder, cuda, archs, verbose)
    loader.load(folder / "libdpa.so")
    _built = folder / "libdpa.so"
    return _built


def _source() -> Path:
    """The folder with CMakeLists.txt: the checkout of an editable install."""
    source = checkout()
    if source is None:
        raise FileNotFoundError(
            "dpa.jit.load: needs the sources of the library, which a wheel does not hold: clone "
            "the repository and import dpa from its folder python/, or unset DPA_LIBRARY to take "
            "the wheel's own library"
        )
    return source


def _cache(source: Path, cuda: str, archs: str) -> Path:
    gpu = torch.cuda.is_available()
    device = "sm{}{}".format(*torch.cuda.get_device_capability()) if gpu else "cpu"
    key = hashlib.sha256(f"{source} {cuda} {archs} {sys.prefix}".encode()).hexdigest()[:12]
    return cache_folder() / f"torch-{torch.__version__}-{device}-{key}"


def _build(source: Path, folder: Path, cuda: str, archs: str, verbose: bool) -> None:
    tools = Path(sys.executable).parent
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    for tool in ("cmake", "ninja"):
        if not shutil.which(tool, path=path):
            raise FileNotFoundError(f"dpa.jit.load: needs {tool}: pip install {tool}")
    configure = ["cmake", "-S", source, "-B", folder, "-G", "Ninja"]
    configure += [f"-DDPA_CUDA={cuda}", f"-DDPA_CUDA_ARCHS={archs}"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    environment = {**os.environ, "PATH": path}
    say = not verbose and not (folder / "libdpa.so").exists()
    if say:
        print(f"dpa.jit.load: building the library in {folder}, for minutes", file=sys.stderr)
    for command in (configure, ["cmake", "--build", folder]):
        status, output = _run([str(part) for part in command], environment, verbose, say)
        if status != 0:
            raise RuntimeError(f"dpa.jit.load: the build in {folder} failed\n{output}")


def _run(
    command: list[str], environment: dict[str, str], verbose: bool, say: bool
) -> tuple[int, str]:
    """Run a command; return its status and output, which ``verbose`` shows instead.

    With ``say`` one line on a terminal counts the files that Ninja has compiled: ``[12/80]``.
    """
    if verbose:
        return subprocess.run(command, env=environment).returncode, ""
    lines = []
    terminal = say and sys.stderr.isatty()
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if terminal and (done := _COUNT.match(line)):
                print(f"\rdpa.jit.load: {done[0]}", end="", file=sys.stderr, flush=True)
    if terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return process.returncode, "".join(lines)
