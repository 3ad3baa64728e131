"""Image encoders on the GPU's kernels: their steps, features, changed weights, whole calls."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from patience import HANGS
from test_image_encoders import _ENCODERS, _grouped, _lerobot_policy, _resnet
from torch import nn
from torch.testing import assert_close

import dpa
from dpa.acceleration.encoder_forward import FastEncoder
from dpa.nn.image_encoder import NotAnEncoder, recognise
from dpa.packed import joint_encoders
from dpa.packed.encoder import why_not
from dpa.packed.encoder_kernels import EncoderKernels
from dpa.packed.encoder_program import EncoderProgram
from dpa.tracking.replacing import replaced
from dpa.training.graphed_calls import replaced_forward

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
# Against float64, in the norm: 16-bit features are rounded some twenty times. TF32 is held against
# PyTorch's own: what an encoder makes of roundings is the encoder's.
_LIMITS = {torch.float16: 5e-3, torch.bfloat16: 3e-2}


def _by_steps(program, images):
    """What the op's steps say, in PyTorch's layers and the encoder's own precision."""
    parameters, constants = iter(program.parameters()), program.constants()
    maps = [images]
    for i, constant in enumerate(constants):
        step = program.config[1 + 11 * i : 12 + 11 * i]
        kind, source, residual, channels, _, stride, padding, groups, bias, relu, _ = step
        x = maps[source]
        if kind == 0:
            given = lambda: next(parameters).to(x.dtype)  # noqa: B023, E731
            weight, start = given(), given() if bias else None
            x = F.conv2d(x, weight, start, stride, padding)
            assert x.shape[1] == channels
            x = F.group_norm(x, groups, eps=constant) if groups else x
            x = x * given()[:, None, None] + given()[:, None, None]
            x = x if residual < 0 else x + maps[residual]
            x = x.relu() if relu else x
        elif kind == 1:
            x = F.max_pool2d(x, step[4], stride, padding)
        elif kind == 2:
            x = x.mean((2, 3))
        else:
            x = dpa.reference.spatial_softmax(x, torch.tensor(constant, dtype=x.dtype))
        maps.append(x)
    assert next(parameters, None) is None
    return maps[-1]


@torch.no_grad()
@pytest.mark.parametrize("name", _ENCODERS)
def test_the_steps_are_the_encoder(name):
    """They give its features, and the op's rule of shapes knows their size."""
    encoder = _ENCODERS[name]()
    program = EncoderProgram.of(recognise(encoder))
    images = torch.rand(2, 3, 40, 40)
    found = _by_steps(program, images)
    assert_close(program.result(found, images.dtype), encoder(images), rtol=1e-3, atol=1e-4)
    on_meta = [tensor.to("meta") for tensor in program.parameters()]
    packed = torch.ops.dpa.image_encoder_pack(on_meta, program.config, torch.bfloat16)
    two = [images.to("meta")] * 2, [packed] * 2
    made = torch.ops.dpa.image_encoder(*two, program.config, program.constants(), torch.bfloat16)
    assert [one.shape for one in made] == [found.shape] * 2


def test_a_shortcut_shares_a_launch():
    program = EncoderProgram.of(recognise(_resnet()))
    assert program.config[11::11].count(1) == 3


def test_what_the_kernels_have_no_step_for():
    encoder = _resnet()
    encoder.layer2[0].conv1 = nn.Conv2d(64, 128, (3, 1), 2, 1)
    with pytest.raises(NotAnEncoder, match=r"\(3, 1\) taps"):
        EncoderProgram.of(recognise(encoder))
    encoder = _resnet()
    encoder.maxpool = nn.MaxPool2d(3, 2, 1, ceil_mode=True)
    with pytest.raises(NotAnEncoder, match="stands between its convolutions"):
        EncoderProgram.of(recognise(encoder))


@pytest.mark.parametrize(
    "change, message",
    [
        ({0: 5}, "images of 1 to 4 channels"),
        ({1: 4}, r"step 0 must be a convolution or a pool"),
        ({2: 1}, "step 0 must read the image or the output of a step before it"),
        ({3: 7}, "step 0 must add the output of a step before it"),
        ({5: 16}, "step 0 must have a kernel of 1 to 15 taps"),
        ({6: 0}, "step 0 must have a stride of 1 or more"),
        ({8: 3}, "step 0 must have a num_groups that divides"),
        ({11: 1}, "step 0 must be a convolution that depends on none"),
    ],
)
def test_wrong_steps(change, message):
    config = [3, 0, 0, -1, 8, 3, 1, 1, 0, 0, 1, 0]
    weight, row = torch.empty(8, 3, 3, 3, device="meta"), torch.empty(8, device="meta")
    torch.ops.dpa.image_encoder_pack([weight, row, row], config, torch.float32)
    for place, value in change.items():
        config[place] = value
    with pytest.raises(RuntimeError, match=f"dpa::image_encoder_pack: config .*{message}"):
        torch.ops.dpa.image_encoder_pack([weight, row, row], config, torch.float32)


