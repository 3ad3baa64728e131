"""Faults in the middle of work: no memory, a lost device, an interrupt, a full disk.

Afterwards the state is usable or whole.
"""

import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from patience import HANGS
from policies import OriginalPolicy
from samplers import diffusers, make_sampler, without_graph
from torch import nn
from typer.testing import CliRunner

import dpa
from dpa.cli.app import app
from dpa.library.graphs import _ROOM
from dpa.sampling.fused_loop import LoopGraphs

PYTHON = [sys.executable, "-c"]
_SUPPORT = Path(__file__).parents[1] / "support"


class Encoded(OriginalPolicy):
    """A policy with an encoder that gives up on what is not finite."""

    def __init__(self, unet, scheduler, steps):
        super().__init__(unet, scheduler, steps)
        self.encoder = nn.Linear(3, 4)

    def act(self, observation):
        if not observation.isfinite().all():
            raise FloatingPointError("camera")
        data = torch.zeros(len(observation), 8, 2, device=observation.device)
        cond = self.encoder(observation)
        return self.conditional_sample(data, data.bool(), global_cond=cond)


def test_an_exception_in_an_observation_encoder(device):
    unet = dpa.reference.plain(
        dpa.nn.ConditionalUnet1D(
            2, global_cond_dim=4, diffusion_step_embed_dim=16, down_dims=(8, 16)
        )
    )
    policy = Encoded(unet, diffusers.DDPMScheduler(20), 3).to(device).eval()
    fast, good = dpa.accelerate(policy), torch.randn(2, 3, device=device)
    hooks = []  # on a layer inside: an exception while the network runs
    for broken in (False, True, False):
        torch.manual_seed(5)
        expected = fast.act(good)
        if broken:
            hooks.append(fast.model.register_forward_pre_hook(lambda *_: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                fast.act(good)
            hooks.pop().remove()
        with pytest.raises(FloatingPointError, match="camera"):
            fast.act(good * torch.nan)
        torch.manual_seed(5)
        torch.testing.assert_close(fast.act(good), expected, rtol=1e-4, atol=1e-4)
    dpa.restore(policy)


def _interrupted(command, out, ready):
    """Start ``dpa command --out out``, interrupt it once ``ready`` is there; what it printed."""
    command = [sys.executable, "-m", "dpa", *command, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What a shell starts in the background ignores interrupts, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + HANGS
    while not ready() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0]
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=HANGS)[0]
    assert process.returncode != 0 and "Traceback" not in printed, printed
    return printed


def test_an_interrupted_demo_leaves_whole_files(tmp_path):
    """Interrupted when its checkpoint has come: what is there can be read, nothing is half."""
    out = tmp_path / "demo"
    _interrupted(
        ["demo", "--quick", "--device", "cpu", "--train-steps", "3"],
        out,
        lambda: (out / "checkpoint.pt").exists(),
    )
    assert not [file.name for file in out.iterdir() if file.name.startswith(".")]
    dpa.load_checkpoint(out / "checkpoint.pt")


def test_an_interrupted_bench_leaves_the_files_of_the_last_one(tmp_path, monkeypatch):
    """Interrupted while it writes."""
    results = tmp_path / "results.json"
    results.write_text("the last one")
    write = Path.write_text

    def interrupted(path, text):
        write(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("dpa.bench.cpu.stages", lambda quick: {"ops": dict})
    monkeypatch.setattr(Path, "write_text", interrupted)
    assert CliRunner().invoke(app, ["bench", "--out", str(tmp_path)]).exit_code != 0
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    assert results.read_text() == "the last one"


@pytest.mark.parametrize("to", ["torchscript", "exported-program"])
def test_a_full_disk_on_export(tmp_path, to):
    """Files may have 20,000 bytes: one line says so, and nothing of the file stays."""
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=4, diffusion_step_embed_dim=16, down_dims=(8, 16)
    )
    torch.save(unet.state_dict(), tmp_path / "unet.pt")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    out = tmp_path / "policy.pt"
    out.write_text("the last one")
    command = ["export", str(tmp_path / "unet.pt"), "--to", to, "--out", str(out)]
    command += ["--horizon", "8", "--scheduler", "DDIM", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "dpa", *command], preexec_fn=limit, capture_output=True, text=True
    )
    assert done.returncode == 1, done
    assert f"File too large: '{out}'" in done.stderr and "Traceback" not in done.stderr
    assert out.read_text() == "the last one"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["policy.pt", "unet.pt"]


