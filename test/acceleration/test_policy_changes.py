"""What is done to a scheduler, and to a policy's calls: accelerated policies do as the original."""

import copy
import re
import types

import pytest
import torch
from policies import (
    call_of,
    diffusers,
    lerobot_policy,
    observations,
    original_policy,
    sampled,
    unet_and_inputs,
)
from scheduler_changes import CHANGES, KINDS_AND_CHANGES, scheduler_for

import dpa

# Nothing falls back here unless a test says so.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def test_a_scheduler_that_is_replaced_later():
    fast, call = dpa.accelerate(original_policy("cpu")), call_of()
    sampled(fast, call)
    fast.noise_scheduler = diffusers.DDIMScheduler(20, thresholding=True)
    plain = dpa.restore(copy.deepcopy(fast))
    with pytest.warns(RuntimeWarning, match=r"cannot be accelerated: .*thresholding"):
        sampled(fast, call)
    torch.testing.assert_close(sampled(fast, call), sampled(plain, call), rtol=1e-3, atol=1e-3)
    for policy in (fast, plain):
        policy.noise_scheduler = diffusers.DDPMScheduler(20)
    for _ in range(2):
        torch.testing.assert_close(sampled(fast, call), sampled(plain, call), rtol=1e-4, atol=1e-4)
    assert dpa.explain(fast).findings[0].active


@torch.no_grad()
def test_what_is_done_to_a_scheduler(device):
    """Its step replaced, its noise levels replaced, new ones for every call."""
    plain = original_policy(device)
    fast, call = dpa.accelerate(copy.deepcopy(plain)), call_of(device)
    sampled(fast, call)
    sampled(fast, call)
    seen = []
    for policy in (plain, fast):
        own = policy.noise_scheduler.step
        policy.noise_scheduler.step = lambda *a, own=own, **k: seen.append(1) or own(*a, **k)
    want = sampled(plain, call)
    with pytest.warns(RuntimeWarning, match="the scheduler's step was replaced on the object"):
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
    assert len(seen) == 2 * fast.num_inference_steps
    assert "step was replaced" in str(dpa.explain(fast))
    for policy in (plain, fast):
        del policy.noise_scheduler.step
        policy.noise_scheduler.alphas_cumprod = policy.noise_scheduler.alphas_cumprod**2
    for _ in range(2):
        torch.testing.assert_close(sampled(fast, call), sampled(plain, call), rtol=1e-4, atol=1e-4)
    loop = vars(fast)["conditional_sample"]
    for steps in range(1, 13):
        fast.num_inference_steps = plain.num_inference_steps = steps
        fast.noise_scheduler = diffusers.DDPMScheduler(20)
        plain.noise_scheduler = fast.noise_scheduler
        for _ in range(2):
            want = sampled(plain, call)
            torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
    assert len(loop._routes) == 8
    assert len({id(route.sampler.packed) for route in loop._routes}) == 1


@torch.no_grad()
@pytest.mark.parametrize(("kind", "change"), KINDS_AND_CHANGES)
def test_a_scheduler_that_changes(kind, change):
    plain, call = original_policy("cpu"), (*call_of(), None)
    plain.noise_scheduler = scheduler_for(kind, change)
    fast = dpa.accelerate(copy.deepcopy(plain))

    def run(policy):
        torch.manual_seed(3)
        return policy.conditional_sample(*call, **({"eta": 0.5} if kind == "DDIM" else {}))

    for _ in range(3):
        before = run(fast)
        fast.noise_scheduler.set_timesteps(9)
        fast.noise_scheduler.add_noise(*torch.ones(2, 1, 2), torch.tensor([3]))
    assert len(vars(fast)["conditional_sample"]._routes) == 1
    for policy in (plain, fast):
        CHANGES[change](policy.noise_scheduler)
    after = run(plain)
    assert (before - after).abs().max() > 1e-3
    for _ in range(2):
        torch.testing.assert_close(run(fast), after, rtol=1e-4, atol=1e-4)
    assert len(vars(fast)["conditional_sample"].shadow.errors) == 2  # checked again, and fast again


