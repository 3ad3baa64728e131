"""An image encoder as one op on the CPU: every level of instructions, images of any layout."""

import copy

import pytest
import torch
from test_encoder_kernels import _LIMITS, _by_steps, _error
from test_image_encoders import _ENCODERS, _resnet
from torch import nn

import dpa
from dpa.nn.image_encoder import recognise
from dpa.packed.encoder import PackedEncoder
from dpa.packed.encoder_kernels import EncoderOnCpu
from dpa.packed.encoder_program import EncoderProgram
from dpa.training.graphed_calls import replaced_forward

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def _poison_host():
    """Have the allocator give memory that holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def poisoned():
    """Fresh memory on the CPU holds NaN."""
    _poison_host()
    yield
    torch.use_deterministic_algorithms(False)


@torch.no_grad()
@pytest.mark.parametrize("name", _ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float32, *_LIMITS], ids=str)
def test_features_on_the_cpu(poisoned, name, dtype):
    """Against float64; float32 is as exact as promised, bfloat16 no worse than autocast."""
    torch.manual_seed(0)
    encoder, images = _ENCODERS[name](), torch.rand(2, 3, 40, 40)
    exact = copy.deepcopy(encoder).double()(images.double())
    kernels = EncoderOnCpu(recognise(encoder), dtype)
    got = kernels.run(images)
    assert got.dtype == torch.float32 and got.shape == exact.shape
    assert _error(got, exact) < {torch.float32: 1e-5, **_LIMITS}[dtype]
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", dtype):
            assert _error(got, exact) < _error(encoder(images), exact)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 if threads == 1 else 1)
    try:
        assert torch.equal(kernels.run(images), got)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@pytest.mark.parametrize(
    "level",
    ["portable", "avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx", "neon", "neon_bf16"],
)
@pytest.mark.parametrize("dtype", [torch.float32, *_LIMITS], ids=str)
def test_every_level_of_the_cpu(poisoned, monkeypatch, level, dtype):
    """Channels that fill no vector, groups across vectors, every kind of step, odd sizes."""
    monkeypatch.setenv("DPA_CPU_LEVEL", level)
    torch.manual_seed(0)
    # kind, from, residual, channels, kernel, stride, padding, groups, bias, relu, together
    steps = [
        (0, 0, -1, 20, 5, 2, 2, 0, 0, 1, 0),
        (1, 1, -1, 0, 3, 2, 1, 0, 0, 0, 0),
        (0, 2, -1, 24, 3, 1, 1, 3, 1, 1, 0),
        (0, 3, 3, 24, 1, 1, 0, 0, 1, 1, 0),
        (0, 4, -1, 40, 3, 2, 1, 8, 0, 1, 0),
        (0, 4, 5, 40, 1, 2, 0, 5, 1, 0, 0),
    ]
    config, parameters = [3, *(field for step in steps for field in step)], []
    for inputs, (kind, _, _, channels, kernel, *_, bias, _, _) in zip(
        [3, 20, 20, 24, 24, 24], steps, strict=True
    ):
        if kind == 0:
            weight = torch.randn(channels, inputs, kernel, kernel) / inputs**0.5 / kernel
            parameters += [weight, *(torch.rand(channels) + 0.3 for _ in range(2 + bias))]
    images, constants = torch.rand(3, 3, 37, 29), [0.0, 0.0, 1e-5, 0.0, 1e-3, 1e-5]
    try:
        packed = torch.ops.dpa.image_encoder_pack(parameters, config, dtype)
        (got,) = torch.ops.dpa.image_encoder([images], [packed], config, constants, dtype)
    except RuntimeError as error:
        assert "DPA_CPU_LEVEL must be one that the machine has" in str(error)
        pytest.skip("the machine has no such instructions")
    program = EncoderProgram(config, _constants=constants)
    program.parameters = lambda: parameters
    exact = _by_steps(program, images.double())
    assert got.dtype == dtype and got.shape == exact.shape
    assert (
        _error(got, exact) < {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    )


@torch.no_grad()
def test_images_of_any_layout_on_the_cpu():
    encoder, images = _resnet(), torch.rand(2, 3, 50, 70)
    want = (kernels := EncoderOnCpu(recognise(encoder), torch.float32)).run(images)
    wider = torch.rand(2, 6, 50, 140)[:, ::2, :, ::2].copy_(images)
    assert torch.equal(kernels.run(wider), want)
    assert torch.equal(kernels.run(images.contiguous(memory_format=torch.channels_last)), want)
    expanded = images[:1].expand(2, -1, -1, -1)
    assert torch.equal(kernels.run(expanded), kernels.run(expanded.contiguous()))
    assert kernels.run(images[:0]).shape == (0, 512)


@torch.no_grad()
def test_which_runs_on_the_cpu():
    """The op where it serves, in the wanted dtype; layer by layer what it does not know."""
    for dtype, wanted in [(torch.float32, None), (torch.float32, torch.bfloat16)]:
        encoder = dpa.accelerate(_resnet().to(dtype), dtype=wanted, fallback=False)
        encoder(torch.rand(2, 3, 40, 40, dtype=dtype))
        packed = replaced_forward(encoder)._packed
        assert isinstance(packed, EncoderOnCpu) and packed.dtype == (wanted or dtype)
    pooled = _resnet()
    pooled.maxpool = nn.MaxPool2d(3, 2, 1, ceil_mode=True).eval()
    for encoder in (_resnet().double(), pooled):
        dpa.accelerate(encoder, fallback=False)
        encoder(torch.rand(2, 3, 40, 40, dtype=encoder.conv1.weight.dtype))
        assert isinstance(replaced_forward(encoder)._packed, PackedEncoder)


@torch.no_grad()
def test_without_fallback_a_changed_encoder_raises_in_every_call():
    encoder, images = dpa.accelerate(_resnet(), fallback=False), torch.rand(2, 3, 40, 40)
    for _ in range(2):
        encoder(images)
    encoder.layer1[0].conv1 = nn.Conv2d(64, 64, 3, padding=2, dilation=2).eval()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"has changed: .* and fallback is False"):
            encoder(images)
