"""The parts of a checkpoint besides the U-Net: scheduler, horizon, normalisation."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpa.checkpoints.files import CheckpointError, read_file
from dpa.checkpoints.loading import Checkpoint, load_checkpoint
from dpa.export import settings
from dpa.export.places import folder_of
from dpa.export.policy import Affine, Around
from dpa.export.schedulers import USUAL_SCHEDULER
from dpa.library.checks import require
from dpa.nn.unet1d import ConditionalUnet1D


@dataclass
class Source:
    """A policy read from a checkpoint.

    Attributes:
        kind: "dpa demo", "LeRobot", "diffusion_policy" or "U-Net".
        loaded: what it was read from.
        scheduler: a configuration as diffusers writes it, with ``_class_name``.
        around: encoder and normalisation.
        observation_dim: width of an observation.
        horizon: T, or None where the file does not hold it.
        steps: denoising steps, or None where the file does not hold them.
        assumed: values that are missing in the file and were assumed, and settings that dpa does
            not know, one sentence each.
        step_options: options of the scheduler's step, as :func:`dpa.schedulers.from_diffusers`
            takes them.
        first_action: which of a chunk's actions is for the time of the newest observation.

    """

    kind: str
    loaded: Checkpoint
    scheduler: dict[str, Any]
    around: Around
    observation_dim: int
    horizon: int | None = None
    steps: int | None = None
    assumed: list[str] = field(default_factory=list)
    step_options: dict[str, Any] = field(default_factory=dict)
    first_action: int = 0

    @property
    def unet(self) -> ConditionalUnet1D:
        """The network, in evaluation mode, on the CPU."""
        return self.loaded.unet


def read(path: Path, **options: Any) -> Source:
    """Read a checkpoint of any kind that :func:`dpa.load_checkpoint` reads, with its options.

    Raises:
        FileNotFoundError, CheckpointError: as there.

    """
    loaded = load_checkpoint(path, **options)
    try:
        source = _source(loaded, path)
    except CheckpointError:
        raise
    except Exception as error:  # a configuration may hold anything, and be read by any code
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"{path}: its configuration cannot be read: {reason}") from None
    for name in ("horizon", "steps"):
        value = getattr(source, name)
        right = value is None or (type(value) is int and value > 0)
        require(right, f"{path}: {name}", "be a positive integer", repr(value), CheckpointError)
    wrong = next((n for n, v in _values(source).items() if not v.isfinite().all()), None)
    got = "NaN or infinity"
    require(wrong is None, f"{path}: {wrong}", "be finite", got, CheckpointError)
    return source


def _values(source: Source) -> dict[str, Tensor]:
    """Return all numbers that actions are made with, by names for messages."""
    around, named = source.around, dict(source.unet.state_dict())
    if around.encoder is not None:
        named |= {f"encoder.{n}": v for n, v in around.encoder.state_dict().items()}
    for name in ("observation", "action"):
        affine = getattr(around, name) or Affine.none()
        named[f"the normalisation of {name}s"] = torch.cat(affine)
    return named


def _source(loaded: Checkpoint, path: Path) -> Source:
    config = loaded.config
    if config.get("format") == "dpa-demo":
        return _demo(loaded)
    if config.get("type") == "diffusion" or "noise_scheduler_type" in config:
        return _lerobot(loaded, path)
    if "cfg" in config:
        if not loaded.arguments["global_cond_dim"]:
            raise CheckpointError(
                f"{path}: the network has no global_cond: the policy passes its observations as "
                "condition_data or local_cond, which an exported loop does not take"
            )
        return _diffusion_policy(loaded, config["cfg"])
    return _bare(loaded)


def _bare(loaded: Checkpoint) -> Source:
    usual = "DDPM, 100 training steps, squaredcos_cap_v2, epsilon, clipped to 1"
    assumed = [
        f"scheduler: the file does not name it; assumed {usual} (--scheduler-config)",
        "normalisation: the file names none; observations and actions are the network's own",
    ]
    width = loaded.arguments["global_cond_dim"] or 0
    return Source("U-Net", loaded, USUAL_SCHEDULER, Around(), width, assumed=assumed)


def _demo(loaded: Checkpoint) -> Source:
    from dpa.demo import train, world

    network = train.Network(loaded.config["unet"])
    encoder = {n.removeprefix("encoder."): v for n, v in loaded.rest.items()}
    network.encoder.load_state_dict(encoder)
    scheduler = {"_class_name": "DDIMScheduler", **loaded.config["scheduler"]}
    around = Around(network.encoder)
    width, horizon = world.OBSERVATION_DIM, world.HORIZON
    return Source("dpa demo", loaded, scheduler, around, width, horizon, steps=8)


def _lerobot(loaded: Checkpoint, path: Path) -> Source:
    config = settings.LEROBOT_DEFAULTS | loaded.config
    scheduler = {name: config[name] for name in settings.LEROBOT_SCHEDULER}
    scheduler["_class_name"] = f"{config['noise_scheduler_type']}Scheduler"
    folder = folder_of(path)
    statistics = _lerobot_statistics(loaded.rest, folder)
    assumed = settings.unknown(config, settings.LEROBOT, "config.json")
    assumed += settings.missing_of_lerobot(loaded.config)
    assumed += settings.unknown_of_processors(folder, config["normalization_mapping"] or {})
    action = _lerobot_affine(config, statistics, "action", "ACTION")
    if action is None:
        needed = _needed(config, "ACTION")
        assumed.append(f"actions: the folder holds no {needed}; they are the network's own")
    observation = None
    frames = settings.frames(config["n_obs_steps"])
    inputs = config.get("input_features") or {}
    width = loaded.arguments["global_cond_dim"] or 0
    if any(feature.get("type") == "VISUAL" for feature in inputs.values()):
        assumed.append(
            "observation: the global_cond that the policy makes (_prepare_global_conditioning)"
        )
    else:
        kinds = {"observation.state": "STATE", "observation.environment_state": "ENV"}
        parts = [
            _lerobot_affine(config, statistics, name, kind, math.prod(inputs[name]["shape"]))
            for name, kind in kinds.items()
            if name in inputs
        ]
        if parts and None not in parts:
            observation = _concatenated(parts, frames)
            given = observation.scale.numel()
            rule = f"give the {width} values that the network takes"
            got = f"{given} of {frames} frames"
            require(
                given == width, f"{path}: input_features, n_obs_steps", rule, got, CheckpointError
            )
        else:
            needed = _needed(config, *kinds.values())
            assumed.append(f"observation: the folder holds no {needed}; normalise it before")
    return Source(
        "LeRobot",
        loaded,
        scheduler,
        Around(None, observation, action and action.inverse()),
        width,
        config.get("horizon"),
        config["num_inference_steps"],
        assumed,
        first_action=frames - 1,
    )


def normalisations_of_lerobot(
    loaded: Checkpoint, path: Path, features: Mapping[str, Any]
) -> dict[str, Affine]:
    """Return how a folder of LeRobot normalises each of its observations.

    Raises:
        ValueError: the folder lacks the statistics of one.

    """
    statistics = _lerobot_statistics(loaded.rest, folder_of(path))
    config, found = settings.LEROBOT_DEFAULTS | loaded.config, {}
    for name, feature in features.items():
        kind = getattr(feature.type, "value", feature.type)
        width = feature.shape[0]  # channels of an image
        affine = _lerobot_affine(config, statistics, name, kind, width)
        if affine is None:
            raise ValueError(f"{path}: holds no {_needed(config, kind)} of {name}")
        found[name] = affine
    return found


def _lerobot_mode(config: Mapping[str, Any], kind: str) -> str | None:
    """Return LeRobot's way to normalise a kind of feature; None where nothing says."""
    modes = config["normalization_mapping"]
    return None if modes is None else modes.get(kind, "IDENTITY")