@torch.no_grad()
def test_a_method_of_a_scheduler_that_is_replaced():
    plain, call = original_policy("cpu"), call_of()
    fast = dpa.accelerate(copy.deepcopy(plain))
    sampled(fast, call)
    for policy in (plain, fast):
        scheduler = policy.noise_scheduler

        def later(steps, scheduler=scheduler):
            type(scheduler).set_timesteps(scheduler, steps)
            scheduler.timesteps = scheduler.timesteps.clamp(min=2)

        scheduler.set_timesteps = later
    want = sampled(plain, call)
    with pytest.warns(RuntimeWarning, match="the scheduler's set_timesteps was replaced"):
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
    with pytest.warns(RuntimeWarning, match="set_timesteps was replaced"):
        dpa.accelerate(fast)  # it says so at once, and need not again
    torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("case", ["no sample", "all is given", "a head of zeros", "not finite"])
def test_a_first_call_that_proves_nothing(case):
    """Here the loop only seems right, which a later call must still find out."""
    policy = original_policy("cpu")

    class Doubled(type(policy)):
        def conditional_sample(
            self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None
        ):
            call = (condition_data, condition_mask, local_cond, global_cond, generator)
            made = super().conditional_sample(*call)
            return made * (2 - condition_mask.to(made.dtype))

    policy.__class__ = Doubled
    plain = copy.deepcopy(policy)
    data, mask, _, cond = call_of()
    call = {"condition_data": data, "condition_mask": mask, "global_cond": cond}
    first = {
        "no sample": {name: value[:0] for name, value in call.items()},
        "all is given": call | {"condition_mask": ~mask},
        "a head of zeros": call,
        "not finite": call | {"global_cond": cond / 0},
    }[case]
    if case == "a head of zeros":
        policy.model.final_conv[1].weight.zero_()
    dpa.accelerate(policy)
    for _ in range(2):
        policy.conditional_sample(**first)
    assert (
        not vars(policy)["conditional_sample"].shadow.errors
        and dpa.explain(policy).findings[0].active
    )
    policy.load_state_dict(plain.state_dict())
    with pytest.warns(RuntimeWarning, match=r"Doubled.conditional_sample differs"):
        policy.conditional_sample(**call)


@torch.no_grad()
def test_the_timesteps_that_a_loop_leaves_behind():
    policy, call = dpa.accelerate(original_policy("cpu")), call_of()
    for steps in (10, 10, 5, 5, 10, 10, 5):
        policy.num_inference_steps = steps
        sampled(policy, call)
        assert len(policy.noise_scheduler.timesteps) == steps


