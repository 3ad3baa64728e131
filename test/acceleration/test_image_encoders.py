"""dpa.accelerate on image encoders: LeRobot's, torchvision's and robomimic's own classes."""

import copy
import pickle
import warnings

import pytest
import torch
from policies import SMALL
from torch import nn
from torch.testing import assert_close

import dpa
from dpa.acceleration.encoder_forward import FastEncoder
from dpa.training.graphed_calls import replaced_forward

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def _statistics(module):
    """Give every norm other weights and statistics than it is made with."""
    torch.manual_seed(3)
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm2d, nn.GroupNorm)):
            for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
                if tensor.dim():
                    low = -0.3 if name in ("bias", "running_mean") else 0.7
                    tensor.data.uniform_(low, low + 0.6)
    return module.eval()


def _grouped(resnet):
    """The norms replaced as diffusion_policy replaces them."""
    for part in list(resnet.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(part, name, nn.GroupNorm(child.num_features // 16, child.num_features))
    return resnet


def _resnet(name="resnet18", grouped=False):
    """As MultiImageObsEncoder holds it: without the classifier."""
    resnet = getattr(torchvision.models, name)()
    resnet.fc = nn.Identity()
    return _statistics(_grouped(resnet) if grouped else resnet)


def _lerobot_policy(**options):
    modeling = pytest.importorskip(
        "lerobot.policies.diffusion.modeling_diffusion",
        reason="LeRobot is not installed (requirements/lerobot.txt)",
        exc_type=ImportError,
    )
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    cameras = options.pop("cameras", ("top",))
    given = {"observation.state": PolicyFeature(FeatureType.STATE, (3,))}
    given |= {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, 48, 64))
        for name in cameras
    }
    config = DiffusionConfig(
        input_features=given,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu",
        num_train_timesteps=10,
        pretrained_backbone_weights=None,
        **{
            **SMALL,
            **{"horizon": 8, "n_action_steps": 4, "crop_shape": (40, 40)},
            "use_separate_rgb_encoder_per_camera": False,  # releases differ in the default
            **options,
        },
    )
    return _statistics(modeling.DiffusionPolicy(config))


def _visual_core(**options):
    core = pytest.importorskip(
        "robomimic.models.obs_core",
        reason="robomimic is not installed (requirements/robomimic.txt)",
        exc_type=ImportError,
    )
    settings = {"pool_kwargs": {"num_kp": 8, "temperature": 0.5, "noise_std": 0.0}, **options}
    return _statistics(core.VisualCore([3, 40, 40], **settings))


_ENCODERS = {
    "LeRobot, GroupNorm": lambda: _lerobot_policy(use_group_norm=True).diffusion.rgb_encoder,
    "LeRobot, BatchNorm": lambda: _lerobot_policy(use_group_norm=False).diffusion.rgb_encoder,
    "ResNet-18, BatchNorm": _resnet,
    "ResNet-18, GroupNorm": lambda: _resnet(grouped=True),
    "ResNet-50": lambda: _resnet("resnet50"),
    "VisualCore": _visual_core,
    "VisualCore, learnt temperature": lambda: _visual_core(
        pool_kwargs={"num_kp": None, "learnable_temperature": True, "temperature": 2.0}
    ),
}


def _images(batch=2, height=40, width=40, dtype=torch.float32):
    return torch.rand(batch, 3, height, width, dtype=dtype)


def _accelerated(encoder, images):
    """The encoder, compared once; the second call is dpa's."""
    dpa.accelerate(encoder, fallback=False)
    with torch.no_grad():
        encoder(images)
    fast = replaced_forward(encoder)
    assert isinstance(fast, FastEncoder) and fast.shadow.errors and not fast.shadow.failed
    return fast


@pytest.mark.parametrize("name", _ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_features(name, dtype):
    """Within 1e-5 of float64, and what the report says is what runs."""
    encoder = _ENCODERS[name]().to(dtype)
    exact = copy.deepcopy(encoder).double()
    images = _images(dtype=dtype)
    fast = _accelerated(encoder, images)
    with torch.no_grad():
        got, want = encoder(images), exact(images.double())
    limit = 1e-11 if dtype == torch.float64 else 1e-5
    assert fast._packed is not None
    assert (got.double() - want).norm() <= limit * want.norm()
    assert "encoder" in str(dpa.explain(encoder)) and "accelerated" in str(dpa.explain(encoder))


@pytest.mark.parametrize("size", [(40, 40), (48, 64), (41, 57), (30, 30)])
@pytest.mark.parametrize("resize", [None, (44, 56)])
def test_lerobots_preprocessing(size, resize):
    """Any size is cropped in the middle; a smaller image than the crop is padded."""
    policy = _lerobot_policy(**({} if resize is None else {"resize_shape": resize}))
    encoder = policy.diffusion.rgb_encoder
    images = _images(2, *size)
    with torch.no_grad():
        want = encoder(images)
        _accelerated(encoder, images)
        assert_close(encoder(images), want, rtol=1e-4, atol=1e-5)


def _writes(encoder):
    """Ways of writing weights and statistics, each with what it writes."""
    conv = next(m for m in encoder.modules() if isinstance(m, nn.Conv2d))
    norm = next(m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d))
    yield lambda: conv.weight.mul_(1.5)
    yield lambda: conv.weight.data.mul_(0.5)
    yield lambda: norm.running_mean.add_(0.3)
    yield lambda: norm.running_var.data.mul_(2.0)
    yield lambda: norm.bias.add_(0.2)
    yield lambda: setattr(norm, "eps", 0.1)
    yield lambda: setattr(norm, "weight", nn.Parameter(norm.weight * 2))
    yield lambda: encoder.load_state_dict({k: v * 0.9 for k, v in encoder.state_dict().items()})


@torch.no_grad()
@pytest.mark.parametrize("which", range(8))
def test_changed_weights_are_noticed(which):
    encoder, images = _resnet(), _images()
    _accelerated(encoder, images)
    before = encoder(images)
    list(_writes(encoder))[which]()
    want = type(encoder).forward(dpa.restore(copy.deepcopy(encoder)), images)
    got = encoder(images)
    assert (got - before).norm() > 1e-3 * before.norm()
    assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_close(encoder(images), want, rtol=1e-4, atol=1e-5)


def test_training_and_gradients_are_the_encoders_own():
    encoder, images = _resnet(), _images()
    plain = copy.deepcopy(encoder)
    _accelerated(encoder, images)
    for mode in (True, False):
        encoder.train(mode), plain.train(mode)
        torch.manual_seed(1)
        encoder(images).sum().backward()
        torch.manual_seed(1)
        plain(images).sum().backward()
        for a, b in zip(encoder.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    with torch.no_grad():  # on the statistics that training left
        assert_close(encoder(images), plain(images), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_copies_pickles_and_undo():
    encoder, images = _resnet(), _images()
    state, want = set(vars(encoder)), encoder(images)
    _accelerated(encoder, images)
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder)), copy.copy(encoder)):
        fast = replaced_forward(other)
        assert isinstance(fast, FastEncoder) and fast.encoder is other
        for _ in range(2):
            assert_close(other(images), want, rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(encoder)
    other.conv1.weight.zero_()
    assert_close(encoder(images), want, rtol=1e-4, atol=1e-5)
    dpa.restore(encoder)
    assert set(vars(encoder)) == state and type(encoder) is torchvision.models.ResNet
    assert torch.equal(encoder(images), want)


@torch.no_grad()
def test_hooks_see_every_layer():
    encoder, images = _resnet(), _images()
    _accelerated(encoder, images)
    seen = []
    handle = encoder.layer1[0].conv1.register_forward_hook(lambda *_: seen.append(1))
    encoder(images)
    assert seen == [1]
    assert "hooks" in str(dpa.explain(encoder))
    handle.remove()
    encoder(images)
    assert seen == [1]


@torch.no_grad()
def test_a_replaced_layer_is_noticed():
    encoder, images = _resnet(), _images()
    dpa.accelerate(encoder)(images)
    assert replaced_forward(encoder).shadow.errors
    encoder.relu = nn.GELU()
    with pytest.warns(RuntimeWarning, match="has changed: it holds a GELU") as said:
        encoder(images)
    assert len(said) == 1
    assert torch.equal(encoder(images), type(encoder).forward(encoder, images))


@torch.no_grad()
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: (x * 255).to(torch.uint8), r"must be torch.float32, .* got uint8: convert"),
        (lambda x: x.double(), r"must be torch.float32, as its weights, got torch.float64"),
        (lambda x: x.permute(0, 2, 3, 1), r"shape \(B, 3, H, W\), got .*: channels come last"),
        (lambda x: x[:, :2], r"must have shape \(B, 3, H, W\), got \(2, 2, 48, 64\)$"),
        (lambda x: x[None], r"must have 4 dimensions \(B, 3, H, W\), got \(1, 2, 3, 48, 64\)"),
    ],
)
def test_bad_images(make, message):
    encoder = _lerobot_policy().diffusion.rgb_encoder
    _accelerated(encoder, _images(2, 48, 64))
    with pytest.raises(RuntimeError, match=message):
        encoder(make(_images(2, 48, 64)))


