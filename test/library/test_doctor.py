"""`dpa doctor` on machines where one thing or another is wrong, simulated and real."""

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run_python

import dpa
from dpa.diagnostics.doctor import NOTE, OK, WRONG, advice, examine, form, is_healthy
from dpa.diagnostics.host import Host, cpu_levels, look
from dpa.packed.unet import PackedUnet

HOPPER = "the CPU and CUDA 13.0.88 for architectures 90a with PTX 80 (as asked)"
CPU = "the CPU alone: DPA_CUDA is off"
OF_12 = "the CPU and CUDA 12.4.131 for architectures 75;80;86;89;90a with PTX 80 (as asked)"
OF_13 = (
    "the CPU and CUDA 13.0.88 for architectures 75;80;86;89;90a;100f;120f with PTX 80 (as asked)"
)
WELL = Host(
    dpa="0.1.0",
    checkout=Path("/sources"),
    python="3.11.7",
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    gpus=(("NVIDIA H200", (9, 0)),),
    seen=("NVIDIA H200",),
    driver="580.65",
    library="/sources/libdpa.so",
    library_torch="2.11.0+cu130",
    built_for=HOPPER,
    cpu_levels=("portable", "avx2", "avx512", "avx512_bf16"),
    compilers={"c++": "/usr/bin/c++"},
    cache="/home/me/.cache/dpa",
    packages={"diffusers": "0.35.2", "lerobot": "0.4.4"},
    smoke={"cpu": "ok", "cuda:0": "ok"},
)
WHEEL = replace(WELL, checkout=None)
NO_GPU = replace(WELL, gpus=(), seen=(), driver=None, smoke={"cpu": "ok"})
V100 = {"gpus": (("Tesla V100", (7, 0)),)}
OF_CUDA_12 = {"torch_cuda": "12.8", "driver": "535.183.01", "built_for": OF_12}
CU12 = replace(WHEEL, kernels_cuda=12, **OF_CUDA_12)
OTHER_TORCH = {"torch": "2.9.1+cu128", "torch_cuda": "12.8", "smoke": {}}
TOOLS = {tool: f"/usr/bin/{tool}" for tool in ("c++", "cmake", "ninja")}
SAYS = "this wheel has ops for torch 2.9, 2.11, and this is torch 2.16.0"
NO_OPS = {"library_torch": None, "library_error": SAYS, "smoke": {}}
CANNOT = {"library_error": "cannot open shared object file", "smoke": {}}


def test_a_machine_where_all_is_well():
    older = replace(WHEEL, torch="2.10.0+cu128", torch_cuda="12.8", kernels_cuda=13)
    ptx = replace(CU12, gpus=(("RTX 5090", (12, 0)),), driver="550.54.14")
    for host in (WELL, WHEEL, older, CU12, ptx, NO_GPU, replace(NO_GPU, built_for=CPU)):
        found = examine(host)
        assert {f.state for f in found} == {OK} and not any(f.mend for f in found), found
    says = {f.name: f.says for f in examine(WELL)}
    assert "resident kernels" in says["kernels 0"] and says["lerobot"] == "0.4.4"


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (("NVIDIA H200", (9, 0)), "100 DDPM steps take {} ms in bfloat16"),
        (
            ("NVIDIA GeForce RTX 4090", (8, 9)),
            "measured on an H100 and an H200 alone: `dpa bench CHECKPOINT`",
        ),
    ],
)
def test_how_fast_it_should_be(gpu, expected):
    figures = json.loads((Path(__file__).parents[2] / "docs/figures.json").read_text())
    rows = {label: value for label, value, _ in figures["loop-gpu"]["rows"]}
    (finding,) = [f for f in examine(replace(WELL, gpus=(gpu,))) if f.name == "kernels 0"]
    assert expected.format(rows["DDPM 100 steps, dpa bfloat16"]) in finding.says


@pytest.mark.parametrize(
    ("level", "row"),
    [
        # Columns of docs/cpu-log.md: one thread at batch 1, and two.
        ("avx512_fp16", r"80 M, T 16 \| 1 \| 34\.1 \| (\S+) \| 22\.7 \| (\S+) \|"),
        ("amx", r"80 M \| 20\.4 / (\S+) = 2\.0x \| 15\.7 / (\S+) ="),
        ("avx512_bf16", None),  # of the chart
    ],
)
def test_what_runs_on_a_cpu_and_how_fast(level, row):
    docs = Path(__file__).parents[2] / "docs"
    rows = {k: v for k, v, _ in json.loads((docs / "figures.json").read_text())["call-cpu"]["rows"]}
    figures = [rows[f"batch 1, {dtype}, dpa"] for dtype in ("float32", "bfloat16")]
    if row:
        figures = re.search(row, (docs / "cpu-log.md").read_text()).groups()
    finding = of_cpu(cpu_levels=("portable", level))
    assert "takes {} ms in float32 and {} in bfloat16".format(*figures) in finding.says


