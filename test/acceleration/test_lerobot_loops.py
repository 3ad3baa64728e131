"""Whole denoising loops of dpa.accelerate against LeRobot's own, for real and for random shapes.

float32 agrees to 1e-4 in every action. 16-bit weights have no such bound: how far rounding moves a
sample depends on the network. The measure is what PyTorch itself gives in those 16 bits: the
original's loop under autocast. dpa must not be further from the float32 loop than 1.5 times that,
and half a rounding step. Of 60 random configurations it is 0.57 times as far in the median.
"""

import copy
import os

import pytest
import torch
from architectures import architectures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import AroundLeRobots, OriginalPolicy, diffusers, lerobot_unet

import dpa
from dpa.acceleration.policy_loop import FastLoop

MIDDLE, WIDE, NARROW = (256, 512, 1024), (512, 1024, 2048), (64, 128, 256)
# Action dimension, horizon, widths, kernel, step embedding, condition, scheduler, steps.
ROWS = {
    "pusht_lowdim": (2, 16, MIDDLE, 5, 256, 40, "DDPM", 100),
    "pusht_inpainting": (22, 16, MIDDLE, 5, 256, 0, "DDIM", 8),
    "notebook": (2, 16, MIDDLE, 5, 256, 1028, "DDPM", 100),
    "kitchen": (9, 16, MIDDLE, 5, 256, 120, "DDPM", 100),
    "real_pusht": (2, 16, MIDDLE, 5, 128, 260, "DDIM", 16),
    "umi": (20, 16, MIDDLE, 5, 128, 1568, "DDIM", 16),
    "aloha": (16, 48, MIDDLE, 5, 256, 206, "DDIM", 10),
    "pusht_image": (2, 16, WIDE, 5, 128, 132, "DDPM", 100),
    "lift_image": (10, 16, WIDE, 5, 128, 2066, "DDPM", 100),
    "lerobot_0.6_ddpm": (6, 64, WIDE, 5, 128, 268, "DDPM", 100),
    "lerobot_0.6_ddim": (6, 64, WIDE, 5, 128, 268, "DDIM", 10),
    "dp3": (24, 16, WIDE, 5, 128, 256, "DDIM", 10),
    "maniskill": (8, 16, NARROW, 5, 64, 84, "DDPM", 100),
    "nomad": (2, 8, NARROW, 3, 256, 256, "DDPM", 10),
}
CASES = int(os.environ.get("DPA_FUZZ_CASES", "30"))
# The same cases in every run, but where the environment wants more.
SAME = "DPA_FUZZ_CASES" not in os.environ
OPTIONS = {"dp3": {"prediction_type": "sample"}}
# What many steps add up to, the narrow rows show on the CPU; a GPU runs every row through all.
STEPS_ON_CPU = 8


@pytest.fixture(scope="module", params=ROWS)
def row(request):
    """A row's name, and what gives copies of one policy: its random weights take longest."""
    name, made = request.param, {}

    def policy(device):
        if device.type == "cpu" and ROWS[name][2] == WIDE:
            pytest.skip("a network of 250 M parameters is for a GPU")
        if device not in made:
            made[device] = row_policy(name, device), torch.get_rng_state()
        found, state = made[device]
        torch.set_rng_state(state)  # what is drawn next is the same, whichever test made it
        return copy.deepcopy(found)

    return name, policy


def row_policy(name, device):
    actions, _, dims, kernel, embedding, cond, kind, steps = ROWS[name]
    arguments = {
        "input_dim": actions,
        "global_cond_dim": cond,
        "diffusion_step_embed_dim": embedding,
        "down_dims": dims,
        "kernel_size": kernel,
        "cond_predict_scale": name != "nomad",
    }
    make = getattr(diffusers, f"{kind}Scheduler")
    options = {"beta_schedule": "squaredcos_cap_v2", **OPTIONS.get(name, {})}
    scheduler = make(10 if name == "nomad" else 100, **options)
    if device.type == "cpu" and dims != NARROW:
        steps = min(steps, STEPS_ON_CPU)
    with torch.device(device):
        return AroundLeRobots(lerobot_unet(arguments), scheduler, steps).eval()


