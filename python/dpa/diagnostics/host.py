"""What is on this machine, looked up so that nothing of it can fail."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dpa.library.checks import first_line
from dpa.library.files import cache_folder, checkout, text_of
from dpa.library.machine_code import built_for
from dpa.library.torches import lerobot_bound

PACKAGES = ("diffusers", "lerobot", "huggingface_hub")


@dataclass(frozen=True)
class Host:
    """The facts that a diagnosis follows from. None is "there is none", or "it does not say".

    Attributes:
        dpa: the version, or None without the metadata of an installed package.
        checkout: the folder of the sources that the package is imported from.
        python: the version.
        torch: the version, or None where it cannot be imported.
        torch_error: why it cannot.
        torch_cuda: the CUDA that torch is built with, such as ``13.0``.
        torch_bound: what LeRobot requires of torch, such as ``<2.11.0,>=2.2.1``.
        gpus: name and compute capability of each GPU that torch sees.
        seen: names of the GPUs that the driver has, whatever torch sees.
        driver: version of the driver.
        library: the path of the library, or None.
        library_error: why it is missing, or cannot be loaded.
        library_torch: the torch that it was built against.
        ops_for: the versions of torch that a wheel has ops for, where this one is none of them.
        built_for: as the build wrote it, such as ``the CPU alone: ...``.
        kernels_cuda: the major version of CUDA that a wheel's kernels are built with.
        cpu_levels: instruction sets of the CPU's kernels that it has, from the least to the best.
        cpu_level: the one that ``DPA_CPU_LEVEL`` names.
        compilers: paths of c++, nvcc, cmake and ninja, where they are.
        cache: the folder of built libraries.
        cache_writable: whether files can be made there.
        packages: versions of :data:`PACKAGES` that are installed.
        smoke: what an op answers on each device: ``ok``, or what went wrong.

    """

    dpa: str | None
    checkout: Path | None
    python: str
    torch: str | None = None
    torch_error: str | None = None
    torch_cuda: str | None = None
    torch_bound: str | None = None
    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()
    seen: tuple[str, ...] = ()
    driver: str | None = None
    library: str | None = None
    library_error: str | None = None
    library_torch: str | None = None
    ops_for: tuple[str, ...] = ()
    built_for: str | None = None
    kernels_cuda: int | None = None
    cpu_levels: tuple[str, ...] = ()
    cpu_level: str | None = None
    compilers: dict[str, str] = field(default_factory=dict)
    cache: str = ""
    cache_writable: bool = True
    packages: dict[str, str] = field(default_factory=dict)
    smoke: dict[str, str] = field(default_factory=dict)


def look() -> Host:
    """Look at this machine. Loads the library, if it can be loaded."""
    seen, driver = _driver()
    facts: dict[str, Any] = {
        "dpa": version("torch-dpa"),
        "checkout": checkout(),
        "python": platform.python_version(),
        "seen": seen,
        "driver": driver,
        "cpu_levels": cpu_levels(platform.machine(), text_of(Path("/proc/cpuinfo")) or ""),
        "cpu_level": os.environ.get("DPA_CPU_LEVEL") or None,
        "compilers": {
            tool: path for tool in ("c++", "nvcc", "cmake", "ninja") if (path := _tool(tool))
        },
        "torch_bound": lerobot_bound(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
    }
    facts["cache"], facts["cache_writable"] = _cache()
    try:
        import torch
    except Exception as error:  # a torch that is half installed raises any
        return Host(**facts, torch_error=first_line(error))
    facts |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "gpus": _gpus()}
    facts |= _library()
    if facts["library_error"] is None:
        facts["smoke"] = _smoke(["cpu", *(f"cuda:{n}" for n in range(len(facts["gpus"])))])
    return Host(**facts)


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except Exception:  # metadata that is missing, damaged or unreadable
        return None


def cpu_levels(machine: str, cpuinfo: str) -> tuple[str, ...]:
    """The levels that ``kernels/cpu/level.cpp`` finds, by what Linux says of the processor."""
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    if machine == "aarch64":
        return ("portable", "neon", *(["neon_bf16"] if "bf16" in flags else []))
    if machine != "x86_64":
        return ("portable",)
    avx2 = {"avx2", "fma"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    dot = avx512 | {"avx512_bf16"}
    needs = {"avx2": avx2, "avx512": avx512, "avx512_bf16": dot}
    if facts.get("vendor_id") == "GenuineIntel":  # whose dot products are slow
        needs["avx512_fp16"] = dot | {"avx512_fp16"}
    needs["amx"] = dot | {"amx_bf16", "amx_tile"}
    return ("portable", *(level for level, needed in needs.items() if needed <= flags))


def _tool(name: str) -> str | None:
    chosen = os.environ.get({"c++": "CXX", "nvcc": "CUDACXX"}.get(name, ""))
    if chosen:
        return shutil.which(chosen)
    return shutil.which(name) or (shutil.which("g++") if name == "c++" else None)


def _cache() -> tuple[str, bool]:
    folder = cache_folder()
    try:  # by a file: permissions say little where root has all of them
        existing = next((f for f in (folder, *folder.parents) if f.exists()), folder)
        with tempfile.TemporaryFile(dir=existing):
            return str(folder), True
    except OSError:
        return str(folder), False


def _driver() -> tuple[tuple[str, ...], str | None]:
    """The GPUs by their names and the driver's version, as nvidia-smi has them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return (), None
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if done.returncode == 0]
    rows = [row for row in rows if row[1]]
    return tuple(name.strip() for name, _, _ in rows), rows[0][2].strip() if rows else None


def _gpus() -> tuple[tuple[str, tuple[int, int]], ...]:
    import warnings

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a driver's age makes torch say is a finding
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            return tuple(
                (torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n))
                for n in range(count)
            )
    except Exception:  # a driver that is there and does not work
        return ()


def _library() -> dict[str, Any]:
    from dpa.library import by_torch, loader

    facts: dict[str, Any] = {"library": None, "library_error": None}
    try:
        facts["kernels_cuda"] = next(
            filter(None, map(by_torch.kernels_cuda, loader.folders())), None
        )
        path = loader.library_path()
        facts["library"] = str(path)
        facts["library_torch"] = text_of(path.with_name("torch-version.txt"))
        facts["built_for"] = built_for(path.parent)
        loader.load(path)
    except by_torch.NoOpsForTorch as error:
        facts["library_error"], facts["ops_for"] = str(error), tuple(error.has)
    except Exception as error:  # the loader's own, and whatever a foreign library raises
        facts["library_error"] = first_line(error)
    return facts


def _smoke(devices: Iterable[str]) -> dict[str, str]:
    """One op against its reference on each device: ``ok`` or what went wrong."""
    import torch

    from dpa import reference

    answers = {}
    for device in devices:
        try:
            x = torch.randn(2, 8, 16, device=device)
            got, want = torch.ops.dpa.group_norm_mish(x, 4), reference.group_norm_mish(x, 4)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            answers[device] = "ok"
        except Exception as error:  # any failure is reported, not raised
            answers[device] = f"{type(error).__name__}: {first_line(error)}"
    return answers
