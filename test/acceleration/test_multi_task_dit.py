"""LeRobot's own multi_task_dit, made by its own constructor around a small CLIP."""

import copy

import pytest
import torch
from other_policies import awake

import dpa
from dpa.acceleration.policy_loop import FastLoop
from dpa.tracking.replacing import replaced

MODULE = "lerobot.policies.multi_task_dit.modeling_multi_task_dit"
modeling = pytest.importorskip(MODULE, reason="LeRobot 0.6", exc_type=ImportError)
transformers = pytest.importorskip("transformers", reason="requirements/lerobot.txt")

OBJECTIVES = {
    "DDPM": {"noise_scheduler_type": "DDPM"},
    "DDIM": {"noise_scheduler_type": "DDIM", "num_inference_steps": 5},
    "euler": {"objective": "flow_matching", "integration_method": "euler"},
    "rk4": {"objective": "flow_matching", "integration_method": "rk4"},
}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A folder with a small CLIP, named as LeRobot requires."""
    folder = tmp_path_factory.mktemp("models") / "clip"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "projection_dim": 16}
    text = {**sizes, "vocab_size": 20, "max_position_embeddings": 8}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    transformers.CLIPModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=OBJECTIVES)
def policy(request, clip):
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig

    torch.manual_seed(0)
    config = MultiTaskDiTConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
            "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu",
        vision_encoder_name=clip,
        text_encoder_name=clip,
        image_crop_shape=None,
        horizon=8,
        n_action_steps=6,
        num_train_timesteps=20,
        num_integration_steps=5,
        hidden_dim=32,
        num_layers=2,
        num_heads=4,
        timestep_embed_dim=16,
        **OBJECTIVES[request.param],
    )
    policy = modeling.MultiTaskDiTPolicy(config).eval()
    awake(policy.noise_predictor)  # its blocks begin as the identity
    return policy


def observation(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (1, 8), generator=generator)
    return {
        "observation.state": torch.randn(1, 3, generator=generator),
        "observation.images.front": torch.rand(1, 3, 32, 32, generator=generator),
        "observation.language.tokens": tokens,
        "observation.language.attention_mask": torch.ones_like(tokens),
    }


def episode(policy, device, steps=8):
    """The actions of an episode of more than one chunk, and the random stream behind it."""
    policy.reset()
    torch.manual_seed(7)
    actions = []
    for step in range(steps):
        seen = {name: value.to(device) for name, value in observation(step).items()}
        actions.append(policy.select_action(seen))
    return torch.stack(actions), torch.randn(2, device=device)


def test_it_acts_as_before(policy, device):
    policy.to(device)
    plain = copy.deepcopy(policy)
    dpa.accelerate(policy, fallback=False)
    for _ in range(2):
        (got, behind), (want, left) = episode(policy, device), episode(plain, device)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(behind, left)
    loop = replaced(policy, "_generate_actions")
    assert isinstance(loop, FastLoop) and max(loop.shadow.errors.values()) < 1e-4
    assert (want.abs() < 0.99).float().mean() > 0.2  # what is clipped would agree in any case
