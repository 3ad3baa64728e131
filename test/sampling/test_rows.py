"""Convolutions of a trace as GEMMs, against PyTorch's own."""

import itertools

import pytest
import torch

from dpa.sampling import rows

aten = torch.ops.aten


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("kernel", "stride"), [*itertools.product((1, 2, 3, 4, 5, 6), (1, 2, 3))])
def test_they_are_pytorchs(kernel, stride, transposed):
    torch.manual_seed(kernel)
    x = torch.randn(2, 3, 11, dtype=torch.float64)
    weight = torch.randn(*((3, 4) if transposed else (4, 3)), kernel, dtype=torch.float64)
    for padding, bias in itertools.product(range(min(3, kernel)), (None, weight.new_ones(4))):
        given = x, weight, bias, [stride], [padding], [1], transposed, [0], 1
        found = rows.parts()[aten.convolution.default](*given)
        if transposed and kernel % stride:
            assert found is NotImplemented
            continue
        torch.testing.assert_close(found, aten.convolution(*given), rtol=1e-12, atol=1e-12)
        assert found.stride(1) == 1  # the channels of a place lie side by side


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((1, 3, 300), {}),  # so many places that PyTorch's convolutions are as fast
        ((1, 3, 11), {"dilation": [2]}),
        ((1, 4, 11), {"groups": 2}),
        ((1, 3, 11), {"transposed": True, "stride": [2], "output_padding": [1]}),
        ((1, 3, 5, 5), {}),
    ],
)
def test_what_stays_as_it_is(shape, change):
    given = {"stride": [1], "padding": [1], "dilation": [1], "transposed": False}
    given |= {"output_padding": [0], "groups": 1} | change
    weight = torch.randn(4, shape[1] // given["groups"], *[3] * (len(shape) - 2))
    found = rows.parts()[aten.convolution.default](torch.randn(shape), weight, None, **given)
    assert found is NotImplemented


@pytest.mark.parametrize("film", [False, True])
@pytest.mark.parametrize("widths", [(16, 16), (8, 16)])
def test_blocks_are_the_ops(widths, film):
    """The ops of a residual block and of its half, with and without FiLM."""
    torch.manual_seed(1)
    (wide, out), randn = widths, torch.randn
    x, scale, shift = randn(2, wide, 6), randn(2, out), randn(2, out)
    norm = [1 + randn(out), randn(out)]
    first = [randn(out, wide, 5), randn(out), *norm]
    second = [randn(out, out, 5), randn(out), *norm[::-1]]
    residual = [None, None] if wide == out else [randn(out, wide, 1), randn(out)]
    given = (scale, shift) if film else (None, None)
    block, half = torch.ops.dpa.residual_block1d.default, torch.ops.dpa.conv1d_gnm.default
    for op, arguments in (
        (block, (x, *first, *second, *residual, 8, 1e-5, *given)),
        (block, (x[:, 3:], *first, *second, *residual, 8, 1e-5, *given, x[:, :3])),
        (half, (x, *first, 4, 1e-5, *given, randn(2, out, 6))),
    ):
        expected = op(*arguments)
        torch.testing.assert_close(rows.parts()[op](*arguments), expected, rtol=1e-4, atol=1e-4)