def test_a_full_disk_while_a_package_is_compiled(tmp_path, monkeypatch):
    """The compiler's own files do not fit: its error comes out in one line, and nothing stays."""
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=4, diffusion_step_embed_dim=16, down_dims=(8, 16)
    )
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    out = tmp_path / "policy.pt2"
    out.write_text("the last one")

    def compile_and_package(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/a.cpp")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_and_package)
    command = ["export", str(tmp_path / "unet.pt"), "--to", "aoti", "--out", str(out)]
    command += ["--horizon", "8", "--scheduler", "DDIM", "--steps", "2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and isinstance(done.exception, OSError)
    assert out.read_text() == "the last one"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["policy.pt2", "unet.pt"]


def _all_room(device):
    """Take all that is large enough for a capture, such as what other tests left reserved."""
    taken = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(_ROOM, dtype=torch.uint8, device=device))
    return taken


def test_no_memory_for_a_capture(cuda):
    sampler, cond = make_sampler(cuda, "DDIM", 3), torch.randn(2, 5, device=cuda)
    noise = torch.randn(2, 16, 2, device=cuda)
    sampler.cuda_graph = False
    expected = sampler(cond, noise=noise)  # packs the weights
    sampler.cuda_graph = True
    total = torch.cuda.get_device_properties(cuda).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    try:
        # Enough for the loop kernel by kernel, and half of what a capture requests.
        allowed = torch.cuda.memory_reserved() + _ROOM // 2
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        taken = _all_room(cuda)
        before = torch.cuda.memory_allocated()
        with pytest.warns(UserWarning, match="no memory for a CUDA graph .* tries again"):
            assert torch.equal(sampler(cond, noise=noise), expected)
        assert len(sampler._graphs) == 0 and not sampler._graphs.refused
        assert torch.cuda.memory_allocated() == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del taken
    for _ in range(3):
        assert torch.equal(sampler(cond, noise=noise), expected)
    assert len(sampler._graphs) == 1


def test_no_memory_in_the_middle_of_a_capture(cuda):
    """The second allocation of the first capture fails, as another process might have it."""
    graphs, x, failed = LoopGraphs(), torch.ones(2, device=cuda), []

    def body(inputs):
        y = inputs["x"] * 2
        if torch.cuda.is_current_stream_capturing() and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return y + 1

    run = lambda: graphs.run("key", cuda, {"x": x}, lambda: body)  # noqa: E731
    with pytest.warns(UserWarning, match="no memory for a CUDA graph .* tries again"):
        assert run().tolist() == [3, 3]
    assert failed and len(graphs) == 0 and not graphs.refused
    gc.collect()
    assert torch.randn(2, device=cuda).shape == (2,)  # the global generator still works
    assert run().tolist() == [3, 3] and len(graphs) == 1
    assert run().tolist() == [3, 3]


def test_a_lost_device_raises(cuda):
    """A kernel that traps takes the context with it: every later call raises, none hangs."""
    script = """
import torch, dpa
from samplers import make_sampler
device = torch.device("cuda")
sampler, cond = make_sampler(device, "DDIM", 3), torch.randn(2, 5, device=device)
sampler(cond), sampler(cond)
x = torch.ones(8, device=device)
try:
    x[torch.full((1,), 99, device=device)].sum().item()
except RuntimeError:
    pass
for call in (lambda: sampler(cond), lambda: torch.ops.dpa.elementwise_mult(x, x),
             lambda: dpa.DiffusionSampler(sampler.unet, sampler.table, horizon=16)(cond)):
    try:
        call()
        torch.cuda.synchronize()
        print("nothing raised")
    except RuntimeError as error:
        print("raised", "CUDA error" in str(error))
"""
    done = subprocess.run(
        [*PYTHON, script], cwd=_SUPPORT, capture_output=True, text=True, timeout=HANGS
    )
    assert done.stdout.split("\n")[:3] == ["raised True"] * 3, done.stdout + done.stderr[-2000:]


def test_several_processes_on_one_device(cuda):
    script = """
import hashlib, torch
from samplers import make_sampler
torch.manual_seed(0)
device = torch.device("cuda")
sampler, cond = make_sampler(device, "DDIM", 3), torch.randn(2, 5, device=device)
noise = torch.randn(2, 16, 2, device=device)
first = sampler(cond, noise=noise)
print(all(torch.equal(sampler(cond, noise=noise), first) for _ in range(500)))
print(hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest())
"""
    folder = _SUPPORT
    processes = [
        subprocess.Popen([*PYTHON, script], cwd=folder, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=HANGS)[0].split() for process in processes]
    assert printed[0][0] == "True" and printed.count(printed[0]) == 3, printed


def test_capture_in_one_thread_while_another_runs(cuda):
    sampler, other = make_sampler(cuda, "DDIM", 3), make_sampler(cuda, "DDIM", 2)
    conds, noise = torch.randn(2, 2, 5, device=cuda), torch.randn(2, 16, 2, device=cuda)
    pairs = zip((sampler, other), conds, strict=True)
    expected = [without_graph(s)(c, noise=noise) for s, c in pairs]
    torch.cuda.synchronize()
    wrong, stop = [], threading.Event()

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            twin = without_graph(other)
            while not stop.is_set():  # allocates, launches and waits
                if not torch.equal(twin(conds[1], noise=noise), expected[1]):
                    wrong.append("other")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(40):
            sampler._graphs.clear()
            for _ in range(2):
                if not torch.equal(sampler(conds[0], noise=noise), expected[0]):
                    wrong.append("captured")
            assert len(sampler._graphs) == 1 and not sampler._graphs.refused
    finally:
        stop.set()
        thread.join(timeout=HANGS)
    assert not thread.is_alive() and not wrong


@pytest.mark.parametrize("name", ["elementwise_mult", "fused_relu_add"])
def test_more_than_2_31_elements(cuda, name):
    count = 2**31 + 1001
    if torch.cuda.mem_get_info()[0] < 8 * count:
        pytest.skip("needs 16 GiB of GPU memory")
    a = torch.randn(1001, device=cuda, dtype=torch.bfloat16).repeat(count // 1001 + 1)[:count]
    b = a.flip(0)
    got = getattr(torch.ops.dpa, name)(a, b)
    step = 2**28
    for begin in range(0, count, step):
        x, y = (t[begin : begin + step] for t in (a, b))
        expected = x * y if name == "elementwise_mult" else x.float().relu_().add_(y).bfloat16()
        assert torch.equal(got[begin : begin + step], expected)
