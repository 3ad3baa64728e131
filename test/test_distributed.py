"""Two processes under torchrun: DDP, FSDP2, the demo, the documented script, sharded sampling."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("diffusers")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)

_ROOT = Path(__file__).parent.parent


def _torchrun(*command, where):
    """Run two processes on the CPU; return what they printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, *map(str, command)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_and_sampling_equal_one_process(tmp_path):
    worker = Path(__file__).with_name("distributed_worker.py")
    _torchrun(worker, tmp_path, where=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_the_demo_trains_the_policy_of_one_process(tmp_path):
    pytest.importorskip("matplotlib")
    from dpa.demo import train

    options = ("--train-only", "--train-steps", 3, "--episodes", 1, "--device", "cpu", "--json")
    printed = _torchrun("-m", "dpa", "demo", *options, "--out", tmp_path, where=tmp_path)
    assert printed.count('"passed"') == 1
    cpu = torch.device("cpu")
    together = train.load(tmp_path / "checkpoint.pt", cpu)
    alone = train.train(3, 0, cpu)
    for name, value in alone.network.state_dict().items():
        # AdamW divides by the root of tiny second moments, which magnifies rounding.
        assert_close(together.network.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert_close(torch.tensor(together.losses), torch.tensor(alone.losses), rtol=1e-4, atol=1e-4)


def test_the_documented_script_runs(tmp_path):
    page = (_ROOT / "docs" / "training.md").read_text()
    code = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert code
    (tmp_path / "train.py").write_text(code[1])
    printed = _torchrun("train.py", where=tmp_path)
    assert len(set(re.findall(r"of 2: loss ([\d.]+)", printed))) == 1
    assert (tmp_path / "average.pt").is_file()
