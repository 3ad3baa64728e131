"""What is wrong with an installation, and the command that mends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dpa.diagnostics.host import Host, look
from dpa.library.machine_code import code_of, runs
from dpa.library.torches import install

OK: Literal["ok"] = "ok"
NOTE: Literal["note"] = "note"  # works, with less than could be
WRONG: Literal["wrong"] = "wrong"

# The oldest driver of each CUDA, as NVIDIA's table of minor-version compatibility has it.
_DRIVERS = {12: 525, 13: 580}
# The oldest driver that compiles the PTX of each release of CUDA, as their release notes have it.
_PTX_DRIVERS = {
    **{"12.0": 525, "12.1": 530, "12.2": 535, "12.3": 545, "12.4": 550, "12.5": 555, "12.6": 560},
    **{"12.8": 570, "12.9": 575, "13.0": 580, "13.1": 590},
}
_OLDEST = (7, 5)  # that a wheel has code for, and that CUDA 13's compiler makes code for
_FORMS = {
    "hopper": "resident kernels: the whole denoising loop is one kernel",
    "phases": "the whole denoising loop is one kernel, without Hopper's instructions",
    "layers": "the small ops; networks run in PyTorch's layers",
}
# What is known of a form's speed: docs/figures.json has the figure.
_SPEEDS = {
    "hopper": "on an H200, channels 256/512/1024, 100 DDPM steps take 8.3 ms in bfloat16",
    "phases": "measured on an H100 and an H200 alone: `dpa bench CHECKPOINT` measures it here",
}
# The same of the levels of kernels/cpu: docs/figures.json and docs/cpu-log.md have the figures.
_CPU_LEVELS = {
    "portable": "vectors of 4, without AVX2",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_bf16": "AVX-512 with bfloat16 dot products",
    "avx512_fp16": "AVX-512 with float16 arithmetic",
    "amx": "AVX-512 and AMX",
    "neon": "NEON",
    "neon_bf16": "NEON with bfloat16 dot products",
}
_CPU_SPEEDS = {
    "avx512_bf16": "on two cores of an EPYC, channels 256/512/1024, one forward pass takes 4.62 ms "
    "in float32 and 2.4 in bfloat16",
    "avx512_fp16": "on one core of a Xeon, channels 256/512/1024, a step takes 17.4 ms in float32 "
    "and 9.66 in bfloat16",
    "amx": "on two cores of a Xeon, channels 256/512/1024, a step takes 10.4 ms in float32 and 9.8 "
    "in bfloat16",
}
_CPU_UNTIMED = "never timed on a U-Net: `dpa bench CHECKPOINT` measures it here"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        state: ``ok``, ``note`` or ``wrong``.
        says: what was found.
        mend: what to do: a command where there is one, empty where nothing is to be done.

    """

    name: str
    state: Literal["ok", "note", "wrong"]
    says: str
    mend: str = ""


def examine(host: Host | None = None) -> list[Finding]:
    """Look at everything that dpa needs; never raises."""
    host = host or look()
    found = [_package(host), *_torch(host)]
    if host.torch is not None:
        found += [*_gpu(host), *_library(host), *_kernels(host), *_cpu(host), *_smoke(host)]
    return [*found, *_packages(host), *_tools(host)]


def advice(found: list[Finding]) -> list[str]:
    """A line for each finding with something to mend, what is wrong before what is a note."""
    ordered = sorted(found, key=lambda finding: finding.state != WRONG)
    return [f"{f.name}: {f.says}: {f.mend}" for f in ordered if f.mend]


def is_healthy(found: list[Finding]) -> bool:
    """Whether nothing is wrong; notes may be there."""
    return all(finding.state != WRONG for finding in found)


def form(capability: tuple[int, int], built_for: str) -> str | None:
    """Which form of the kernels runs on a GPU, or None where the library has no code for it."""
    archs, ptx = code_of(built_for)
    if not archs:
        return None
    major, minor = capability
    if capability == (9, 0) and "90a" in archs:
        return "hopper"
    if not runs(archs, capability) and not any(base <= major * 10 + minor for base in ptx):
        return None
    return "phases" if major >= 8 else "layers"


def _package(host: Host) -> Finding:
    where = f", from the sources in {host.checkout}" if host.checkout else ""
    if host.dpa is None:
        mend = "make build" if host.checkout else "reinstall dpa's wheel"
        says = f"the package has no metadata: imported from a folder{where}"
        return Finding("dpa", NOTE, says, mend)
    return Finding("dpa", OK, f"{host.dpa}{where}, Python {host.python}")


