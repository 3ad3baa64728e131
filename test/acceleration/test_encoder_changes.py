"""What users do to an accelerated image encoder: its answers are a plain twin's."""

import copy
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from encoder_actions import ACTIONS, DiffusionRgbEncoder, group_norm
from torch import nn
from torch.testing import assert_close

import dpa
from dpa.nn.image_encoder import recognise
from dpa.packed.encoder_kernels import EncoderKernels
from dpa.tracking.replacing import replaced


def _twins(norm=nn.BatchNorm2d):
    """An accelerated encoder, whose comparison has passed, and its plain twin."""
    torch.manual_seed(0)
    plain = DiffusionRgbEncoder(5, norm).eval()
    fast = dpa.accelerate(copy.deepcopy(plain))
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        fast(images)
    assert replaced(fast, "forward").shadow.agreed
    return SimpleNamespace(encoder=fast), SimpleNamespace(encoder=plain), images


def _assert_twins(fast, plain, images):
    for seed in range(3):  # a comparison comes first, and answers of dpa's after it
        answers = []
        for policy in (fast, plain):
            torch.manual_seed(seed)
            with torch.no_grad():
                answers.append(policy.encoder(images))
        assert_close(*answers, rtol=1e-4, atol=1e-5)
    for a, b in zip(fast.encoder.buffers(), plain.encoder.buffers(), strict=True):
        assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ACTIONS)
def test_changes(name, seed):
    fast, plain, images = _twins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # falling back is right, where the answer is
        for policy in (fast, plain):
            ACTIONS[name](policy, random.Random(seed))
        _assert_twins(fast, plain, images)


def test_a_changed_group_norm():
    fast, plain, images = _twins(group_norm)
    for change in (
        lambda norm: setattr(norm, "num_groups", 2),
        lambda norm: setattr(norm, "eps", 0.5),
        lambda norm: setattr(norm, "weight", None),
        lambda norm: setattr(norm, "bias", None),
        lambda norm: setattr(norm, "bias", nn.Parameter(torch.ones(8))),
    ):
        for policy in (fast, plain):
            change(policy.encoder.backbone[1])
        _assert_twins(fast, plain, images)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_norm_of_another_dtype_is_refused_as_before(dtype):
    fast, plain, images = _twins()
    for policy in (fast, plain):
        policy.encoder.backbone[1].to(dtype)
        with pytest.raises(RuntimeError, match=r"dtype|must be torch\.float32"):
            policy.encoder(images)


def test_a_captured_call_goes_with_the_places_of_pixels(monkeypatch):
    """What holds packed weights for a graph says that the graph is of another encoder now."""
    encoder = DiffusionRgbEncoder(5).eval()
    kernels = EncoderKernels(recognise(encoder), torch.float32)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(kernels, "_pack", lambda: (torch.zeros(1), []))
    kernels.repack()
    encoder.backbone[0].weight.data.mul_(2)
    assert not kernels.current()
    before = kernels.generation
    kernels.repack()
    assert kernels.generation == before and kernels.current()
    encoder.pool.pos_grid.mul_(2)
    assert not kernels.current()
    kernels.repack()
    assert kernels.generation != before
