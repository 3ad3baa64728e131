"""Small policies as they are exported, each with the sampler that it must agree with."""

import pytest
import torch
from torch import nn

import dpa
from dpa.export import Around, ImagePolicy, LayeredLoop, PackedLoop
from dpa.export.images import Encoder, Observed

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
# Batch, horizon, and the numbers of an action, an observation and the conditioning.
B, T, DA, DO, DG = 2, 8, 2, 5, 4
UNET = {"diffusion_step_embed_dim": 16, "down_dims": (8, 16)}


def make_policy(name, device, dtype, kind, seed=3, steps=3, **options):
    """Return a policy, the sampler that it must agree with, and what is around both."""
    torch.manual_seed(seed)
    scheduler = {"ddim": diffusers.DDIMScheduler, "ddpm": diffusers.DDPMScheduler}[name]
    scheduler = scheduler(20, beta_schedule="squaredcos_cap_v2")
    unet = dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DG, **{**UNET, **options}).to(device).eval()
    affines = [(torch.rand(n) + 0.5, torch.randn(n)) for n in (DO, DA)]
    around = Around(nn.Linear(DO, DG).to(device), *affines)
    packed = kind is not LayeredLoop
    sampler = dpa.DiffusionSampler(unet, scheduler, steps, dtype, horizon=T, fused=packed)
    if packed:
        # Packed as the sampler packs it, since other widths round sums elsewhere.
        loop = kind(unet, sampler.table, dtype, around, size=(B, T)).to(device)
        return loop, sampler, around
    unet.to(dtype)  # the sampler's too
    return LayeredLoop(unet, sampler.table, around).to(device), sampler, around


class Cameras(nn.Module):
    """Two cameras and a state to a vector, as an image policy's encoder makes it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 2, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def encode(self, given):
        frames = torch.cat([given["top"], given["side"]], dim=1)
        features = self.layers(frames.flatten(0, 1)).reshape(len(frames), -1)
        return torch.cat([features, given["state"].flatten(1)], dim=1)


def make_image_policy(frames=2, seed=4):
    """Return a policy from two cameras and a state, on the CPU, and an example of its inputs."""
    torch.manual_seed(seed)
    affine = torch.rand(3) + 0.5, torch.randn(3)
    sizes = {"top": (frames, 12, 16, 3), "side": (frames, 12, 16, 3), "state": (frames, 3)}
    observed = [Observed(name, shape, affine) for name, shape in sizes.items()]
    cameras, width = Cameras(), frames * (2 * 2 + 3)
    unet = dpa.nn.ConditionalUnet1D(DA, global_cond_dim=width, **UNET).eval()
    table = dpa.schedulers.from_diffusers(diffusers.DDIMScheduler(20), 3)
    loop = PackedLoop(unet, table, torch.float32, Around(action=(torch.rand(DA), torch.randn(DA))))
    policy = ImagePolicy(Encoder(observed, cameras.encode, cameras), loop)
    inputs = {one.name: one.example(1) for one in observed}
    return policy, inputs | {"noise": torch.randn(1, 1, T, DA)}
