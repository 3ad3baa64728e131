"""Many at once: threads, processes that were forked or share a GPU, replays by the thousand."""

import subprocess
import sys
import threading

import pytest
import soak
import torch
from everywhere import EveryOp
from patience import HANGS
from test_everywhere import packed
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset

# A network whose clusters of blocks exchange partial sums, on two inputs by turns: the sums that
# one call leaves behind are not the next one's. A graph has many calls, each compared on the GPU.
_CLUSTERED = """
import sys, time, torch, dpa

batch, seconds = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
torch.set_grad_enabled(False)
device = torch.device("cuda")
unet = dpa.nn.ConditionalUnet1D(
    2, global_cond_dim=8, diffusion_step_embed_dim=32, down_dims=(256, 512), kernel_size=3,
    cond_predict_scale=True,
).to(device)
packed = dpa.PackedUnet(unet, torch.float16)
times = torch.arange(batch, device=device).float()
cond = torch.randn(batch, 8, device=device)
given = [torch.randn(batch, 16, 2, device=device) for _ in range(2)]
first = [packed(x, times, cond).clone() for x in given]
differ = torch.zeros((), dtype=torch.int64, device=device)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(25):
        for x, y in zip(given, first):
            differ += (packed(x, times, cond) != y).any()
print("ready", flush=True)
sys.stdin.readline()
calls, end = 0, time.monotonic() + seconds
while time.monotonic() < end or calls < 200:
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    calls += 4 * 50
print(calls, differ.item())
"""


class _Answers(Dataset):
    """Inputs beside what a model makes of them, in the process that asks."""

    def __init__(self, model, inputs):
        self.model, self.inputs = model, inputs

    def __len__(self):
        return len(self.inputs)

    @torch.no_grad()
    def __getitem__(self, i):
        return self.model(*self.inputs[i])


def _models():
    device = torch.device("cpu")
    yield "every op", EveryOp().eval(), [(torch.randn(3, 3, 12),) for _ in range(16)]
    model, _ = packed(device)
    yield "packed", model, [packed(device)[1] for _ in range(4)]


@pytest.mark.parametrize("which", [0, 1], ids=["every op", "packed"])
def test_python_threads(which):
    _, model, inputs = list(_models())[which]
    with torch.no_grad():
        expected = [model(*x) for x in inputs]
    wrong = []

    @torch.no_grad()
    def work(start):
        for i in range(start, start + 40):
            got = model(*inputs[i % len(inputs)])
            if not torch.equal(got, expected[i % len(inputs)]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANGS)
        assert not thread.is_alive()
    assert not wrong


def test_gradients_in_python_threads():
    """Each has its own inputs; the parameters are shared and need no gradients."""
    model, x = EveryOp().requires_grad_(False), torch.randn(3, 3, 12)

    def gradient():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(model(leaf).sum(), leaf)[0]

    expected, got = gradient(), []
    threads = [threading.Thread(target=lambda: got.append(gradient())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANGS)
    assert len(got) == 8
    for g in got:
        assert_close(g, expected, rtol=0, atol=0)


def test_threads_whose_kernels_take_different_memory(cuda):
    """The driver keeps one limit of shared memory a kernel, for all threads.

    A GEMM on a small grid requests more of it than one on a large grid.
    """

    def gemm(rows, outputs):
        x, weight = (torch.randn(n, 256, device=cuda) for n in (rows, outputs))
        bias = torch.randn(outputs, device=cuda)
        got = torch.ops.dpa.joint_linear(x.bfloat16(), [weight], [bias])
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        assert (got - expected).norm() < 1e-2 * expected.norm()

    gemm(1024, 1024)
    other = threading.Thread(target=gemm, args=(4096, 4096))
    other.start()
    other.join()
    gemm(1024, 1024)


def test_processes_that_share_a_device(hopper):
    """The device takes turns between them in the middle of a call, and stops blocks anywhere."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CLUSTERED, batch, "3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for batch in ("16", "40") * 3
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 6
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        printed = [process.communicate(timeout=HANGS)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    calls, differ = (sum(map(int, numbers)) for numbers in zip(*printed, strict=True))
    assert calls >= 1000
    assert differ == 0, f"{differ} of {calls} calls gave other bits than the first"


@pytest.mark.parametrize("which", [0, 1], ids=["every op", "packed"])
def test_workers_of_a_data_loader(which):
    """Forked after the parent has used the ops with all its threads."""
    _, model, inputs = list(_models())[which]
    data = _Answers(model, inputs)
    expected = torch.stack([data[i] for i in range(len(data))])
    loader = DataLoader(data, num_workers=2, timeout=HANGS, multiprocessing_context="fork")
    assert_close(torch.cat(list(loader)), expected, rtol=1e-6, atol=1e-6)


def test_replays_neither_drift_nor_leak(device):
    """A short run of what test/support/soak.py does by the million."""
    report = soak.run(device, replays=400)
    assert report["different"] == 0
    assert report["files"] == 0
    assert report["bytes reserved"] == 0
    assert report["MB on the host"] < 64
