"""The loss of the demo's policy while it trains: dpa beside plain PyTorch, from several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn
from torch.nn import functional as F

import dpa
from dpa.bench.train import DPA, EAGER
from dpa.demo import train as demo
from dpa.training import GraphedStep

# The demo's own network, and one of which every layer has a 16-bit kernel on Hopper.
CASES = (
    ("demo", (32, 64), "float32"),
    ("demo", (32, 64), "bfloat16 autocast"),
    ("wide", (256, 512), "bfloat16 autocast"),
)
DTYPES = {"float32": None, "bfloat16 autocast": torch.bfloat16}

Data = tuple[Tensor, Tensor]


def demonstrations(device: torch.device) -> Data:
    """Observations and chunks of actions, the same for every curve."""
    return demo.dataset(torch.Generator().manual_seed(0), device)


def curve(
    data: Data,
    how: str,
    down_dims: Sequence[int],
    lower: torch.dtype | None,
    seed: int,
    steps: int,
) -> list[float]:
    """The loss of each step. Weights, batches and noise depend on the seed alone, not on ``how``.

    Steps are replays of one CUDA graph where there is CUDA. ``lower`` is autocast's dtype, or None.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    observations, chunks = data
    device = chunks.device
    network: nn.Module = demo.Network(demo.UNET | {"down_dims": list(down_dims)}).to(device)
    if how == EAGER:
        network.unet = dpa.reference.plain(network.unet)
    cuda = device.type == "cuda"
    rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, fused=True, capturable=cuda)
    scheduler = DDPMScheduler(**demo.SCHEDULER)
    alphas = scheduler.alphas_cumprod.to(device)

    def step(observation: Tensor, chunk: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        alpha = alphas[timestep][:, None, None]
        noisy = alpha.sqrt() * chunk + (1 - alpha).sqrt() * noise
        with torch.autocast(device.type, lower or torch.bfloat16, enabled=lower is not None):
            predicted = network(noisy, timestep, observation)
        loss = F.mse_loss(predicted.float(), noise)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, losses = GraphedStep(step), []
    for number in range(steps):
        index = torch.randint(len(chunks), (demo.BATCH_SIZE,), generator=generator).to(device)
        noise = torch.randn(len(index), *chunks.shape[1:], generator=generator).to(device)
        timestep = torch.randint(len(alphas), (len(index),), generator=generator).to(device)
        rate.fill_(demo.LEARNING_RATE * demo.rate_at(number, steps))
        losses.append(run(observations[index], chunks[index], noise, timestep))
    return torch.stack(losses).tolist()


def run(steps: int = 300, seeds: Sequence[int] = (0, 1, 2)) -> list[dict[str, Any]]:
    """A row for each case and seed: both curves, as means over a 20th of the steps."""
    data = demonstrations(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows = []
    for network, widths, dtype in CASES:
        for seed in seeds:
            row: dict[str, Any] = {"network": network, "dtype": dtype, "seed": seed}
            for how in (EAGER, DPA):
                losses = curve(data, how, widths, DTYPES[dtype], seed, steps)
                row[how] = smoothed(losses, max(steps // 20, 1))
            rows.append(row)
    return rows


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Means over windows that follow one another."""
    return [
        statistics.fmean(losses[i : i + window]) for i in range(0, len(losses) - window + 1, window)
    ]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far dpa's curves are from PyTorch's of the same seed, and PyTorch's among themselves.

    Differences are root mean squares over the curves' second half, relative to PyTorch's mean.
    """
    found = []
    for network, dtype in dict.fromkeys((row["network"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["dtype"]) == (network, dtype)]
        plain, ours = (
            torch.tensor([row[how][len(row[how]) // 2 :] for row in mine], dtype=torch.float64)
            for how in (EAGER, DPA)
        )
        mean = plain.mean(0)
        row = {"network": network, "dtype": dtype, "last loss, eager": plain[:, -1].mean().item()}
        row["last loss, dpa"] = ours[:, -1].mean().item()
        row["same seed"] = ((ours - plain) / mean).square().mean().sqrt().item()
        pairs = [(i, j) for i in range(len(mine)) for j in range(i)]
        between = torch.stack([(plain[i] - plain[j]) / mean for i, j in pairs])
        row["between seeds"] = between.square().mean().sqrt().item()
        found.append(row)
    return found
