"""Kernels that older GPUs run compile for the oldest of a release's wheel, compute capability 7.5.

Its assembler lacks instructions that newer ones have, which no build for the GPU at hand shows. The
wheel's own build compiles everything for every architecture.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

# What compiles for half a minute, as one kernel of its arithmetic instead of all.
_CHANNELS_LAST = """
#include "kernels/cuda/group_norm_mish/common.cuh"
__global__ void mish(float* x) {
  const dpa::kernels::channels_last::Mish at(x[threadIdx.x]);
  x[threadIdx.x] = at.value + at.slope;
}
"""
_FILES = [
    "group_norm_mish/group_norm_mish.cu",
    "scheduler_step/scheduler_step.cu",
    "conv1d/convolution.cu",
    "unet1d/layered.cu",
    "unet1d/phases.cu",
    "unet1d/teams.cu",
]


@pytest.fixture
def nvcc():
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not found:
        pytest.skip("no nvcc")
    return found


@pytest.mark.parametrize("file", [*_FILES, "channels_last"])
def test_kernels_compile_for_the_oldest_gpu(file, nvcc, tmp_path):
    source = _ROOT / "kernels" / "cuda" / file
    if file == "channels_last":
        source = tmp_path / "channels_last.cu"
        source.write_text(_CHANNELS_LAST)
    command = [nvcc, "-std=c++20", "-arch=sm_75", "-cubin", f"-I{_ROOT}", "-Xptxas", "-O0"]
    command += ["-o", str(tmp_path / "out.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
