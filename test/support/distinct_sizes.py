"""Arguments of every op that has derivatives, in which no two dimensions share a size.

A rule that takes one dimension for another then answers in another shape, or with other values.
"""

from collections.abc import Callable

import torch

EXAMPLES = 7
_BATCH, _IN, _OUT, _GROUPS, _LENGTH = 2, 6, 8, 4, 9
_NEW = Callable[..., torch.Tensor]


def _pair(new: _NEW) -> tuple:
    return new(_BATCH, _IN), new(_BATCH, _IN)


def _norm(new: _NEW) -> tuple:
    x = new(_BATCH, _OUT, _LENGTH)
    film = new(_BATCH, _OUT), new(_BATCH, _OUT)
    return x, _GROUPS, new(_OUT), new(_OUT), 1e-5, *film, new(*x.shape)


def _norm_act(new: _NEW) -> tuple:
    x = new(_BATCH, _OUT, 9, 11)
    return x, _GROUPS, new(_OUT), new(_OUT), 1e-5, new(*x.shape), False


def _batch_norm(new: _NEW) -> tuple:
    x, _, *parameters = _norm_act(new)
    return x, *parameters


def _batch_norm_backward(new: _NEW) -> tuple:
    x, *rest = _batch_norm(new)
    out, *statistics = torch.ops.dpa.batch_norm_act_forward(x, *rest)
    return new(*out.shape), x, *statistics, *rest, [True] * 4


def _pool_backward(new: _NEW) -> tuple:
    x = new(_BATCH, 3, 9, 11)
    _, taps = torch.ops.dpa.max_pool2d_forward(x, 3, 2, 1)
    return new(*taps.shape), taps, x, 3, 2, 1


def _conv(new: _NEW, taps: int, stride: int = 1, transposed: bool = False) -> tuple:
    channels = (_IN, _OUT) if transposed else (_OUT, _IN)
    x, weight = new(_BATCH, _IN, _LENGTH), new(*channels, taps)
    return x, weight, new(_OUT), stride, taps // 2, transposed


def _conv_gnm(new: _NEW, taps: int) -> tuple:
    x, weight, bias, *_ = _conv(new, taps)
    _, groups, *norm, film1, film2, residual = _norm(new)
    return x, weight, bias, *norm[:2], groups, norm[2], film1, film2, residual


def _block(new: _NEW, taps: int) -> tuple:
    halves = [
        (new(_OUT, channels, taps), new(_OUT), new(_OUT), new(_OUT)) for channels in (_IN, _OUT)
    ]
    residual = new(_OUT, _IN, 1), new(_OUT)
    film = new(_BATCH, _OUT), new(_BATCH, _OUT)
    x, skip = new(_BATCH, _IN - 1, _LENGTH), new(_BATCH, 1, _LENGTH)
    return x, *halves[0], *halves[1], *residual, _GROUPS, 1e-5, *film, skip


def _linear(new: _NEW) -> tuple:
    weights = [new(rows, 10) for rows in (3, 5)]
    return new(_BATCH, _IN), weights, [new(3), new(5)], new(_BATCH, 10 - _IN)


def _cell(new: _NEW) -> tuple:
    return new(_BATCH, 5), new(9, 8), new(9), new(_BATCH, 3), new(_BATCH, 3)


def _image(new: _NEW, groups: int) -> tuple:
    x, weight = new(_BATCH, _IN, 9, 11), new(_OUT, _IN, 3, 5)
    ends = new(_OUT), new(_OUT), new(_OUT), new(_BATCH, _OUT, 5, 5)
    return x, weight, *ends, groups, 1e-5, 2, 1, False


def _denoise(new: _NEW, timestep) -> tuple:
    x = new(_BATCH, 3, _IN)
    return x, new(*x.shape), new(4, 5).abs() + 0.5, torch.tensor(timestep), new(*x.shape)


def _step(new: _NEW, index) -> tuple:
    x = new(_BATCH, 3, _IN)
    return x, new(*x.shape), new(4, 6), torch.tensor(index), new(*x.shape), 1.0


