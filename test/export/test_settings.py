"""Configurations of any content: refused in one line, or read with nothing left out in silence."""

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from exported import DA, DO, UNET
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lerobot_names import lerobot_name

import dpa
from dpa.checkpoints.loading import CheckpointError
from dpa.export import settings as known
from dpa.export.checkpoint import read, whole_policy_config
from dpa.export.schedulers import make_scheduler
from dpa.schedulers.conversion import from_diffusers

pytest.importorskip("diffusers", reason="diffusers is not installed")
SCALARS = st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
BETAS = st.sampled_from(["linear", "squaredcos_cap_v2", "scaled_linear"]) | VALUES
SCHEDULER = {
    "num_train_timesteps": st.sampled_from([20, 1, 0]) | VALUES,
    "beta_schedule": BETAS,
    "clip_sample": VALUES,
    "clip_sample_range": VALUES,
    "prediction_type": st.sampled_from(["epsilon", "sample", "v_prediction"]) | VALUES,
    "set_alpha_to_one": VALUES,
    "steps_offset": VALUES,
}
# One value of these that is refused would hide what becomes of the others.
SOUND = {
    "n_groups": st.just(8),
    "horizon": st.integers(1, 40),
    "n_action_steps": st.integers(1, 40),
    "num_inference_steps": st.none() | st.integers(1, 9),
    "pred_action_steps_only": st.booleans(),
    **{f"use_{part}_condition": st.booleans() for part in ("down", "mid", "up")},
}
NAMES = st.sampled_from(["DDPMScheduler", "DDIMScheduler"])
CLASSES = NAMES.map("diffusers.{}".format) | VALUES
POLICY = {
    "noise_scheduler": st.fixed_dictionaries({"_target_": CLASSES}, optional=SCHEDULER) | VALUES,
    **dict.fromkeys(sorted(known.DIFFUSION_POLICY - {"noise_scheduler"}), VALUES),
    **dict.fromkeys(["guidance", "temperature", "strength"], VALUES),
    **SOUND,
}
MODES = st.dictionaries(
    st.sampled_from(["ACTION", "STATE", "ENV"]),
    st.sampled_from(["MEAN_STD", "MIN_MAX", "QUANTILES", "IDENTITY"]) | VALUES,
)
LEROBOT = {
    **{name: SCHEDULER.get(name, VALUES) for name in sorted(known.LEROBOT)},
    "normalization_mapping": MODES | VALUES,
    "guidance": VALUES,
    **SOUND,
}
CALM = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(5)
    return dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DO, **UNET).state_dict()


def check(path, policy, names, where):
    """Whatever is refused is so by CheckpointError or ValueError; the rest is known or listed."""
    try:
        source = read(path)
    except CheckpointError:
        return
    given = {name for name, value in policy.items() if value is not None}
    for name in given - {*names}:
        assert any(line.startswith(f"{where}.{name}: ") for line in source.assumed), name
    with contextlib.suppress(ValueError):
        scheduler = make_scheduler(source.scheduler, None)
        table = from_diffusers(scheduler, source.steps or 3, **source.step_options)
        assert table.coefficients.isfinite().all()


@CALM
@given(st.fixed_dictionaries({}, optional=POLICY) | VALUES)
@example(policy={".": False})
def test_policies_of_diffusion_policy(weights, policy):
    state = {f"model.{name}": value for name, value in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.ckpt"
        torch.save({"cfg": {"policy": policy}, "state_dict": state}, path)
        check(path, policy if isinstance(policy, dict) else {}, known.DIFFUSION_POLICY, "policy")


def test_a_configuration_of_omegaconf(weights, tmp_path):
    """As diffusion_policy pickles it: references, and expressions that its workspaces compute."""
    omega = pytest.importorskip("omegaconf").OmegaConf
    policy = {
        "noise_scheduler": {"_target_": "diffusers.DDIMScheduler", "num_train_timesteps": 50},
        "horizon": "${horizon}",
        "n_action_steps": "${eval:'${n_action_steps}+${n_latency_steps}'}",
        "n_obs_steps": "${n_obs_steps}",
        "pred_action_steps_only": True,
        "obs_encoder": {"shape_meta": "${task.shape_meta}"},
    }
    sizes = {"horizon": 16, "n_action_steps": 6, "n_latency_steps": 2, "n_obs_steps": 3}
    task = {"task": {"shape_meta": {"action": [2]}}, "output": "${now:%Y}"}
    cfg = omega.create({"policy": policy} | sizes | task)
    state = {f"model.{name}": value for name, value in weights.items()}
    torch.save({"cfg": cfg, "state_dicts": {"ema_model": state}}, tmp_path / "a.ckpt")
    source = read(tmp_path / "a.ckpt", trust_pickle=True)
    assert source.horizon == 8 and source.scheduler["_class_name"] == "DDIMScheduler"
    assert source.scheduler["num_train_timesteps"] == 50
    whole = whole_policy_config(source.loaded.config["cfg"])
    assert whole["obs_encoder"]["shape_meta"] == {"action": [2]} and whole["n_obs_steps"] == 3
    assert not omega.has_resolver("eval")


@CALM
@given(
    st.fixed_dictionaries({"noise_scheduler_type": st.sampled_from(["DDPM", "DDIM"]) | VALUES}),
    st.fixed_dictionaries({}, optional=LEROBOT),
)
def test_configurations_of_lerobot(weights, kind, config):
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = config | kind
    with tempfile.TemporaryDirectory() as folder:
        names = {f"diffusion.unet.{lerobot_name(n)}": v for n, v in weights.items()}
        save_file(names, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        check(Path(folder), config, known.LEROBOT, "config.json")
