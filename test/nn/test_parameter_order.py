"""Parameters in the original's order: what finds them by position finds the same ones."""

import contextlib
import copy
import io

import pytest
import torch
from policies import lerobot_unet

import dpa

ARGUMENTS = {
    "input_dim": 3,
    "global_cond_dim": 5,
    "diffusion_step_embed_dim": 16,
    "down_dims": (16, 24, 32),
    "cond_predict_scale": True,
}
# Of diffusion_policy's modules, as their constructors assign them.
BLOCK = ["blocks", "cond_encoder", "residual_conv"]
NETWORK = ["mid_modules", "diffusion_step_encoder", "local_cond_encoder", "up_modules"]
NETWORK += ["down_modules", "final_conv"]


def firsts(names):
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def test_modules_have_the_original_order():
    unet = dpa.nn.ConditionalUnet1D(**ARGUMENTS, local_cond_dim=2)
    assert firsts(name for name, _ in unet.named_parameters()) == NETWORK
    assert firsts(unet.state_dict()) == NETWORK
    for module in unet.modules():
        if isinstance(module, dpa.nn.ConditionalResidualBlock1D):
            names = firsts(name for name, _ in module.named_parameters())
            assert names == (BLOCK if module.residual_conv.state_dict() else BLOCK[:2])
    without = dpa.nn.ConditionalUnet1D(**ARGUMENTS)
    assert firsts(without.state_dict()) == [n for n in NETWORK if n != "local_cond_encoder"]


def trained(unet, forward, parameters=None):
    """Weights and an optimizer after two steps, so that every parameter has its own moments."""
    optimizer = torch.optim.AdamW(parameters or unet.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        sample = torch.randn(2, 8, 3, generator=generator)
        optimizer.zero_grad()
        forward(sample, torch.tensor([3, 40]), torch.randn(2, 5, generator=generator)).backward()
        optimizer.step()
    return optimizer


def check_carries_over(theirs, optimizer, ours, parameters, fused):
    """Every moment has the parameter of its name, and a step of both ends at the same weights."""
    state = copy.deepcopy(optimizer.state_dict())
    named = {dpa.nn.family.original_name(n): v for n, v in theirs.state_dict().items()}
    ours.load_state_dict(named)
    ours_optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    ours_optimizer.load_state_dict(state)
    ours_optimizer.param_groups[0].update(fused=fused, foreach=False if fused else None)
    named = {dpa.nn.family.original_name(n): p for n, p in theirs.named_parameters()}
    own = dict(ours.named_parameters())
    assert named.keys() == own.keys()
    for name, parameter in own.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = optimizer.state[named[name]][moment]
            assert torch.equal(ours_optimizer.state[parameter][moment], expected)
        parameter.grad = named[name].grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    ours_optimizer.step()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter, named[name])


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_state_of_robomimic_carries_over(fused):
    """Its network is diffusion_policy's, module for module."""
    nets = pytest.importorskip(
        "robomimic.models.diffusion_policy_nets", reason="robomimic is not installed"
    )
    arguments = {name: v for name, v in ARGUMENTS.items() if name != "cond_predict_scale"}
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = nets.ConditionalUnet1D(**arguments, kernel_size=3)
    optimizer = trained(theirs, lambda *inputs: theirs(*inputs).square().mean())
    ours = dpa.nn.ConditionalUnet1D(**ARGUMENTS)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    check_carries_over(theirs, optimizer, ours, ours.parameters(), fused)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_state_of_lerobot_carries_over(fused):
    theirs = lerobot_unet(ARGUMENTS)
    optimizer = trained(theirs, lambda *inputs: theirs(*inputs).square().mean())
    ours = dpa.nn.ConditionalUnet1D(**ARGUMENTS)
    parameters = dpa.nn.lerobot_parameters(ours)
    assert {id(p) for p in parameters} == {id(p) for p in ours.parameters()}
    check_carries_over(theirs, optimizer, ours, parameters, fused)


@pytest.mark.parametrize("levels", [1, 3, 12])
def test_parameters_of_lerobot_are_in_order_already(levels):
    theirs = lerobot_unet(ARGUMENTS | {"down_dims": (8,) * levels})
    found = dpa.nn.lerobot_parameters(theirs)
    assert all(a is b for a, b in zip(found, theirs.parameters(), strict=True))