def _after(op: str, args: tuple, new: _NEW, kept: int | None = None, mask: int = 0) -> tuple:
    """Arguments of an op's backward: gradients and what its forward kept, as if it had run.

    Args:
        op: that is called for the shapes.
        args: of the forward.
        new: makes a tensor.
        kept: outputs from here on are kept; None: nothing is.
        mask: how many gradients there are.

    """
    out = getattr(torch.ops.dpa, op)(*args)
    out = out if isinstance(out, tuple) else (out,)
    grads, rest = out[:kept], () if kept is None else out[kept:]
    random = lambda x: new(*x.shape).to(x.dtype)  # noqa: E731
    return *map(random, grads), *args, *map(random, rest), [True] * mask


def _backward(op: str, args: tuple, new: _NEW, mask: int) -> tuple:
    return _after(op, args, new, None, mask)


def calls(new: _NEW) -> dict[str, tuple[str, tuple]]:
    """Name of a case: the op and its arguments, ``new`` making the floating tensors."""
    cases = {
        "elementwise_mult": _pair(new),
        "fused_relu_add": (*_pair(new), 0.5),
        "sinusoidal_embedding": (new(_BATCH, _IN), 10),
        "group_norm_mish": _norm(new),
        "group_norm_mish_backward": _backward("group_norm_mish", _norm(new), new, 5),
        "group_norm_act": _norm_act(new),
        "group_norm_act_backward": _backward("group_norm_act", _norm_act(new), new, 4),
        "batch_norm_act": _batch_norm(new),
        "batch_norm_act_forward": _batch_norm(new),
        "batch_norm_act_backward": _batch_norm_backward(new),
        "conv2d": (new(_BATCH, 3, 9, 11), new(_OUT, 3, 5, 4), 2, 1),
        "conv2d_backward": _backward(
            "conv2d", (new(_BATCH, 3, 9, 11), new(_OUT, 3, 5, 4), 2, 1), new, 2
        ),
        "max_pool2d": (new(_BATCH, 3, 9, 11), 3, 2, 1),
        "max_pool2d_forward": (new(_BATCH, 3, 9, 11), 3, 2, 1),
        "max_pool2d_backward": _pool_backward(new),
        "conv2d_norm_act": _image(new, 0),
        "conv2d_norm_act-groups": _image(new, _GROUPS),
        "spatial_softmax": (new(_BATCH, 3, 4, 5), new(1).abs() + 0.5),
        "resize_crop_normalize": (
            *(new(_BATCH, 3, 9, 11), (5, 7), (1, 2, 4, 5)),
            *(new(3), new(3).abs() + 0.5),
        ),
        "joint_linear": _linear(new),
        "joint_linear-mish": (*_linear(new), True),
        "joint_linear_backward": _backward("joint_linear", _linear(new), new, 4),
        "joint_linear_backward-mish": (*_backward("joint_linear", _linear(new), new, 4), True),
        "lltm": _cell(new),
        "lltm_forward": _cell(new),
        "lltm_backward": _after("lltm_forward", _cell(new), new, 2, 5),
        "denoise": _denoise(new, 3),
        "denoise-each": _denoise(new, [0, 2]),
        "denoise_backward": _backward("denoise", _denoise(new, [2]), new, 4),
        "scheduler_step": _step(new, [1]),
        "scheduler_step-each": _step(new, [3, 1]),
        "scheduler_step_backward": _backward("scheduler_step", _step(new, 2), new, 4),
    }
    block = _block(new, 3)
    cases["residual_block1d_forward"] = block
    cases["residual_block1d_backward"] = _after("residual_block1d_forward", block, new, 1, 14)
    # Its residual has no gradient of its own there.
    cases["group_norm_mish_backward"] = tuple(
        x for i, x in enumerate(cases["group_norm_mish_backward"]) if i != 8
    )
    for taps in (1, 3, 5):
        cases |= {
            f"conv1d-{taps}": _conv(new, taps, stride=2),
            f"conv1d-transposed-{taps}": _conv(new, taps, stride=2, transposed=True),
            f"conv1d_forward-{taps}": _conv(new, taps),
            f"conv1d_backward-{taps}": _conv_backward(new, taps, False),
            f"conv1d_backward-transposed-{taps}": _conv_backward(new, taps, True),
            f"conv1d_gnm-{taps}": _conv_gnm(new, taps),
            f"residual_block1d-{taps}": _block(new, taps),
        }
    return {name: (name.split("-")[0], args) for name, args in cases.items()}


def _conv_backward(new: _NEW, taps: int, transposed: bool) -> tuple:
    grad, *args, packed, mask = _after("conv1d_forward", _conv(new, taps, 2, transposed), new, 1, 3)
    return grad, *args[:3], packed, *args[3:], mask