def _error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


@pytest.fixture
def tf32(monkeypatch):
    """As PyTorch has it by default: float32 convolutions round to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _poison(device):
    """Fill free memory, large blocks and small, with bytes that are NaN in every dtype."""
    sizes = [1 << 24] * 16 + [1 << 17] * 256
    held = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    torch.cuda.synchronize()
    del held


_PUBLISHED = {
    "ResNet-18, GroupNorm, 84": (lambda: _resnet(grouped=True), (2, 84, 84)),
    "ResNet-18, GroupNorm, 216": (lambda: _resnet(grouped=True), (4, 216, 216)),
    "ResNet-18, BatchNorm, 240 x 320": (_resnet, (2, 240, 320)),
    "ResNet-18, BatchNorm, 480 x 640": (_resnet, (2, 480, 640)),
    "ResNet-34, GroupNorm": (lambda: _grouped_of("resnet34"), (1, 96, 128)),
    "ResNet-50": (lambda: _resnet("resnet50"), (3, 97, 111)),
}
_PUBLISHED |= {f"{name}, 40": (make, (2, 40, 40)) for name, make in _ENCODERS.items()}


def _grouped_of(name):
    return _grouped(_resnet(name)).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", _PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.float32, *_LIMITS], ids=str)
def test_features_on_a_gpu(sm80, tf32, name, dtype):
    """Against float64, on memory that held NaN; a second call gives the same bits."""
    make, (batch, height, width) = _PUBLISHED[name]
    encoder = make().to(sm80)
    images = torch.rand(batch, 3, height, width, device=sm80)
    exact = copy.deepcopy(encoder).double()(images.double())
    kernels = EncoderKernels(recognise(encoder), dtype)
    _poison(sm80)
    got = kernels.run(images)
    assert got.dtype == torch.float32 and got.shape == exact.shape
    limit = _LIMITS[dtype] if dtype in _LIMITS else 1.5 * _error(encoder(images), exact)
    assert _error(got, exact) < limit
    _poison(sm80)
    assert torch.equal(kernels.run(images), got)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["strided", "channels last", "expanded"])
def test_images_of_any_layout(sm80, layout):
    encoder = _resnet().to(sm80)
    images = torch.rand(2, 3, 50, 70, device=sm80)
    want = (kernels := EncoderKernels(recognise(encoder), torch.float32)).run(images)
    if layout == "strided":
        images = torch.rand(2, 6, 50, 140, device=sm80)[:, ::2, :, ::2].copy_(images)
    elif layout == "channels last":
        images = images.contiguous(memory_format=torch.channels_last)
    else:
        images = images[:1].expand(2, -1, -1, -1)
        want = kernels.run(images.contiguous())
    assert torch.equal(kernels.run(images), want)
    assert kernels.run(images[:0]).shape == (0, 512)


@torch.no_grad()
@pytest.mark.parametrize("write", ["version", "data", "statistic", "replaced"])
def test_writes_are_noticed_on_a_gpu(sm80, tf32, write):
    encoder = _resnet().to(sm80)
    images = torch.rand(2, 3, 84, 84, device=sm80)
    dpa.accelerate(encoder, fallback=False)
    encoder(images)
    before = encoder(images)
    fast = replaced_forward(encoder)
    assert fast.shadow.errors and fast.kernels.generation
    assert torch.equal(fast.kernels.run(images), before)
    if write == "version":
        encoder.layer3[0].conv1.weight.mul_(1.5)
    elif write == "data":
        encoder.layer3[0].conv1.weight.data.mul_(1.5)
    elif write == "statistic":
        encoder.layer1[0].bn1.running_mean.add_(0.5)
    else:
        encoder.layer3[0].bn1.weight = nn.Parameter(encoder.layer3[0].bn1.weight * 2)
    want = type(encoder).forward(dpa.restore(copy.deepcopy(encoder)), images)
    got = encoder(images)
    assert (got - before).norm() > 0.02 * before.norm()
    assert _error(got, want.double()) < 4e-3
    assert torch.equal(fast.kernels.run(images), got)


def test_why_an_encoder_runs_as_it_is(monkeypatch):
    device, capability = torch.device("cuda"), [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))
    if not torch._C._dispatch_has_kernel_for_dispatch_key("dpa::image_encoder", "CUDA"):
        pytest.skip("the library is built for the CPU")
    assert "allows no TF32" in why_not(torch.float32, device)
    assert why_not(torch.float32, device, torch.bfloat16) is None
    assert "weights are torch.float64" in why_not(torch.float64, device)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert why_not(torch.float32, device) is None
    for capability[:] in ([8, 0], [8, 6], [12, 0]):
        assert why_not(torch.float32, device) is None
    capability[:] = [7, 5]
    assert "below 8.0" in why_not(torch.float32, device)


@torch.no_grad()
def test_float32_without_tf32_is_the_encoders_own(sm80):
    encoder = _resnet().to(sm80)
    images = torch.rand(2, 3, 84, 84, device=sm80)
    want = encoder(images)
    dpa.accelerate(encoder, fallback=False)
    for _ in range(2):
        assert_close(encoder(images), want)
    assert replaced_forward(encoder).kernels is None
    assert "torch.backends.cudnn allows no TF32" in str(dpa.explain(encoder))
    dpa.accelerate(encoder, torch.bfloat16, fallback=False)
    for _ in range(2):
        assert _error(encoder(images), want.double()) < _LIMITS[torch.bfloat16]
    assert replaced_forward(encoder).kernels.generation


@torch.no_grad()
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("separate", [False, True])
def test_a_whole_call_on_a_gpu(sm80, tf32, separate, dtype, monkeypatch):
    """LeRobot's policy in one graph: the plain policy's actions, before and after a write.

    A camera's network shares its launches with the other's.
    """
    together, run_alike = [], joint_encoders.run_alike
    count = lambda calls: together.append(len(calls)) or run_alike(calls)  # noqa: E731
    monkeypatch.setattr(joint_encoders, "run_alike", count)
    alone = lambda call: call.features(*run_alike([call]))  # noqa: E731
    monkeypatch.setattr(joint_encoders.EncoderCall, "run", alone)
    options = {"cameras": ("left", "right"), "use_separate_rgb_encoder_per_camera": separate}
    policy = _lerobot_policy(**options).to(sm80)
    policy.config.device = "cuda"
    fast = dpa.accelerate(copy.deepcopy(policy), dtype, fallback=False)
    batch = {
        "observation.state": torch.randn(1, 2, 3, device=sm80),
        "observation.images": torch.rand(1, 2, 2, 3, 48, 64, device=sm80),
    }
    encoders = [m for m in fast.modules() if isinstance(replaced_forward(m), FastEncoder)]
    assert len(encoders) == (2 if separate else 1)
    for weights in (1.0, 0.8):
        for model in (policy, fast):
            model.diffusion.rgb_encoder.state_dict()
            for module in model.diffusion.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.mul_(weights)
        for _ in range(4):
            actions = []
            for model in (policy, fast):
                torch.manual_seed(5)
                actions.append(model.diffusion.generate_actions(batch))
            assert _error(actions[1], actions[0].double()) < (0.05 if dtype else 5e-3)
    whole = replaced(fast.diffusion, "generate_actions")
    assert whole.captured, whole.refused
    assert set(together) == {len(encoders)}
    assert all(replaced_forward(m).kernels.generation for m in encoders)


# Encoders in two streams, called and replayed, and a sampling loop in a third, all at once. Blocks
# of each wait for one another: a launch that held a part of the device would wait for ever for
# what another one holds.
_STREAMS = """
import threading
import torch, torchvision
from torch import nn
import dpa
from diffusers import DDIMScheduler
from dpa.nn.image_encoder import recognise
from dpa.packed.encoder_kernels import EncoderKernels

