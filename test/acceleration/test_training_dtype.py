"""accelerate(training_dtype=): a float32 trainer's network trains in bfloat16, unedited."""

import copy

import pytest
import torch
from policies import lerobot_policy
from torch.testing import assert_close

import dpa
from dpa.tracking.replacing import replaced
from dpa.training.graphed_calls import GraphedForward

BF16 = torch.bfloat16


def _batch(policy, size, device, generator):
    steps, horizon = policy.config.n_obs_steps, policy.config.horizon
    new = lambda *shape: torch.randn(size, *shape, generator=generator).to(device)  # noqa: E731
    state = new(steps, 3)
    ramp = torch.linspace(0, 1, horizon, device=device)[None, :, None]
    return {
        "observation.state": state,
        "observation.environment_state": new(steps, 4),
        "action": (ramp * state[:, -1:, :2]).clamp(-1, 1),
        "action_is_pad": torch.zeros(size, horizon, dtype=torch.bool, device=device),
    }


def _train(policy, device, steps=20, around=lambda: torch.autocast("cpu", enabled=False)):
    """LeRobot's own step in float32: loss, clipping, Adam."""
    policy.train()
    optimizer = torch.optim.Adam(policy.get_optim_params(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(2), []
    torch.manual_seed(3)  # of noise and timesteps
    for _ in range(steps):
        with around():
            loss, _ = policy.forward(_batch(policy, 16, device, generator))
        assert loss.dtype == torch.float32
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), optimizer


def _dtypes_of_layers(unet):
    """The dtypes that the network's layers give, seen by hooks, which leave it to the original."""
    seen = set()
    for module in unet.modules():
        if isinstance(module, torch.nn.Conv1d):
            module.register_forward_hook(lambda *a: seen.add(a[2].dtype))
    return seen


def test_a_lerobot_policy_trains_as_in_float32(device):
    """The losses go down together; parameters, gradients and moments are float32."""
    torch.manual_seed(0)
    policy = lerobot_policy(device)
    plain = copy.deepcopy(policy)
    dpa.accelerate(policy, training_dtype=BF16)
    assert "in bfloat16" in str(dpa.explain(policy.train()))
    losses, optimizer = _train(policy, device)
    expected, _ = _train(plain, device)
    assert expected[-5:].mean() < 0.9 * expected[:5].mean()
    assert (losses - expected).norm() / expected.norm() < 0.02
    assert not torch.equal(losses, expected)  # in another precision
    for parameter in policy.parameters():
        assert parameter.dtype == torch.float32
        if parameter.requires_grad:
            assert parameter.grad.dtype == torch.float32
            state = optimizer.state[parameter]
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_the_first_losses_are_those_of_autocast_around_the_network(device):
    """An edited trainer's, that puts autocast around the network alone."""
    torch.manual_seed(0)
    policy = lerobot_policy(device)
    edited = copy.deepcopy(policy)
    dpa.accelerate(policy, training_dtype=BF16)
    unet = edited.diffusion.unet
    forward = type(unet).forward

    def lowered(*args, **kwargs):
        with torch.autocast(device.type, BF16):
            return forward(unet, *args, **kwargs).float()

    unet.forward = lowered
    losses, _ = _train(policy, device, 3)
    expected, _ = _train(edited, device, 3)
    assert_close(losses, expected, rtol=2e-3, atol=2e-3)


def _unet(device, **options):
    torch.manual_seed(1)
    unet = dpa.reference.plain(
        dpa.nn.ConditionalUnet1D(
            2, global_cond_dim=3, diffusion_step_embed_dim=16, down_dims=(16, 32)
        )
    ).to(device)
    return dpa.accelerate(unet, training_dtype=BF16, **options)


def _inputs(device):
    generator = torch.Generator().manual_seed(4)
    new = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    return new(4, 8, 2), torch.tensor([1, 2, 3, 4], device=device), None, new(4, 3)


def test_all_other_calls_stay_as_they_are(device):
    """Evaluation, no gradients, the trainer's own autocast, and other dtypes of weights."""
    unet, inputs = _unet(device, graphs=False), _inputs(device)
    plain = dpa.restore(copy.deepcopy(unet))
    assert _dtypes_of_layers(plain) == set()
    for training, gradients in ((True, False), (False, True), (False, False)):
        unet.train(training), plain.train(training)
        with torch.set_grad_enabled(gradients):
            for _ in range(2):
                assert_close(unet(*inputs), plain(*inputs), rtol=1e-4, atol=1e-4)
    unet.train(), plain.train()
    assert (unet(*inputs) - plain(*inputs)).abs().max() > 1e-4  # and this one does not
    with torch.autocast(device.type, BF16):
        assert unet(*inputs).dtype == plain(*inputs).dtype
    for each in (unet, plain):
        each.double()
    doubled = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    assert_close(unet(*doubled), plain(*doubled), rtol=1e-9, atol=1e-9)


def test_networks_that_fall_back_train_in_it_too(device):
    unet, inputs = _unet(device, graphs=False).train(), _inputs(device)
    seen = _dtypes_of_layers(unet)
    result = unet(*inputs)
    assert seen == {BF16} and result.dtype == torch.float32
    result.square().mean().backward()
    assert {p.grad.dtype for p in unet.parameters()} == {torch.float32}


def test_copies_keep_it_and_restored_ones_do_not(device):
    unet, inputs = _unet(device, graphs=False).train(), _inputs(device)
    copied = copy.deepcopy(unet)
    assert_close(copied(*inputs), unet(*inputs), rtol=2e-2, atol=2e-2)
    plain = dpa.restore(copy.deepcopy(unet))
    error = (copied(*inputs) - plain(*inputs)).abs().max()
    assert error > 1e-4
    assert (dpa.restore(copied)(*inputs) - plain(*inputs)).abs().max() == 0


def test_calls_replay(cuda):
    unet, inputs = _unet(cuda).train(), _inputs(cuda)
    losses = []
    for _ in range(8):
        unet.zero_grad(set_to_none=True)
        out = unet(*inputs)
        assert out.dtype == torch.float32
        out.square().mean().backward()
        losses.append(out.square().mean().item())
    forward = replaced(unet, "forward")
    assert isinstance(forward, GraphedForward) and forward.captured == 1
    assert max(losses) - min(losses) < 2e-2 * max(losses)


def test_other_dtypes_are_refused():
    unet = dpa.nn.ConditionalUnet1D(2, global_cond_dim=3, down_dims=(16, 32))
    for dtype in (torch.float16, torch.float32, torch.int8):
        with pytest.raises(ValueError, match="accelerate: training_dtype must be bfloat16, got"):
            dpa.accelerate(unet, training_dtype=dtype)
