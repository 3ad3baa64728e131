"""Packed weights say what they are: other architectures and dtypes refuse them."""

import functools
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dpa

_OPS = torch.ops.dpa
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _config(down_dims, *, groups=8, kernel=3, cond=7, scale=1):
    return [2, kernel, groups, 16, cond, scale, *down_dims]


_CONFIGS = [
    _config(dims, groups=groups, kernel=kernel, cond=cond)
    for dims, groups, kernel, cond in itertools.product(
        [(16,), (16, 32), (32, 16), (32, 32), (16, 16, 32), (16, 32, 16)],
        [1, 2, 4, 8, 16],
        [1, 3],
        [0, 7],
    )
]


def _weights(config, device):
    """Tensors that a pack of this architecture takes."""
    action, kernel, _, *others = config
    named = _named(device, action, kernel, *others)
    return [named[name] for name in _OPS.unet1d_weight_names(config)]


@functools.cache
def _named(device, action, kernel, step, cond, scale, *down_dims):
    """All weights of a network, whose shapes are the same for any number of groups."""
    with torch.device(device):
        unet = dpa.nn.ConditionalUnet1D(
            action,
            global_cond_dim=cond or None,
            diffusion_step_embed_dim=step,
            down_dims=down_dims,
            kernel_size=kernel,
            cond_predict_scale=bool(scale),
        )
    return {name: p.detach() for name, p in unet.named_parameters()}


def _lengths(pack, device):
    lengths = {}
    for config in _CONFIGS:
        weights = _weights(config, device)
        for dtype in _DTYPES:
            lengths[(*config, dtype)] = pack(weights, config, dtype).numel()
    return lengths


def test_lengths_tell_networks_and_dtypes_apart():
    """Without a read of the bytes, which would stop the host that a GPU works for."""
    lengths = _lengths(_OPS.unet1d_pack, "meta")
    assert len(set(lengths.values())) >= 0.98 * len(lengths)
    for config in _CONFIGS:
        assert len({lengths[(*config, dtype)] for dtype in _DTYPES}) == len(_DTYPES)
        others = [_config(config[6:], groups=g, kernel=config[1]) for g in (1, 2, 4, 8, 16)]
        assert len({lengths[(*c, torch.float16)] for c in others}) == len(others)


def test_lengths_tell_batch_networks_apart():
    with FakeTensorMode():
        lengths = {}
        for config in _CONFIGS:
            weights = [torch.empty(w.shape, device="cpu") for w in _weights(config, "meta")]
            lengths[tuple(config)] = _OPS.unet1d_batch_pack(weights, config, torch.half).numel()
    assert len(set(lengths.values())) >= 0.99 * len(lengths)


def _run(config, packed, dtype):
    sample, cond = torch.zeros(1, 8, config[0]), torch.zeros(1, config[4])
    return _OPS.unet1d(sample, torch.zeros(1), cond if config[4] else None, packed, config, dtype)


@pytest.mark.parametrize("made, read", itertools.permutations(_DTYPES, 2), ids=str)
def test_dtypes_refuse_one_another(made, read):
    config = _config((16, 32))
    packed = _OPS.unet1d_pack(_weights(config, "cpu"), config, made)
    assert _run(config, packed, made).isfinite().all()
    with pytest.raises(RuntimeError, match=r"dpa::unet1d: packed must be the \d+ bytes"):
        _run(config, packed, read)


def test_the_stamp_tells_what_a_length_does_not():
    """Bytes of the right number, packed for another network or dtype, on the CPU."""
    config, other = _config((32, 32), groups=2), _config((32, 32), groups=4)
    own = _OPS.unet1d_pack(_weights(config, "cpu"), config, torch.half)
    for packed in (
        _OPS.unet1d_pack(_weights(config, "cpu"), config, torch.bfloat16),
        _OPS.unet1d_pack(_weights(other, "cpu"), other, torch.half),
    ):
        resized = torch.zeros_like(own)
        n = min(len(own), len(packed))
        resized[:n] = packed[:n]
        with pytest.raises(RuntimeError, match=r"packed must be what unet1d_pack made on the CPU"):
            _run(config, resized, torch.half)
