"""Whether values are others than those kept, by their bytes."""

import pytest
import torch

_OP = torch.ops.dpa.values_differ


def _kept(values):
    """The reference of what is kept: the bytes of all values, one after the other."""
    return torch.cat([torch.cat([value.reshape(-1)]).view(torch.uint8) for value in values])


def _values(device):
    """Views of every dtype, dense and strided, of no element and of one."""
    weight = torch.randn(40, 30, 3, device=device)
    ints = torch.randint(-9, 9, (200,), device=device)
    return [
        weight.view(-1)[::7],
        weight.as_strided((30,), (93,), 1),
        weight[0, 0, :1],
        weight[:0, 0, 0],
        torch.tensor(float("nan"), device=device),
        torch.tensor([float("nan"), -0.0], device=device)[1:],
        weight.bfloat16()[:, 3, 1],
        weight.half().view(-1),
        weight.double()[1, :, 0],
        ints[::3],
        ints.short()[1::2],
        ints.to(torch.int8)[::2],
        ints.bool()[5::5],
        torch.randn(20, dtype=torch.complex128, device=device)[::3],
        torch.randn(20, dtype=torch.complex64, device=device),
    ]


def test_each_element_of_each_view_shows(device):
    values = _values(device)
    kept = _kept(values)
    assert not _OP(values, kept)
    assert not _OP(values, kept.clone())
    for at in range(len(kept)):
        other = kept.clone()
        other[at] ^= 64
        assert _OP(values, other), at


def test_many_threads_find_one_element(device):
    weights = [torch.randn(300, 70, device=device) for _ in range(9)]
    values = [weight.t().reshape(-1, 10)[:, 3] for weight in weights]
    values += [weight[:, 5] for weight in weights]
    kept = _kept(values)
    assert not _OP(values, kept)
    for weight in weights:
        weight[200, 5] += 1
        assert _OP(values, kept)
        weight[200, 5] -= 1
        kept = _kept(values)


def test_each_of_many_views_shows(device):
    """More views than one launch takes."""
    rows = torch.randn(300, 40, device=device)
    values, kept = [row[::3] for row in rows], _kept([row[::3] for row in rows])
    assert not _OP(values, kept)
    for number in range(0, 300, 7):
        before = rows[number, 39].clone()
        rows[number, 39] += 1
        assert _OP(values, kept), number
        rows[number, 39] = before
    assert not _OP(values, kept)


def test_no_values(device):
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    assert not _OP([], nothing)
    assert not _OP([nothing], nothing)


def test_rejected(device):
    values = [torch.zeros(4, device=device), torch.zeros(2, device=device).double()]
    kept = _kept(values)
    for wrong in (kept[1:], kept.float(), kept[None], torch.cat([kept, kept])[::2]):
        with pytest.raises(RuntimeError, match="dpa::values_differ: kept must "):
            _OP(values, wrong)
    with pytest.raises(RuntimeError, match="values must have at most one dimension each, got"):
        _OP([values[0][None], values[1]], kept)


def test_conjugates_count_by_their_values(device):
    numbers = torch.randn(4, dtype=torch.complex64, device=device)
    assert not _OP([numbers.conj()], _kept([torch.cat([numbers.conj()]).resolve_conj()]))
    assert _OP([numbers.conj()], _kept([numbers]))


def test_registered(device):
    values = [torch.zeros(4, device=device), torch.zeros(2, device=device).double()]
    kept = _kept(values)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_OP.default, (values, kept), test_utils=checks)
    with torch.inference_mode():
        assert not _OP(values, kept)
    assert not _OP([values[0].requires_grad_(), values[1]], kept).requires_grad
