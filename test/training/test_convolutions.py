"""Convolutions as captures of encoders record them: PyTorch's values and gradients."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from dpa.training.convolutions import Convolutions

# Channels, height, width, output channels, size of the window, padding
_FEW = [
    *((3, 84, 84, 8, 7, 3), (3, 85, 91, 8, 7, 3), (1, 17, 20, 4, 5, 2), (4, 9, 8, 4, 5, 0)),
    *((3, 20, 31, 4, 6, 3), (2, 12, 13, 4, 7, 2), (3, 7, 7, 4, 7, 0), (3, 8, 9, 4, 7, 1)),
]


def _compare(inputs, weights, run, want):
    """Values and the gradients of all inputs that want one."""
    wanted = [t for t in (*inputs, *weights) if t.requires_grad]
    got, want = run(*inputs, *weights), want(*inputs, *weights)
    grad = torch.randn_like(want)
    assert_close(got, want)
    found, right = (torch.autograd.grad(out, wanted, grad) for out in (got, want))
    for tensor, a, b in zip(wanted, found, right, strict=True):
        assert_close(a, b)
        if any(tensor is weight for weight in weights):
            assert a.is_contiguous()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sizes", _FEW, ids=str)
def test_few_channels_are_read_as_they_lie(device, sizes, known):
    torch.manual_seed(0)
    channels, height, width, out, window, padding = sizes
    options = {"device": device, "dtype": torch.float64}
    images = torch.randn(2, channels, height, width, **options)
    weight = torch.randn(out, channels, window, window, **options, requires_grad=True)
    convolve = Convolutions([weight] if known else [])

    def run(x, w):
        found = convolve(x, w, None, (2, 2), (padding, padding))
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert found.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()
        return found

    _compare([images], [weight], run, lambda x, w: F.conv2d(x, w, None, 2, padding))


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 3},
        {"stride": (2, 1), "padding": (3, 2)},
        {"padding": "same"},
        {"dilation": 2, "padding": (1,)},
        {"groups": 3},
        {"bias": True, "stride": 2},
    ],
    ids=str,
)
def test_whatever_a_convolution_is_called_with(device, options):
    torch.manual_seed(0)
    new = {"device": device, "dtype": torch.float64, "requires_grad": True}
    images = torch.randn(2, 3, 20, 22, **new)
    weight = torch.randn(6, 3 // options.get("groups", 1), 7, 7, **new)
    if options.get("bias"):
        options = options | {"bias": torch.randn(6, **new)}
    convolve = Convolutions([weight])
    _compare(
        [images], [weight], lambda *t: convolve(*t, **options), lambda *t: F.conv2d(*t, **options)
    )


def test_gradients_of_many_weights(device):
    """More than run beside at once; one of the weights is used twice, one has no gradient."""
    torch.manual_seed(0)
    new = {"device": device, "dtype": torch.float64}
    images = torch.randn(2, 8, 9, 9, **new, requires_grad=True)
    weights = [torch.randn(8, 8, 3, 3, **new).mul_(0.1).requires_grad_() for _ in range(6)]
    weights[3].requires_grad_(False)
    convolve = Convolutions(weights)

    def chain(convolution):
        def run(x, *weights):
            for weight in (*weights, weights[1]):
                x = convolution(x, weight, None, 1, 1).tanh()
            return x

        return run

    _compare([images], weights, chain(convolve), chain(F.conv2d))


def test_second_derivatives(device):
    torch.manual_seed(0)
    new = {"device": device, "dtype": torch.float64, "requires_grad": True}
    images, weight = torch.randn(1, 4, 6, 6, **new), torch.randn(4, 4, 3, 3, **new)

    def run(x, w):
        return Convolutions([weight])(x, w, None, 1, 1).square()

    # PyTorch's own convolutions, which on a GPU repeat their bits where they are asked to.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        torch.autograd.gradgradcheck(run, (images, weight), nondet_tol=1e-12)


def test_replays_over_poisoned_memory(cuda):
    """The stream beside is part of a captured pass, and every replay gives the same bits."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 24, 24, device=cuda)
    weights = [torch.randn(16, 16, 3, 3, device=cuda).mul_(0.1).requires_grad_() for _ in range(5)]
    weights.insert(0, torch.randn(16, 3, 7, 7, device=cuda).mul_(0.1).requires_grad_())
    found = []

    def run():
        convolve, x = Convolutions(weights), images
        with torch.autocast("cuda", torch.bfloat16):
            x = convolve(x, weights[0], None, 2, 3)
            for weight in weights[1:]:
                x = convolve(x, weight, None, 1, 1).relu()
        found[:] = torch.autograd.grad(x.float().square().sum(), weights)

    run()
    want = [g.clone() for g in found]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(4):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)
