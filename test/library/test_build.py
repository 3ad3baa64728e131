"""What the build makes code for, and what the library that it made holds."""

import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dpa

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "kernels" / "cuda").rglob("*.cu"))
PTX, CODE = 1, 2  # kinds of a fat binary's entries

SCRIPT = """
include({root}/cmake/DpaCudaArchs.cmake)
dpa_cuda_code_flags(flags "{archs}" {version})
message("${{flags}}")
"""


def flags(archs, version="13.0.88"):
    """The options that the build gives to nvcc, or the error's text."""
    cmake = shutil.which("cmake") or pytest.skip("needs cmake")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "flags.cmake")
        script.write_text(SCRIPT.format(root=ROOT, archs=archs, version=version))
        done = subprocess.run([cmake, "-P", script], capture_output=True, text=True)
    return done.stderr.strip().split(";") if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("archs", ["90a", "80", "86", "75;80;90a", "100f", "120"])
def test_every_build_holds_ptx_of_8_0_and_code_of_what_is_asked(archs):
    given = flags(archs)
    assert "--generate-code=arch=compute_80,code=compute_80" in given
    for arch in archs.split(";"):
        assert f"--generate-code=arch=compute_{arch},code=sm_{arch}" in given
    assert len(given) == len(archs.split(";")) + 2 and "--compress-mode=size" in given


@pytest.mark.parametrize("version", ["12.1.105", "12.9.86"])
def test_code_of_cuda_12_is_packed_as_every_driver_of_cuda_12_reads_it(version):
    assert not any("compress" in option for option in flags("90a", version))


def test_an_architecture_that_is_none_is_refused():
    assert "must hold architectures such as 80, 90a or 100f, got sm_90" in " ".join(
        flags("sm_90").split()
    )


@pytest.mark.parametrize("variable, below", [("CUDACXX", "bin/nvcc"), ("CUDA_HOME", "")])
def test_the_compiler_is_the_one_that_is_named(variable, below, tmp_path):
    cmake = shutil.which("cmake") or pytest.skip("needs cmake")
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    script = tmp_path / "find.cmake"
    script.write_text(
        f"include({ROOT}/cmake/DpaCudaArchs.cmake)\n"
        'dpa_find_nvcc(found 12)\nmessage("${found}")\n'
    )
    environment = {key: os.environ[key] for key in os.environ.keys() - {"CUDACXX", "CUDA_HOME"}}
    environment[variable] = str(tmp_path / "toolkit" / below)
    done = subprocess.run([cmake, "-P", script], env=environment, capture_output=True, text=True)
    assert done.stderr.strip() == str(nvcc)


DECISION = """
macro(enable_language) # of a compiler that is there by name alone
  set(CMAKE_CUDA_COMPILER_VERSION {nvcc})
endmacro()
macro(add_compile_options)
endmacro()
set(CMAKE_FIND_ROOT_PATH {folder})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(DPA_CUDA {wanted})
set(DPA_CUDA_ARCHS 90a)
set(DPA_KERNELS "{kernels}")
set(DPA_TORCH_VERSION 2.11.0)
set(DPA_TORCH_CUDA {torch})
include({root}/cmake/DpaCuda.cmake)
"""


