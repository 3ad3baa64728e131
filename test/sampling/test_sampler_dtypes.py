"""Samplers of networks in another dtype than that of their weights, and in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from policies import lerobot_unet
from test_sampler import DDIM, SHAPE, diffusers, diffusers_loop, make_scheduler, make_unet
from torch import nn

import dpa


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_network_in_another_dtype_follows_its_weights(dtype, device):
    scheduler, steps, _ = make_scheduler("ddim")
    unet = make_unet(device)
    cond, noise = torch.randn(3, 4, device=device), torch.randn(SHAPE, device=device)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, dtype, fused=False)
    for _ in range(2):
        got = sampler(cond, noise=noise)
        cast = copy.deepcopy(unet).to(dtype)
        want = dpa.DiffusionSampler(cast, scheduler, steps, fused=False)(cond, noise=noise)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        # Training goes on between two calls, in a way that no version counter shows.
        for parameter in unet.parameters():
            parameter.data.mul_(1.5)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in unet.parameters())


class _Louder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def _wrapped(unet):
    unet.final_conv[0] = _Louder(unet.final_conv[0])


def _eps(unet):
    for module in unet.modules():
        if isinstance(module, nn.GroupNorm):
            module.eps = 0.5


def _parametrized(unet):
    nn.utils.parametrizations.weight_norm(unet.final_conv[1])
    unet.final_conv[1].parametrizations.weight.original0.data *= 2


def _hook(unet):
    unet.final_conv[0].register_forward_hook(lambda module, args, out: 2 * out)


def _mode(unet):
    unet.final_conv.append(nn.Dropout(1.0).eval())
    return unet.final_conv[2].train


@pytest.mark.parametrize("change", [_wrapped, _eps, _parametrized, _hook, _mode])
def test_network_in_another_dtype_follows_its_structure(change):
    scheduler, steps = DDIM(20, prediction_type="sample"), 1  # in which rounding does not grow
    unet, cond, noise = make_unet("cpu").eval(), torch.randn(3, 4), torch.randn(SHAPE)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, torch.bfloat16, fused=False)
    before = sampler(cond, noise=noise)
    if (later := change(unet)) is not None:
        assert torch.equal(sampler(cond, noise=noise), before)
        later()
    got = sampler(cond, noise=noise)
    want = diffusers_loop(unet, scheduler, steps, cond, noise)
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)
    assert not torch.allclose(got, before, rtol=0.1, atol=0.1)


def test_the_copy_in_another_dtype_serves_other_modes():
    unet, cond, noise = make_unet("cpu").eval(), torch.randn(3, 4), torch.randn(SHAPE)
    sampler = dpa.DiffusionSampler(unet, DDIM(20), 2, torch.bfloat16, fused=False)
    with torch.inference_mode():
        before = sampler(cond, noise=noise)
    assert torch.equal(sampler(cond, noise=noise), before)
    first, second = unet.mid_modules[0].blocks
    second.block[0].weight = first.block[0].weight  # in two places from now on
    fresh = dpa.DiffusionSampler(unet, DDIM(20), 2, torch.bfloat16, fused=False)
    assert torch.equal(sampler(cond, noise=noise), fresh(cond, noise=noise))


class _Scaled(nn.Module):
    """A network with a number, which TorchScript keeps in C++, and a mode."""

    def __init__(self):
        super().__init__()
        self.unet, self.factor = make_unet("cpu"), 1.0
        self.dropout = nn.Dropout(1.0).eval()

    def forward(self, sample, timestep, global_cond: torch.Tensor):
        return self.dropout(self.unet(sample, timestep, global_cond=global_cond)) * self.factor


@pytest.mark.parametrize(
    "change", [lambda net: setattr(net, "factor", 2.0), lambda net: net.dropout.train()]
)
def test_a_scripted_network_in_another_dtype_follows_its_attributes(change):
    scheduler, steps = DDIM(20, prediction_type="sample"), 1
    unet, cond, noise = torch.jit.script(_Scaled()), torch.randn(3, 4), torch.randn(SHAPE)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, torch.bfloat16, fused=False)
    before = sampler(cond, noise=noise)
    change(unet)
    got = sampler(cond, noise=noise)
    fresh = dpa.DiffusionSampler(unet, scheduler, steps, torch.bfloat16, fused=False)
    assert torch.equal(got, fresh(cond, noise=noise)) and not torch.equal(got, before)


def test_the_copy_in_another_dtype_is_kept(monkeypatch):
    scheduler, steps, _ = make_scheduler("ddim")
    unet, made = make_unet("cpu"), []
    networks = [unet, torch.compile(make_unet("cpu"), backend="eager"), torch.jit.script(unet)]
    samplers = [
        dpa.DiffusionSampler(network, scheduler, steps, torch.bfloat16, horizon=8, fused=False)
        for network in networks
    ]
    copied = copy.deepcopy
    monkeypatch.setattr(
        "dpa.sampling.stepwise_loop.copy",
        SimpleNamespace(deepcopy=lambda m: made.append(m) or copied(m)),
    )
    for sampler in samplers:
        for _ in range(3):
            sampler(torch.randn(3, 4))
            for parameter in unet.parameters():
                parameter.data = parameter.data * 1.5
    assert list(map(id, made)) == list(map(id, networks))


@pytest.mark.parametrize("parallel", [None, dpa.Parallel(3, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lerobots_network_in_another_dtype(dtype, parallel):
    """It computes the timestep's embedding in float32 whatever its weights are."""
    arguments = {"input_dim": 2, "global_cond_dim": 4, "down_dims": (16, 32)}
    unet = lerobot_unet({**arguments, "diffusion_step_embed_dim": 16}).eval()
    scheduler, steps = DDIM(20, prediction_type="sample"), 5
    cond, noise = torch.randn(3, 4), torch.randn(SHAPE)
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, dtype, parallel=parallel)

    def called(sample, timestep, global_cond):
        return unet(sample, timestep.expand(3), global_cond)

    want = diffusers_loop(called, scheduler, steps, cond, noise)
    assert (sampler(cond, noise=noise) - want).norm() < 5e-2 * want.norm()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("parallel", [None, dpa.Parallel(3, 0)])
