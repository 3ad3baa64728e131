"""dpa beside plain PyTorch: the same weights, the same noise, an ordinary diffusers loop."""

from __future__ import annotations

import statistics

import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import Tensor, nn

from dpa import reference
from dpa.bench.timing import in_turns
from dpa.demo import world as W
from dpa.demo.rollout import STEPS, make_sampler, make_scheduler
from dpa.demo.train import Policy

WARMUP = 2


@torch.inference_mode()
def diffusers_sample(
    unet: nn.Module,
    scheduler: DDPMScheduler | DDIMScheduler,
    steps: int,
    global_cond: Tensor,
    noise: Tensor,
    generator: torch.Generator | None = None,
    trace: list[Tensor] | None = None,
) -> Tensor:
    """Sample chunks in an ordinary diffusers loop; the network runs in global_cond's dtype.

    ``trace`` receives the sample before every step, and the chunk.
    """
    scheduler.set_timesteps(steps)
    sample = noise
    for timestep in scheduler.timesteps:
        if trace is not None:
            trace.append(sample)
        output = unet(sample.to(global_cond.dtype), timestep, global_cond=global_cond)
        output = output.to(sample.dtype)
        sample = scheduler.step(output, timestep, sample, generator=generator).prev_sample
    if trace is not None:
        trace.append(sample)
    return sample


def compare(
    name: str,
    policy: Policy,
    observations: Tensor,
    dtype: torch.dtype,
    repeats: int,
    seed: int,
) -> dict:
    """Time one action chunk at batch 1 both ways, and compare all the observations' chunks.

    Return milliseconds (medians), their ratio, and the largest difference between the two in
    actions, whose range is [-1, 1]. Both run in this process, in turn, with the same threads.
    """
    device = observations.device
    encoded = policy.network.encoder(observations).to(dtype)
    plain = reference.plain(policy.network.unet).to(dtype).eval()
    scheduler = make_scheduler(name, policy)
    sampler = make_sampler(name, policy, dtype)
    noise_generator = torch.Generator(device).manual_seed(seed)
    shape = (len(observations), W.HORIZON, W.ACTION_DIM)
    sample_dtype = torch.promote_types(dtype, torch.float32)
    noise = torch.randn(shape, generator=noise_generator, device=device, dtype=sample_dtype)

    def with_plain(count: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        start, given = noise[:count], encoded[:count]
        return diffusers_sample(plain, scheduler, STEPS[name], given, start, generator)

    def with_dpa(count: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return sampler(encoded[:count], noise=noise[:count], generator=generator)

    everything = len(observations)
    difference = (with_plain(everything).double() - with_dpa(everything).double()).abs().max()
    calls = {"plain": lambda: with_plain(1), "dpa": lambda: with_dpa(1)}
    times = in_turns(calls, range(WARMUP + repeats), warm_up=WARMUP)
    plain_ms, dpa_ms = (statistics.median(times[way]) / 1e3 for way in ("plain", "dpa"))
    return {
        "plain_ms": plain_ms,
        "dpa_ms": dpa_ms,
        "ratio": plain_ms / dpa_ms,
        "max_difference": difference.item(),
        "compared": everything,
        "repeats": repeats,
    }
