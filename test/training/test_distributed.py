"""Processes under torchrun: DDP, FSDP2, sharded optimizers and sampling, demo and script."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from patience import HANGS
from torch.testing import assert_close

pytest.importorskip("diffusers")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "training.md"
_DYING = _ROOT / "test/support/dying_worker.py"
# Seconds from a process's death to the end of the job; torchrun waits 30 before it kills.
_SOON = 60

_DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])


def _several(device):
    """How many processes: two on a CPU, one a GPU up to four, which tests' batches divide into."""
    if device == "cpu":
        return 2
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices here")
    return min(torch.cuda.device_count(), 4)


def _torchrun(*command, where, device, count, fails=False):
    """Run the processes; return what they printed, on stderr if they are to fail."""
    # Sums over halves of a batch agree in float32, not in TF32.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={count}", *map(str, command)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


@_DEVICES
def test_training_and_sampling_equal_one_process(device, tmp_path):
    """And the script of the documentation, in the same processes, which import PyTorch once."""
    worker, script = _ROOT / "test/support/distributed_worker.py", tmp_path / "train.py"
    code = re.search(r"^```python\n(.*?)^```", _PAGE.read_text(), re.M | re.S)
    assert code
    script.write_text(code[1])
    count = _several(device)
    printed = _torchrun(worker, tmp_path, script, where=tmp_path, device=device, count=count)
    assert {f"rank{i}" for i in range(count)} <= {file.name for file in tmp_path.iterdir()}
    assert len(set(re.findall(rf"of {count}: loss ([\d.]+)", printed))) == 1
    assert (tmp_path / "average.pt").is_file()


@_DEVICES
def test_a_sharded_optimizer_equals_one_process(device, tmp_path):
    kinds = {"peers": "_Peers", "collectives": "Exchange"}
    count = 3 if device == "cpu" else _several(device)
    if device == "cuda" and not torch.cuda.can_device_access_peer(0, 1):
        del kinds["peers"]  # the GPUs here do not reach each other's memory
    worker = _ROOT / "test/support/sharded_worker.py"
    _torchrun(worker, tmp_path, *kinds, where=tmp_path, device=device, count=count)
    for kind, name in kinds.items():
        found = {(tmp_path / f"{kind}{rank}").read_text() for rank in range(count)}
        assert found == {name}


def _dies(how, device, folder, count):
    """Processes that train until the last one dies; return torchrun's report."""
    report = _torchrun(_DYING, how, folder, where=folder, device=device, count=count, fails=True)
    assert time.time() - float((folder / "died").read_text()) < _SOON, report
    return report


@_DEVICES
def test_an_error_in_one_process_ends_the_job_and_is_reported(device, tmp_path):
    last = _several(device) - 1
    report = _dies("raises", device, tmp_path, last + 1)
    error = f"RuntimeError: the disk of rank {last} is full"
    assert re.search(rf"rank +: {last} .*?{error}", report, re.S), report


@_DEVICES
def test_after_a_process_died_the_others_go_on_from_the_last_checkpoint(device, tmp_path):
    left = _several(device) - 1
    report = _dies("killed", device, tmp_path, left + 1)
    assert re.search(rf"rank +: {left} .*?Signal 9 \(SIGKILL\)", report, re.S), report
    whole = tmp_path / "whole"
    whole.mkdir()
    runs = {left: [tmp_path], 1: [whole]} if left > 1 else {1: [tmp_path, whole]}
    for count, folders in runs.items():
        _torchrun(_DYING, "lives", *folders, where=tmp_path, device=device, count=count)
    ran = [(folder / "ran").read_text() for folder in (tmp_path, whole)]
    assert ran == [f"5 to 8 on {left}", "0 to 8 on 1"]
    resumed, expected = (torch.load(folder / "last.pt") for folder in (tmp_path, whole))
    assert_close(resumed, expected, rtol=1e-8, atol=1e-9)


@_DEVICES
def test_the_demo_trains_the_policy_of_one_process(device, tmp_path):
    pytest.importorskip("matplotlib")
    from dpa.demo import train

    options = ("--train-only", "--train-steps", 3, "--episodes", 1, "--device", device, "--json")
    command = ("-m", "dpa", "demo", *options, "--out", tmp_path)
    printed = _torchrun(*command, where=tmp_path, device=device, count=_several(device))
    assert printed.count('"passed"') == 1
    device = torch.device(device)
    together = train.load(tmp_path / "checkpoint.pt", device)
    alone = train.train(3, 0, device)
    torch.manual_seed(0)
    start = train.Network(dict(train.UNET)).to(device)
    flat = lambda network: torch.cat([p.flatten() for p in network.state_dict().values()])  # noqa: E731
    begun, one, two = map(flat, (start, alone.network, together.network))
    # AdamW divides by the root of tiny second moments, which magnifies the rounding of a few.
    ratio = float((one - two).norm() / (one - begun).norm())
    assert ratio < (1e-4 if device.type == "cpu" else 5e-2), ratio
    assert_close(torch.tensor(together.losses), torch.tensor(alone.losses), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no scheduling class for idle threads")
def test_processes_end_though_gloo_is_behind():
    worker, count = _ROOT / "test/support/ending_workers.py", 24
    command = [sys.executable, str(worker), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.split() == ["0"] * count, done.stderr
