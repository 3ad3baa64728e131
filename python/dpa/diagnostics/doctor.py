"""What is wrong with an installation, and the command that mends it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpa.diagnostics.host import Host, look

OK: Literal["ok"] = "ok"
NOTE: Literal["note"] = "note"  # works, with less than could be
WRONG: Literal["wrong"] = "wrong"

# The oldest driver of each CUDA, as NVIDIA's table of minor-version compatibility has it.
_DRIVERS = {12: 525, 13: 580}
_FORMS = {
    "hopper": "resident kernels: the whole denoising loop is one kernel",
    "phases": "the whole denoising loop is one kernel, without Hopper's instructions",
    "layers": "the small ops; networks run in PyTorch's layers",
}
# What is known of a form's speed: docs/figures.json has the figure.
_SPEEDS = {
    "hopper": "on an H200, channels 256/512/1024, 100 DDPM steps take 8.3 ms in bfloat16",
    "phases": "measured on an H200 alone: `dpa bench CHECKPOINT` measures it here",
}


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
        found += [*_gpu(host), *_library(host), *_kernels(host), *_smoke(host)]
    return [*found, *_packages(host), *_tools(host)]


def to_dict(found: list[Finding]) -> dict[str, Any]:
    """The findings, ready for JSON."""
    return {"healthy": is_healthy(found), "findings": [asdict(finding) for finding in found]}


def advice(found: list[Finding]) -> list[str]:
    """A line for each finding with something to mend, what is wrong before what is a note."""
    ordered = sorted(found, key=lambda finding: finding.state != WRONG)
    return [f"{f.name}: {f.says}: {f.mend}" for f in ordered if f.mend]


def is_healthy(found: list[Finding]) -> bool:
    """Whether nothing is wrong; notes may be there."""
    return all(finding.state != WRONG for finding in found)


def form(capability: tuple[int, int], built_for: str) -> str | None:
    """Which form of the kernels runs on a GPU, or None where the library has no code for it."""
    listed, _, with_ptx = built_for.partition("(")[0].partition("architectures")[2].partition("PTX")
    archs = re.findall(r"\d+[af]?", listed)
    if not archs:
        return None
    major, minor = capability
    own = f"{major}{minor}"
    if capability == (9, 0) and "90a" in archs:
        return "hopper"
    exact = own in archs or any(a.rstrip("af") == own for a in archs)
    ptx = [int(base) for base in re.findall(r"\d+", with_ptx)]
    if not exact and not any(base <= major * 10 + minor for base in ptx):
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
        mend = f'pip install "torch=={minor}.*"' if minor else "pip install torch"
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
        mend = mend if builds else f'pip install "torch=={host.ops_for[-1]}.*"'
        yield Finding("library", WRONG, host.library_error, mend)
    elif built and built != has:
        says = f"built against torch {host.library_torch}, and this is torch {host.torch}"
        yield Finding("library", WRONG, says, _rebuild(host, f'pip install "torch=={built}.*"'))
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
        mend = f"make build CUDA_ARCHS={arch}" if host.checkout else "install a dpa wheel with CUDA"
        if runs is None:
            yield Finding(name, WRONG, f"the library has no code for this GPU ({arch})", mend)
        elif capability == (9, 0) and runs != "hopper":
            yield Finding(name, NOTE, f"{_FORMS[runs]}; those for 9.0a are not built", mend)
        elif runs == "layers":
            yield Finding(name, NOTE, f"older than 8.0: {_FORMS[runs]}")
        else:
            yield Finding(name, OK, f"{_FORMS[runs]}; {_SPEEDS[runs]}")


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