def _torch(host: Host) -> Iterator[Finding]:
    if host.torch is None:
        minor = _minor(host.library_torch)
        mend = f'pip install "torch{host.torch_bound}"' if host.torch_bound else "pip install torch"
        mend = install([minor], None, host.torch_bound) if minor else mend
        yield Finding("torch", WRONG, f"cannot be imported: {host.torch_error}", mend)
    else:
        cuda = f"built with CUDA {host.torch_cuda}" if host.torch_cuda else "a build for the CPU"
        yield Finding("torch", OK, f"{host.torch}, {cuda}")


def _gpu(host: Host) -> Iterator[Finding]:
    for number, (name, (major, minor)) in enumerate(host.gpus):
        yield Finding(f"GPU {number}", OK, f"{name}, compute capability {major}.{minor}")
    if host.gpus:
        return
    if not host.seen:
        yield Finding("GPU", OK, "none: dpa runs on the CPU")
        return
    names = ", ".join(host.seen)
    release = (host.torch or "").partition("+")[0]
    if host.torch_cuda is None:
        says = f"{names}: this torch is a build for the CPU"
        yield Finding("GPU", WRONG, says, f"pip install --force-reinstall torch=={release}")
        return
    needed = _DRIVERS.get(_major(host.torch_cuda))
    if needed and host.driver and _major(host.driver) < needed:
        says = (
            f"{names}: driver {host.driver} is too old for torch's CUDA {host.torch_cuda}, which "
            f"needs {needed}"
        )
        mend = _newer_driver(needed, host.driver, "take a torch built with CUDA 12")
        yield Finding("driver", WRONG, says, mend)
        return
    says = f"{names}, driver {host.driver}: torch sees none of them"
    mend = 'python -c "import torch; torch.zeros(1).cuda()"  # says why'
    yield Finding("GPU", WRONG, says, mend)


def _newer_driver(needed: int, driver: str, otherwise: str) -> str:
    """To update the driver; or what does with this one, where it runs CUDA 12."""
    mend = f"update NVIDIA's driver to {needed} or later"
    return f"{mend}, or {otherwise}" if _DRIVERS[12] <= _major(driver) < needed else mend


def _library(host: Host) -> Iterator[Finding]:
    built, has = _minor(host.library_torch), _minor(host.torch)
    if host.library_error is None:
        says = f"{host.library}, built for {host.built_for or 'what it does not say'}"
        yield Finding("library", OK, says)
    elif host.ops_for:
        builds = {"c++", "cmake", "ninja"} <= host.compilers.keys()
        mend = 'python -c "import dpa"  # builds them, in minutes'
        mend = mend if builds else install(host.ops_for, host.torch, host.torch_bound)
        yield Finding("library", WRONG, host.library_error, mend)
    elif "unset DPA_LIBRARY" in host.library_error:
        yield Finding("library", WRONG, host.library_error, "unset DPA_LIBRARY")
    elif built and built != has:
        says = f"built against torch {host.library_torch}, and this is torch {host.torch}"
        mend = _rebuild(host, install([built], None, host.torch_bound))
        yield Finding("library", WRONG, says, mend)
    else:
        reinstall = "pip install --force-reinstall --no-deps DPA_WHEEL  # the file you installed"
        yield Finding("library", WRONG, host.library_error, _rebuild(host, reinstall))


def _rebuild(host: Host, otherwise: str) -> str:
    """``make build`` where the sources are, else what an installed package needs."""
    return "make build" if host.checkout else otherwise


def _kernels(host: Host) -> Iterator[Finding]:
    if host.library_error is not None or host.built_for is None or not host.gpus:
        return
    has_cuda = host.built_for.startswith("the CPU and CUDA")
    needed = _DRIVERS.get(host.kernels_cuda or 0)
    if not has_cuda and needed and host.driver and _major(host.driver) < needed:
        says = (
            f"{host.driver} is too old for the kernels, of CUDA {host.kernels_cuda}, which need "
            f"{needed}: everything on a GPU runs in PyTorch's layers"
        )
        mend = _newer_driver(needed, host.driver, "install dpa's wheel for CUDA 12 (+cu12)")
        yield Finding("driver", WRONG, says, mend)
        return
    if not has_cuda:
        says = "the library has none for GPUs: everything on a GPU runs in PyTorch's layers"
        mend = "make build CUDA=on" if host.checkout else "install a dpa wheel with CUDA"
        yield Finding("kernels", WRONG, says, mend)
        return
    for number, (_, capability) in enumerate(host.gpus):
        name = f"kernels {number}"
        runs = form(capability, host.built_for)
        arch = "{}{}".format(*capability) + ("a" if capability == (9, 0) else "")
        if runs is None:
            says = f"the library has no code for this GPU ({arch})"
            yield Finding(name, WRONG, says, _code_for(host, capability, arch))
        elif too_old := _too_old_for_ptx(host, capability):
            says, mend = too_old
            yield Finding(name, WRONG, says, mend)
        elif capability == (9, 0) and runs != "hopper":
            says = f"{_FORMS[runs]}; those for 9.0a are not built"
            yield Finding(name, NOTE, says, _code_for(host, capability, arch))
        elif runs == "layers":
            yield Finding(name, NOTE, f"older than 8.0: {_FORMS[runs]}")
        else:
            yield Finding(name, OK, f"{_FORMS[runs]}; {_SPEEDS[runs]}")


