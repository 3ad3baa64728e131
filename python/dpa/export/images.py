"""A policy from camera images: normalisation, encoders and denoising loop in one module."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpa.export.checkpoint import (
    Source,
    normalisations_of_lerobot,
    normalizer_of,
    whole_policy_config,
)
from dpa.export.policy import Affine, Exported
from dpa.library.checks import require

_IMAGES = "have images to be exported with --images"
_LIMIT = 1e-4  # of the actions of a traced module, relative, beside those of the module


@dataclass(frozen=True)
class Observed:
    """What an exported policy takes of one sensor.

    Attributes:
        name: as the checkpoint names it.
        shape: of an observation: (frames, H, W, C) of an image, (frames, D) of a state.
        affine: what it is normalised with, an image in [0, 1] by channels; or (scale, offset).

    """

    name: str
    shape: tuple[int, ...]
    affine: Affine | tuple[Tensor, Tensor]

    @property
    def is_image(self) -> bool:
        """Whether it is an image, uint8."""
        return len(self.shape) == 4

    def example(self, batch: int) -> Tensor:
        """Return random numbers of its kind."""
        shape = (batch, *self.shape)
        return (
            torch.randint(0, 256, shape, dtype=torch.uint8) if self.is_image else torch.randn(shape)
        )


class Encoder(nn.Module):
    """Observations to ``global_cond``: images to [0, 1] and channels first, all normalised.

    Args:
        observed: what comes, in order.
        encode: maps the normalised observations by name to (B, Dg).
        holder: the module that ``encode`` calls.

    """

    def __init__(
        self,
        observed: list[Observed],
        encode: Callable[[dict[str, Tensor]], Tensor],
        holder: nn.Module,
    ):
        super().__init__()
        self.observed, self._encode, self.holder = observed, encode, holder
        for place, one in enumerate(observed):
            for part, value in Affine(*one.affine)._asdict().items():
                value = value.detach().float().clone()
                self.register_buffer(
                    f"{part}_{place}", value[:, None, None] if one.is_image else value
                )

    def forward(self, *observations: Tensor) -> Tensor:
        """Encode (B, frames, ...) of each."""
        given: dict[str, Tensor] = {}
        for place, (one, value) in enumerate(zip(self.observed, observations, strict=True)):
            if one.is_image:
                value = value.permute(0, 1, 4, 2, 3).float() / 255
            scale, offset, center = (getattr(self, f"{part}_{place}") for part in Affine._fields)
            given[one.name] = (value - center) * scale + offset
        return self._encode(given)


class ImagePolicy(nn.Module):
    """The whole policy: ``(*observations, noise) -> actions``.

    Args:
        encoder: of the observations.
        loop: a loop on what it encodes; it normalises actions alone.

    """

    def __init__(self, encoder: Encoder, loop: Exported):
        super().__init__()
        self.encoder, self.loop = encoder, loop
        self.dtype, self.steps, self.clip = loop.dtype, loop.steps, loop.clip
        self.timesteps = loop.timesteps

    def forward(self, *inputs: Tensor) -> Tensor:
        """Map observations (B, frames, ...) and noise, as the loop takes it, to (B, T, Da)."""
        *observations, noise = inputs
        return self.loop(self.encoder(*observations), noise)

    def normalisation(self) -> dict[str, dict[str, list[float]]]:
        """Return what each observation is normalised with, and actions unnormalised."""
        found = {one.name: Affine(*one.affine).numbers() for one in self.encoder.observed}
        return found | {"action": self.loop.normalisation()["action"]}

    def traced(self, inputs: Mapping[str, Tensor]) -> torch.jit.ScriptModule:
        """Return the policy as TorchScript, tried on other inputs than it was traced on.

        Raises:
            ValueError: it gives other actions there.

        """
        given = tuple(inputs.values())
        # Encoders compute with sizes, which are numbers in a program and tensors in a trace.
        program = torch.export.export(self, given).module(check_guards=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of those sizes
            traced = torch.jit.trace(_Described(program, inputs), given, check_trace=False)
        others = [
            torch.randint_like(x, 0, 256) if x.dtype == torch.uint8 else torch.randn_like(x)
            for x in inputs.values()
        ]
        expected, got = self(*others), traced(*others)
        error = float((got - expected).norm() / expected.norm())
        got = f"a relative error of {error:.1e}"
        require(error < _LIMIT, "the encoder", "be traceable", got)
        return traced


class _Described(nn.Module):
    """A program that is traced, which refuses what is not as it was traced with.

    A trace divides an image by 255 whatever its dtype is, and stretches a state of one number.
    """

    def __init__(self, program: nn.Module, inputs: Mapping[str, Tensor]):
        super().__init__()
        self.program, self._checked = program, torch.jit.script(_checked)
        self.like = [torch.empty_like(value, device="cpu") for value in inputs.values()]
        self.rules = [f"{n} must be {x.dtype}, {list(x.shape)}" for n, x in inputs.items()]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the program."""
        return self.program(*self._checked(list(inputs), self.like, self.rules))


