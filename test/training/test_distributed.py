"""Processes under torchrun: DDP, FSDP2, sharded optimizers and sampling, demo and script."""

import os
import re
import subprocess
import sys
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


_DEVICES = pytest.mark.parametrize("device", ["cpu", "cuda"])


def _torchrun(*command, where, device, count=2):
    """Run the processes; return what they printed."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices here")
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
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@_DEVICES
def test_training_and_sampling_equal_one_process(device, tmp_path):
    worker = _ROOT / "test/support/distributed_worker.py"
    _torchrun(worker, tmp_path, where=tmp_path, device=device)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0", "rank1"]


@_DEVICES
@pytest.mark.parametrize("kind", ["peers", "collectives"])
def test_a_sharded_optimizer_equals_one_process(device, kind, tmp_path):
    several = device == "cuda" and torch.cuda.device_count() > 1
    if several and kind == "peers" and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the GPUs here do not reach each other's memory")
    worker = _ROOT / "test/support/sharded_worker.py"
    count = 3 if (device, kind) == ("cpu", "peers") else 2
    _torchrun(worker, kind, tmp_path, where=tmp_path, device=device, count=count)
    found = {(tmp_path / f"rank{rank}").read_text() for rank in range(count)}
    assert found == {{"peers": "_Peers", "collectives": "Exchange"}[kind]}


@_DEVICES
def test_the_demo_trains_the_policy_of_one_process(device, tmp_path):
    pytest.importorskip("matplotlib")
    from dpa.demo import train

    options = ("--train-only", "--train-steps", 3, "--episodes", 1, "--device", device, "--json")
    command = ("-m", "dpa", "demo", *options, "--out", tmp_path)
    printed = _torchrun(*command, where=tmp_path, device=device)
    assert printed.count('"passed"') == 1
    device = torch.device(device)
    together = train.load(tmp_path / "checkpoint.pt", device)
    alone = train.train(3, 0, device)
    for name, value in alone.network.state_dict().items():
        # AdamW divides by the root of tiny second moments, which magnifies rounding.
        assert_close(together.network.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert_close(torch.tensor(together.losses), torch.tensor(alone.losses), rtol=1e-4, atol=1e-4)


@_DEVICES
def test_the_documented_script_runs(device, tmp_path):
    page = (_ROOT / "docs" / "training.md").read_text()
    code = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert code
    (tmp_path / "train.py").write_text(code[1])
    printed = _torchrun("train.py", where=tmp_path, device=device)
    assert len(set(re.findall(r"of 2: loss ([\d.]+)", printed))) == 1
    assert (tmp_path / "average.pt").is_file()