@torch.no_grad()
def test_calls_that_no_fused_loop_takes(device):
    plain = original_policy(device)
    fast, (data, mask, _, cond) = dpa.accelerate(copy.deepcopy(plain)), call_of(device)
    noise = torch.randn_like(data)
    for options, why in (
        ({"eta": 0.5, "variance_noise": noise}, "no fused step takes variance_noise"),
        ({"condition_data": data.double(), "eta": 0.5}, "condition_data is torch.float64"),
        ({"condition_mask": mask.long()}, "condition_mask is torch.int64"),
    ):
        call = {"condition_data": data, "condition_mask": mask, "global_cond": cond, **options}
        want = error = None
        try:
            want = plain.conditional_sample(**call)
        except (IndexError, RuntimeError) as raised:
            error = str(raised)
        with pytest.warns(RuntimeWarning, match=f"cannot be accelerated: {why}"):
            if error is None:
                torch.testing.assert_close(fast.conditional_sample(**call).shape, want.shape)
            else:
                with pytest.raises((IndexError, RuntimeError), match=re.escape(error)):
                    fast.conditional_sample(**call)
        strict = dpa.accelerate(copy.deepcopy(plain), fallback=False)
        with pytest.raises(RuntimeError, match=why):
            strict.conditional_sample(**call)

    class Bare:
        """A scheduler with none of diffusers' attributes besides those that the loop reads."""

        timesteps = torch.arange(4, -1, -1)

        def set_timesteps(self, steps):
            pass

        def step(self, output, timestep, sample, generator=None):
            return types.SimpleNamespace(prev_sample=sample - 0.1 * output)

    plain.noise_scheduler = fast.noise_scheduler = Bare()
    want = sampled(plain, call_ := (data, mask, None, cond))
    with pytest.warns(RuntimeWarning, match="got Bare"):
        torch.testing.assert_close(sampled(fast, call_), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_raises_where_the_original_did_not(monkeypatch):
    """No memory for the packed weights, say: the first call finds out, and the original runs."""

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    policy, call = original_policy("cpu"), call_of()
    want = sampled(policy, call)
    monkeypatch.setattr(dpa.PackedUnet, "repack", out_of_memory)
    fast = dpa.accelerate(copy.deepcopy(policy))
    with pytest.warns(RuntimeWarning, match=r"raised CUDA out of memory\., so the original runs"):
        assert torch.equal(sampled(fast, call), want)
    with pytest.warns(RuntimeWarning, match="ConditionalUnet1D raised CUDA out of memory"):
        torch.testing.assert_close(sampled(fast, call), want)
    torch.testing.assert_close(sampled(fast, call), want)
    assert "unchanged: raised CUDA out of memory." in str(dpa.explain(fast))
    with pytest.raises(RuntimeError, match=r"raised CUDA .*, and fallback is False"):
        sampled(dpa.accelerate(policy, fallback=False), call)


@torch.no_grad()
def test_given_noise_replaces_the_draw(device):
    """LeRobot's ``noise=``, through its public methods."""
    plain = lerobot_policy(device, noise_scheduler_type="DDIM", num_inference_steps=5)
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False)
    noise = torch.randn(1, 8, 2, device=device)
    for observation in observations(9, device):
        results = []
        for policy in (plain, fast):
            torch.manual_seed(8)
            results.append(policy.select_action(dict(observation), noise=noise))
            results.append(torch.randn(2, device=device))
        torch.testing.assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(results[3], results[1])
    assert dpa.explain(fast).findings[0].errors


@torch.no_grad()
def test_given_noise_of_another_horizon(device):
    plain = lerobot_policy(device, num_inference_steps=5)
    for first in (16, 8):
        fast = dpa.accelerate(copy.deepcopy(plain))
        for horizon in (first, 8, 16, 4, 16):
            noise = torch.randn(2, horizon, 2, device=device)
            cond, results = torch.randn(2, 14, device=device), []
            for policy in (plain, fast):
                torch.manual_seed(8)
                results.append(policy.diffusion.conditional_sample(2, cond, noise=noise))
            torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
        assert len(vars(fast.diffusion)["conditional_sample"].shadow.errors) == 3
        with (
            pytest.warns(RuntimeWarning, match=r"cannot be accelerated: noise is \(16, 2\)"),
            pytest.raises((RuntimeError, ValueError)),
        ):
            fast.diffusion.conditional_sample(2, cond, noise=noise[0])


def test_the_tolerance_decides():
    unet, inputs = unet_and_inputs()

    class Shifted(type(unet)):
        def forward(self, sample, timestep, local_cond=None, global_cond=None):
            return 1.01 * super().forward(sample, timestep, local_cond, global_cond)

    unet.__class__ = Shifted
    with torch.no_grad():
        want = unet(*inputs)
        dpa.accelerate(unet, tolerance=0.1)
        unet(*inputs)
        torch.testing.assert_close(1.01 * unet(*inputs), want, rtol=1e-4, atol=1e-4)
        dpa.accelerate(unet)
        with pytest.warns(RuntimeWarning, match="the accelerated Shifted differs"):
            unet(*inputs)
        assert torch.equal(unet(*inputs), want)
    assert "unchanged: differs from the original by" in str(dpa.explain(unet))
    for tolerance in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="tolerance must be positive and finite, got"):
            dpa.accelerate(unet, tolerance=tolerance)