def call_of(name, device, batch):
    """The arguments of a row's call: condition_data, condition_mask and the conditioning."""
    actions, horizon, cond = ROWS[name][0], ROWS[name][1], ROWS[name][5]
    data = torch.randn(batch, horizon, actions, device=device).clamp(-1, 1)
    mask = torch.zeros_like(data, dtype=torch.bool)
    mask[:, :2, 2:] = name == "pusht_inpainting"
    cond = torch.randn(batch, cond, device=device) if cond else None
    return {"condition_data": data, "condition_mask": mask, "global_cond": cond}


@torch.no_grad()
def sample(policy, call, seed=0):
    generator = torch.Generator(call["condition_data"].device).manual_seed(seed)
    result = policy.conditional_sample(**call, generator=generator)
    return result, torch.randn(2, generator=generator, device=result.device)


def test_rows_in_float32(row, device):
    name, policy_on = row
    policy, call = policy_on(device), call_of(name, device, 2)
    expected, behind = sample(policy, call)
    dpa.accelerate(policy)
    for _ in range(2):
        got, drawn = sample(policy, call)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(drawn, behind)
    loop = vars(policy)["conditional_sample"]
    assert isinstance(loop, FastLoop) and max(loop.shadow.errors.values()) < 1e-4
    # What is clipped would agree in any case.
    free = ~call["condition_mask"] & (expected.abs() < 0.99)
    assert free.sum() >= 0.05 * free.numel(), f"{free.float().mean():.3f}"


def error(got, exact):
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def assert_as_near_as_autocast(policy, call, dtype, **options):
    exact, _ = sample(policy, call)
    # Its output in float32, or the scheduler would draw other, 16-bit numbers.
    handle = policy.model.register_forward_hook(lambda *seen: seen[2].float())
    with torch.autocast(exact.device.type, dtype):
        theirs, _ = sample(policy, call)
    handle.remove()
    dpa.accelerate(policy, dtype, **options)
    for _ in range(2):
        ours, _ = sample(policy, call)
    assert vars(policy)["conditional_sample"].shadow.errors
    assert not torch.equal(ours, exact)  # it is not the original that ran
    # What half a rounding step makes, chance decides.
    chance = torch.finfo(dtype).eps / 2
    assert error(ours, exact) <= 1.5 * error(theirs, exact) + chance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_sixteen_bits(row, dtype, device):
    name, policy_on = row
    policy, batch = policy_on(device), 8
    if device.type == "cpu":  # which computes 16 bits slowly where it has no instructions for them
        batch, most = (2, 16) if ROWS[name][2] == NARROW else (1, 4)
        policy.num_inference_steps = min(policy.num_inference_steps, most)
    assert_as_near_as_autocast(policy, call_of(name, device, batch), dtype)


@st.composite
def schedulers(draw):
    """DDPM or DDIM of diffusers, with options that change its numbers, and steps."""
    kind, train = draw(st.sampled_from(["DDPM", "DDIM"])), draw(st.integers(4, 60))
    options = {
        "beta_schedule": draw(st.sampled_from(["linear", "scaled_linear", "squaredcos_cap_v2"])),
        "prediction_type": draw(st.sampled_from(["epsilon", "sample", "v_prediction"])),
        "timestep_spacing": draw(st.sampled_from(["leading", "linspace", "trailing"])),
        "clip_sample_range": draw(st.sampled_from([0.5, 1.0, 3.0])),
    }
    if kind == "DDPM":
        options["variance_type"] = draw(st.sampled_from(["fixed_small", "fixed_large"]))
    else:
        options["set_alpha_to_one"] = draw(st.booleans())
    scheduler = getattr(diffusers, f"{kind}Scheduler")(train, **options)
    return scheduler, draw(st.integers(2, min(train, 20)))


