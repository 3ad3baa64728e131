import pytest
import torch
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES
from tolerances import tolerance
from torch.testing import assert_close

import dpa


def _sample(device, dtype, batch, features, state, row=False):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    weights = new(3 * state, state + features) / max(1, state + features) ** 0.5
    bias = new(1, 3 * state) if row else new(3 * state)
    return Sample((new(batch, features), weights, bias, new(batch, state), new(batch, state)))


class TestLltm(OpProofs):
    op = torch.ops.dpa.lltm
    reference = dpa.reference.lltm

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, 2, 3, 4)
        yield _sample(device, dtype, 5, 7, 9, row=True)
        yield _sample(device, dtype, 1, 1, 1)
        yield _sample(device, dtype, 0, 3, 4)
        yield _sample(device, dtype, 3, 0, 5)

    @staticmethod
    def rejected(device):
        x, w, b, h, c = _sample(device, torch.float32, 2, 3, 4).args
        head = r"^dpa::lltm: "
        yield head + r"input must be float64, float32.*got Int", Sample((x.int(), w, b, h, c))
        yield (
            head + r"input must have 2 dimensions \(B, I\), got shape \[3\]",
            Sample((x[0], w, b, h, c)),
        )
        yield (
            head + r"weights must have shape \(3 S, S \+ I\) = \[12, 7\], got \[12, 6\]",
            Sample((x, w[:, 1:], b, h, c)),
        )
        yield (
            head + r"bias must have shape \(3 S\) = \[12\], got \[4\]",
            Sample((x, w, b[:4], h, c)),
        )
        yield head + r"bias must have shape \(1, 3 S\)", Sample((x, w, b.view(2, 6), h, c))
        yield (
            head + r"old_h must have shape \(B, S\) = \[2, 4\], got \[1, 4\]",
            Sample((x, w, b, h[:1], c)),
        )
        yield head + r"old_h must have 2 dimensions", Sample((x, w, b, h[0], c))
        yield head + r"old_cell must have the dtype of input", Sample((x, w, b, h, c.half()))
        if device.type == "cuda":
            yield head + r"old_cell must be on the device of input", Sample((x, w, b, h, c.cpu()))

    @staticmethod
    def batches(device):
        for batch in (2, 3, 5, 7):
            yield _sample(device, torch.float32, batch, 3, 4)

    @staticmethod
    def drawn(d):
        batch, features, state = d(SIZES), d(SIZES), d(SIZES)
        bias = (3 * state,) if d(st.booleans()) else (1, 3 * state)
        input = d.tensor(batch, features)
        # GEMMs of bfloat16 on a CPU take denormal numbers for zero, and an infinite weight makes
        # NaN of zero.
        limits = {"low": -2.0, "high": 2.0} if d.dtype == torch.bfloat16 else {}
        weights = d.tensor(3 * state, state + features, **limits)
        return Sample((input, weights, *(d.tensor(*s) for s in (bias, *[(batch, state)] * 2))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(16, 32, 128), (33, 100, 130), (256, 256, 512)], ids=str)
def test_real_sizes(device, dtype, sizes):
    """Both the one-kernel path and the path through a library's GEMMs, with gradients."""
    ours = _sample(device, dtype, *sizes).requiring_grad()
    exact = ours.map(lambda x: x.double()).requiring_grad()
    out, expected = torch.ops.dpa.lltm(*ours.args), dpa.reference.lltm(*exact.args)
    grads = [torch.randn_like(x) for x in out]
    torch.autograd.backward(out, grads)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for a, b in zip(out, expected, strict=True):
        assert_close(a, b.to(dtype), **tolerance(dtype))
    for a, b in zip(ours.floating(), exact.floating(), strict=True):
        error = (a.grad.double() - b.grad).norm() / b.grad.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def test_one_output_alone(device):
    """The gradient of an output that nobody uses is zero, not missing."""
    for which in (0, 1):
        ours, exact = (_s.requiring_grad() for _s in [_sample(device, torch.float64, 2, 3, 4)] * 2)
        torch.ops.dpa.lltm(*ours.args)[which].sum().backward()
        dpa.reference.lltm(*exact.args)[which].sum().backward()
        for a, b in zip(ours.floating(), exact.floating(), strict=True):
            assert_close(a.grad, torch.zeros_like(a) if b.grad is None else b.grad)


def test_module(device):
    cell = dpa.nn.LLTM(3, 16).to(device)
    assert {k: tuple(v.shape) for k, v in cell.state_dict().items()} == {
        "weights": (48, 19),
        "bias": (48,),
    }
    assert all(p.abs().max() <= 0.25 and p.std() > 0.1 for p in cell.parameters())
    x, h, c = (torch.randn(5, n, device=device) for n in (3, 16, 16))
    for a, b in zip(
        cell(x, (h, c)), dpa.reference.lltm(x, cell.weights, cell.bias, h, c), strict=True
    ):
        assert_close(a, b)
    scripted = torch.jit.script(cell)
    assert_close(scripted(x, (h, c)), cell(x, (h, c)))


def test_a_sequence_learns(device):
    """The cell over a sequence, trained to remember its first input."""
    torch.manual_seed(1)
    cell, head = dpa.nn.LLTM(1, 32).to(device), torch.nn.Linear(32, 1).to(device)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(150):
        inputs = torch.randn(6, 64, 1, device=device)
        h = c = torch.zeros(64, 32, device=device)
        for x in inputs:
            h, c = cell(x, (h, c))
        loss = (head(h) - inputs[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])


def test_autocast(device):
    sample = _sample(device, torch.float32, 2, 3, 4)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.lltm(*sample.args)
    half = sample.map(lambda x: x.bfloat16())
    for a, b in zip(got, torch.ops.dpa.lltm(*half.args), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"LLTM: .* must be at least 0, got -1 and 3"):
        dpa.nn.LLTM(-1, 3)