def of_cpu(**facts):
    (finding,) = [f for f in examine(replace(NO_GPU, **facts)) if f.name == "kernels cpu"]
    return finding


def test_a_cpu_that_was_never_timed():
    finding = of_cpu(cpu_levels=("portable", "neon"))
    assert "by NEON; never timed on a U-Net: `dpa bench CHECKPOINT` measures" in finding.says
    assert "by AVX2; " in of_cpu(cpu_level="avx2").says
    assert not [f for f in examine(WELL) if f.name == "kernels cpu"]  # there is a GPU


def test_the_levels_of_this_cpu_are_those_of_the_library(monkeypatch):
    packed = PackedUnet(dpa.nn.ConditionalUnet1D(2, down_dims=(16,), diffusion_step_embed_dim=32))
    _ = packed.packed
    monkeypatch.setenv("DPA_CPU_LEVEL", "none")
    with pytest.raises(RuntimeError) as caught:
        packed(torch.zeros(1, 4, 2), torch.zeros(1))
    names = re.search(r"that the machine has \((.*?)\)", str(caught.value))[1]
    assert look().cpu_levels == tuple(names.split(", ")) and look().cpu_level == "none"


XEON = "fpu avx avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16"


@pytest.mark.parametrize(
    ("machine", "vendor", "flags", "best"),
    [
        ("x86_64", "GenuineIntel", "fpu sse2", "portable"),
        ("x86_64", "GenuineIntel", "fpu avx2", "portable"),
        ("x86_64", "AuthenticAMD", "fpu avx2 fma", "avx2"),
        ("x86_64", "GenuineIntel", XEON.replace(" avx512_bf16", ""), "avx512"),
        ("x86_64", "AuthenticAMD", XEON + " avx512_fp16", "avx512_bf16"),
        ("x86_64", "GenuineIntel", XEON + " avx512_fp16", "avx512_fp16"),
        ("x86_64", "GenuineIntel", XEON + " avx512_fp16 amx_bf16 amx_tile", "amx"),
        ("aarch64", "", "fp asimd", "neon"),
        ("aarch64", "", "fp asimd bf16", "neon_bf16"),
        ("riscv64", "", "", "portable"),
    ],
)
def test_the_best_level_by_what_linux_says(machine, vendor, flags, best):
    name = "Features" if machine == "aarch64" else "flags"
    text = f"processor\t: 0\nvendor_id\t: {vendor}\n{name}\t\t: {flags}\n\nprocessor\t: 1\n"
    assert cpu_levels(machine, text)[-1] == best