@torch.no_grad()
def test_images_in_the_range_of_bytes():
    """The encoder's own layers take them, and nothing would say why the policy fails."""
    encoder = dpa.accelerate(_lerobot_policy().diffusion.rgb_encoder, fallback=False)
    right = _images(2, 48, 64)
    normalised = lambda x: (x - 0.485) / 0.229  # noqa: E731
    for wrong in (right * 255, (right * 255).round(), normalised(right * 255), right * 510 - 1):
        with pytest.raises(ValueError, match=r"0 to 1, got .* to .*: divide them by 255"):
            encoder(wrong)
    assert not replaced_forward(encoder).shadow.errors
    encoder((right - 0.1) / 0.01)  # of a small deviation
    assert replaced_forward(encoder).shadow.errors
    dark = right.new_zeros(2, 3, 64, 64)
    dark[..., 5, 7] = 1.0  # which a mean of 1/4096 and a deviation of 1/64 make -1/64 to 64
    encoder((dark - dark.mean()) / dark.std())


@torch.no_grad()
def test_images_of_another_size_than_the_keypoints():
    encoder = _lerobot_policy(crop_shape=None).diffusion.rgb_encoder
    _accelerated(encoder, _images(2, 48, 64))
    fast = replaced_forward(encoder)
    with pytest.raises(RuntimeError, match=r"the size that the encoder was made for: .*\(4, 4\)"):
        fast._run(_images(2, 128, 128))
    core = _visual_core()
    _accelerated(core, _images())
    with pytest.raises(AssertionError):
        core(_images(2, 48, 48))