def in_double(policy, call):
    """The loop in float32 with the network in float64."""
    unet = copy.deepcopy(policy.model).double()
    # The position embedding is float32 whatever the weights are.
    unet.diffusion_step_encoder[0].register_forward_hook(lambda *seen: seen[2].double())

    def network(x, timestep, **conditions):
        conditions = {k: v if v is None else v.double() for k, v in conditions.items()}
        return unet(x.double(), timestep, **conditions).float()

    twin = copy.copy(policy)
    twin._modules = {}
    vars(twin)["model"] = network
    return sample(twin, call)[0]


def assert_as_near_as_rounding(plain, call, got):
    """A group of few values, nearly equal, magnifies rounding: the original's own is the measure.

    Which is chance, so its weights are moved by a unit in the last place to see more of it.
    """
    exact, own = in_double(plain, call), []
    for _ in range(4):
        own.append(float((sample(plain, call)[0] - exact).abs().max()))
        for parameter in plain.parameters():
            away = torch.randn_like(parameter).sign() * torch.inf
            parameter.data = torch.nextafter(parameter.data, away)
    assert (got - exact).abs().max() <= 2 * max(own)


@given(architectures(), schedulers(), st.integers(1, 5), st.integers(2, 4), st.booleans())
@settings(
    max_examples=CASES,
    deadline=None,
    derandomize=SAME,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_random_configurations(arguments, scheduler, batch, multiple, inpainting):
    torch.manual_seed(0)
    local = arguments["local_cond_dim"]
    horizon = multiple * 2 ** (len(arguments["down_dims"]) - 1)
    if local is None:
        policy = AroundLeRobots(lerobot_unet(arguments), *scheduler).eval()
    else:
        unet = dpa.reference.plain(dpa.nn.ConditionalUnet1D(**arguments))
        policy = OriginalPolicy(unet, *scheduler).eval()
    data = torch.randn(batch, horizon, arguments["input_dim"])
    call = {
        "condition_data": data,
        "condition_mask": (torch.rand_like(data) < 0.3) & inpainting,
        "local_cond": None if local is None else torch.randn(batch, horizon, local),
        "global_cond": None,
    }
    if (cond := arguments["global_cond_dim"]) is not None:
        call["global_cond"] = torch.randn(batch, cond)
    expected, behind = sample(policy, call)
    bound = 1e-4 * max(1.0, float(expected.abs().max()))
    plain = copy.deepcopy(policy)
    # The self-check knows no reason for a difference, and would run the original.
    dpa.accelerate(policy, tolerance=10.0, fallback=False)
    for _ in range(2):
        got, drawn = sample(policy, call)
        assert torch.equal(drawn, behind)
        if (got - expected).abs().max() > bound:
            assert_as_near_as_rounding(plain, call, got)
    assert vars(policy)["conditional_sample"].shadow.errors


@given(architectures(), schedulers(), st.integers(2, 4), st.booleans())
@settings(
    max_examples=CASES * 2 // 5,
    deadline=None,
    derandomize=SAME,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_random_configurations_in_sixteen_bits(arguments, scheduler, multiple, half):
    torch.manual_seed(0)
    arguments["local_cond_dim"] = None
    horizon = multiple * 2 ** (len(arguments["down_dims"]) - 1)
    policy = AroundLeRobots(lerobot_unet(arguments), *scheduler).eval()
    data = torch.randn(8, horizon, arguments["input_dim"])
    mask = torch.zeros_like(data, dtype=torch.bool)
    call = {"condition_data": data, "condition_mask": mask, "global_cond": None}
    if (cond := arguments["global_cond_dim"]) is not None:
        call["global_cond"] = torch.randn(8, cond)
    # No training has made these networks draw nearby samples together: any error is possible.
    dtype = torch.float16 if half else torch.bfloat16
    assert_as_near_as_autocast(policy, call, dtype, tolerance=10.0)
