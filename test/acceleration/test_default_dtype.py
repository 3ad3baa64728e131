"""torch.set_default_dtype changes what new tensors are, and no result."""

import copy

import pytest
import torch
from other_policies import ManiSkillAgent

import dpa
from dpa.packed.agreement import relative_error

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
SHAPE = (2, 8, 2)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default(request):
    """Sets the default, and back."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


def unet_and_inputs(device):
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(8, 16)
    )
    return unet.to(device).eval(), torch.randn(SHAPE, device=device), torch.randn(2, 3).to(device)


def check(call, default):
    """The same result, and of the same dtype, under that default."""
    expected = call()
    default()
    got = call()
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("timestep", [999, torch.tensor(999), torch.tensor([998, 999])], ids=str)
@pytest.mark.parametrize("kind", ["nn", "packed", "accelerated", "chain"])
def test_a_network(kind, timestep, default, device):
    """999 has ten bits, bfloat16 eight."""
    unet, sample, cond = unet_and_inputs(device)
    if kind == "packed":
        packed = dpa.PackedUnet(unet)
        if isinstance(timestep, int):
            timestep = torch.tensor(timestep)
        check(lambda: packed(sample, timestep.expand(2).to(device), cond), default)
        return
    if kind != "nn":
        unet = dpa.accelerate(
            dpa.reference.plain(unet), mode="chain" if kind == "chain" else "step"
        )
        unet(sample, 5, None, cond)  # compared here
    check(lambda: unet(sample, timestep, None, cond), default)


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"fused": True}, {"parallel": dpa.Parallel(4)}], ids=str
)
@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_a_sampler(kind, options, default, device):
    unet, _, cond = unet_and_inputs(device)
    scheduler = getattr(diffusers, f"{kind}Scheduler")(1000)
    made = lambda: dpa.DiffusionSampler(unet, scheduler, 4, horizon=8, **options)  # noqa: E731

    def call():
        sampler = made()
        generator = torch.Generator(device).manual_seed(1)
        return torch.stack([sampler(cond, generator=generator) for _ in range(3)])

    check(call, default)


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_a_step(kind, default, device):
    scheduler = getattr(diffusers, f"{kind}Scheduler")(1000)
    scheduler.set_timesteps(4)
    sample, output = torch.randn(2, *SHAPE, device=device)

    def call():
        fast = dpa.accelerate(copy.deepcopy(scheduler))
        generator = torch.Generator(device).manual_seed(1)
        steps = [fast.step(output, t, sample, generator=generator) for t in fast.timesteps]
        return torch.stack([step.prev_sample for step in steps])

    check(call, default)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loop_that_starts_in_the_default(default, device):
    """Its start, and the result, are of another dtype, or there is none."""
    torch.manual_seed(0)
    seen = torch.randn(2, 2, 3, device=device)
    plain = ManiSkillAgent().to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(plain))

    def act(agent):
        torch.manual_seed(7)
        with torch.autocast(device.type, torch.bfloat16):
            return agent.get_action(seen)

    for _ in range(3):
        assert relative_error(act(fast), act(plain)) < 0.05
    default()
    try:
        wanted = act(plain)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            act(fast)
        return
    for _ in range(3):
        got = act(fast)
        assert got.dtype == wanted.dtype and relative_error(got, wanted) < 0.05
