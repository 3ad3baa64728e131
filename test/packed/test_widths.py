"""Widths that kernels do not like, packed among zeros: against float64, by every kernel."""

import copy

import pytest
import torch
from test_packed import ERROR, _rounded_to_e4m3, error

import dpa
from dpa.nn import ConditionalUnet1D
from dpa.packed.unet import PackedUnet

diffusers = pytest.importorskip("diffusers")

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
_CONFIG = [3, 5, 8, 16, 4, 1]  # of the networks below, before their widths


def _net(device, own, kernel=5, groups=8):
    torch.manual_seed(3)
    unet = ConditionalUnet1D(
        3,
        global_cond_dim=4,
        diffusion_step_embed_dim=16,
        down_dims=own,
        kernel_size=kernel,
        n_groups=groups,
        cond_predict_scale=True,
    )
    return unet.to(device).eval()


def _inputs(device, count, horizon):
    sample = torch.randn(count, horizon, 3, device=device)
    return sample, torch.randn(count, 4, device=device)


@pytest.mark.parametrize(
    ("own", "wide"),
    [
        ((192, 384, 640), (256, 512, 1024)),
        ((96, 192, 320), (128, 256, 512)),
        ((128, 256, 384), (128, 256, 512)),
        ((384, 384), (512, 512)),
        ((320, 480, 960), (512, 512, 1024)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_widened_network_takes_the_networks_own_weights(own, wide, dtype):
    """On every device the same names and shapes; a CPU gains nothing by it and says so."""
    unet = _net(torch.device("cpu"), own)
    config = [*_CONFIG, *own]
    names = torch.ops.dpa.unet1d_weight_names(config)
    widened = [*_CONFIG, *wide, 0, *own]
    assert torch.ops.dpa.unet1d_weight_names(widened) == names
    weights = [unet.state_dict()[name] for name in names]
    with pytest.raises(RuntimeError, match="must have the network's own widths on the CPU"):
        torch.ops.dpa.unet1d_pack(weights, widened, dtype)
    packed = torch.ops.dpa.unet1d_pack([w.to("meta") for w in weights], widened, dtype)
    own_packed = torch.ops.dpa.unet1d_pack([w.to("meta") for w in weights], config, dtype)
    assert len(packed) > len(own_packed)


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        ((256, 512, 0, 192), "as many widths behind the 0"),
        ((256, 512, 0, 192, 300), "leave the network's structure"),  # groups of 37.5
        ((256, 512, 0, 264, 512), "leave the network's structure"),  # narrower than it is
        ((256, 512, 0, 192, 192), "leave the network's structure"),  # a convolution more
        ((512, 512, 0, 384, 192), "leave the network's structure"),  # one more behind the skip
        ((512, 256, 0, 384, 192), "leave the network's structure"),  # groups of two inputs
        ((256, 512, 0, 192, 384, 0), "as many widths behind the 0"),
    ],
)
def test_widths_that_make_another_network_are_refused(behind, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.dpa.unet1d_weight_names([*_CONFIG, *behind])


def test_a_cpu_keeps_a_networks_widths():
    packed = PackedUnet(_net(torch.device("cpu"), (192, 384, 640)))
    assert packed.sized(1, 16) is packed


_CASES = [  # own widths, kernel, batch, horizon, what is widened
    ((192, 384, 640), 3, 1, 16, KINDS),
    ((192, 384, 640), 5, 1, 48, KINDS),
    ((192, 384, 640), 5, 16, 16, KINDS[1:]),
    ((320, 640, 1280), 3, 1, 16, KINDS),
    ((320, 640, 1280), 3, 1, 64, KINDS[1:]),  # in float32 the model sees no gain of 5 %
    ((384, 768, 1536), 5, 4, 24, KINDS[1:]),
    ((320, 480, 960), 5, 1, 16, KINDS),
    ((320, 480, 960), 3, 4, 32, KINDS[1:]),
    ((192, 256, 512), 5, 1, 24, KINDS),
    ((128, 256, 384), 5, 1, 16, KINDS),
    ((128, 256, 384), 3, 1, 40, KINDS),
    ((64, 128, 256), 7, 1, 64, KINDS),
    ((96, 192, 320), 7, 1, 16, KINDS),
    ((96, 160), 3, 1, 16, KINDS),
    ((48, 96), 9, 1, 16, KINDS),
    ((80, 160, 320), 5, 8, 16, KINDS[1:]),
    ((80, 160, 320), 3, 3, 16, KINDS),
    ((56, 112), 9, 6, 8, KINDS),  # groups of 7 and 14 channels, in teams
    ((72, 144, 288), 5, 2, 24, KINDS),
    ((40, 80), 5, 1, 48, KINDS),
    ((64, 96, 144, 144), 1, 4, 8, KINDS),
    ((160, 240, 360), 5, 1, 16, KINDS),  # groups of 45 channels
    ((160, 240, 360), 5, 1, 48, KINDS),
    ((80, 160, 320, 640), 5, 1, 32, KINDS),
    ((160, 320, 480, 720), 3, 8, 8, KINDS),
    ((192, 384, 384, 768), 5, 6, 16, KINDS[1:]),
    ((192, 192, 384, 384, 768), 3, 1, 32, KINDS),
]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("own", "kernel", "count", "horizon", "kinds"), _CASES)
def test_against_float64(hopper, own, kernel, count, horizon, kinds, dtype):
    """The kernel that the size is widened for, and those that serve other sizes."""
    unet = _net(hopper, own, kernel)
    with torch.no_grad():  # means far from zero, which channels that are not counted would move
        for name, weight in unet.named_parameters():
            if name.endswith("block.0.bias"):
                weight.add_(0.3)
    exact = copy.deepcopy(unet if dtype.itemsize > 1 else _rounded_to_e4m3(unet)).double()
    packed = PackedUnet(unet, dtype)
    wide = packed.sized(count, horizon)
    assert (wide is not packed) == (dtype in kinds)
    assert wide.sized(count, horizon) is wide and wide.sized(9, 512) is packed
    for batch, times in [(count, horizon), (9, 512), (1, 1 << len(own))]:
        calls = []
        for _ in range(max(1, 64 // (batch * times))):  # of few numbers, luck
            sample, cond = _inputs(hopper, batch, times)
            steps = torch.randint(100, (batch,), device=hopper)
            calls.append([net(sample, steps, cond) for net in (wide, wide, packed)])
            with torch.no_grad():
                calls[-1].append(exact(sample.double(), steps, global_cond=cond.double()))
        got, again, unfilled, expected = map(torch.cat, zip(*calls, strict=True))
        # Biases this large cost 16-bit sums some bits, whichever widths they are summed over.
        kind = torch.float16 if dtype.itemsize == 1 else dtype
        most = max(ERROR[kind], 1.5 * error(unfilled, expected))
        assert error(got, expected) < most < 5 * ERROR[kind], (batch, times)
        assert torch.equal(got, again)


def test_a_sampler_follows_sizes_and_weights(hopper):
    """Calls of several sizes in turns, each on its own packed weights, which follow a write."""
    unet = _net(hopper, (128, 256, 384))
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=100)
    sampler, plain = (
        dpa.DiffusionSampler(unet, scheduler, 4, horizon=16, fused=fused) for fused in (None, False)
    )
    for change in (0.0, 0.1):
        with torch.no_grad():
            unet.final_conv[1].bias.add_(change)
        for batch in (1, 3, 1, 3):
            noise, cond = _inputs(hopper, batch, 16)
            got, want = (s(cond, noise=noise) for s in (sampler, plain))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_every_size_has_its_packing(hopper):
    """One sample, a batch in teams, and many samples: three packings that know one another."""
    packed = PackedUnet(_net(hopper, (80, 160, 320)), torch.bfloat16)
    one, some = packed.sized(1, 16), packed.sized(8, 16)
    assert len({id(one), id(some), id(packed)}) == 3
    assert some.sized(1, 16) is one and one.sized(8, 16) is some and some.sized(64, 64) is packed
    for network, widths in ((one, [128, 256, 512]), (some, [96, 160, 320])):
        network.repack()
        assert network.operands[1][6:] == [*widths, 0, 80, 160, 320]


def test_phases_have_float16_where_weights_are_rounded_to_e4m3(hopper):
    """They would widen e4m3 in every block: slower than to read float16."""
    torch.manual_seed(5)
    sizes = {"diffusion_step_embed_dim": 16, "down_dims": (256, 512, 1024), "kernel_size": 9}
    unet = ConditionalUnet1D(3, global_cond_dim=4, **sizes).to(hopper).eval()
    packed = PackedUnet(unet, torch.float8_e4m3fn).sized(2, 16)
    packed.repack()
    assert packed.operands[2] == torch.float16
    sample, cond = _inputs(hopper, 2, 16)
    steps = torch.randint(100, (2,), device=hopper)
    with torch.no_grad():
        exact = copy.deepcopy(_rounded_to_e4m3(unet)).double()
        expected = exact(sample.double(), steps, global_cond=cond.double())
    assert error(packed(sample, steps, cond), expected) < ERROR[torch.float16]
