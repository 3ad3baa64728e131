"""dpa.accelerate on robomimic's own Diffusion Policy: an algorithm that is no module."""

import copy
import functools

import pytest
import torch

import dpa
from dpa.acceleration.scheduler_step import FastStep
from dpa.acceleration.unet_forward import FastForward
from dpa.packed.agreement import LOOP_LIMITS, relative_error
from dpa.tracking.replacing import replaced
from dpa.training.graphed_calls import replaced_forward

pytest.importorskip(
    "robomimic.algo.diffusion_policy",
    reason="robomimic is not installed (requirements/robomimic.txt)",
    exc_type=ImportError,
)
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.fixture
def algorithm(device, monkeypatch):
    """Its DiffusionPolicyUNet with the averaged weights that it acts on, small and random."""
    import robomimic.models.diffusion_policy_nets as networks
    import robomimic.utils.obs_utils as observations
    from robomimic.algo import algo_factory
    from robomimic.config import config_factory

    small = {"diffusion_step_embed_dim": 16, "down_dims": [16, 32]}
    unet = functools.partial(networks.ConditionalUnet1D, **small)
    monkeypatch.setattr(networks, "ConditionalUnet1D", unet)  # its configuration has no say in it
    config = config_factory("diffusion_policy")
    with config.unlocked():
        config.observation.modalities.obs.low_dim = ["position"]
        config.algo.ddpm.num_inference_timesteps = 10
        config.algo.optim_params.policy.learning_rate.scheduler_type = "multistep"
    observations.initialize_obs_utils_with_config(config)
    made = algo_factory(config.algo_name, config, {"position": [3]}, 2, device)
    made.set_eval()
    for parameter in made.ema_nets.parameters():
        parameter.mul_(1.1)
    made.ema_nets.eval()
    return made


def episode(algorithm, device, steps=20):
    algorithm.reset()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    actions = []
    with torch.no_grad():
        for _ in range(steps):
            position = torch.randn(1, 2, 3, generator=generator).to(device)
            actions.append(algorithm.get_action({"position": position}))
    return torch.cat([*actions, torch.randn(1, 2, device=device)])


def test_an_episode(algorithm, device):
    want = episode(algorithm, device)
    dpa.accelerate(algorithm, fallback=False)
    loop = replaced(algorithm, "_get_action_trajectory")
    nets, averaged = (n["policy"]["noise_pred_net"] for n in (algorithm.nets, algorithm.ema_nets))
    for _ in range(2):
        torch.testing.assert_close(episode(algorithm, device), want, rtol=1e-4, atol=1e-4)
    for unet in (nets, averaged):
        assert isinstance(replaced_forward(unet), FastForward)
    assert loop.shadow.errors and max(loop.shadow.errors.values()) < 1e-4
    assert len(loop._routes) == 1
    assert "accelerated: the whole loop" in str(dpa.explain(algorithm))
    dpa.restore(algorithm)
    assert torch.equal(episode(algorithm, device), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_episode_in_sixteen_bits(algorithm, dtype, device):
    """Whole loops; the observations are those of an episode, whatever the actions."""
    if device.type == "cpu" and dtype == torch.float16:
        pytest.skip("on a CPU networks in float16 are as those in bfloat16, which are tried")
    want = episode(algorithm, device)
    dpa.accelerate(algorithm, dtype=dtype, fallback=False)
    loop = replaced(algorithm, "_get_action_trajectory")
    for _ in range(2):
        got = episode(algorithm, device)
        assert torch.equal(got[-1], want[-1])  # random numbers
        assert 0 < relative_error(got[:-1], want[:-1]) < LOOP_LIMITS[dtype]
    assert 0 < max(loop.shadow.errors.values()) < LOOP_LIMITS[dtype]
    [route] = loop._routes
    assert route.sampler.dtype == dtype


def test_an_episode_step_by_step(algorithm, device):
    want = episode(algorithm, device)
    dpa.accelerate(algorithm, mode="step", fallback=False)
    dpa.accelerate(algorithm.noise_scheduler, fallback=False)
    for _ in range(2):
        torch.testing.assert_close(episode(algorithm, device), want, rtol=1e-4, atol=1e-4)
    averaged = replaced_forward(algorithm.ema_nets["policy"]["noise_pred_net"])
    assert max(averaged.shadow.errors.values()) < 1e-5
    assert isinstance(vars(algorithm.noise_scheduler)["step"], FastStep)
    assert max(vars(algorithm.noise_scheduler)["step"].shadow.errors.values()) < 1e-5
    dpa.restore(dpa.restore(algorithm).noise_scheduler)
    assert torch.equal(episode(algorithm, device), want)


def test_its_checkpoint(algorithm, device, tmp_path):
    torch.save({"model": algorithm.serialize(), "config": "{}"}, tmp_path / "model.pth")
    averaged = copy.deepcopy(algorithm.ema_nets["policy"]["noise_pred_net"])
    loaded = dpa.load_checkpoint(tmp_path / "model.pth")
    state = averaged.state_dict()
    assert loaded.source.startswith("model.ema: ")
    assert all(torch.equal(v, state[k].cpu()) for k, v in loaded.unet.state_dict().items())
