"""Policies that tests accelerate: LeRobot's own, and fakes of policies that are not on PyPI."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dpa

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
SMALL = {"diffusion_step_embed_dim": 16, "down_dims": (16, 32)}
ONE_LEVEL = {"down_dims": (16,)}  # compiles in half the time


def lerobot_unet(arguments):
    """LeRobot's network of the same arguments."""
    modeling = pytest.importorskip(
        "lerobot.policies.diffusion.modeling_diffusion",
        reason="LeRobot is not installed (requirements/lerobot.txt)",
        exc_type=ImportError,
    )
    config = SimpleNamespace(
        action_feature=SimpleNamespace(shape=(arguments["input_dim"],)),
        diffusion_step_embed_dim=arguments["diffusion_step_embed_dim"],
        down_dims=tuple(arguments["down_dims"]),
        kernel_size=arguments.get("kernel_size", 3),
        n_groups=arguments.get("n_groups", 8),
        use_film_scale_modulation=arguments.get("cond_predict_scale", False),
        gradient_checkpointing=False,
    )
    return modeling.DiffusionConditionalUnet1d(config, arguments.get("global_cond_dim") or 0)


def lerobot_policy(device="cpu", **options):
    """LeRobot's own policy on state observations, with small random weights."""
    modeling = pytest.importorskip(
        "lerobot.policies.diffusion.modeling_diffusion",
        reason="LeRobot is not installed (requirements/lerobot.txt)",
        exc_type=ImportError,
    )
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    config = DiffusionConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
            "observation.environment_state": PolicyFeature(FeatureType.ENV, (4,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu",
        num_train_timesteps=20,
        **{**SMALL, "horizon": 8, "n_action_steps": 4, **options},
    )
    return modeling.DiffusionPolicy(config).to(device).eval()


def observations(steps, device):
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        yield {
            "observation.state": torch.randn(1, 3, generator=generator).to(device),
            "observation.environment_state": torch.randn(1, 4, generator=generator).to(device),
        }


class OriginalPolicy(nn.Module):
    """A network with the attributes and the loop of diffusion_policy's lowdim policy."""

    def __init__(self, model, scheduler, steps):
        super().__init__()
        self.model = model
        self.normalizer = nn.Linear(1, 1)
        self.noise_scheduler, self.num_inference_steps = scheduler, steps
        self.kwargs = {}

    def predict(self, x, t, **conditions):
        return self.model(x, t, **conditions)

    def conditional_sample(
        self,
        condition_data,
        condition_mask,
        local_cond=None,
        global_cond=None,
        generator=None,
        **kwargs,
    ):
        x = torch.randn(
            condition_data.shape,
            dtype=condition_data.dtype,
            device=condition_data.device,
            generator=generator,
        )
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x[condition_mask] = condition_data[condition_mask]
            out = self.predict(x, t, local_cond=local_cond, global_cond=global_cond)
            x = self.noise_scheduler.step(out, t, x, generator=generator, **kwargs).prev_sample
        x[condition_mask] = condition_data[condition_mask]
        return x


class AroundLeRobots(OriginalPolicy):
    """The same loop around LeRobot's network, which takes a timestep a sample."""

    def predict(self, x, t, local_cond, global_cond):
        times = torch.full(x.shape[:1], t, dtype=torch.long, device=x.device)
        return self.model(x, times, global_cond=global_cond)


def original_policy(device, kind="DDIM", local_cond_dim=None, global_cond_dim=4):
    """A small random policy of diffusion_policy's kind."""
    scheduler = getattr(diffusers, f"{kind}Scheduler")(20, beta_schedule="squaredcos_cap_v2")
    unet = dpa.nn.ConditionalUnet1D(2, local_cond_dim, global_cond_dim, **SMALL)
    return OriginalPolicy(dpa.reference.plain(unet), scheduler, 5).to(device).eval()


def unet_and_inputs(device="cpu", **options):
    unet = dpa.nn.ConditionalUnet1D(2, None, 4, **{**SMALL, **options})
    unet = dpa.reference.plain(unet).to(device).eval()
    return unet, (
        torch.randn(3, 8, 2, device=device),
        torch.arange(3, device=device),
        None,
        torch.randn(3, 4, device=device),
    )


@torch.no_grad()
def assert_follows(unet, inputs):
    """The accelerated network gives what its original gives, at once and again."""
    plain = dpa.restore(copy.deepcopy(unet))
    for _ in range(2):
        torch.testing.assert_close(unet(*inputs), plain(*inputs), rtol=1e-5, atol=1e-5)


def call_of(device="cpu"):
    data = torch.zeros(2, 8, 2, device=device)
    return data, data.bool(), None, torch.randn(2, 4, device=device)


@torch.no_grad()
def sampled(policy, call):
    torch.manual_seed(7)
    return policy.conditional_sample(*call)
