"""Networks and policies as other projects have them: solvers, compiled, switches, holders."""

import copy
import types

import pytest
import torch
from policies import (
    SMALL,
    assert_follows,
    call_of,
    diffusers,
    lerobot_unet,
    original_policy,
    sampled,
    unet_and_inputs,
)
from torch import nn

import dpa
from dpa.acceleration.unet_forward import FastForward
from dpa.training.graphed_calls import replaced_forward

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


SOLVERS = ["DPMSolverMultistep", "FlowMatchEulerDiscrete", "EulerDiscrete", "EDMEuler"]


@pytest.mark.parametrize("kind", SOLVERS)
def test_policies_with_other_solvers(kind, device):
    policy = original_policy(device)
    policy.noise_scheduler = getattr(diffusers, f"{kind}Scheduler")(num_train_timesteps=20)
    fast, call = dpa.accelerate(copy.deepcopy(policy), fallback=False), call_of(device)
    for steps in (5, 5, 8):
        policy.num_inference_steps = fast.num_inference_steps = steps
        want = sampled(policy, call)
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
    assert dpa.explain(fast).findings[0].active


def test_a_compiled_network_inside_a_policy(device):
    policy = original_policy(device)
    fast, call = copy.deepcopy(policy), call_of(device)
    fast.model = torch.compile(fast.model, backend="eager")
    dpa.accelerate(fast, fallback=False)
    for _ in range(2):
        want = sampled(policy, call)
        torch.testing.assert_close(sampled(fast, call), want, rtol=1e-4, atol=1e-4)
    assert [f.active for f in dpa.explain(fast).findings] == [True, True]
    assert all("_orig_mod" in name for name in fast.state_dict() if "down_modules" in name)


def test_a_compiled_network_is_compared_with_the_original():
    class Doubled(type(original_policy("cpu").model)):
        def forward(self, sample, timestep, local_cond=None, global_cond=None):
            return 2 * super().forward(sample, timestep, local_cond, global_cond)

    policy, call = original_policy("cpu"), call_of()
    policy.model.__class__ = Doubled
    want = sampled(policy, call)
    policy.model = torch.compile(policy.model, backend="eager")
    dpa.accelerate(policy)
    with pytest.warns(RuntimeWarning, match="the accelerated OriginalPolicy.* differs"):
        sampled(policy, call)
    dpa.restore(policy)
    torch.testing.assert_close(sampled(policy, call), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_lerobots_network_compiles_without_a_graph_break(device):
    arguments = {"input_dim": 2, "global_cond_dim": 4, "cond_predict_scale": True, **SMALL}
    unet = dpa.accelerate(lerobot_unet(arguments).to(device).eval())
    plain = dpa.restore(copy.deepcopy(unet))
    inputs = (torch.randn(3, 8, 2, device=device), torch.arange(3, device=device))
    cond = torch.randn(3, 4, device=device)
    unet(*inputs, global_cond=cond)

    def user(x, timestep):
        return unet(x, timestep, global_cond=cond) * 2

    compiled = torch.compile(user, backend="aot_eager", fullgraph=True)
    for scale in (1.0, 0.9):
        for network in (unet, plain):
            for parameter in network.parameters():
                parameter.mul_(scale)
        want = 2 * plain(*inputs, global_cond=cond)
        torch.testing.assert_close(compiled(*inputs), want, rtol=1e-5, atol=1e-5)


PARTS = {
    "use_down_condition": "down_modules",
    "use_mid_condition": "mid_modules",
    "use_up_condition": "up_modules",
}


@pytest.mark.parametrize("off", [(), *[(name,) for name in PARTS], tuple(PARTS)])
@pytest.mark.parametrize("scale", [True, False])
def test_blocks_without_conditioning(off, scale, device):
    """DP3's use_*_condition: its blocks then leave FiLM out, here LeRobot's blocks."""
    arguments = {"input_dim": 2, "global_cond_dim": 4, "cond_predict_scale": scale, **SMALL}
    unet = lerobot_unet(arguments).to(device).eval()

    def without_film(block, x, cond):
        return block.conv2(block.conv1(x)) + block.residual_conv(x)

    for name in off:
        setattr(unet, name, False)
        for block in getattr(unet, PARTS[name]).modules():
            if hasattr(block, "cond_encoder"):
                block.__class__ = type("Block", (type(block),), {"forward": without_film})
    inputs = (torch.randn(3, 8, 2, device=device), torch.arange(3, device=device))
    cond = torch.randn(3, 4, device=device)
    with torch.no_grad():
        want = unet(*inputs, global_cond=cond)
        dpa.accelerate(unet, fallback=False)
        for _ in range(2):
            got = unet(*inputs, global_cond=cond)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_networks_in_dictionaries_and_plain_objects():
    """As robomimic holds them: an object without forward, its networks in module dictionaries."""

    class Algorithm:
        def __init__(self):
            unet, self.inputs = unet_and_inputs()
            policy = nn.ModuleDict({"noise_pred_net": unet})
            self.nets = nn.ModuleDict({"policy": policy})
            self.ema = types.SimpleNamespace(averaged_model=copy.deepcopy(self.nets))

    algorithm = dpa.accelerate(Algorithm(), fallback=False)
    unets = [
        nets["policy"]["noise_pred_net"] for nets in (algorithm.nets, algorithm.ema.averaged_model)
    ]
    for unet in unets:
        assert isinstance(replaced_forward(unet), FastForward)
        assert_follows(unet, algorithm.inputs)
    assert str(dpa.explain(algorithm)).count("step by step: the loop around it") == 2
    assert [finding.path for finding in dpa.explain(algorithm).findings] == [
        "nets.policy.noise_pred_net",
        "ema.averaged_model.policy.noise_pred_net",
    ]
