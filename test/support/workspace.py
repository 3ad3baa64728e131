"""diffusion_policy's own training workspace, unedited, on a small task.

Its source tree has to be on PYTHONPATH. Of its dependencies those that only configure, log or store
have replacements here, used where they are not installed.
"""

import copy
import functools
import importlib
import importlib.util
import json
import sys
import types
import typing
from importlib.machinery import ModuleSpec

import numpy as np
import torch

MODULE = "diffusion_policy.workspace.train_diffusion_unet_lowdim_workspace"
ROOTS = ("hydra", "omegaconf", "wandb", "zarr")


class Config(dict):
    """Attributes for keys, as OmegaConf has them."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    __setattr__ = dict.__setitem__

    def __deepcopy__(self, memo):
        return Config({key: copy.deepcopy(value, memo) for key, value in self.items()})


def config(value):
    """Dictionaries as configurations, all the way down."""
    return Config({k: config(v) for k, v in value.items()}) if isinstance(value, dict) else value


def _instantiate(node, **options):
    options = {k: v for k, v in node.items() if k != "_target_"} | options
    made = {
        k: _instantiate(v) if isinstance(v, dict) and "_target_" in v else v
        for k, v in options.items()
    }
    module, _, name = node["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**made)


def _replacements():
    nothing = lambda *_, **__: None  # noqa: E731
    hydra = types.ModuleType("hydra")
    hydra.main = lambda **_: lambda function: function
    hydra.utils = types.SimpleNamespace(instantiate=_instantiate)
    core, settings = types.ModuleType("hydra.core"), types.ModuleType("hydra.core.hydra_config")
    settings.HydraConfig = None
    omega = types.ModuleType("omegaconf")
    omega.OmegaConf = types.SimpleNamespace(
        register_new_resolver=nothing, to_container=lambda node, **_: dict(node)
    )
    wandb, zarr = types.ModuleType("wandb"), types.ModuleType("zarr")
    wandb.init = lambda **_: types.SimpleNamespace(log=nothing)
    wandb.config = types.SimpleNamespace(update=nothing)
    zarr.Array = np.ndarray
    return [hydra, core, settings, omega, wandb, zarr]


def workspace_class(monkeypatch):
    """The workspace, or None where the source tree is not there."""
    if importlib.util.find_spec("diffusion_policy") is None:
        return None
    missing = {root for root in ROOTS if importlib.util.find_spec(root) is None}
    missing.add("omegaconf")  # which takes no configuration but its own
    for module in _replacements():
        if module.__name__.partition(".")[0] in missing:
            module.__spec__ = ModuleSpec(module.__name__, None)  # others look for it
            monkeypatch.setitem(sys.modules, module.__name__, module)
    from diffusers import optimization

    for name in (
        "Union",
        "Optional",
    ):  # which diffusers imports no more, and the project takes there
        if not hasattr(optimization, name):
            monkeypatch.setattr(optimization, name, getattr(typing, name), raising=False)
    return importlib.import_module(MODULE).TrainDiffusionUnetLowdimWorkspace


@functools.cache
def _task():
    from diffusion_policy.dataset.base_dataset import BaseLowdimDataset
    from diffusion_policy.env_runner.base_lowdim_runner import BaseLowdimRunner
    from diffusion_policy.model.common.normalizer import LinearNormalizer

    class Data(BaseLowdimDataset):
        """Actions along the observation."""

        def __init__(self, samples, seed=0):
            generator = torch.Generator().manual_seed(seed)
            obs = torch.randn(samples, 1, 4, generator=generator).repeat(1, 8, 1)
            ramp = torch.linspace(0, 1, 8)[None, :, None]
            self.data = {"obs": obs, "action": ramp * obs[..., :2]}

        def get_validation_dataset(self):
            return Data(4, seed=1)

        def get_normalizer(self):
            normalizer = LinearNormalizer()
            normalizer.fit(data=self.data, last_n_dims=1)
            return normalizer

        def __len__(self):
            return len(self.data["obs"])

        def __getitem__(self, i):
            return {name: value[i] for name, value in self.data.items()}

    class Runner(BaseLowdimRunner):
        """Acts once."""

        def run(self, policy):
            with torch.no_grad():
                action = policy.predict_action({"obs": torch.ones(2, 2, 4)})["action"]
            return {"test_mean_score": float(action.square().mean())}

    return {"Data": Data, "Runner": Runner}


def make_task(kind, **options):
    """What the configuration names: the data set, or what runs the environment."""
    return _task()[kind](**options)


def configuration(device="cpu"):
    """As the project's, small."""
    package, here = "diffusion_policy.", f"{__name__}.make_task"
    policy = {
        "_target_": f"{package}policy.diffusion_unet_lowdim_policy.DiffusionUnetLowdimPolicy",
        "model": {
            "_target_": f"{package}model.diffusion.conditional_unet1d.ConditionalUnet1D",
            "input_dim": 2, "global_cond_dim": 8, "diffusion_step_embed_dim": 16,
            "down_dims": (16, 32), "kernel_size": 5, "n_groups": 8, "cond_predict_scale": True,
        },
        "noise_scheduler": {
            "_target_": "diffusers.DDPMScheduler", "num_train_timesteps": 8,
            "beta_schedule": "squaredcos_cap_v2",
        },
        "horizon": 8, "obs_dim": 4, "action_dim": 2, "n_action_steps": 4, "n_obs_steps": 2,
        "num_inference_steps": 4, "obs_as_global_cond": True, "oa_step_convention": True,
    }  # fmt: skip
    loader = {"batch_size": 4, "num_workers": 0, "shuffle": True}
    training = {
        "seed": 3, "device": device, "use_ema": True, "resume": False, "debug": False,
        "lr_scheduler": "cosine", "lr_warmup_steps": 2, "num_epochs": 2,
        "gradient_accumulate_every": 1, "max_train_steps": None, "max_val_steps": None,
        "rollout_every": 1, "val_every": 1, "sample_every": 1, "checkpoint_every": 1,
        "tqdm_interval_sec": 1.0,
    }  # fmt: skip
    topk = {"monitor_key": "test_mean_score", "mode": "max", "k": 1}
    return config(
        {
            "policy": policy,
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 1e-6},
            "ema": {"_target_": f"{package}model.diffusion.ema_model.EMAModel"},
            "task": {
                "dataset": {"_target_": here, "kind": "Data", "samples": 12},
                "env_runner": {"_target_": here, "kind": "Runner"},
            },
            "dataloader": loader,
            "val_dataloader": loader | {"shuffle": False},
            "training": training,
            "logging": {"mode": "disabled"},
            "checkpoint": {"topk": topk, "save_last_ckpt": True, "save_last_snapshot": False},
            "pred_action_steps_only": False,
            "n_obs_steps": 2,
            "n_action_steps": 4,
        }
    )


def logged(folder):
    """What each step and epoch logged."""
    return [json.loads(line) for line in (folder / "logs.json.txt").read_text().splitlines()]
