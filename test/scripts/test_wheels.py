"""`make wheels` and `make test-wheels` on machines that lack something, with programs that only say
what they were called with."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAYS = '#!/bin/sh\necho "$(basename "$0") $*" >>"$LOG"\n'
# cmake/wheel.sh BIN FOLDER ...
MAKES = SAYS + 'echo "nvcc ${CUDACXX:-}" >>"$LOG"\nmkdir -p "$2"; touch "$2/torch_dpa.whl"\n'
WHEELS = ("dist/torch_dpa.whl", "dist/cpu/torch_dpa.whl", "dist/cu12/torch_dpa.whl")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose environment is set up, and whose wheels are made in no time."""
    for name in ("Makefile", "requirements", "cmake"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    write(tmp_path / "cmake/wheel.sh", MAKES)
    for program in (".venv/bin/python", ".venv/bin/pip", "bin/apt-get"):
        write(tmp_path / program, SAYS)
    for done in (".venv/.setup-build-auto", ".venv/.setup-auto", ".venv/bin/auditwheel"):
        write(tmp_path / done, SAYS)
    return tmp_path


def make(checkout, *arguments):
    """What `make` prints, and what it called."""
    # Without what the `make test` that runs this gives to those that it starts.
    outer = {"CUDA", "CUDACXX", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VENV", "TORCHES"}
    environment = {key: os.environ[key] for key in os.environ.keys() - outer}
    environment |= {
        "LOG": str(checkout / "log"),
        "PATH": f"{checkout / 'bin'}{os.pathsep}{environment['PATH']}",
    }
    done = subprocess.run(
        ["make", *arguments], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, (checkout / "log").read_text()


@pytest.mark.parametrize("nvcc", ["", "/toolkit/bin/nvcc"])
def test_the_wheel_with_cuda_fetches_the_compiler_where_none_is(nvcc, checkout):
    said, called = make(checkout, "wheel-cuda", f"NVCC={nvcc}")
    assert ("taking the compiler from PyPI" in said) == (not nvcc)
    assert ("install -r requirements/nvcc.txt" in called) == (not nvcc)
    assert "DPA_CUDA=on" in called


def test_wheels_without_cuda_12_go_on_and_say_which_were_made(checkout):
    """apt-get, which says nothing here, has no source of Debian's packages; elsewhere there is none
    of Debian at all."""
    write(checkout / WHEELS[2], "of an earlier day")
    os.utime(checkout / WHEELS[2], (0, 0))
    said, called = make(checkout, "wheels", "CUDA12=", "NVCC=/toolkit/bin/nvcc")
    assert "no CUDA 12 wheel: " in said and "wheel.sh" in called and "cu12" not in called
    assert "Debian alone" in said or "no source for Debian's packages" in said
    assert "64-bit ARM" in said or "dist/aarch64" in called  # what comes after it
    made = said.partition("made:\n")[2].split()
    assert set(made) - {"dist/aarch64/torch_dpa.whl"} == set(WHEELS[:2])


def test_wheels_with_cuda_12_where_its_compiler_is(checkout):
    said, called = make(checkout, "wheels", "CUDA12=/cuda-12/nvcc", "NVCC=/toolkit/bin/nvcc")
    assert "nvcc /cuda-12/nvcc" in called and set(WHEELS) <= set(said.split())


def test_wheels_for_the_cpu_alone(checkout):
    for name in (".setup-build-off", ".setup-off"):
        write(checkout / ".venv" / name, "")
    said, _ = make(checkout, "wheels", "CUDA=off", "NVCC=")
    assert "PyPI" not in said and "dist/torch_dpa.whl" not in said.split()


PIP = SAYS + 'case "$*" in *list*) echo torch==2.16.0 ;; esac\n'
OPS = 'case "$*" in *"import dpa"*) touch ops ;; esac\necho "a call 9.0 ms, accelerated 1.0"\n'
DOCTOR = SAYS + "[ -e ops ]\n"  # something is wrong until an import has built the ops


@pytest.fixture
def python(tmp_path):
    """A python3.99, in whose environments the first import of dpa builds the ops."""
    for program, text in (("python", SAYS + OPS), ("pip", PIP), ("dpa", DOCTOR)):
        write(tmp_path / "venv/bin" / program, text)
    copies = f"[ $2 != venv ] || cp -r '{tmp_path}/venv' .\n"
    write(tmp_path / "bin/python3.99", f"#!/bin/sh\n[ $1 != -m ] || {{ {copies.strip()}; }}\n")
    write(tmp_path / "torch_dpa-0.1.0-py3-none-any.whl", "")
    return tmp_path


def try_wheels(folder, *arguments):
    """The status of wheels.sh, what it prints, and what it called."""
    environment = {**os.environ, "LOG": str(folder / "log")}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    allow, cases = [a for a in arguments if a[0] == "-"], [a for a in arguments if a[0] != "-"]
    (wheel,) = folder.glob("*.whl")
    command = ["sh", ROOT / "test/scripts/wheels.sh", *allow, wheel, *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    log = folder / "log"
    return done.returncode, done.stdout, log.read_text() if log.exists() else done.stderr


def test_a_torch_that_the_wheel_has_no_ops_for_is_tried(python):
    status, said, called = try_wheels(python, "3.99 torch==2.16.* cmake ninja")
    assert status == 0 and "pip --disable-pip-version-check install -q --no-compile" in called
    assert "torch==2.16.* cmake ninja diffusers" in called
    row = "0.1.0 | torch==2.16.* cmake ninja | clean | as before | a call 9.0 ms, accelerated 1.0"
    assert said.splitlines()[-1] == row


@pytest.mark.parametrize("allowed", [False, True])
def test_a_python_that_is_not_here_is_said_last_and_fails(python, allowed):
    cases = ["3.98 lerobot[diffusion]==0.6.1", "3.99 torch==2.16.*"]
    status, said, _ = try_wheels(python, *["--allow-missing"] * allowed, *cases)
    assert said.splitlines()[-1] == "not run, no python3.98: lerobot[diffusion]==0.6.1"
    assert "0.1.0 | torch==2.16.* | clean" in said and (status == 0) == allowed
