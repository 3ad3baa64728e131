"""A whole training step under what PyTorch can demand of it: the same bits, no waits, one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dpa
from dpa.training import EMA


def _unet(device):
    """Of widths that have every fast kernel."""
    torch.manual_seed(0)
    return dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(64, 128)
    ).to(device)


def _batch(device, size=4):
    new = lambda *shape: torch.randn(size, *shape, device=device)  # noqa: E731
    return new(8, 2), torch.randint(50, (size,), device=device), new(3), new(8, 2)


def _loss(model, lower, sample, timestep, cond, noise):
    enabled = lower is not None
    with torch.autocast(sample.device.type, lower or torch.bfloat16, enabled=enabled):
        out = model(sample, timestep, None, cond)
    return F.mse_loss(out.float(), noise)


_DTYPES = pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(dpa.nn.blocks1d, "_CHANNELS_LAST", True)


@_DTYPES
def test_deterministic_mode_repeats_bit_for_bit(device, monkeypatch, lower):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def train():
        unet = _unet(device)
        optimizer, ema = torch.optim.AdamW(unet.parameters(), fused=True), EMA(unet)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            _loss(unet, lower, *_batch(device, 70)).backward()
            optimizer.step()
            ema.update()
        return [*unet.parameters(), *(p.grad for p in unet.parameters()), *ema.averages]

    torch.use_deterministic_algorithms(True)
    try:
        for one, again in zip(train(), train(), strict=True):
            assert torch.equal(one, again)
    finally:
        torch.use_deterministic_algorithms(False)


@_DTYPES
def test_a_step_never_waits_for_the_gpu(device, lower):
    if device.type == "cpu":
        pytest.skip("the CPU has nothing to wait for")
    unet = _unet(device)
    optimizer, ema = torch.optim.AdamW(unet.parameters(), fused=True), EMA(unet)
    scaler = torch.amp.GradScaler(device.type, enabled=lower == torch.float16)
    batch = _batch(device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(_loss(unet, lower, *batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.update()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_step_has_no_graph_breaks(device):
    """Autocast, forward, loss and backward are one graph; PyTorch's optimizers break theirs."""

    def train(compile):
        unet = _unet(device)
        # An eps that no second moment reaches: the step is then smooth in the gradient.
        optimizer = torch.optim.AdamW(unet.parameters(), lr=0.1, eps=1.0, fused=True)
        loss_of = compile(lambda *batch: _loss(unet, torch.bfloat16, *batch))
        torch.manual_seed(1)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            loss_of(*_batch(device)).backward()
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(unet.parameters()).detach()

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = train(lambda f: torch.compile(f, backend=graphs, fullgraph=True, dynamic=False))
    plain, start = (
        train(lambda f: f),
        torch.nn.utils.parameters_to_vector(_unet(device).parameters()),
    )
    error = (compiled - plain).norm() / (plain - start).norm()
    assert error < 2e-2
    assert graphs.frame_count == 1


def test_compilers_see_one_op_a_residual_block(device):
    """But exported programs, which may run anywhere, have the layers."""
    unet, batch = _unet(device), _batch(device)[:3]
    args = (batch[0], batch[1], None, batch[2])
    seen = []

    def backend(module, inputs):
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module

    torch.compile(unet, backend=backend, fullgraph=True)(*args)
    blocks = [m for m in unet.modules() if isinstance(m, dpa.nn.ConditionalResidualBlock1D)]
    assert sum("residual_block1d" in name for name in seen) == len(blocks) == 8
    exported = torch.export.export(unet, args)
    assert not any("residual_block1d" in str(node.target) for node in exported.graph.nodes)


@_DTYPES
def test_checkpointed_steps_have_the_same_gradients(device, lower):
    unet, batch = _unet(device), _batch(device)
    wrapped = lambda *args: checkpoint(unet, *args, use_reentrant=False)  # noqa: E731
    parameters = list(unet.parameters())
    got = torch.autograd.grad(_loss(wrapped, lower, *batch), parameters)
    expected = torch.autograd.grad(_loss(unet, lower, *batch), parameters)
    for one, again in zip(got, expected, strict=True):
        assert_close(one, again)


class _Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_the_average_of_all_weights_moves_at_once(device):
    ema = EMA(_unet(device))
    with _Launches() as seen:
        ema.update()
    assert seen.ops == [torch.ops.aten._foreach_lerp_.Scalar]
