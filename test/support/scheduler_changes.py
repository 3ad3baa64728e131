"""diffusers' schedulers, and what users change in one between two loops."""

import inspect

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
OPTIONS = {
    "DDPM": [
        {},
        {"clip_sample": False, "variance_type": "fixed_large"},
        {"prediction_type": "sample", "timestep_spacing": "trailing"},
        {"prediction_type": "v_prediction", "clip_sample_range": 0.5},
    ],
    "DDIM": [
        {},
        {"set_alpha_to_one": False, "prediction_type": "v_prediction"},
        {"clip_sample": False, "timestep_spacing": "linspace"},
        {"prediction_type": "sample"},
    ],
}


def make_scheduler(kind, **options):
    """A scheduler; options that this version of diffusers lacks are left out."""
    kind = getattr(diffusers, f"{kind}Scheduler")
    accepted = inspect.signature(kind.__init__).parameters
    options = {"beta_schedule": "squaredcos_cap_v2", **options}
    return kind(50, **{name: value for name, value in options.items() if name in accepted})


def square(scheduler):
    with torch.inference_mode():
        scheduler.alphas_cumprod.pow_(2)


def replace_config(scheduler):
    """The config that it has last takes the place in memory of the one that it had."""
    before = id(scheduler.config)
    for _ in range(50):
        scheduler.register_to_config(clip_sample=False)
        if id(scheduler.config) == before:
            break


# What is done to a scheduler between two loops of it.
CHANGES = {
    "levels replaced": lambda s: setattr(s, "alphas_cumprod", s.alphas_cumprod**2),
    "levels written": lambda s: s.alphas_cumprod.pow_(2),
    "levels written in inference mode": square,
    "last level": lambda s: setattr(s, "final_alpha_cumprod", torch.tensor(1.0)),
    "variance": lambda s: setattr(s, "variance_type", "fixed_small_log"),
    "class": lambda s: setattr(s, "__class__", type("Squared", (type(s),), {
        "_get_variance": lambda self, *args, **kwargs: torch.tensor(1e-3)})),
    "config": replace_config,
}  # fmt: skip
OF_ONE_KIND = {"last level": "DDIM", "variance": "DDPM"}
KINDS_AND_CHANGES = [(k, c) for c in CHANGES for k in OPTIONS if OF_ONE_KIND.get(c, k) == k]


def scheduler_for(kind, change):
    """A scheduler whose steps the change alters."""
    with torch.inference_mode("inference" in change):
        return make_scheduler(kind, set_alpha_to_one=False, clip_sample_range=0.3)
