"""The modules that a steady call meets, which docs/architecture.md names."""

import sys
from pathlib import Path

import pytest
import torch
from policies import call_of, lerobot_policy, original_policy, unet_and_inputs

import dpa

_PACKAGE = str(Path(dpa.__file__).parent)


def walk(run):
    """The modules of dpa whose functions a call runs, in order; and each way back up.

    That is a call into a module which the caller was itself called from.
    """
    modules, back = [], []

    def enter(frame, event, _):
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(_PACKAGE):
            return
        above, caller = [], frame.f_back
        while caller is not None:
            above.append(caller.f_code.co_filename)
            caller = caller.f_back
        above = [other for other in above if other.startswith(_PACKAGE)]
        modules.append(path)
        if above and path != above[0] and path in above:
            back.append(f"{above[0]} -> {path}: {frame.f_code.co_qualname}")

    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [str(Path(path).relative_to(_PACKAGE)) for path in dict.fromkeys(modules)], back


def originals_call():
    policy, call = dpa.accelerate(original_policy("cpu")), call_of()
    return lambda: policy.conditional_sample(*call)


def lerobots_call():
    diffusion = dpa.accelerate(lerobot_policy()).diffusion
    cond = torch.randn(1, 14)
    return lambda: diffusion.conditional_sample(1, global_cond=cond)


@pytest.mark.parametrize("make", [originals_call, lerobots_call])
def test_a_call_of_a_policy_meets_seven_modules(make):
    call = make()
    with torch.no_grad():
        for _ in range(3):
            call()
        modules, back = walk(call)
    assert len(modules) <= 7, modules
    assert "sampling/fused_loop.py" in modules
    assert not back


def test_a_call_on_a_gpu_meets_seven_modules(cuda):
    """What launches graphs stands for what makes random numbers."""
    diffusion = dpa.accelerate(lerobot_policy(cuda)).diffusion
    cond = torch.randn(1, 14, device=cuda)
    with torch.no_grad():
        for _ in range(4):
            diffusion.conditional_sample(1, global_cond=cond)
        modules, back = walk(lambda: diffusion.conditional_sample(1, global_cond=cond))
    assert len(modules) <= 7 and "library/graphs.py" in modules, modules
    assert not back


def test_a_call_from_observations_to_actions_meets_one_more():
    diffusion = dpa.accelerate(lerobot_policy()).diffusion
    batch = {"observation.state": torch.randn(1, 2, 3)}
    batch["observation.environment_state"] = torch.randn(1, 2, 4)
    with torch.no_grad():
        for _ in range(3):
            diffusion.generate_actions(batch)
        modules, back = walk(lambda: diffusion.generate_actions(batch))
    assert len(modules) <= 8 and "acceleration/whole_call.py" in modules, modules
    assert not back


def test_a_training_step_meets_nine_modules():
    unet, inputs = unet_and_inputs()
    dpa.accelerate(unet.train())

    def step():
        unet(*inputs).sum().backward()

    step()
    step()
    modules, back = walk(step)
    assert len(modules) <= 9, modules
    assert "nn/blocks1d.py" in modules
    assert not back


def test_a_way_back_up_is_seen():
    _, (sample, timestep, _, cond) = unet_and_inputs()
    unet = dpa.nn.ConditionalUnet1D(2, None, 4, diffusion_step_embed_dim=16, down_dims=(16, 32))

    def hook(*_):
        unet.embed(sample, timestep)

    unet.mid_modules[0].blocks[0].register_forward_pre_hook(hook)
    _, back = walk(lambda: unet(sample, timestep, None, cond))
    assert any("blocks1d.py" in step and "ConditionalUnet1D.embed" in step for step in back)