# Each case: what differs, the state, the thing that is named, what is said, what mends it.
CASES = {
    "another torch, from a wheel": (
        replace(WHEEL, library_error="built against torch", **OTHER_TORCH),
        (WRONG, "library", "built against torch 2.11.0+cu130, and this is torch 2.9.1"),
        r'^pip install "torch==2\.11\.\*"$',
    ),
    "another torch, in a checkout": (
        replace(WELL, library_error="built against torch", **OTHER_TORCH),
        (WRONG, "library", "built against torch"),
        "^make build$",
    ),
    "no torch": (
        replace(WHEEL, torch=None, torch_error="No module named 'torch'"),
        (WRONG, "torch", "No module named"),
        r'^pip install "torch==2\.11\.\*"$',
    ),
    "no library": (
        replace(WHEEL, library=None, library_torch=None, built_for=None, **CANNOT),
        (WRONG, "library", "cannot open"),
        "^pip install --force-reinstall",
    ),
    "no library in a checkout": (
        replace(WELL, library=None, library_torch=None, built_for=None, **CANNOT),
        (WRONG, "library", "cannot open"),
        "^make build$",
    ),
    "kernels that are newer than the driver": (
        replace(WHEEL, torch_cuda="12.8", driver="570.86", built_for=CPU, kernels_cuda=13),
        (WRONG, "driver", "570.86 is too old for the kernels, of CUDA 13, which need 580"),
        r"^update NVIDIA's driver to 580 or later, or install dpa's wheel for CUDA 12 \(\+cu12\)$",
    ),
    "a torch that a wheel has no ops for": (
        replace(WHEEL, library=None, ops_for=("2.9", "2.11"), built_for=None, **NO_OPS),
        (WRONG, "library", "has ops for torch 2.9, 2.11, and this is torch 2.16.0"),
        r'^pip install "torch==2\.11\.\*"$',
    ),
    "a torch that a wheel has no ops for, beside LeRobot 0.4": (
        replace(
            WHEEL,
            library=None,
            ops_for=("2.9", "2.10", "2.11"),
            built_for=None,
            torch_bound="<2.11.0,>=2.2.1",
            **NO_OPS,
        ),
        (WRONG, "library", "has ops for torch 2.9"),
        r'^pip install "torch==2\.10\.\*"$',
    ),
    "another torch, from a wheel for one that LeRobot does not allow": (
        replace(WHEEL, library_error="built against", torch_bound="<2.11", **OTHER_TORCH),
        (WRONG, "library", "built against torch 2.11.0+cu130"),
        r"^take a dpa wheel with ops for a torch that LeRobot allows \(<2\.11\)$",
    ),
    "no torch beside LeRobot": (
        replace(
            WHEEL,
            torch=None,
            torch_error="No module named 'torch'",
            library_torch=None,
            torch_bound="<2.11.0,>=2.2.1",
        ),
        (WRONG, "torch", "No module named"),
        r'^pip install "torch<2\.11\.0,>=2\.2\.1"$',
    ),
    "a GPU that no wheel has code for": (
        replace(WHEEL, built_for=OF_13, **V100),
        (WRONG, "kernels 0", "no code for this GPU (70)"),
        r"^let policies run on the CPU: no wheel has code for GPUs below 7\.5",
    ),
    "a GPU that CUDA 13's compiler makes no code for, in a checkout": (
        replace(WELL, **V100),
        (WRONG, "kernels 0", "no code for this GPU (70)"),
        "^let policies run on the CPU: .* CUDA 13's compiler makes none",
    ),
    "a GPU that CUDA 12's compiler makes code for, in a checkout": (
        replace(WELL, **OF_CUDA_12, **V100),
        (WRONG, "kernels 0", "no code for this GPU (70)"),
        "^make build CUDA_ARCHS=70$",
    ),
    "a wheel for another GPU": (
        replace(WHEEL, gpus=(("RTX 2080", (7, 5)),)),
        (WRONG, "kernels 0", "no code for this GPU (75)"),
        "^install dpa's wheel of `make wheel-cuda`",
    ),
    "PTX of CUDA 12 under a driver that is too old for it": (
        replace(CU12, gpus=(("RTX 5090", (12, 0)),)),
        (
            WRONG,
            "kernels 0",
            "capability 12.0, of CUDA 12.4, and driver 535.183.01 is too old",
        ),
        "^update NVIDIA's driver to 550 or later$",
    ),
    "the same on a Jetson, for which code of 8.6 is none": (
        replace(CU12, gpus=(("Orin", (8, 7)),)),
        (WRONG, "kernels 0", "PTX alone for compute capability 8.7"),
        "^update NVIDIA's driver to 550 or later$",
    ),
    "a level of instructions that the CPU has not": (
        replace(NO_GPU, cpu_level="amx"),
        (WRONG, "kernels cpu", "DPA_CPU_LEVEL is amx, and this CPU has portable, avx2, avx512"),
        "^unset DPA_CPU_LEVEL$",
    ),
    "a torch that a wheel has no ops for, where they can be built": (
        replace(
            WHEEL, library=None, ops_for=("2.9", "2.11"), built_for=None, compilers=TOOLS, **NO_OPS
        ),
        (WRONG, "library", "has ops for torch 2.9, 2.11, and this is torch 2.16.0"),
        r'^python -c "import dpa"  # builds them',
    ),
    "a library for the CPU on a machine with a GPU": (
        replace(WELL, built_for=CPU),
        (WRONG, "kernels", "has none for GPUs"),
        "^make build CUDA=on$",
    ),
    "a library without code for the GPU": (
        replace(WELL, gpus=(("RTX 4090", (8, 9)),), built_for=HOPPER.replace(" with PTX 80", "")),
        (WRONG, "kernels 0", "no code for this GPU (89)"),
        "^make build CUDA_ARCHS=89$",
    ),
    "a library without Hopper's own instructions": (
        replace(WELL, built_for=HOPPER.replace("90a", "80")),
        (NOTE, "kernels 0", "those for 9.0a are not built"),
        "^make build CUDA_ARCHS=90a$",
    ),
    "a torch for the CPU on a machine with a GPU": (
        replace(NO_GPU, torch="2.11.0+cpu", torch_cuda=None, seen=("RTX 4090",), driver="580.65"),
        (WRONG, "GPU", "this torch is a build for the CPU"),
        "^pip install --force-reinstall torch==2.11.0$",
    ),
    "an old driver": (
        replace(NO_GPU, seen=("RTX 4090",), driver="535.183.01"),
        (WRONG, "driver", "535.183.01 is too old for torch's CUDA 13.0, which needs 580"),
        "^update NVIDIA's driver to 580 or later, or take a torch built with CUDA 12$",
    ),
    "a driver that is too old for CUDA 12 as well": (
        replace(NO_GPU, seen=("RTX 3090",), driver="470.223.02"),
        (WRONG, "driver", "470.223.02 is too old for torch's CUDA 13.0, which needs 580"),
        "^update NVIDIA's driver to 580 or later$",
    ),
    "a GPU that torch does not see": (
        replace(NO_GPU, seen=("RTX 4090",), driver="580.65"),
        (WRONG, "GPU", "torch sees none of them"),
        r"^python -c .*\.cuda\(\)",
    ),
    "no compiler": (
        replace(WELL, compilers={}),
        (NOTE, "compiler", "no C++ compiler"),
        "install g",
    ),
    "a home that cannot be written": (
        replace(WELL, cache_writable=False),
        (NOTE, "cache", "/home/me/.cache/dpa cannot be written"),
        "^export XDG_CACHE_HOME=",
    ),
    "no metadata of the package": (
        replace(WELL, dpa=None),
        (NOTE, "dpa", "no metadata"),
        "^make build$",
    ),
    "no diffusers": (
        replace(WELL, packages={}),
        (NOTE, "diffusers", "not installed"),
        "^pip install diffusers$",
    ),
    "an op that fails": (
        replace(WELL, smoke={"cpu": "ok", "cuda:0": "RuntimeError: it broke"}),
        (WRONG, "smoke test cuda:0", "it broke"),
        "^make build$",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_and_what_mends_it(case):
    host, (state, name, says), mend = CASES[case]
    found = examine(host)
    (finding,) = [f for f in found if f.mend]
    assert (finding.state, finding.name) == (state, name)
    assert says in finding.says and re.search(mend, finding.mend), finding
    assert is_healthy(found) == (state == NOTE)


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ((9, 0), "90a with PTX 80", "hopper"),
        ((9, 0), "80 with PTX 80", "phases"),
        ((8, 9), "90a with PTX 80", "phases"),
        ((12, 0), "90a with PTX 80", "phases"),
        ((8, 6), "86 with PTX 80", "phases"),
        ((8, 9), "90a", None),
        ((10, 3), "100f", "phases"),
        ((10, 3), "100a", None),
        ((8, 9), "80", "phases"),
        ((8, 7), "80;86", None),
        ((7, 5), "90a with PTX 80", None),
        ((7, 5), "75;80 with PTX 80", "layers"),
    ],
)
def test_the_form_of_the_kernels(capability, archs, expected):
    built_for = f"the CPU and CUDA 13.0.88 for architectures {archs} (as asked)"
    assert form(capability, built_for) == expected
    assert form(capability, CPU) is None