def _code_for(host: Host, capability: tuple[int, int], arch: str) -> str:
    """What brings machine code for a GPU, where anything does."""
    makes = capability >= _OLDEST or (host.torch_cuda and _major(host.torch_cuda) < 13)
    if host.checkout and makes:
        return f"make build CUDA_ARCHS={arch}"
    if capability >= _OLDEST:
        return "install dpa's wheel of `make wheel-cuda`, which has code for every GPU from 7.5 on"
    return (
        "let policies run on the CPU: no wheel has code for GPUs below 7.5, and CUDA 13's compiler "
        "makes none. With a torch and an nvcc of CUDA 12 a build from the sources that names "
        f"CUDA_ARCHS={arch} may have the small ops; nobody has tried it"
    )


def _too_old_for_ptx(host: Host, capability: tuple[int, int]) -> tuple[str, str] | None:
    """What is wrong, and its mend, where the driver cannot compile the PTX that a GPU needs."""
    release = re.search(r"CUDA (\d+\.\d+)", host.built_for or "")
    needed = _PTX_DRIVERS.get(release[1]) if release else None
    archs, _ = code_of(host.built_for or "")
    if runs(archs, capability) or not needed or not host.driver or _major(host.driver) >= needed:
        return None
    says = (
        "the library has PTX alone for compute capability {}.{}, ".format(*capability)
        + f"of CUDA {release[1]}, and driver {host.driver} is too old to compile it"
    )
    return says, f"update NVIDIA's driver to {needed} or later"


def _cpu(host: Host) -> Iterator[Finding]:
    """Which kernels run on the CPU; beside a GPU it is not what policies run on."""
    if host.library_error is not None or host.gpus or not host.cpu_levels:
        return
    level = host.cpu_level or host.cpu_levels[-1]
    if level not in host.cpu_levels:
        says = f"DPA_CPU_LEVEL is {level}, and this CPU has {', '.join(host.cpu_levels)}"
        yield Finding("kernels cpu", WRONG, says, "unset DPA_CPU_LEVEL")
        return
    says = f"loop and ResNet encoders on packed weights, by {_CPU_LEVELS[level]}"
    yield Finding("kernels cpu", OK, f"{says}; {_CPU_SPEEDS.get(level, _CPU_UNTIMED)}")


def _smoke(host: Host) -> Iterator[Finding]:
    for device, answer in host.smoke.items():
        if answer == "ok":
            yield Finding(f"smoke test {device}", OK, "an op agrees with its reference")
        else:
            yield Finding(f"smoke test {device}", WRONG, answer, _rebuild(host, "reinstall dpa"))


def _packages(host: Host) -> Iterator[Finding]:
    for name in ("diffusers", "lerobot", "huggingface_hub"):
        if name in host.packages:
            yield Finding(name, OK, host.packages[name])
        elif name == "diffusers":
            says = "not installed: schedulers come from there"
            yield Finding(name, NOTE, says, "pip install diffusers")


def _tools(host: Host) -> Iterator[Finding]:
    if "c++" in host.compilers:
        yield Finding("compiler", OK, ", ".join(host.compilers))
    else:
        says = "no C++ compiler: torch.compile, dpa export --to aoti and dpa.jit need one"
        yield Finding("compiler", NOTE, says, "sudo apt install g++  # or conda install gxx")
    if not host.cache_writable:
        says = f"{host.cache} cannot be written: libraries built by dpa.jit and by torch go there"
        yield Finding("cache", NOTE, says, "export XDG_CACHE_HOME=/tmp/cache HOME=/tmp")


def _minor(version: str | None) -> str | None:
    return ".".join(version.split(".")[:2]) if version else None


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
