"""Trains the demo's diffusion policy on demonstrations and keeps it in a checkpoint."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from dpa.checkpoints.files import read_file
from dpa.demo import world as W
from dpa.library.files import replacing
from dpa.nn import ConditionalUnet1D
from dpa.training.distributed import Ranks

DEMONSTRATIONS = 1500
BATCH_SIZE = 256
LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
EMA_DECAY = 0.995
CHECKPOINT_FORMAT = "dpa-demo"

ENCODED_DIM = 64
UNET = {
    "input_dim": W.ACTION_DIM,
    "global_cond_dim": ENCODED_DIM,
    "diffusion_step_embed_dim": 64,
    "down_dims": [32, 64],
    "kernel_size": 5,
    "n_groups": 8,
    "cond_predict_scale": True,
}
SCHEDULER = {
    "num_train_timesteps": 100,
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "epsilon",
    "clip_sample": True,
}


class Network(nn.Module):
    """The U-Net, and an encoder that makes its ``global_cond`` of an observation.

    FiLM is linear in its conditioning but for one Mish: geometry needs the encoder before it.
    """

    def __init__(self, unet: dict):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(W.OBSERVATION_DIM, 128), nn.Mish(), nn.Linear(128, unet["global_cond_dim"])
        )
        self.unet = ConditionalUnet1D(**unet)

    def forward(self, sample: Tensor, timestep: Tensor, observation: Tensor) -> Tensor:
        """Predict the noise in ``sample`` (B, HORIZON, ACTION_DIM)."""
        return self.unet(sample, timestep, global_cond=self.encoder(observation))


@dataclass
class Policy:
    """A network with its U-Net's constructor arguments, its scheduler's, and its record.

    ``network`` holds the EMA weights. ``history`` has a row an evaluation: ``step`` and what the
    evaluation returned; ``losses`` has pairs (step, mean loss since the pair before).
    """

    network: Network
    unet_config: dict = field(default_factory=lambda: dict(UNET))
    scheduler_config: dict = field(default_factory=lambda: dict(SCHEDULER))
    history: list[dict] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    train_steps: int = 0
    seed: int = 0


def train(
    steps: int,
    seed: int,
    device: torch.device,
    evaluate: Callable[[Policy], dict] | None = None,
    evaluations: int = 9,
    progress: Callable[[int, float], None] | None = None,
    team: Ranks | None = None,
    unet: dict | None = None,
    learning_rate: float = LEARNING_RATE,
) -> Policy:
    """Train for ``steps`` batches with the DDPM loss, AdamW and a cosine learning rate.

    Several processes (``team``) share each batch out among themselves: the gradients, and so the
    policy, are those of one process up to rounding. The first of them evaluates and reports.

    ``evaluate`` is called with the EMA weights at ``evaluations`` points, the first one before the
    first step and the last one after the last; ``progress`` after every step, with its number and
    a smoothed loss. ``unet`` are constructor arguments of another network than the demo's.
    """
    team = team or Ranks(0, 1, device)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    observations, chunks = dataset(generator, device)
    config = dict(unet or UNET)
    network = Network(config).to(device)
    model = team.wrap(network)
    average = copy.deepcopy(network).requires_grad_(False).eval()
    policy = Policy(average, config, train_steps=steps, seed=seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    scheduler = DDPMScheduler(**SCHEDULER)
    points = evaluation_points(steps, evaluations)

    def evaluate_at(number: int) -> None:
        if evaluate and team.first and number in points:
            policy.history.append({"step": number, **evaluate(policy)})

    running: list[Tensor] = []
    smoothed = math.nan
    evaluate_at(0)
    for number in range(1, steps + 1):
        index = torch.randint(len(chunks), (BATCH_SIZE,), generator=generator).to(device)
        batch = observations[index], chunks[index]
        loss = diffusion_loss(model, scheduler, *batch, generator, team)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        rate.step()
        update_ema(average, network, number)
        running.append(loss.detach())
        # Reading the loss waits for the device, so it is read once in a while.
        if len(running) == 20 or number == steps:
            smoothed = team.mean(torch.stack(running).mean()).item()
            policy.losses.append([number, smoothed])
            running.clear()
        if progress and team.first:
            progress(number, smoothed)
        evaluate_at(number)
    return policy


def dataset(generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make demonstrations: observations, and a chunk of actions for each."""
    worlds = W.sample_worlds(DEMONSTRATIONS, generator)
    usual = W.windows(worlds, W.demonstrate(worlds, generator))
    recovering = W.windows(*W.demonstrate_recovery(worlds, generator))
    pairs = zip(usual, recovering, strict=True)
    observations, chunks = (torch.cat(pair).to(device) for pair in pairs)
    return observations, chunks


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))


def evaluation_points(steps: int, evaluations: int) -> set[int]:
    """Steps at which to evaluate: the untrained network, densely at first, and the last step."""
    return {round(steps * (k / (evaluations - 1)) ** 2) for k in range(evaluations)}


def diffusion_loss(
    network: nn.Module,
    scheduler: DDPMScheduler,
    observation: Tensor,
    chunk: Tensor,
    generator: torch.Generator,
    team: Ranks | None = None,
) -> Tensor:
    """Mean squared error of the predicted noise, at a random timestep for each chunk.

    Each of several processes samples the noise of the whole batch and takes its part; the mean of
    their losses is the batch's.
    """
    noise = torch.randn(chunk.shape, generator=generator).to(chunk.device)
    count = scheduler.config.num_train_timesteps
    timestep = torch.randint(count, (len(chunk),), generator=generator).to(chunk.device)
    noisy = scheduler.add_noise(chunk, noise, timestep)
    if team is None or team.count == 1:
        return F.mse_loss(network(noisy, timestep, observation), noise)
    part = team.shard(len(chunk))
    predicted = network(noisy[part], timestep[part], observation[part])
    return F.mse_loss(predicted, noise[part], reduction="sum") * (team.count / noise.numel())


@torch.no_grad()
def update_ema(average: torch.nn.Module, model: torch.nn.Module, step: int) -> None:
    """Move the average towards the model; faster in the first steps."""
    decay = min(EMA_DECAY, (1 + step) / (10 + step))
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, 1.0 - decay)


def save(policy: Policy, path: Path) -> None:
    """Write the policy as plain tensors, numbers, lists and dicts (safe to load)."""
    content = {
        "format": CHECKPOINT_FORMAT,
        "unet": policy.unet_config,
        "scheduler": policy.scheduler_config,
        "state_dict": {name: value.cpu() for name, value in policy.network.state_dict().items()},
        "history": policy.history,
        "losses": policy.losses,
        "train_steps": policy.train_steps,
        "seed": policy.seed,
    }
    whole = io.BytesIO()  # PyTorch's own writer of files aborts the process on a full disk
    torch.save(content, whole)
    with replacing(path) as temporary:
        temporary.write_bytes(whole.getvalue())


def load(path: Path, device: torch.device) -> Policy:
    """Read a policy back. ValueError where the file is not a checkpoint of this demo."""
    if not path.is_file():
        raise ValueError(f"checkpoint must be a file, got {path}")
    content = read_file(path)
    if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"checkpoint must be one that the demo wrote, got {path}")
    parts = ("unet", "scheduler", "history", "losses", "train_steps", "seed")
    try:
        network = Network(content["unet"]).to(device)
        network.load_state_dict(content["state_dict"])
        return Policy(network.requires_grad_(False).eval(), *(content[part] for part in parts))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"checkpoint must fit the demo's network, got {path}") from error
