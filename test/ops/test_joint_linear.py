import gc

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from proofs import OpProofs, Sample
from strategies import SIZES, roundoff
from tolerances import gradient_tolerance, tolerance

import dpa


def _sample(device, dtype, batch, c_in, *outs, rest=0, mish=False):
    new = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    weights = [new(n, c_in + rest) / 3 for n in outs]
    args = (new(batch, c_in), weights, [new(n) for n in outs])
    if mish:
        return Sample((*args, new(batch, rest) if rest else None, True))
    return Sample((*args, new(batch, rest)) if rest else args)


class TestJointLinear(OpProofs):
    op = torch.ops.dpa.joint_linear
    reference = dpa.reference.joint_linear

    @staticmethod
    def samples(device, dtype):
        yield _sample(device, dtype, 3, 5, 4, 1, 7)
        yield _sample(device, dtype, 2, 8, 16)
        yield _sample(device, dtype, 1, 3, 2, 2, 2, 2)
        yield _sample(device, dtype, 2, 8, 4, 16, rest=5)
        yield _sample(device, dtype, 3, 5, 4, 1, mish=True)
        yield _sample(device, dtype, 2, 8, 16, 8, rest=8, mish=True)

    @staticmethod
    def rejected(device):
        new = lambda *size: torch.randn(size, device=device)  # noqa: E731
        x, ws, bs = new(2, 3), [new(4, 3), new(5, 3)], [new(4), new(5)]
        head = r"^dpa::joint_linear: "
        yield head + r"input must have 2 dimensions", Sample((x[0], ws, bs))
        yield head + r"weights must name at least one layer, got none", Sample((x, [], []))
        yield head + r"biases must be as many as the 2 weights, got 1", Sample((x, ws, bs[:1]))
        yield (
            head + r"weights must have shape \(C_i, C_in\) with C_in = 3, got \[5, 2\]",
            Sample((x, [ws[0], new(5, 2)], bs)),
        )
        yield (
            head + r"weights must have the dtype of input",
            Sample((x, [w.half() for w in ws], bs)),
        )
        yield (
            head + r"biases must have shape \(C_i\) = \[5\], got \[4\]",
            Sample((x, ws, [bs[0]] * 2)),
        )
        yield head + r"biases must have the dtype", Sample((x, ws, [bs[0], bs[1].double()]))
        head += "rest must have "
        yield head + r"shape \(B, C_rest\) with B = 2, got \[3, 1\]", Sample((x, ws, bs, new(3, 1)))
        yield head + r"the dtype of input", Sample((x, ws, bs, new(2, 1).double()))
        head = r"^dpa::joint_linear: weights must "
        yield head + r"have shape .* C_in = 4, got \[4, 3\]", Sample((x, ws, bs, new(2, 1)))
        if device.type == "cuda":
            yield head + r"be on the device", Sample((x, [ws[0], ws[1].cpu()], bs))

    @staticmethod
    def batches(device):
        for batch in (2, 3, 5, 6):
            yield _sample(device, torch.float32, batch, 3, 4, 8, rest=2)

    @staticmethod
    def drawn(d):
        """One to five layers on one input."""
        batch, inputs = d(SIZES), d(SIZES)
        outputs = d(st.lists(SIZES, min_size=1, max_size=5), "outputs")
        # As with lltm: GEMMs of bfloat16 on a CPU.
        limits = {"low": -2.0, "high": 2.0} if d.dtype == torch.bfloat16 else {}
        others = d(st.sampled_from([0, 1, 8]), "columns of rest")
        weights = [d.tensor(count, inputs + others, **limits) for count in outputs]
        rest = d.tensor(batch, others, **limits) if others else None
        input, biases = d.tensor(batch, inputs, **limits), [d.tensor(count) for count in outputs]
        mish = inputs > 0 and d(st.booleans(), "mish")  # or no rounding to count, below
        return Sample((input, weights, biases, rest, mish))

    @staticmethod
    def rounding(sample, finite):
        """Of the Mish, which the layers read in the input's dtype."""
        input, weights, _, rest, mish = finite.args
        if not mish:
            return 0.0
        read = F.mish(input if rest is None else torch.cat([input, rest], 1)).abs()
        terms = read @ torch.cat(weights).abs().T
        return roundoff(sample) / 2 * terms.max().item() if terms.numel() else 0.0