def _lerobot_statistics(rest: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return ``FEATURE.STATISTIC`` tensors, of whichever of LeRobot's two layouts is there."""
    found = {}
    for name, value in rest.items():  # within the model, up to LeRobot 0.3
        _, buffer, name = name.partition(".buffer_")
        if buffer:
            feature, _, statistic = name.rpartition(".")
            feature = feature.replace("observation_", "observation.", 1)
            found[f"{feature}.{statistic}"] = value
    for kind in ("pre", "post"):  # in processors of their own, since
        for file in sorted(folder.glob(f"policy_{kind}processor_step_*.safetensors")):
            # Both have the statistics of everything; the second unnormalises actions with its own.
            own = kind == "pre" or not found
            found |= {n: v for n, v in read_file(file).items() if own or n.startswith("action.")}
    return {name: value.flatten().float() for name, value in found.items()}


def _lerobot_affine(
    config: Mapping[str, Any],
    statistics: Mapping[str, Tensor],
    name: str,
    kind: str,
    width: int = 1,
) -> Affine | None:
    """Return what normalises a feature; None where its statistics are missing."""
    mode = _lerobot_mode(config, kind)

    def of(statistic: str) -> Tensor:
        return statistics[f"{name}.{statistic}"]

    if mode == "IDENTITY":
        return Affine.none(width)
    if mode is None:
        return None
    rule = f"be of {', '.join(_MODES)}"
    require(mode in _MODES, "normalization_mapping", rule, repr(mode))
    low, high = _MODES[mode]
    if any(f"{name}.{statistic}" not in statistics for statistic in (low, high)):
        return None
    if mode == "MEAN_STD":
        return Affine(1 / (of("std") + 1e-8), torch.zeros_like(of("mean")), of("mean"))
    span = of(high) - of(low)
    span = torch.where(span == 0, torch.full_like(span, 1e-8), span)
    return Affine(2 / span, -torch.ones_like(span), of(low))


# The two statistics of each of LeRobot's ways to normalise.
_MODES = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


def _needed(config: Mapping[str, Any], *kinds: str) -> str:
    """Name the statistics that features of these kinds need."""
    modes = [_lerobot_mode(config, kind) or "" for kind in kinds]
    names = dict.fromkeys(name for mode in modes for name in _MODES.get(mode, ()))
    return f"statistics ({', '.join(names)})" if names else "statistics"


def _diffusion_policy(loaded: Checkpoint, cfg: Any) -> Source:
    cfg = _plain(cfg)
    policy = cfg.get("policy") or {}
    scheduler = dict(policy.get("noise_scheduler") or {})
    assumed = settings.unknown(policy, settings.DIFFUSION_POLICY, "policy")
    assumed += settings.unknown(policy.get("model") or {}, settings.NETWORK, "policy.model")
    horizon = policy.get("horizon", cfg.get("horizon"))
    if settings.switch(policy, "pred_action_steps_only"):
        # The loop is as long as the chunk that is executed.
        horizon = policy.get("n_action_steps", cfg.get("n_action_steps"))
        switch, rule = "pred_action_steps_only", "have n_action_steps beside it"
        require(horizon is not None, switch, rule, "none")
    if scheduler:
        scheduler["_class_name"] = str(scheduler.pop("_target_", "DDPMScheduler")).rpartition(".")[
            2
        ]
    else:
        scheduler = USUAL_SCHEDULER
        assumed.append("scheduler: cfg.policy names none; assumed DDPM with the usual options")
    affines = normalizer_of(loaded.rest)
    action, low, observation = affines.get("action"), affines.get("obs"), None
    if action is None:
        assumed.append("actions: the file holds no normalizer; they are the network's own")
    width = loaded.arguments["global_cond_dim"] or 0
    frame = 0 if low is None else low.scale.numel()
    if frame and width % frame == 0:
        observation = _concatenated([low], width // frame)
    elif width:
        assumed.append("observation: the global_cond that the policy's encoder makes")
    return Source(
        "diffusion_policy",
        loaded,
        scheduler,
        Around(None, observation, action and action.inverse()),
        width,
        horizon,
        policy.get("num_inference_steps"),
        assumed,
        {name: policy[name] for name in settings.STEP_OPTIONS if policy.get(name) is not None},
        _first_action(policy, cfg),
    )


def _first_action(policy: Mapping[str, Any], cfg: Mapping[str, Any]) -> int:
    """Return where diffusion_policy begins to execute a chunk."""
    if settings.switch(policy, "pred_action_steps_only"):
        return 0
    given = policy.get("n_obs_steps", cfg.get("n_obs_steps"))
    frames = 1 if given is None else settings.frames(given)
    # Only its low-dimensional policies have the switch; off, they leave the newest one's out.
    from_newest = "obs_dim" not in policy or settings.switch(policy, "oa_step_convention")
    return frames - 1 if from_newest else frames


def normalizer_of(rest: Mapping[str, Tensor]) -> dict[str, Affine]:
    """Return how diffusion_policy's LinearNormalizer normalises each feature."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in rest.items():
        head, _, tail = name.partition("normalizer.params_dict.")
        feature, _, part = tail.rpartition(".")
        if tail and not head.strip(".") and part in ("scale", "offset"):
            parts.setdefault(feature, {})[part] = value.flatten().float()
    return {
        feature: Affine(found["scale"], found["offset"], torch.zeros_like(found["offset"]))
        for feature, found in parts.items()
        if len(found) == 2
    }


def whole_policy_config(cfg: Any) -> dict[str, Any]:
    """Return all of diffusion_policy's ``cfg.policy`` as plain values, references resolved."""
    if not _is_omegaconf(cfg):
        return dict(cfg.get("policy") or {})
    with _expressions() as omega:
        policy = omega.select(cfg, "policy")
        return omega.to_container(policy, resolve=True) if policy is not None else {}


def _plain(cfg: Any) -> dict[str, Any]:
    """Return a configuration's values: of one of omegaconf's those that are read, resolved."""
    if not _is_omegaconf(cfg):
        return dict(cfg)
    with _expressions() as omega:
        policy = omega.select(cfg, "policy")
        plain: dict[Any, Any] = omega.to_container(policy) if omega.is_config(policy) else {}
        for name in settings.RESOLVED & set(plain):
            value = omega.select(cfg, f"policy.{name}")
            plain[name] = (
                omega.to_container(value, resolve=True) if omega.is_config(value) else value
            )
        outside = {"horizon", "n_action_steps", "n_obs_steps"} & set(cfg) - set(plain)
        return {name: omega.select(cfg, name) for name in outside} | {"policy": plain}


def _is_omegaconf(cfg: Any) -> bool:
    return type(cfg).__module__.partition(".")[0] == "omegaconf"  # whose dicts are mappings too


@contextlib.contextmanager
def _expressions() -> Iterator[Any]:
    """Give omegaconf's class, for which ``${eval:...}`` has a meaning meanwhile.

    diffusion_policy's workspaces register that where they are imported. Whoever may read such a
    configuration trusts the file: it was pickled.
    """
    from omegaconf import OmegaConf

    unknown = not OmegaConf.has_resolver("eval")
    if unknown:
        with warnings.catch_warnings():  # of the name, which newer releases shorten
            warnings.simplefilter("ignore")
            getattr(OmegaConf, "register_new_resolver", OmegaConf.register_resolver)("eval", eval)
    try:
        yield OmegaConf
    finally:
        if unknown:
            OmegaConf.clear_resolver("eval")


def _concatenated(parts: list[Affine], repeats: int) -> Affine:
    return Affine(*(torch.cat(values).repeat(repeats) for values in zip(*parts, strict=True)))
