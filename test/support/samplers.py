"""Samplers whose loop tests capture in a CUDA graph."""

import copy

import pytest

import dpa

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


def make_sampler(device, kind="DDPM", steps=12, **options):
    unet = dpa.nn.ConditionalUnet1D(
        2, global_cond_dim=5, down_dims=(32, 64), diffusion_step_embed_dim=32
    ).to(device)
    scheduler = getattr(diffusers, f"{kind}Scheduler")(20, beta_schedule="squaredcos_cap_v2")
    options = {"horizon": 16, "fused": True, **options}
    return dpa.DiffusionSampler(unet, scheduler, steps, **options)


def without_graph(sampler):
    """The same sampler, whose loop is not captured."""
    twin = copy.copy(sampler)
    twin.cuda_graph = False
    return twin