# And really: in a process of its own, whose exit is never a traceback.


def doctor(*arguments, command="doctor", **environment):
    whole = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1", **environment}
    command = ["-m", "dpa", command, "--json", *arguments]
    if "PYTHONPATH" in environment:  # where another torch is
        done = subprocess.run([sys.executable, *command], env=whole, capture_output=True, text=True)
    else:
        done = run_python(*command, env=whole)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def state(found, name):
    return next(f for f in found["findings"] if f["name"] == name)


def test_the_machine_here():
    status, found = doctor()
    assert (status == 0) == found["healthy"]
    assert state(found, "torch")["says"].startswith(torch.__version__)
    assert state(found, "smoke test cpu")["state"] == "ok"
    assert look().dpa == dpa.info()["dpa"] or dpa.info()["dpa"].startswith("not installed")


@pytest.fixture
def library(tmp_path):
    """A copy of the library, with what the build wrote beside it."""
    path = Path(dpa.library_path())
    for name in ("torch-version.txt", "built-for.txt"):
        if path.with_name(name).exists():
            shutil.copy(path.with_name(name), tmp_path / name)
    (tmp_path / "libdpa.so").symlink_to(path)
    return tmp_path / "libdpa.so"


@pytest.mark.parametrize("command", ["doctor", "info"])
def test_a_missing_library(command, tmp_path):
    status, found = doctor(command=command, DPA_LIBRARY=str(tmp_path / "none.so"))
    text = json.dumps(found)
    assert status == 1 and "none.so, which does not exist: correct or unset DPA_LIBRARY" in text


