"""Train LeRobot's own diffusion policy on scripted demonstrations of FetchReach, and save it.

    python test/support/train_fetch_reach.py FOLDER

gymnasium-robotics simulates the arm with MuJoCo: its gripper must reach a random point and stay.
"""

import sys
import time

import numpy as np
import torch
from fit_lerobot import fit, save

from dpa.eval import Environment

HORIZON, OBSERVED, EXECUTED = 16, 2, 8
EPISODES, STEPS, BATCH = 60, 800, 64


def demonstrate(episodes):
    """Observations and actions of a proportional controller that is nudged off its way."""
    environment, random = Environment("FetchReach"), np.random.default_rng(0)
    records = []
    for seed in range(10_000, 10_000 + episodes):
        observation, record, over = environment.reset(seed), [], False
        while not over:
            goal = observation["observation.environment_state"]
            error = goal - observation["observation.state"][:3]  # that of the gripper
            wanted = np.append(np.clip(10 * error.numpy(), -1, 1), 0).astype(np.float32)
            record.append({**observation, "action": torch.from_numpy(wanted)})
            observation, _, over, success = environment.step(wanted + random.normal(0, 0.2, 4))
        assert success
        records.append({key: torch.stack([step[key] for step in record]) for key in record[0]})
    return records


def windows(records):
    """Every window of a training example, with the first and last step repeated at the ends."""
    found = {key: [] for key in records[0]}
    for record in records:
        length = len(record["action"])
        for start in range(length):
            actions = torch.arange(start + 1 - OBSERVED, start + 1 - OBSERVED + HORIZON)
            for key, values in record.items():
                which = actions if key == "action" else actions[:OBSERVED]
                found[key].append(values[which.clamp(0, length - 1)])
    return {key: torch.stack(values) for key, values in found.items()}


def make_policy(stats):
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

    config = DiffusionConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (10,)),
            "observation.environment_state": PolicyFeature(FeatureType.ENV, (3,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
        normalization_mapping=dict.fromkeys(("STATE", "ENV", "ACTION"), NormalizationMode.MIN_MAX),
        device="cpu",
        horizon=HORIZON,
        n_obs_steps=OBSERVED,
        n_action_steps=EXECUTED,
        down_dims=(64, 128),
        diffusion_step_embed_dim=32,
        noise_scheduler_type="DDIM",
        num_inference_steps=10,
        push_to_hub=False,
    )
    return DiffusionPolicy(config), *make_diffusion_pre_post_processors(config, stats)


def train(folder, steps=STEPS, episodes=EPISODES, batch_size=BATCH):
    """Train on the CPU, and write what LeRobot's save_pretrained writes."""
    torch.manual_seed(0)
    records = demonstrate(episodes)
    every = {key: torch.cat([record[key] for record in records]) for key in records[0]}
    # The closed gripper moves by micrometres: 0.05 keeps its noise small beside what matters.
    stats = {key: {"min": v.amin(0) - 0.05, "max": v.amax(0) + 0.05} for key, v in every.items()}
    policy, before, after = make_policy(stats)
    data = before(windows(records))
    data = {key: data[key] for key in every}
    loss = fit(policy, data, steps, batch_size, warm_up=0.05)
    save(folder, policy, before, after)
    return loss


if __name__ == "__main__":
    started = time.perf_counter()
    print(f"loss {train(sys.argv[1]):.4f} in {time.perf_counter() - started:.0f} s")
