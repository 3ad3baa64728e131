import pytest
import torch
from proofs import Calls, OpProofs, Sample, layouts, strided

import dpa


def _pair(device, dtype, *shape):
    return Sample(tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)))


class TestElementwiseMult(OpProofs):
    op = torch.ops.dpa.elementwise_mult
    reference = dpa.reference.elementwise_mult
    contiguous_output = False

    @staticmethod
    def samples(device, dtype):
        for shape in [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (3, 0, 2), (1031,)]:
            yield _pair(device, dtype, *shape)

    @staticmethod
    def rejected(device):
        x = torch.randn(3, 4, device=device)
        head = r"^dpa::elementwise_mult: "
        yield (
            head + r"a must be float64, float32, float16 or bfloat16, got Long",
            Sample((x.long(), x)),
        )
        yield head + r"a must be .*got ComplexFloat", Sample((x.cfloat(), x.cfloat()))
        yield head + r"b must have the dtype of a \(Float\), got Half", Sample((x, x.half()))
        yield head + r"b must have the shape of a \[3, 4\], got \[3\]", Sample((x, x[:, 0]))
        if device.type == "cuda":
            yield head + r"b must be on the device of a \(cuda:0\), got cpu", Sample((x, x.cpu()))

    @staticmethod
    def batches(device):
        for batch, length in [(2, 5), (3, 8), (5, 16), (7, 11)]:
            yield _pair(device, torch.float32, batch, length)

    @staticmethod
    def drawn(d):
        shape = d.shape()
        return Sample((d.tensor(*shape), d.tensor(*shape)))


def test_layouts(device):
    for a, b in layouts(device):
        got = torch.ops.dpa.elementwise_mult(a, b)
        assert torch.equal(got, a * b)
        assert got.stride() == (a * torch.ones_like(a)).stride()


def test_too_many_dimensions(device):
    """The kernel's launch has room for 16 dimensions that do not merge; the CPU has no limit."""
    if device.type == "cpu":
        pytest.skip("the limit is that of the CUDA launch")
    x = torch.randn((2,) * 18, device=device)
    message = r"^dpa::elementwise_mult: a must have at most 16 dimensions .*, got 18"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dpa.elementwise_mult(x, x.permute(*reversed(range(18))))


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)])
def test_a_gradient_that_nobody_asks_for_is_not_computed(device, which):
    a, b = torch.randn(2, 6, device=device).unbind()
    out = torch.ops.dpa.elementwise_mult(a.requires_grad_(which[0]), b.requires_grad_(which[1]))
    with Calls() as calls:
        out.backward(torch.ones_like(out))
    assert calls.names.count("dpa.elementwise_mult.default") == sum(which)


def test_out(device):
    for a, b in layouts(device):
        for out in (torch.full_like(a, torch.nan).contiguous(), strided(torch.zeros_like(a))):
            version = out._version
            assert dpa.ops.elementwise_mult(a, b, out=out) is out
            assert torch.equal(out, a * b)
            assert out._version == version + 1


def test_out_may_be_an_input(device):
    a, b = torch.randn(2, 40, device=device).unbind()
    expected = a * b
    torch.ops.dpa.elementwise_mult.out(a, b, out=a)
    assert torch.equal(a, expected)


def test_out_is_rejected(device):
    a, b = torch.randn(2, 6, device=device).unbind()
    call = torch.ops.dpa.elementwise_mult.out
    head = r"^dpa::elementwise_mult: out must "
    with pytest.raises(RuntimeError, match=head + r"have the shape of a \[6\], got \[5\]"):
        call(a, b, out=torch.empty(5, device=device))
    with pytest.raises(RuntimeError, match=head + r"have the dtype of a"):
        call(a, b, out=torch.empty(6, device=device, dtype=torch.half))
    with pytest.raises(RuntimeError, match=head + r"have one place in memory"):
        call(a, b, out=torch.empty(1, device=device).expand(6))
    memory = torch.randn(7, device=device)
    with pytest.raises(RuntimeError, match=head + r"be a itself or share no memory"):
        call(memory[:-1], b, out=memory[1:])
    with pytest.raises(RuntimeError, match=head + r"not be given where a gradient"):
        call(a.requires_grad_(), b, out=torch.empty(6, device=device))


def test_views_that_negate_or_conjugate(device):
    """PyTorch's own fallback corrupts memory with an out that is one."""
    z = torch.randn(6, dtype=torch.complex64, device=device)
    lazy, b = z.conj().imag, torch.randn(6, device=device)
    assert lazy.is_neg()
    assert torch.equal(torch.ops.dpa.elementwise_mult(lazy, b), lazy * b)
    out = torch.empty_like(b)
    torch.ops.dpa.elementwise_mult.out(lazy, b, out=out)
    assert torch.equal(out, lazy * b)
    head = r"^dpa::elementwise_mult: "
    with pytest.raises(RuntimeError, match=head + r"out must hold its values as they are"):
        torch.ops.dpa.elementwise_mult.out(b, b, out=lazy)
    for args in ((z, z, z.conj()), (z.conj(), z, z)):
        with pytest.raises(RuntimeError, match=head + r"a must be .*got ComplexFloat"):
            torch.ops.dpa.elementwise_mult.out(*args[:2], out=args[2])


def test_out_stops_a_backward_that_needs_the_old_value(device):
    x = torch.randn(4, device=device, requires_grad=True)
    saved = x.exp()  # exp saves its output
    with torch.no_grad():
        torch.ops.dpa.elementwise_mult.out(saved.detach(), saved.detach(), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_out_compiles(device):
    def double(a, b):
        out = torch.empty_like(a)
        torch.ops.dpa.elementwise_mult.out(a, b, out=out)
        return out + 1

    a, b = torch.randn(2, 6, device=device).unbind()
    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a, b), a * b + 1)


def test_special_values(device):
    values = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38], device=device
    )
    a, b = values.repeat(7), values.repeat_interleave(7)
    got = torch.ops.dpa.elementwise_mult(a, b)
    torch.testing.assert_close(got, a * b, rtol=0, atol=0, equal_nan=True)


def test_autocast_promotes(device):
    a, b = torch.randn(2, 6, device=device).unbind()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.ops.dpa.elementwise_mult(a.bfloat16(), b)
    assert torch.equal(got, a.bfloat16().float() * b)