@pytest.mark.parametrize("command", ["doctor", "info"])
def test_a_file_that_is_no_library(command, tmp_path):
    (tmp_path / "notes.txt").write_text("no library\n")
    status, found = doctor(command=command, DPA_LIBRARY=str(tmp_path / "notes.txt"))
    text = json.dumps(found)
    assert status == 1 and "does not load with torch" in text and "make build" not in text


@pytest.mark.parametrize("command", ["doctor", "info"])
def test_a_truncated_library(command, library):
    whole = library.read_bytes()
    library.unlink()
    library.write_bytes(whole[: len(whole) // 2])
    status, found = doctor(command=command, DPA_LIBRARY=str(library))
    assert status == 1 and "damaged or cut short" in json.dumps(found)


@pytest.mark.parametrize("command", ["doctor", "info"])
def test_another_torch(command, library):
    (library.parent / "torch-version.txt").write_text("2.9.1+cu128\n")
    status, found = doctor(command=command, DPA_LIBRARY=str(library))
    text = json.dumps(found)
    assert status == 1 and "built against torch 2.9.1+cu128, and this is torch" in text


def test_the_import_with_another_torch_says_so_in_its_last_line(library):
    (library.parent / "torch-version.txt").write_text("2.9.1+cu128\n")
    environment = {**os.environ, "DPA_LIBRARY": str(library)}
    done = run_python("-c", "import dpa", env=environment)
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("ImportError: dpa: the library was built against torch 2.9.1+cu128")
    assert 'pip install "torch==2.9.*"' in line and "_OpNamespace" not in done.stderr


def test_a_library_whose_symbols_torch_lacks(tmp_path):
    """As of a torch whose version text fits and whose build differs."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    source = tmp_path / "a.cpp"
    source.write_text("extern int of_another_torch(); int f() { return of_another_torch(); }")
    command = ["g++", "-shared", "-fPIC", "-Wl,-z,now", "-o", tmp_path / "libdpa.so", source]
    subprocess.run(command, check=True)
    status, found = doctor(DPA_LIBRARY=str(tmp_path / "libdpa.so"))
    says = state(found, "library")["says"]
    assert status == 1 and "does not load with torch" in says and "of_another_torch" in says


def test_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so: not found')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, found = doctor(PYTHONPATH=path)
    finding = state(found, "torch")
    assert status == 1 and "libtorch.so: not found" in finding["says"] and finding["mend"]
    status, found = doctor(command="info", PYTHONPATH=path)
    assert status == 1 and "libtorch.so" in found["advice"][0]


def test_what_is_wrong_is_advised_on_first():
    found = examine(replace(WELL, dpa=None, torch=None, torch_error="libtorch.so: not found"))
    assert [f.state for f in found[:2]] == [NOTE, WRONG]
    assert [line.partition(":")[0] for line in advice(found)[:2]] == ["torch", "dpa"]


def seen_here(name):
    """What is found of this machine from this process."""
    return next(finding for finding in examine(look()) if finding.name == name)


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    assert seen_here("compiler").state == NOTE


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert seen_here("cache").state == NOTE


def test_a_home_where_root_can_write_nothing():
    status, found = doctor(HOME="/proc", XDG_CACHE_HOME="")
    finding = state(found, "cache")
    assert finding["state"] == NOTE and "/proc/.cache/dpa cannot be written" in finding["says"]
    assert (status == 0) == found["healthy"]


def test_a_user_without_a_home(monkeypatch):
    """As of a container that runs under a number which no table of users has."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    finding = seen_here("cache")
    assert finding.state == NOTE and "export XDG_CACHE_HOME=" in finding.mend


def test_a_driver_by_what_nvidia_smi_says(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 470.57.02'\n")
    script.chmod(0o755)
    if torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("torch sees a GPU, or is a build for the CPU")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    finding = seen_here("driver")
    assert finding.state == WRONG and "driver 470.57.02 is too old" in finding.says


def test_the_output_for_people_names_each_command():
    broken = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "DPA_LIBRARY": "/none.so"}
    done = subprocess.run(
        [sys.executable, "-m", "dpa", "doctor"], env=broken, capture_output=True, text=True
    )
    assert done.returncode == 1 and re.search(r"wrong +library", done.stdout)
    assert "library: do this\n  unset DPA_LIBRARY" in done.stdout