@torch.no_grad()
@pytest.mark.parametrize("separate", [False, True])
def test_a_whole_policy(separate):
    """Two cameras, one network or one a camera: the same actions."""
    options = {"cameras": ("left", "right"), "use_separate_rgb_encoder_per_camera": separate}
    policy = _lerobot_policy(**options)
    fast = dpa.accelerate(copy.deepcopy(policy), fallback=False)
    encoders = [m for m in fast.modules() if isinstance(replaced_forward(m), FastEncoder)]
    assert len(encoders) == (2 if separate else 1)
    generator = torch.Generator().manual_seed(5)
    for model in (policy, fast):
        model.reset()
    for step in range(6):
        batch = {"observation.state": torch.randn(1, 3, generator=generator)}
        for name in options["cameras"]:
            batch[f"observation.images.{name}"] = torch.rand(1, 3, 48, 64, generator=generator)
        actions = []
        for model in (policy, fast):
            torch.manual_seed(step)
            actions.append(model.select_action(dict(batch)))
        assert_close(actions[1], actions[0], rtol=1e-3, atol=1e-4)
    assert all(replaced_forward(m).shadow.errors for m in encoders)


def test_the_switch():
    policy = _lerobot_policy()
    dpa.accelerate(policy, fallback=False, encoders=False)
    encoder = policy.diffusion.rgb_encoder
    assert replaced_forward(encoder) is None
    assert "rgb_encoder (encoder, DiffusionRgbEncoder): can be accelerated" in str(
        dpa.explain(policy)
    )


def test_an_encoder_that_dpa_does_not_know_stays():
    """The reason stands in the report, and nothing warns."""
    encoder = _resnet()
    encoder.conv1 = nn.Conv2d(3, 64, 7, 2, 3, dilation=2)
    model = nn.ModuleDict({"unet": dpa.nn.ConditionalUnet1D(2, None, 4, **SMALL), "eye": encoder})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpa.accelerate(model, fallback=False)
    assert replaced_forward(encoder) is None
    assert "eye (encoder, ResNet): unchanged: a convolution has dilation" in str(dpa.explain(model))


