"""What dpa.accelerate leaves to the original, and what it refuses."""

import copy
import warnings

import pytest
import torch
from policies import (
    diffusers,
    original_policy,
    unet_and_inputs,
)
from test_acceleration import attributes, doubled_and_inputs
from torch import nn

import dpa
from dpa.acceleration.unet_forward import FastForward
from dpa.training.graphed_calls import replaced_forward


def test_more_levels_than_the_ops_run_layer_by_layer():
    policy = original_policy("cpu")
    unet = dpa.nn.ConditionalUnet1D(2, None, 4, 16, (8, 8, 8, 8, 8, 8))
    policy.model = dpa.reference.plain(unet).eval()
    with pytest.raises(ValueError, match="must have 1 to 5 down_dims to be packed, got"):
        dpa.PackedUnet(policy.model)
    fast = dpa.accelerate(copy.deepcopy(policy), fallback=False)
    assert "layer by layer with dpa's ops: unet must have 1 to 5" in str(dpa.explain(fast))
    data, cond = torch.zeros(2, 32, 2), torch.randn(2, 4)
    for _ in range(2):
        results = []
        for current in (fast, policy):
            torch.manual_seed(1)
            with torch.no_grad():
                results.append(current.conditional_sample(data, data.bool(), None, cond))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_a_network_that_only_looks_right_falls_back(device):
    unet, inputs = doubled_and_inputs(device)
    expected = unet(*inputs)
    dpa.accelerate(unet)
    with pytest.warns(RuntimeWarning, match=r"accelerated Doubled differs .* the original runs"):
        assert torch.equal(unet(*inputs), expected)
    assert torch.equal(unet(*inputs), expected)


def test_hooks_are_still_called():
    unet, inputs = unet_and_inputs()
    dpa.accelerate(unet)
    seen = []
    unet.mid_modules[0].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        unet(*inputs)
        unet(*inputs)
    assert len(seen) == 2


@torch.no_grad()
def test_a_scheduler_of_another_class_leaves_the_loop(device):
    policy = original_policy(device)
    policy.noise_scheduler = diffusers.EulerAncestralDiscreteScheduler(20)
    data = torch.zeros(1, 8, 2, device=device)
    call = (data, data.bool(), None, torch.randn(1, 4, device=device))
    torch.manual_seed(3)
    expected = policy.conditional_sample(*call)
    dpa.accelerate(policy)
    for _ in range(2):
        torch.manual_seed(3)
        torch.testing.assert_close(policy.conditional_sample(*call), expected, rtol=1e-3, atol=1e-3)
    assert "EulerAncestralDiscreteScheduler" in str(dpa.explain(policy))


def test_objects_that_only_hold_modules():
    class Holder:
        pass

    outer, outer.ema = Holder(), Holder()
    outer.ema.averaged_model, _ = unet_and_inputs()
    dpa.accelerate(outer)
    assert isinstance(replaced_forward(outer.ema.averaged_model), FastForward)
    assert dpa.explain(outer).findings[0].path == "ema.averaged_model"
    dpa.restore(outer)
    assert "forward" not in vars(outer.ema.averaged_model)


def test_what_is_refused():
    with pytest.raises(TypeError, match="no conditional U-Net and no denoising loop was found"):
        dpa.accelerate(nn.Linear(2, 2))
    unet, _ = unet_and_inputs()
    with pytest.raises(ValueError, match="mode must be one of loop, step, chain, got 'fast'"):
        dpa.accelerate(unet, mode="fast")
    with pytest.raises(ValueError, match="tolerance must be positive and finite, got high"):
        dpa.accelerate(unet, tolerance="high")
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16"):
        dpa.accelerate(unet, torch.float64)
    unet.final_conv[0] = nn.Identity()
    with pytest.raises(TypeError, match=r"unchanged: .*parameters differ: missing: final_conv"):
        dpa.accelerate(unet)


def test_what_fails_leaves_the_model_as_it_was():
    policy = original_policy("cpu")
    policy.noise_scheduler = diffusers.PNDMScheduler(20)
    with pytest.raises(TypeError, match=r"all must be fused, got: .*PNDMScheduler"):
        dpa.accelerate(policy, fallback=False)
    plain = attributes(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="PNDMScheduler"):
            dpa.accelerate(policy)
    assert attributes(policy) == plain
    with pytest.warns(RuntimeWarning, match="PNDMScheduler"):
        dpa.accelerate(policy, tolerance=0.1)
    before = attributes(policy)
    with pytest.raises(TypeError, match="with fallback=False all must be fused"):
        dpa.accelerate(policy, fallback=False)
    assert attributes(policy) == before
    scheduler = dpa.accelerate(diffusers.DDPMScheduler(20))
    step = scheduler.step
    scheduler.register_to_config(thresholding=True)
    with pytest.raises(TypeError, match="thresholding"):
        dpa.accelerate(scheduler)
    assert scheduler.step is step
