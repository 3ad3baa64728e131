"""Tables, steps and loops follow the diffusers that is installed: tests under older versions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = sorted(path.stem.partition("-")[2] for path in ROOT.glob("requirements/diffusers-*"))
# `make build` installs each version into a folder of the environment.
FOLDERS = {version: Path(sys.prefix) / f"diffusers-{version}" for version in VERSIONS}


TESTS = (
    "test/schedulers/test_scheduler_combinations.py",
    "test/acceleration/test_accelerated_scheduler.py",
    "test/acceleration/test_acceleration.py::test_original_policy",
)


def run(folder, *arguments, **options):
    """Start Python with the packages of ``folder`` before all others."""
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "DPA_FUZZ_CASES": "20",  # random schedulers a test; the newest version is tried on more
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | environment,
        text=True,
        cwd=ROOT,
        **options,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The tests under every version that is installed, all at once, and what they print."""
    folder, started = tmp_path_factory.mktemp("versions"), {}
    for version, packages in FOLDERS.items():
        if packages.is_dir():
            with (folder / version).open("w") as log:
                options = ("-m", "pytest", "-p", "no:cacheprovider", "-vv")
                started[version] = (
                    run(packages, *options, *TESTS, stdout=log, stderr=subprocess.STDOUT),
                    folder / version,
                )
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_diffusers_is_followed(version, runs):
    if version not in runs:
        pytest.skip(f"diffusers {version} is not in {FOLDERS[version]} (make build installs it)")
    process, log = runs[version]
    status, output = process.wait(), log.read_text()
    assert status == 0, output[-6000:]
    for name in ("DDPM", "DDIM", "DPMSolverMultistep"):
        assert f"[{name}Scheduler] PASSED" in output
    for kind in ("DDPM", "DDIM"):  # dpa.accelerate on a scheduler, and on a policy
        assert re.search(rf"test_whole_loops\[cpu-{kind}-\w+\] PASSED", output)
        assert f"test_original_policy[cpu-True-{kind}] PASSED" in output


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
    process = run(FOLDERS[version], "-W", "ignore", "-c", code, stdout=subprocess.PIPE)
    assert process.communicate()[0].split() == [version, "0.0"]
