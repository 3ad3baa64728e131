"""The settings of a policy's configuration that dpa knows; any other may change its actions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dpa.library.checks import require

# Of diffusion_policy's policies: their loop passes these on to the scheduler's step.
STEP_OPTIONS = ("eta", "use_clipped_model_output")
# Settings that are read, and may be expressions of omegaconf.
RESOLVED = {
    *("noise_scheduler", "horizon", "n_action_steps", "num_inference_steps"),
    *("pred_action_steps_only", "n_obs_steps", "oa_step_convention", *STEP_OPTIONS),
}
# Of the U-Net: the shapes of its weights show them.
NETWORK = {
    *("_target_", "input_dim", "local_cond_dim", "global_cond_dim", "diffusion_step_embed_dim"),
    *("down_dims", "kernel_size", "n_groups", "cond_predict_scale"),
}
# DP3's switches are read with the weights. The encoder, and the choice of the actions that are
# executed, lie outside of the exported loop.
DIFFUSION_POLICY = {
    *RESOLVED,
    *NETWORK,
    *("model", "shape_meta", "obs_dim", "action_dim"),
    *("obs_as_local_cond", "obs_as_global_cond", "lowdim_as_global_cond"),
    *("obs_encoder", "rgb_net", "crop_shape", "obs_encoder_group_norm", "eval_fixed_crop"),
    *("use_down_condition", "use_mid_condition", "use_up_condition"),
    *("encoder_output_dim", "use_pc_color", "pointnet_type", "pointcloud_encoder_cfg"),
}
LEROBOT = {
    *("type", "n_obs_steps", "horizon", "n_action_steps", "drop_n_last_frames"),
    *("input_features", "output_features", "normalization_mapping"),
    # the encoder
    *("vision_backbone", "pretrained_backbone_weights", "use_group_norm"),
    *("resize_shape", "crop_ratio", "crop_shape", "crop_is_random"),
    *("spatial_softmax_num_keypoints", "use_separate_rgb_encoder_per_camera"),
    # the network
    *("down_dims", "kernel_size", "n_groups", "diffusion_step_embed_dim"),
    "use_film_scale_modulation",
    # the loop
    *("noise_scheduler_type", "num_train_timesteps", "num_inference_steps", "prediction_type"),
    *("beta_schedule", "beta_start", "beta_end", "clip_sample", "clip_sample_range"),
    # training, and where it runs
    *("gradient_checkpointing", "compile_model", "compile_mode", "do_mask_loss_for_padding"),
    *("optimizer_lr", "optimizer_betas", "optimizer_eps", "optimizer_weight_decay"),
    *("scheduler_name", "scheduler_warmup_steps", "device", "use_amp"),
    *("push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path"),
}
# What LeRobot's DiffusionConfig takes for settings that config.json leaves out: those of the loop,
# and of the network what no shape shows. Not the horizon: 16 before LeRobot 0.6, 64 since.
LEROBOT_DEFAULTS = {
    "n_obs_steps": 2,
    "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
    "n_groups": 8,
    "noise_scheduler_type": "DDPM",
    "num_train_timesteps": 100,
    "beta_schedule": "squaredcos_cap_v2",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "prediction_type": "epsilon",
    "clip_sample": True,
    "clip_sample_range": 1.0,
    "num_inference_steps": None,
}
# Those of the scheduler, which LeRobot passes on to diffusers.
LEROBOT_SCHEDULER = (
    *("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "prediction_type"),
    *("clip_sample", "clip_sample_range"),
)
# LeRobot's processors that change no value, and those that normalise.
_PROCESSORS = {
    *("rename_observations_processor", "to_batch_processor", "device_processor"),
    *("normalizer_processor", "unnormalizer_processor"),
}
_EPS = 1e-8


def unknown(given: Mapping[str, Any], known: Collection[str], where: str) -> list[str]:
    """Name the settings that are not known; one that is None is not set."""
    return [
        f"{where}.{name}: unknown here, and left out; got {_short(value)}"
        for name, value in given.items()
        if name not in known and value is not None and (name, value) != ("use_peft", False)
    ]


def missing_of_lerobot(config: Mapping[str, Any]) -> list[str]:
    """Name the settings that LeRobot's configuration leaves out, with what is assumed for each."""
    options = {"num_inference_steps": " (--steps)"}
    options |= dict.fromkeys(("noise_scheduler_type", *LEROBOT_SCHEDULER), " (--scheduler-config)")
    return [
        f"{name}: config.json does not name it; assumed LeRobot's default, {value!r}"
        f"{options.get(name, '')}"
        for name, value in LEROBOT_DEFAULTS.items()
        if name not in config
    ]


def frames(n_obs_steps: Any) -> int:
    """Return ``n_obs_steps``, where it is a number of frames."""
    right = type(n_obs_steps) is int and n_obs_steps > 0
    require(right, "n_obs_steps", "be a positive integer", repr(n_obs_steps))
    return n_obs_steps


def switch(given: Mapping[str, Any], name: str) -> bool:
    """Return a setting that is true or false; false where it is missing."""
    value = given.get(name)
    right = value is None or isinstance(value, bool)
    require(right, name, "be true or false", repr(value))
    return bool(value)


def unknown_of_processors(folder: Path, modes: Mapping[str, str]) -> list[str]:
    """Name what the processors in LeRobot's folder do besides normalising as ``modes`` have it."""
    lines = []
    for file in sorted(folder.glob("policy_*processor.json")):
        for step in json.loads(file.read_text())["steps"]:
            name, config = step.get("registry_name"), step.get("config") or {}
            where = f"{file.name}: {name or step.get('class')}"
            if name not in _PROCESSORS:
                lines.append(f"{where} is unknown here, and left out")
            if config.get("eps", _EPS) != _EPS:
                lines.append(f"{where} has an eps of {config['eps']}; assumed {_EPS}")
            if config.get("norm_map", modes) != modes:
                got = _short(config["norm_map"])
                lines.append(f"{where} has another norm_map, {got}; assumed config.json's")
            if config.get("normalize_observation_keys") is not None:
                lines.append(f"{where} normalises some observations; assumed all")
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
