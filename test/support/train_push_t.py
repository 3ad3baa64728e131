"""Train LeRobot's own diffusion policy on images of PushT, and save it.

    python test/support/train_push_t.py FOLDER

gym-pusht simulates and renders. The T lies a little off its goal, on one of two sides, and is to be
pushed back from there; only the image says which. A script demonstrates it. The environment is
``train_push_t:PushTBack-v0``.
"""

import sys
import time

import gymnasium
import numpy as np
import torch
from fit_lerobot import fit, save
from gym_pusht.envs.pusht import PushTEnv

from dpa.eval import Environment

PIXELS, HORIZON, EXECUTED = 96, 16, 8
EPISODES, STEPS, BATCH = 40, 600, 64
GOAL, ANGLE, RADIUS = np.array([256.0, 256.0]), np.pi / 4, 15
# Of the T's own axes: its bar reaches from y = 0 to 30, its stem on to 120.
FACES = {1: 0 - RADIUS, -1: 120 + RADIUS}  # where the agent's centre ends, by direction of the push
AXES = np.array([[np.cos(ANGLE), np.sin(ANGLE)], [-np.sin(ANGLE), np.cos(ANGLE)]])


class Back(PushTEnv):
    """PushT from a start that a push along the stem solves."""

    def reset(self, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        random = self.np_random
        self.side = random.choice([1, -1])
        block = GOAL + np.array([0, -self.side * random.uniform(20, 35)]) @ AXES
        # PushT sets the angle last, and so turns what it has placed around the centre of mass.
        block += np.array([0, 45]) @ AXES - [0, 45]
        agent = GOAL + np.array([-150, 45 + random.uniform(-20, 20)]) @ AXES
        return super().reset(options={"reset_to_state": [*agent, *block, ANGLE]})


gymnasium.register(
    "PushTBack-v0",
    Back,
    max_episode_steps=80,
    kwargs={"obs_type": "pixels_agent_pos"},
)


def wanted(agent, side):
    """Where the script moves next: around the T, behind it, then along its stem."""
    x, y = AXES @ (agent - GOAL)
    end = FACES[side]
    behind = end - 65 * side
    if x < -95 and abs(y - behind) > 20:
        to, speed = np.array([-90.0, behind]), 14
    elif abs(x) > 3:
        to, speed = np.array([0.0, behind]), 14
    else:
        to, speed = np.array([0.0, end]), 9
    move = to - (x, y)
    move *= min(1, speed / max(np.linalg.norm(move), 1e-6))
    return np.array([x, y]) + move


def demonstrate(episodes, nudge=4.0):
    """Observations and actions of the script, which is nudged off its way."""
    environment, records = Environment("train_push_t:PushTBack-v0", pixels=True), []
    random = np.random.default_rng(0)
    for seed in range(10_000, 10_000 + episodes):
        observation, record, over = environment.reset(seed), [], False
        env = environment.gym.unwrapped
        while not over:
            plan, at = [], np.array(env.agent.position)
            for _ in range(HORIZON):  # as if the agent came to where it is sent
                at = GOAL + wanted(at, env.side) @ AXES
                plan.append(at)
            record.append({**observation, "action": torch.tensor(np.array(plan)).float()})
            for action in plan[: random.integers(1, EXECUTED)]:
                sent = action + random.normal(0, nudge, 2)
                observation, _, over, _ = environment.step(sent)
                if over:
                    break
        records += record
    return {key: torch.stack([step[key] for step in records]) for key in records[0]}


def make_policy(stats):
    """A policy of one observation, and LeRobot's processors."""
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

    config = DiffusionConfig(
        input_features={
            "observation.image": PolicyFeature(FeatureType.VISUAL, (3, PIXELS, PIXELS)),
            "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        normalization_mapping=dict.fromkeys(
            ("VISUAL", "STATE", "ACTION"), NormalizationMode.MIN_MAX
        ),
        device="cpu",
        pretrained_backbone_weights=None,
        use_group_norm=True,
        crop_shape=None,
        use_separate_rgb_encoder_per_camera=False,
        horizon=HORIZON,
        n_obs_steps=1,
        n_action_steps=EXECUTED,
        down_dims=(32, 64),
        diffusion_step_embed_dim=32,
        noise_scheduler_type="DDIM",
        num_inference_steps=10,
        push_to_hub=False,
    )
    return DiffusionPolicy(config), *make_diffusion_pre_post_processors(config, stats)


def train(folder, steps=STEPS, episodes=EPISODES, batch_size=BATCH):
    """Train on the CPU, and write what LeRobot's save_pretrained writes."""
    torch.manual_seed(0)
    every = demonstrate(episodes)
    stats = {"observation.image": {"min": torch.zeros(3, 1, 1), "max": torch.ones(3, 1, 1)}}
    reach = {"min": torch.full((2,), 50.0), "max": torch.full((2,), 420.0)}
    stats |= {"observation.state": reach, "action": reach}
    policy, before, after = make_policy(stats)
    data = before({k: v if k == "action" else v[:, None] for k, v in every.items()})
    data = {key: data[key] for key in every}
    encoder = policy.diffusion.rgb_encoder
    backbone, encoder.backbone = encoder.backbone, torch.nn.Identity()
    with torch.no_grad():
        images = data["observation.image"][:, 0].split(batch_size)
        data["observation.image"] = torch.cat(list(map(backbone, images)))[:, None]
    loss = fit(policy, data, steps, batch_size, warm_up=0.1)
    encoder.backbone = backbone
    save(folder, policy, before, after)
    return loss


if __name__ == "__main__":
    started = time.perf_counter()
    print(f"loss {train(sys.argv[1]):.4f} in {time.perf_counter() - started:.0f} s")
