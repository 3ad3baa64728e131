"""Image encoders in training: their residual networks replay, everything else is the user's."""

import copy

import pytest
import torch
from proofs import Calls
from test_image_encoders import _ENCODERS, _lerobot_policy, _resnet, _visual_core
from torch.testing import assert_close

import dpa
from dpa.acceleration.encoder_forward import FastEncoder
from dpa.nn.image_encoder import backbone_of
from dpa.tracking.replacing import replaced
from dpa.training.graphed_calls import GraphedForward, replaced_forward

pytest.importorskip("torchvision", reason="torchvision is not installed")
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize("name", _ENCODERS)
def test_the_residual_network_alone_replays(name):
    """Random crops are outside of it, and the keypoints that robomimic's encoder keeps."""
    encoder = _ENCODERS[name]()
    before = {path: set(vars(module)) for path, module in encoder.named_modules()}
    dpa.accelerate(encoder, fallback=False)
    graphed = [m for m in encoder.modules() if isinstance(replaced(m, "forward"), GraphedForward)]
    assert graphed == [backbone_of(encoder)]
    held = lambda kind: {m for m in graphed[0].modules() if isinstance(m, kind)}  # noqa: E731
    assert held(torch.nn.Conv2d) and not {type(m).__name__ for m in held(torch.nn.Module)} & {
        "RandomCrop",
        "SpatialSoftmax",
    }
    assert isinstance(replaced_forward(encoder), FastEncoder)
    dpa.restore(encoder)
    assert {path: set(vars(module)) for path, module in encoder.named_modules()} == before


def test_without_graphs_or_encoders_nothing_replays():
    encoder = _resnet()
    dpa.accelerate(encoder, graphs=False)
    assert isinstance(replaced(encoder, "forward"), FastEncoder)
    policy = dpa.accelerate(_lerobot_policy(), encoders=False)
    assert backbone_of(policy.diffusion.rgb_encoder) is not None
    assert replaced(backbone_of(policy.diffusion.rgb_encoder), "forward") is None


def test_evaluation_stays_packed():
    """The first comparison decides, whatever replays in training."""
    encoder = _visual_core()
    images = torch.rand(2, 3, 40, 40)
    with torch.no_grad():
        want = encoder(images)
        dpa.accelerate(encoder, fallback=False)
        for _ in range(2):
            assert_close(encoder(images), want, rtol=1e-4, atol=1e-5)
    fast = replaced_forward(encoder)
    assert fast.shadow.errors and fast.fallback_reason() is None


def test_captures_record_channels_last_where_it_gains(monkeypatch):
    encoder = dpa.accelerate(_ENCODERS["ResNet-18, GroupNorm"]().train())
    graphed, images = replaced(encoder, "forward"), torch.rand(2, 3, 40, 40)

    def norms(images, tf32):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
        with Calls() as calls:
            out = graphed.recorded(images)
        assert_close(out, want, rtol=1e-3, atol=1e-3)
        return calls.names.count("dpa.group_norm_act.default")

    want = graphed.original(images)
    assert norms(images, tf32=True) == 20
    assert norms(images, tf32=False) == 0
    encoder.double()
    images, want = images.double(), want.double()
    assert norms(images, tf32=True) == 0


def _whole(**options):
    """LeRobot's encoder without a crop: nothing in it differs from step to step."""
    return _lerobot_policy(use_group_norm=True, crop_shape=None, **options).diffusion.rgb_encoder


def test_an_encoder_without_crops_replays_as_a_whole():
    encoder = dpa.accelerate(_whole(), fallback=False)
    graphed = replaced(encoder, "forward")
    assert isinstance(graphed, GraphedForward) and isinstance(graphed.inner, FastEncoder)
    assert replaced(backbone_of(encoder), "forward") is None
    images = torch.rand(2, 3, 48, 64)
    for model in (encoder.train(), dpa.restore(encoder)):
        features = model(images)
    assert_close(graphed.original(images), features)
    assert replaced(encoder, "forward") is None


_RESNETS = ("ResNet-18, GroupNorm", "ResNet-18, BatchNorm")


def _statistics(module):
    return {
        name: buffer for name, buffer in module.named_buffers() if buffer.dim() or "num" in name
    }


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["LeRobot, GroupNorm", "LeRobot, BatchNorm", "whole", *_RESNETS])
def test_training_steps_replay(sm80, name, autocast):
    """Gradients and statistics are the plain encoder's; every step has a crop of its own."""
    plain = {**_ENCODERS, "whole": _whole}[name]().to(sm80).train()
    exact = copy.deepcopy(plain)
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False)
    crops = []
    backbone_of(plain).register_forward_pre_hook(lambda _, args: crops.append(args[0].clone()))
    images = torch.rand(4, 3, 48, 64, device=sm80)
    for step in range(7):
        found = []
        for model in (exact, plain, fast):
            torch.manual_seed(step)
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast and model is not exact):
                features = model(images)
            features.float().square().sum().backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        error = [float((got - found[0]).norm() / found[0].norm()) for got in found[1:]]
        assert error[1] <= max(1.5 * error[0], 1e-3)
        kept = [_statistics(model) for model in (exact, plain, fast)]
        for name_, want in kept[1].items():  # and how many batches
            got, right = kept[2][name_], kept[0][name_]
            if autocast and want.is_floating_point():  # both round: neither is the other's measure
                limit = max(1.5 * (want - right).norm(), 1e-3 * right.norm())
                assert (got - right).norm() <= limit, name_
            else:
                assert_close(got, want, rtol=1e-4, atol=1e-3)
    graphed = fast if name == "whole" else backbone_of(fast)
    assert replaced(graphed, "forward").captured == 1
    assert name in (*_RESNETS, "whole") or not torch.equal(crops[-1], crops[-2])