def _checked(given: list[Tensor], like: list[Tensor], rules: list[str]) -> list[Tensor]:
    for i in range(len(given)):
        if given[i].dtype != like[i].dtype:
            raise ValueError(f"{rules[i]}, got another dtype")
        if given[i].shape != like[i].shape:
            raise ValueError(f"{rules[i]}, got {list(given[i].shape)}")
    return given


def encoder_of(source: Source, path: Path, device: torch.device, trusted: bool) -> Encoder:
    """Return the encoder of a checkpoint, with its project's own code.

    Args:
        source: read from the checkpoint.
        path: of the checkpoint.
        device: where it shall run.
        trusted: whether code that the checkpoint names may run.

    Raises:
        ValueError: no images, or a checkpoint of another kind; the message says why.
        RuntimeError: the project is not installed.

    """
    if source.kind == "diffusion_policy":
        return _of_diffusion_policy(source, trusted).eval().to(device)
    rule = "be a folder of LeRobot, or diffusion_policy's, with --images"
    require(source.kind == "LeRobot" and path.is_dir(), "checkpoint", rule, source.kind)
    return _of_lerobot(source, path, device).eval().to(device)


def _of_lerobot(source: Source, path: Path, device: torch.device) -> Encoder:
    from dpa.eval.policies import LeRobotPolicy

    policy = LeRobotPolicy(path, device).policy
    config, model = policy.config, policy.diffusion
    names = ["observation.state", "observation.environment_state"]
    names = [*config.image_features, *(n for n in names if n in config.input_features)]
    affines = normalisations_of_lerobot(source.loaded, path, config.input_features)
    require(config.image_features, "checkpoint", _IMAGES, "none")
    shapes = {name: tuple(config.input_features[name].shape) for name in names}
    observed = [
        Observed(name, _shape(shape, config.n_obs_steps, len(shape) == 3), affines[name])
        for name, shape in shapes.items()
    ]

    def encode(given: dict[str, Tensor]) -> Tensor:
        images = torch.stack([given[name] for name in config.image_features], dim=2)
        batch = {n: v for n, v in given.items() if n not in config.image_features}
        return model._prepare_global_conditioning(batch | {"observation.images": images})

    return Encoder(observed, encode, model)


def _of_diffusion_policy(source: Source, trusted: bool) -> Encoder:
    """Return the ``obs_encoder`` of the policy that the configuration's ``_target_`` makes."""
    if not trusted:
        raise ValueError("checkpoint must be trusted to run the code that it names: --trust-pickle")
    config = whole_policy_config(source.loaded.config["cfg"])
    features = (config.get("shape_meta") or {}).get("obs") or {}
    images = any(feature.get("type") == "rgb" for feature in features.values())
    require(images, "checkpoint", _IMAGES, "none")
    encoder = getattr(_made(config), "obs_encoder", None)
    got = config.get("_target_")
    require(isinstance(encoder, nn.Module), "policy", "have an obs_encoder", got)
    rest, begin = source.loaded.rest, "obs_encoder."
    encoder.load_state_dict(
        {n.removeprefix(begin): v for n, v in rest.items() if n.startswith(begin)}
    )
    frames, affines, observed = config["n_obs_steps"], normalizer_of(rest), []
    for name, feature in features.items():
        require(name in affines, "checkpoint", f"have a normalizer of {name}", "none")
        shape = _shape(tuple(feature["shape"]), frames, feature.get("type") == "rgb")
        observed.append(Observed(name, shape, affines[name]))

    def encode(given: dict[str, Tensor]) -> Tensor:
        batch = next(iter(given.values())).shape[0]
        return encoder({n: v.flatten(0, 1) for n, v in given.items()}).reshape(batch, -1)

    return Encoder(observed, encode, encoder)


def _made(config: Any) -> Any:
    """Make what a configuration says, as hydra does: an object of each ``_target_``."""
    if isinstance(config, list):
        return [_made(value) for value in config]
    if not isinstance(config, Mapping):
        return config
    values = {name: _made(value) for name, value in config.items() if name != "_target_"}
    if "_target_" not in config:
        return values
    module, _, name = config["_target_"].rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise RuntimeError(f"exporting the encoder needs the policy's own code: {error}") from None
    return kind(**values)


def _shape(shape: tuple[int, ...], frames: int, is_image: bool) -> tuple[int, ...]:
    return (frames, *shape[1:], shape[0]) if is_image else (frames, *shape)