def decided(tmp_path, wanted, torch, nvcc=None, kernels=""):
    """What the build says of CUDA, in one line: ``torch`` and ``nvcc`` are versions of CUDA."""
    cmake = shutil.which("cmake") or pytest.skip("needs cmake")
    environment = {key: os.environ[key] for key in os.environ.keys() - {"CUDACXX", "CUDA_HOME"}}
    if nvcc:
        compiler = tmp_path / "bin" / "nvcc"
        compiler.parent.mkdir()
        compiler.touch(0o755)
        environment["CUDACXX"] = str(compiler)
    values = {"wanted": wanted, "torch": torch, "nvcc": nvcc or 0, "kernels": kernels}
    script = tmp_path / "decide.cmake"
    script.write_text(DECISION.format(root=ROOT, folder=tmp_path, **values))
    done = subprocess.run(
        [cmake, "-P", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("wanted", "torch", "says"),
    [
        ("auto", 0, "building for the CPU alone: torch 2.11.0 is a build for it"),
        ("auto", 13, "the CPU alone: there is no nvcc (CUDA=on fetches one from PyPI)"),
        ("off", 13, "the CPU alone: DPA_CUDA is off"),
        ("on", 13, "no nvcc: set CUDACXX, or pip install -r requirements/nvcc.txt"),
        ("on", 12, "PyPI has none of CUDA 12. Install NVIDIA's toolkit (conda install"),
        ("yes", 13, "DPA_CUDA must be auto, on or off, got yes"),
    ],
)
def test_a_build_without_a_cuda_compiler(wanted, torch, says, tmp_path):
    assert says in decided(tmp_path, wanted, torch)


@pytest.mark.parametrize(("torch", "nvcc"), [(12, "13.0.88"), (13, "12.9.86"), (0, "13.0.88")])
def test_a_compiler_of_another_cuda_than_torch_s_is_refused(torch, nvcc, tmp_path):
    says = decided(tmp_path, "on", torch, nvcc)
    assert f"torch 2.11.0 goes with CUDA {torch} (0: none)" in says
    assert f"is of CUDA {nvcc[:2]}: build with DPA_CUDA=off, or set CUDACXX" in says


@pytest.mark.parametrize(
    ("torch", "package"), [(13, "nvidia-cuda-crt==13.*"), (12, "nvidia-cuda-nvcc-cu12")]
)
def test_ops_beside_kernels_with_cuda_need_its_headers(torch, package, tmp_path):
    (tmp_path / "built-for.txt").write_text("the CPU and CUDA 13.0.88 for architectures 90a\n")
    kernels = tmp_path / "libdpa_kernels.so"
    says = decided(tmp_path, "auto", torch, kernels=kernels)
    assert f'CUDA\'s headers are not here: pip install "{package}"' in says
    assert "the CPU alone" in decided(tmp_path, "auto", 0, kernels=kernels)


# Alike in CUDA 12 and 13, name and arguments. Others, such as cudaStreamGetCaptureInfo, the kernels
# call, which hold a runtime of their own.
ALIKE = {
    "cudaDeviceGetAttribute",
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaEventRecord",
    "cudaGetLastError",
    "cudaStreamCreateWithFlags",
    "cudaStreamIsCapturing",
    "cudaStreamWaitEvent",
}


def test_ops_call_what_the_runtimes_of_cuda_12_and_13_have_alike():
    sources = [path for path in (ROOT / "ops").rglob("*") if path.suffix in (".cpp", ".h")]
    text = "".join(path.read_text() for path in sources)
    called = set(re.findall(r"\bcuda[A-Z]\w+(?=\()", text))
    assert "cudaEventRecord" in called and called <= ALIKE


FUNCTION = re.compile(r"^(?:[\w:<>*&,]+ )+[*&]?(\w+)\(", re.M)


def kept_to_itself(file):
    """What a source says in namespaces without a name."""
    return "".join(
        re.findall(r"^namespace \{$(.*?)^\}  // namespace$", file.read_text(), re.M | re.S)
    )


def types_of_its_own(file):
    """The classes that a source keeps to itself."""
    return re.findall(r"^(?:class|struct) (\w+)(?= [:{]|;| final)", kept_to_itself(file), re.M)


@pytest.mark.parametrize("cuda", [False, True])
def test_all_ops_can_be_compiled_as_one_file(cuda):
    """As on few cores: what a source keeps to itself, its neighbours see there."""
    files = [f for f in (ROOT / "ops").rglob("*.cpp") if (f.name == "cuda.cpp") == cuda]
    names = [name for file in files for name in types_of_its_own(file)]
    assert len(names) > 5 and len(names) == len(set(names)), sorted(names)
    # A function without a namespace's name hides those of a header.
    seen = {header for file in files for header in included(file)[0]}
    headers = [file for file in seen if file.suffix == ".h" and file.is_relative_to(ROOT / "ops")]
    shared = {name for file in headers for name in FUNCTION.findall(file.read_text())}
    own = {name for file in files for name in FUNCTION.findall(kept_to_itself(file))}
    assert len(shared) > 50 and len(own) > 20 and not own & shared, own & shared


def included(file):
    """The files of this repository that a source sees, and the other headers that these name."""
    seen, others, queue = set(), set(), [file]
    while queue:
        seen.add(current := queue.pop())
        for name in re.findall(r'^#include [<"](.+)[>"]', current.read_text(), re.M):
            inside = [f for f in (ROOT / name, current.parent / name) if f.is_file()]
            others |= set() if inside else {name}
            queue += set(inside[:1]) - seen
    return seen, others


def test_a_build_for_the_cpu_sees_no_header_of_cuda():
    """Where CUDA's headers lie on the compiler's path a build would not notice."""
    ops = [f for f in (ROOT / "ops").rglob("*.cpp") if f.name != "cuda.cpp"]
    host = [
        *(ROOT / "kernels" / "plans").rglob("*.cpp"),
        *(ROOT / "kernels" / "cpu").rglob("*.cpp"),
    ]
    assert len(ops) > 30 and len(host) > 5
    for file in ops + host:
        seen, others = included(file)
        ours = [f for f in seen if ROOT / "kernels" / "cuda" in f.parents]
        theirs = [name for name in others if re.search(r"\bcu(da|blas|dnn)", name)]
        assert not ours and not theirs, f"{file.relative_to(ROOT)} sees {ours + theirs}"


PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(one LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
include(DpaCompile)
include(DpaTorch)
dpa_torch_targets()
add_library(one SHARED one.cpp)
target_link_libraries(one PRIVATE torch::cpu)
"""
MESSAGE = """
#include <c10/core/SymInt.h>
#include <c10/util/StringUtil.h>
extern "C" int length() { return static_cast<int>(c10::str("shape ", c10::SymInt(3)).size()); }
"""


def test_a_compiler_with_a_static_library_links_the_shared_one(tmp_path):
    """As of a gcc built without shared libraries: errors that name a shape ended the process."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or not shutil.which("cmake"):
        pytest.skip("needs g++ and cmake")
    script = tmp_path / "g++"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -static-libstdc++\n')
    script.chmod(0o755)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    (tmp_path / "one.cpp").write_text(MESSAGE)
    where = ["-S", tmp_path, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        ["cmake", *where, f"-DCMAKE_CXX_COMPILER={script}"],
        ["cmake", "--build", tmp_path / "build"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    run = "import ctypes, sys, torch; print(ctypes.CDLL(sys.argv[1]).length())"
    library = tmp_path / "build" / "libone.so"
    done = subprocess.run([sys.executable, "-c", run, library], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def fat_binaries(library):
    """For each fat binary of an ELF file, the (kind, architecture) of its entries."""
    content = library.read_bytes()
    for match in re.finditer(b"\x50\xed\x55\xba\x01\x00\x10\x00", content):
        at = match.start()
        (size,) = struct.unpack_from("<Q", content, at + 8)
        entries, position, end = set(), at + 16, at + 16 + size
        while position < end:
            kind, _, header, length = struct.unpack_from("<HHIQ", content, position)
            entries.add((kind, *struct.unpack_from("<I", content, position + 28)))
            position += header + length
        yield entries


def test_the_library_runs_on_every_gpu_from_8_0():
    """Each kernel file of the library here has PTX of 8.0 that a driver can compile."""
    built_for = Path(dpa.library_path()).with_name("built-for.txt")
    if not built_for.is_file() or "PTX 80" not in built_for.read_text():
        pytest.skip("the library here has no CUDA kernels, or is built by another recipe")
    found = list(fat_binaries(Path(dpa.library_path())))
    assert len(found) == len(SOURCES)
    assert all((PTX, 80) in entries for entries in found), found
    assert all(any(kind == CODE for kind, _ in entries) for entries in found)


def test_a_wheel_gets_a_local_version_everywhere_it_says_its_version(tmp_path):
    wheel = tmp_path / "torch_dpa-0.1.0-py3-none-any.whl"
    info = "torch_dpa-0.1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.4\nName: torch-dpa\nVersion: 0.1.0\n"
        )
        file.writestr("dpa/__init__.py", '__version__ = "0.1.0"\n')
        file.writestr(f"{info}/RECORD", f"{info}/METADATA,,\ndpa/__init__.py,,\n{info}/RECORD,,\n")
    script = ROOT / "cmake" / "local_version.py"
    subprocess.run([sys.executable, script, wheel, "cpu"], check=True)
    (made,) = tmp_path.iterdir()
    new = "torch_dpa-0.1.0+cpu"
    assert made.name == f"{new}-py3-none-any.whl"
    with zipfile.ZipFile(made) as file:
        assert "\nVersion: 0.1.0+cpu\n" in file.read(f"{new}.dist-info/METADATA").decode()
        listed = file.read(f"{new}.dist-info/RECORD").decode().split(",,\n")[:-1]
        assert sorted(listed) == sorted(file.namelist())
        assert file.read("dpa/__init__.py") == b'__version__ = "0.1.0"\n'
