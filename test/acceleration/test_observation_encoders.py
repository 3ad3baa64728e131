"""dpa.accelerate on what holds image encoders: diffusion_policy's and robomimic's own classes."""

import copy

import pytest
import torch
from test_image_encoders import _grouped, _statistics
from torch import nn

import dpa
from dpa.acceleration.encoder_forward import FastEncoder
from dpa.training.graphed_calls import replaced_forward

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
_SIZE = 3, 48, 64


def _images():
    return {name: torch.rand(2, *_SIZE) for name in ("left", "right")}


def _multi_image(**options):
    """diffusion_policy's encoder of its image policies, with a checkout of it on the path."""
    module = pytest.importorskip(
        "diffusion_policy.model.vision.multi_image_obs_encoder",
        reason="diffusion_policy is not on the path",
        exc_type=ImportError,
    )
    meta = {name: {"shape": _SIZE, "type": "rgb"} for name in ("left", "right")}
    meta["state"] = {"shape": (4,), "type": "low_dim"}
    resnet = torchvision.models.resnet18()
    resnet.fc = nn.Identity()
    encoder = module.MultiImageObsEncoder({"obs": meta}, options.pop("model", resnet), **options)
    return _statistics(encoder), _images() | {"state": torch.rand(2, 4)}


def _hybrid(grouped, randomizer="CropRandomizer"):
    """robomimic's encoder, as diffusion_policy's hybrid image policy makes it."""
    nets = pytest.importorskip(
        "robomimic.models.obs_nets",
        reason="robomimic is not installed (requirements/robomimic.txt)",
        exc_type=ImportError,
    )
    import robomimic.models.obs_core  # noqa: F401  (registers the cores and randomizers)
    import robomimic.utils.obs_utils as obs_utils

    obs_utils.initialize_obs_modality_mapping_from_dict(
        {"rgb": ["left", "right"], "low_dim": ["state"]}
    )
    core = {
        "feature_dimension": 64,
        "backbone_class": "ResNet18Conv",
        "backbone_kwargs": {"pretrained": False, "input_coord_conv": False},
        "pool_class": "SpatialSoftmax",
        "pool_kwargs": {"num_kp": 32, "temperature": 1.0, "noise_std": 0.0},
    }
    crop = {"crop_height": 40, "crop_width": 40, "num_crops": 1, "pos_enc": False}
    kwargs = {
        "rgb": {
            "core_class": "VisualCore",
            "core_kwargs": core,
            "obs_randomizer_class": randomizer,
            "obs_randomizer_kwargs": crop if randomizer else {},
        },
        "low_dim": {
            "core_class": None,
            "core_kwargs": {},
            "obs_randomizer_class": None,
            "obs_randomizer_kwargs": {},
        },
    }
    shapes = {"left": list(_SIZE), "right": list(_SIZE), "state": [4]}
    encoder = nets.obs_encoder_factory(shapes, encoder_kwargs=kwargs)
    return _statistics(_grouped(encoder) if grouped else encoder), _images() | {
        "state": torch.rand(2, 4)
    }


_MADE = {
    "a network a camera, GroupNorm": lambda: _multi_image(use_group_norm=True),
    "one network": lambda: _multi_image(share_rgb_model=True),
    "resized, cropped, normalised": lambda: _multi_image(
        resize_shape=(44, 60), crop_shape=(40, 40), imagenet_norm=True, use_group_norm=True
    ),
    "hybrid, GroupNorm": lambda: _hybrid(True),
    "hybrid, BatchNorm": lambda: _hybrid(False),
    "hybrid, whole images": lambda: _hybrid(True, randomizer=None),
}


@torch.no_grad()
@pytest.mark.parametrize("name", _MADE)
def test_features(name):
    """Within 1e-5 of float64; every network in it runs on packed weights."""
    encoder, observation = _MADE[name]()
    exact = copy.deepcopy(encoder).double()
    want = exact({key: value.double() for key, value in observation.items()})
    dpa.accelerate(encoder, fallback=False)
    encoder(observation)
    fast = [replaced_forward(module) for module in encoder.modules()]
    fast = [forward for forward in fast if isinstance(forward, FastEncoder)]
    assert len(fast) == (1 if name == "one network" else 2)
    assert all(forward.shadow.errors and not forward.shadow.failed for forward in fast)
    got = encoder(observation)
    assert (got - want).norm() <= 1e-5 * want.norm()
    assert all(forward._packed is not None for forward in fast)
    for key in ("left", "right"):  # each camera counts
        other = encoder(observation | {key: torch.rand(2, *_SIZE)})
        assert (other - got).norm() > 1e-2 * got.norm()


@torch.no_grad()
def test_networks_that_dpa_does_not_know():
    """They run as they are, and the report says why where they resemble one."""
    models = {"left": torchvision.models.resnet18(), "right": nn.Sequential(nn.Flatten())}
    models["left"].conv1 = nn.Conv2d(3, 64, 7, 2, 3, dilation=2)
    encoder, observation = _multi_image(model=models)
    want = copy.deepcopy(encoder)(observation)
    policy = nn.ModuleDict(
        {"eyes": encoder, "unet": dpa.nn.ConditionalUnet1D(2, None, 4, down_dims=(16,))}
    )
    dpa.accelerate(policy, fallback=False)
    assert torch.equal(policy["eyes"](observation), want)
    said = str(dpa.explain(policy))
    assert (
        "eyes.key_model_map.left (encoder, ResNet): unchanged: a convolution has dilation" in said
    )
    assert "key_model_map.right" not in said


def test_training_is_the_encoders_own():
    """Random crops and statistics, from the same random numbers."""
    encoder, observation = _hybrid(False)
    plain = copy.deepcopy(encoder)
    dpa.accelerate(encoder, fallback=False)
    with torch.no_grad():
        encoder(observation)
    for model in (plain, encoder):
        torch.manual_seed(1)
        model.train()(observation).sum().backward()
    for a, b in zip(encoder.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(encoder.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)
