"""Graphed callables over dpa's modules: training ends in the weights of the eager loop."""

import copy

import pytest
import torch
from everywhere import EveryOp
from torch.testing import assert_close

import dpa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

_STEPS = 30


class _Cell(torch.nn.Module):
    """An LLTM over a sequence, and a read-out of its last state."""

    def __init__(self):
        super().__init__()
        self.cell = dpa.nn.LLTM(3, 16)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[1], 16)
        for step in x:
            h, c = self.cell(step, (h, c))
        return self.head(h)


class _Unet(torch.nn.Module):
    """The U-Net with tensors alone for arguments, as graphed callables want them."""

    def __init__(self):
        super().__init__()
        self.unet = dpa.nn.ConditionalUnet1D(
            2, global_cond_dim=5, diffusion_step_embed_dim=16, down_dims=(16, 32)
        )

    def forward(self, sample, timestep, cond):
        return self.unet(sample, timestep, None, cond)


def _cell():
    return _Cell(), lambda: (torch.randn(6, 8, 3, device="cuda"),)


def _block():
    return dpa.nn.Conv1dBlock(3, 16, 5, n_groups=4), lambda: (torch.randn(8, 3, 16, device="cuda"),)


def _unet():
    return _Unet(), lambda: (
        torch.randn(8, 8, 2, device="cuda"),
        torch.randint(0, 100, (8,), device="cuda"),
        torch.randn(8, 5, device="cuda"),
    )


def _train(module, run, batches):
    """Fit ``run``, which evaluates ``module``, to a fixed target; return the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = (run(*batch) - batch[0].mean()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [_cell, _block, _unet], ids=lambda f: f.__name__[1:])
def test_training_ends_in_the_same_weights(make):
    eager, batch = make()
    eager.cuda()
    graphed = copy.deepcopy(eager)
    start = copy.deepcopy(eager.state_dict())
    batches = [batch() for _ in range(4)] * (_STEPS // 4)
    run = torch.cuda.make_graphed_callables(graphed, batch())
    expected, losses = _train(eager, eager, batches), _train(graphed, run, batches)
    assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    for name, weight in graphed.state_dict().items():
        assert_close(weight, eager.state_dict()[name], rtol=1e-4, atol=1e-5)
    moved = [not torch.equal(weight, start[name]) for name, weight in eager.state_dict().items()]
    assert sum(moved) > len(moved) // 2


@pytest.mark.parametrize("make", [_block, EveryOp], ids=["block", "every op"])
def test_work_follows_the_current_stream_in_graphs(make):
    """A replay on a side stream waits for what was queued there before it."""
    module = (make() if make is EveryOp else make()[0]).cuda().requires_grad_(False)
    x = torch.randn(8, 3, 16, device="cuda")
    expected = module(x)
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    target = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(4):  # warm-up, recording, replay
            compiled(target)
        side.synchronize()
        target.fill_(torch.nan)
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        target.copy_(x)
        got = compiled(target).clone()
    side.synchronize()
    assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_chain_in_a_graph_is_the_chain_outside():
    """Dependent launches: each kernel starts early and reads the output of the one before.

    Between them stand kernels of PyTorch, copies and fills, which release nobody.
    """
    mult, add, lltm = (
        torch.ops.dpa.elementwise_mult,
        torch.ops.dpa.fused_relu_add,
        torch.ops.dpa.lltm,
    )
    x = torch.rand(64, 1024, device="cuda") + 0.5
    cell = dpa.nn.LLTM(32, 128).cuda().requires_grad_(False)
    large = dpa.nn.LLTM(256, 768).cuda().requires_grad_(False)
    scratch = torch.zeros_like(x)

    def chain():
        y = x
        for i in range(6):
            y = mult(y, x)
            y = add(y, x, -0.25)
            if i == 1:
                y = torch.sin(y)
            if i == 2:
                y = scratch.copy_(y) + 0
            if i == 3:
                scratch.zero_()
                y = mult(y, scratch + 1)
            y = y / y.abs().mean()
        h = c = y[:16, :128].contiguous()
        wide_h = wide_c = y[:, :768].contiguous()
        for i in range(4):
            h, c = lltm(y[:16, 32 * i : 32 * i + 32], cell.weights, cell.bias, h, c)
            step = y[:, 256 * i : 256 * i + 256].contiguous()
            wide_h, wide_c = lltm(step, large.weights, large.bias, wide_h, wide_c)
        return h, c, wide_h, wide_c, y

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        x.uniform_(0.5, 1.5)  # what the last replay left in memory is wrong now
        expected = chain()
        graph.replay()
        assert_close(out, expected, rtol=1e-5, atol=1e-5)
