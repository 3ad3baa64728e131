"""Copies of weights in another order and dtype, all at once."""

import pytest
import torch
from torch.testing import assert_close

_LAST, _FIRST = torch.channels_last, torch.contiguous_format
_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
_SHAPES = [(64, 3, 7, 7), (8, 64, 3, 3), (5, 700, 3, 3), (3, 5, 1, 1), (1, 1, 2, 3), (0, 4, 3, 3)]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("given", _DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_values(device, given, dtype, channels_last):
    """In either order already, strided, empty, and more than a launch takes."""
    orders = (_FIRST, _LAST) if channels_last else (_LAST, _FIRST)
    weights = [
        torch.randn(shape, device=device).to(given).contiguous(memory_format=order)
        for order in orders
        for shape in _SHAPES
    ]
    weights += [torch.randn(4, 6, 5, 3, device=device).to(given).transpose(2, 3), *weights * 6]
    copies = torch.ops.dpa.weights_in_order(weights, dtype, channels_last)
    for weight, copy in zip(weights, copies, strict=True):
        assert_close(copy, weight.to(dtype), rtol=0, atol=0)
        assert copy.is_contiguous(memory_format=_LAST if channels_last else _FIRST)
        assert not copy.numel() or copy.data_ptr() != weight.data_ptr()


def test_opcheck_and_meta(device):
    weights = [torch.randn(4, 6, 3, 3, device=device), torch.randn(2, 4, 1, 1, device=device)]
    op = torch.ops.dpa.weights_in_order.default
    torch.library.opcheck(op, (weights, torch.bfloat16, True))
    for copy in op([w.to("meta") for w in weights], torch.bfloat16, True):
        assert copy.dtype == torch.bfloat16 and copy.is_contiguous(memory_format=_LAST)


@pytest.mark.parametrize("to", ["cpu", "meta"])
def test_rejected(to):
    op, weight = torch.ops.dpa.weights_in_order, torch.randn(4, 6, 3, 3, device=to)
    head = "^dpa::weights_in_order: "
    for match, weights, dtype in (
        (r"weights must have 4 dimensions.*got shape \[6, 3, 3\]", [weight, weight[0]], torch.half),
        (r"weights must be float64.*got Int", [weight.int()], torch.half),
        (r"dtype must be float64, float32.*got Int", [weight], torch.int32),
    ):
        with pytest.raises(RuntimeError, match=head + match):
            op(weights, dtype, True)


def test_its_gradient_is_the_callers(device):
    weight = torch.randn(4, 6, 3, 3, device=device, requires_grad=True)
    (copy,) = torch.ops.dpa.weights_in_order([weight], torch.float32, True)
    with pytest.raises(RuntimeError, match="not implemented"):
        copy.sum().backward()
