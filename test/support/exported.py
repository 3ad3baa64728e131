"""Small policies as they are exported, each with the sampler that it must agree with."""

import pytest
import torch
from torch import nn

import dpa
from dpa.export import Around, LayeredLoop

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
# Batch, horizon, and the numbers of an action, an observation and the conditioning.
B, T, DA, DO, DG = 2, 8, 2, 5, 4
UNET = {"diffusion_step_embed_dim": 16, "down_dims": (8, 16)}


def make_policy(name, device, dtype, kind, seed=3, **options):
    """Return a policy, the sampler that it must agree with, and what is around both."""
    torch.manual_seed(seed)
    scheduler = {"ddim": diffusers.DDIMScheduler, "ddpm": diffusers.DDPMScheduler}[name]
    scheduler = scheduler(20, beta_schedule="squaredcos_cap_v2")
    unet = dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DG, **{**UNET, **options}).to(device).eval()
    affines = [(torch.rand(n) + 0.5, torch.randn(n)) for n in (DO, DA)]
    around = Around(nn.Linear(DO, DG).to(device), *affines)
    packed = kind is not LayeredLoop
    sampler = dpa.DiffusionSampler(unet, scheduler, 3, dtype, horizon=T, fused=packed)
    if packed:
        return kind(unet, sampler.table, dtype, around).to(device), sampler, around
    unet.to(dtype)  # the sampler's too
    return LayeredLoop(unet, sampler.table, around).to(device), sampler, around