torch.set_grad_enabled(False)
torch.manual_seed(0)

def encoder(dtype):
    resnet = torchvision.models.resnet18(norm_layer=lambda c: nn.GroupNorm(c // 16, c))
    resnet.fc = nn.Identity()
    return EncoderKernels(recognise(resnet.cuda().eval()), dtype)

def captured(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out

encoders = [encoder(torch.bfloat16), encoder(torch.float32)]
images = [torch.rand(n, 3, 84, 84, device="cuda") for n in (2, 4)]
wants = [e.run(x).clone() for e, x in zip(encoders, images)]
graphs = [captured(lambda: e.run(x)) for e, x in zip(encoders, images)]
unet = dpa.nn.ConditionalUnet1D(2, None, 8, down_dims=(256, 512)).cuda().eval().bfloat16()
scheduler = DDIMScheduler(100)
scheduler.set_timesteps(10)
loop = dpa.DiffusionSampler(unet, scheduler, 10)
cond = torch.rand(1, 8, device="cuda", dtype=torch.bfloat16)
noise = torch.randn(1, 16, 2, device="cuda", dtype=torch.bfloat16)
wants += [loop(cond, noise=noise).clone() for _ in range(3)][2:]
torch.cuda.synchronize()
wrong = []

def work(i):
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for turn in range(300):
            if i == 2:
                got = loop(cond, noise=noise)
            elif turn % 3 == 0:
                got = encoders[i].run(images[i])
            else:
                graphs[i][0].replay()
                got = graphs[i][1]
            if turn % 20 == 0 and not torch.equal(got, wants[i]):
                wrong.append((i, turn))
        torch.cuda.current_stream().synchronize()

threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not wrong, wrong
print("right")
"""


def test_encoders_at_once_end(sm80):
    """In a process of its own, which ends here where its kernels do not."""
    command = [sys.executable, "-c", _STREAMS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr[-2000:]
