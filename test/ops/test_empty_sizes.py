"""A dimension of no elements, in one tensor or in all: Meta answers as the device's kernel does.

Where that raises, Meta raises too, and the error names the op.
"""

import pytest
import test_corrupted_calls as inference_ops
import torch
from distinct_sizes import calls
from proofs import Sample, call, proofs_by_op
from torch.utils._pytree import tree_leaves


def _samples(device):
    """Name, op and arguments of a valid call of every op."""
    for op, args in calls(torch.randn).values():
        move = lambda x: x.to(device)  # noqa: E731
        yield op, getattr(torch.ops.dpa, op), Sample(args).map(move)
    for name, sample in inference_ops._samples(device):
        if inference_ops._has_kernel(name, device):
            yield name, getattr(torch.ops.dpa, name), sample
    for name, proofs in proofs_by_op().items():
        for sample in proofs.samples(device, torch.float32):
            yield name, proofs.op, sample


def _emptied(sample):
    """The call with each size that occurs made 0 wherever it does, and in one place alone."""
    tensors = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    for size in {n for x in tensors for n in x.shape} - {0}:
        shape = lambda x, size=size: [0 if n == size else n for n in x.shape]  # noqa: E731
        yield sample.map(lambda x: x.new_zeros(shape(x)) if size in x.shape else x)  # noqa: B023
    for victim in tensors:
        for at in range(victim.dim()):
            empty = victim.new_zeros((*victim.shape[:at], 0, *victim.shape[at + 1 :]))
            yield sample.map(lambda x: empty if x is victim else x)  # noqa: B023


def _answer(op, sample):
    """Shapes and dtypes of the results, or the error."""
    try:
        results = tree_leaves(call(op, sample), is_leaf=lambda x: x is None)
    except (RuntimeError, NotImplementedError) as error:
        return error
    return [x if x is None else (x.shape, x.dtype) for x in results]


def test_meta_answers_as_the_kernels(device):
    count = 0
    for name, op, sample in _samples(device):
        for emptied in _emptied(sample):
            got = _answer(op, emptied)
            on_meta = _answer(op, emptied.map(lambda x: x.to("meta")))
            shapes = [tuple(x.shape) for x in tree_leaves((emptied.args, emptied.kwargs))
                      if isinstance(x, torch.Tensor)]  # fmt: skip
            if isinstance(got, Exception):
                assert isinstance(on_meta, Exception), (name, shapes, got, on_meta)
                assert "dpa::" in str(got), (name, shapes, got)
                assert "dpa::" in str(on_meta), (name, shapes, on_meta)
            else:
                assert got == on_meta, (name, shapes)
            count += 1
    assert count > 1000


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_without_channels_is_refused(device, transposed):
    """PyTorch's, of no input channel, gives no output channel either where the bias has eight."""
    with pytest.raises(RuntimeError, match="weight must have at least one channel each way"):
        shape = (0, 8, 3) if transposed else (8, 0, 3)
        torch.ops.dpa.conv1d(
            torch.zeros(2, 0, 9, device=device), torch.zeros(shape, device=device),
            torch.ones(8, device=device), 1, 1, transposed,
        )  # fmt: skip
