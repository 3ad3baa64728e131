"""Tables, steps and loops follow the diffusers that is installed: tests under older versions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VERSIONS = sorted(
    path.stem.partition("-")[2] for path in HERE.parent.glob("requirements/diffusers-*")
)
# `make build` installs each version into a folder of the environment.
FOLDERS = {version: Path(sys.prefix) / f"diffusers-{version}" for version in VERSIONS}


def run(folder, *arguments):
    """Run Python with the packages of ``folder`` before all others."""
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_diffusers_is_followed(version):
    folder = FOLDERS[version]
    if not folder.is_dir():
        pytest.skip(f"diffusers {version} is not installed in {folder} (make build does it)")
    result = run(
        folder,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-vv",
        "test/test_scheduler_combinations.py",
        "test/test_steps.py",
        "test/test_acceleration.py::test_original_policy",
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    for name in ("DDPM", "DDIM", "DPMSolverMultistep"):
        assert f"[{name}Scheduler] PASSED" in result.stdout
    for kind in ("DDPM", "DDIM"):  # dpa.accelerate on a scheduler, and on a policy
        assert re.search(rf"test_whole_loops\[cpu-{kind}-\w+\] PASSED", result.stdout)
        assert f"test_original_policy[cpu-True-{kind}] PASSED" in result.stdout


def test_the_old_version_is_the_one_that_is_tested():
    version = "0.11.1"
    if not FOLDERS[version].is_dir():
        pytest.skip(f"diffusers {version} is not installed (make build does it)")
    # Its DDIM takes the predicted x0 for the noise, so that the sample has no weight of its own.
    code = (
        "import diffusers, dpa; print(diffusers.__version__); "
        "s = diffusers.DDIMScheduler(20, prediction_type='sample', clip_sample=False); "
        "print(dpa.schedulers.from_diffusers(s, 5).coefficients[0, 3].item())"
    )
    result = run(FOLDERS[version], "-W", "ignore", "-c", code)
    assert result.stdout.split() == [version, "0.0"], result.stdout + result.stderr