# batch, channels in, channels out of each layer
SHAPES = [
    (2, 16, (24, 8)),
    (3, 5, (7, 16, 1)),
    (70, 136, (64, 128, 520)),
    (256, 1284, (512,) * 5),
    (4, 8, (8,) * 60),
    (0, 8, (8, 16)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_beside_float32_parameters(device, dtype, shape):
    """Against float64; as in a U-Net's training under autocast."""
    batch, c_in, outs = shape
    x = torch.randn(batch, c_in, device=device, dtype=dtype)
    # Values that the input's dtype can hold: the GEMMs read the weights in it.
    held = lambda *size: torch.randn(size, device=device).to(dtype).float()  # noqa: E731
    weights, biases = [held(n, c_in) / 64 for n in outs], [held(n) for n in outs]
    leaves = [t.detach().requires_grad_() for t in (x, *weights, *biases)]
    n = len(outs)
    out = torch.ops.dpa.joint_linear(leaves[0], leaves[1 : n + 1], leaves[n + 1 :])
    grad = torch.randn_like(out)
    out.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = dpa.reference.joint_linear(exact[0], exact[1 : n + 1], exact[n + 1 :])
    expected.backward(grad.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), **tolerance(dtype))
    for leaf, reference in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.is_contiguous()
        torch.testing.assert_close(
            leaf.grad, reference.grad.to(leaf.dtype), **gradient_tolerance(dtype)
        )


def _replayed(run):
    """What a replay of a captured call writes over NaN."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for x in got:
        x.detach().fill_(torch.nan)
    graph.replay()
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own, others", [(8, 16), (256, 1028), (5, 2), (0, 8), (16, 0)])
@pytest.mark.parametrize("wanted", ["first", "rest", "both"])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("mish", [False, True])
def test_an_input_in_two_parts(device, dtype, own, others, wanted, same, captured, mish):
    """Whichever part wants a gradient gets that of the input in one piece, and only that part."""
    if captured and device.type != "cuda":
        pytest.skip("the CPU has no graphs")
    outs, batch = (24, 512, 1, 8), 33
    names = ["first", "rest"] if wanted == "both" else [wanted]
    x = torch.randn(batch, own + others, device=device, dtype=dtype)
    type = dtype if same else torch.float32  # of the parameters
    held = lambda *size: torch.randn(size, device=device).to(dtype).to(type)  # noqa: E731
    weights, biases = [held(n, own + others) / 64 for n in outs], [held(n) for n in outs]
    grad = torch.randn(batch, sum(outs), device=device, dtype=dtype)
    whole, *exact = (t.double().requires_grad_() for t in (x, *weights))
    expected = dpa.reference.joint_linear(whole, exact, [b.double() for b in biases], None, mish)
    of_whole, *of_weights = torch.autograd.grad(expected, [whole, *exact], grad.double())
    references = dict(zip(("first", "rest"), of_whole.split([own, others], 1), strict=True))

    def run():
        # Leaves of its own: a capture's backward must not lead to those of another stream.
        # GEMMs take a first part without gaps, and a rest of any strides.
        first, rest = x.split([own, others], 1)
        parts = {"first": first.clone(), "rest": rest.clone() if same else rest}
        leaves = [parts[name].detach().requires_grad_() for name in names]
        parts |= dict(zip(names, leaves, strict=True))
        trained = [w.detach().requires_grad_() for w in weights]
        out = torch.ops.dpa.joint_linear(parts["first"], trained, biases, parts["rest"], mish)
        return out, *torch.autograd.grad(out, [*leaves, *trained], grad)

    out, *got = _replayed(run) if captured else run()
    torch.testing.assert_close(out, expected.to(dtype), **tolerance(dtype))
    with torch.no_grad():
        parts = x.split([own, others], 1)
        mask = ["first" in names, False, False, "rest" in names]
        given = grad, parts[0], weights, biases, parts[1], mask, mish
        made = torch.ops.dpa.joint_linear_backward(*given)
    assert [d is not None for d in made] == mask
    for d, reference in zip(got, [references[n] for n in names] + of_weights, strict=True):
        assert d.is_contiguous()
        torch.testing.assert_close(d, reference.to(d.dtype), **gradient_tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_not_kept_twice(device, dtype):
    """The backward holds the arguments alone: what GEMMs read is made again."""
    x, weights, biases = _sample(device, torch.float32, 4, 8, 16, 24).requiring_grad().args
    x = x.detach().to(dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.ops.dpa.joint_linear(x, weights, biases)
    given = {t.data_ptr() for t in (x, *weights, *biases)}
    assert kept and all(t.data_ptr() in given for t in kept)


@pytest.mark.parametrize("mapped", ["input", "weight", "bias", "all"])
def test_vmap_equals_a_loop(device, mapped):
    """Values and gradients, each example with an input, a weight or a bias of its own."""
    new = lambda *size: torch.randn(size, device=device, dtype=torch.float64)  # noqa: E731
    examples = 3
    own = lambda name, *size: new(examples, *size) if mapped in (name, "all") else new(*size)  # noqa: E731
    x, w, b = own("input", 2, 5), own("weight", 4, 5), own("bias", 4)
    rest = new(3, 5), new(3)

    def loss(x, w, b):
        return torch.ops.dpa.joint_linear(x, [w, rest[0]], [b, rest[1]]).square().sum()

    step = torch.func.grad_and_value(loss, (0, 1, 2))
    dims = tuple(0 if mapped in (name, "all") else None for name in ("input", "weight", "bias"))
    got = torch.vmap(step, dims)(x, w, b)
    pick = lambda t, d, i: t if d is None else t[i]  # noqa: E731
    for i in range(examples):
        expected = step(*(pick(t, d, i) for t, d in zip((x, w, b), dims, strict=True)))
        each = torch.utils._pytree.tree_map(lambda t, i=i: t[i], got)
        torch.testing.assert_close(each, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's memory is counted")
def test_packed_weights_go_before_the_gradients_of_the_weights_come(device):
    """A backward's peak is the gradients alone, whether or not its graph is kept."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).major < 8:
        pytest.skip("weights are packed from compute capability 8.0 on")
    x, weights, biases = _sample(device, torch.bfloat16, 64, 1024, 4096, 4096).requiring_grad().args
    packed = sum(w.numel() for w in weights) * 2  # bytes, and so are the gradients of the weights

    def peak(keep):
        out = torch.ops.dpa.joint_linear(x, weights, biases)
        grad = torch.ones_like(out)
        torch.cuda.synchronize()
        torch.empty(1, device=device)  # takes back what branches of the call before had used
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, [x, *weights], grad, retain_graph=keep)
        return torch.cuda.max_memory_allocated() - before

    gc.collect()  # what other tests left must not go in between
    for keep in (False, True):
        peak(keep)
        assert packed <= peak(keep) < packed * 1.2


@pytest.mark.parametrize("bias", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("second", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast_of_mixed_dtypes(device, first, second, bias):
    """Under autocast weights and biases may be of any dtypes, as those of F.linear."""
    new = lambda dtype, *size: torch.randn(size, device=device).to(dtype).requires_grad_()  # noqa: E731
    x, weights = new(torch.float32, 3, 6), [new(first, 4, 6), new(second, 5, 6)]
    biases = [new(bias, 4), new(torch.float32, 5)]
    leaves = [x, *weights, *biases]
    with torch.autocast(device.type, torch.bfloat16):
        got = torch.ops.dpa.joint_linear(x, weights, biases)
        pairs = zip(weights, biases, strict=True)
        expected = torch.cat([torch.nn.functional.linear(x, w, b) for w, b in pairs], 1)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, **tolerance(torch.bfloat16))
    got, expected = (torch.autograd.grad(y.float().sin().sum(), leaves) for y in (got, expected))
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, **gradient_tolerance(torch.bfloat16))