@torch.no_grad()
def test_compiled():
    encoder, images = _resnet(), _images()
    _accelerated(encoder, images)
    compiled = torch.compile(encoder, backend="eager")
    assert_close(compiled(images), type(encoder).forward(encoder, images))


class _Bytes(torchvision.models.ResNet):
    def forward(self, x):
        if x.max() > 2:
            x = x / 255
        return self._forward_impl(x)


class _Batch(torchvision.models.ResNet):
    def forward(self, x):
        y = self._forward_impl(x)
        return y if len(x) < 3 else y - y.mean(0)


class _Random(torchvision.models.ResNet):
    def forward(self, x):
        return self._forward_impl(x) + 0 * torch.rand(1).to(x)


class _BlockOfBatch(torchvision.models.resnet.BasicBlock):
    def forward(self, x):
        y = super().forward(x)
        return y if len(x) < 3 else 0.5 * y


class _WithoutRelu(torchvision.models.resnet.BasicBlock):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        del self.relu

    def forward(self, x):
        return nn.functional.relu(x)


class _Frozen(nn.Module):
    """As DETR has it: what it adds to a variance stands in its forward."""

    def __init__(self, features):
        super().__init__()
        for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.register_buffer(name, torch.full((features,), float(value)))

    def forward(self, x):
        scale = (self.running_var + 1e-5).rsqrt() * self.weight
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


_Frozen.__name__ = "FrozenBatchNorm2d"
_WithoutRelu.__name__ = _BlockOfBatch.__name__ = "BasicBlock"


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        (_Bytes, {}, "forward names max, which the published one does not"),
        (_Batch, {}, "forward names len, which the published one does not"),
        (_Random, {}, "forward names rand, which the published one does not"),
        (
            torchvision.models.ResNet,
            {"block": _WithoutRelu},
            "names functional, which the published",
        ),
        (torchvision.models.ResNet, {"block": _BlockOfBatch}, "a BasicBlock of it: its forward"),
        (torchvision.models.ResNet, {"norm_layer": _Frozen}, "a FrozenBatchNorm2d has no eps"),
    ],
)
def test_a_class_of_a_known_name_that_is_another(kind, given, why):
    """It stays, and a network beside it is accelerated."""
    block = given.pop("block", torchvision.models.resnet.BasicBlock)
    resnet = kind(block, [1, 1, 1, 1], num_classes=3, **given)
    type(resnet).__name__ = "ResNet"
    unet = dpa.reference.plain(dpa.nn.ConditionalUnet1D(2, None, 4, 16, (16,)))
    both = nn.ModuleList([resnet, unet]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dpa.accelerate(both)
    assert why in str(dpa.explain(both)) and "one op on packed weights" in str(dpa.explain(both))


def test_an_activation_that_is_there_twice_runs_twice():
    resnet, act = _resnet(), nn.ReLU()
    resnet.fc = nn.Sequential(nn.Linear(512, 8), act, nn.Linear(8, 6), act)
    plain = copy.deepcopy(resnet)
    dpa.accelerate(resnet)
    images = torch.rand(3, 3, 40, 40)
    with torch.no_grad():
        for sign in (1, -1, 1):
            for one in (resnet, plain):
                one.fc[2].weight.mul_(sign)
            for _ in range(2):
                want = plain(images)
                assert_close(resnet(images), want, rtol=1e-4, atol=1e-5)
    assert (want >= 0).all()


def test_features_in_a_dictionary_are_the_encoders_own():
    from torchvision.models.feature_extraction import create_feature_extractor

    resnet = _statistics(create_feature_extractor(torchvision.models.resnet18(), {"maxpool": "f"}))
    fast, images = copy.deepcopy(resnet), torch.rand(2, 3, 40, 40)
    unet = dpa.reference.plain(dpa.nn.ConditionalUnet1D(2, None, 4, 16, (16,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dpa.accelerate(nn.ModuleList([fast, unet]).eval())
        with torch.no_grad():
            for _ in range(3):
                assert_close(fast(images)["f"], resnet(images)["f"])


def test_one_infinite_pixel_is_no_range_of_bytes():
    resnet = _resnet()
    fast, images = dpa.accelerate(copy.deepcopy(resnet)), torch.rand(1, 3, 40, 40)
    images[0, 0, 0, 0] = float("inf")
    with torch.no_grad():
        assert_close(fast(images), resnet(images), equal_nan=True)