def test_float64_network_in_float32_gives_float64(parallel, fused, device):
    scheduler, steps, _ = make_scheduler("ddim")
    unet = make_unet(device).double()
    cond, noise = torch.randn(3, 4, device=device), torch.randn(SHAPE, device=device)
    options = {"dtype": torch.float32, "fused": fused, "parallel": parallel}
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, **options)
    want = diffusers_loop(unet, scheduler, steps, cond.double(), noise.double())
    for _ in range(2):
        got = sampler(cond, noise=noise)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_float64_network_samples_in_float64(device):
    scheduler, steps, _ = make_scheduler("ddpm")
    sampler = dpa.DiffusionSampler(make_unet(device).double(), scheduler, steps, horizon=8)
    cond = torch.randn(3, 4, device=device)
    got = sampler(cond, generator=torch.Generator().manual_seed(0))
    want = sampler(cond.double(), generator=torch.Generator().manual_seed(0))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_8_bit_dtypes_are_for_packed_weights_alone():
    """A network itself cannot run in float8: said at construction, not deep in a convolution."""
    unet = torch.nn.Linear(2, 2)
    table = dpa.schedulers.from_diffusers(diffusers.DDPMScheduler(), 2)
    for dtype, fused in [(torch.float8_e4m3fn, False), (torch.float8_e5m2, True)]:
        with pytest.raises(ValueError, match="dtype must have 16 bits or more"):
            dpa.DiffusionSampler(unet, table, dtype=dtype, fused=fused)


def test_8_bits_mean_the_fused_loop(device):
    """No option needed; a CPU, whose packed weights have 16 bits or more, says so."""
    scheduler, steps, _ = make_scheduler("ddim")
    noise, cond = torch.randn(2, 8, 2, device=device), torch.randn(2, 4, device=device)
    unet, dtype = make_unet(device), torch.float8_e4m3fn
    default, fused = (
        dpa.DiffusionSampler(unet, scheduler, steps, dtype, fused=given) for given in (None, True)
    )
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match=r"unet1d_pack: dtype must be float32.*on the CPU"):
            default(cond, noise=noise)
        return
    got = default(cond, noise=noise)
    assert got.isfinite().all() and torch.equal(got, fused(cond, noise=noise))
