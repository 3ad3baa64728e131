"""LeRobot's diffusion policies from their folders, with the normalisation that lies beside them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpa.checkpoints.files import read_config, read_file
from dpa.library.checks import first_line


class LeRobotPolicy:
    """LeRobot's ``DiffusionPolicy`` with its processors: observations in, actions out.

    Args:
        folder: what ``save_pretrained`` wrote: config.json, model.safetensors, and the processors
            policy_preprocessor.json and policy_postprocessor.json.
        device: where it runs.
        num_inference_steps: denoising steps; None keeps the checkpoint's.

    Attributes:
        policy: LeRobot's object, in evaluation mode.
        inputs: shapes of the observations that it takes, by name.

    Raises:
        FileNotFoundError, ValueError: the folder is no such checkpoint; the message says why.
        RuntimeError: LeRobot is not installed.

    """

    def __init__(
        self, folder: str | Path, device: torch.device, num_inference_steps: int | None = None
    ):
        folder = Path(folder)
        _check(folder)
        try:
            from lerobot.configs.policies import PreTrainedConfig
            from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
        except ImportError as error:
            raise RuntimeError(f"evaluating a LeRobot checkpoint needs LeRobot: {error}") from None
        try:
            config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
            config.device = str(device)
            config.pretrained_backbone_weights = None  # the file has them
            with contextlib.redirect_stdout(io.StringIO()):
                self.policy = DiffusionPolicy.from_pretrained(folder, config=config, strict=True)
            self._before, self._after = _processors(folder, device)
        except Exception as error:  # of any class: configuration, weights and processors raise
            raise ValueError(f"{folder}: LeRobot cannot load it: {_reason(error)}") from error
        self.device = device
        self.inputs = {name: tuple(f.shape) for name, f in config.input_features.items()}
        if num_inference_steps is not None:
            self.policy.diffusion.num_inference_steps = num_inference_steps

    def reset(self) -> None:
        """Forget the observations and actions of the episode before."""
        self.policy.reset()
        self._before.reset()
        self._after.reset()

    def plans_next(self) -> bool:
        """Whether the next :meth:`act` samples a new chunk."""
        return not self.policy._queues["action"]

    def check(self, observation: Mapping[str, Tensor], where: str) -> None:
        """Raise ValueError where an observation of the environment lacks what the policy takes."""
        for name, shape in self.inputs.items():
            got = tuple(observation[name].shape) if name in observation else "nothing"
            if got != shape:
                raise ValueError(f"the policy takes {name} of shape {shape}, {where} gives {got}")

    def prepared(self, observation: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the policy takes: normalised, a batch of one, on its device."""
        return self._before({name: observation[name] for name in self.inputs})

    def act(self, observation: Mapping[str, Tensor]) -> np.ndarray:
        """Return the action for an observation, in the environment's units."""
        action = self._after(self.policy.select_action(self.prepared(observation)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return action.squeeze(0).cpu().numpy()


def _check(folder: Path) -> None:
    if folder.is_file():
        raise ValueError(
            f"{folder}: must be a folder that LeRobot's save_pretrained wrote; policies of "
            "other projects need their own code to run"
        )
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: there is no such file")
    kind = read_config(folder / "config.json").get("type", "diffusion")
    if kind != "diffusion":
        raise ValueError(f"{folder}: its policy must be of type diffusion, got {kind}")
    for name in ("preprocessor", "postprocessor"):
        file = folder / f"policy_{name}.json"
        if not file.is_file():
            raise ValueError(f"{folder}: has no {file.name}: {_without_processors(folder)}")
        for state in _state_files(file):
            if not state.is_file():
                raise FileNotFoundError(f"{state}: there is no such file, which {file.name} names")


def _state_files(file: Path) -> list[Path]:
    """Return the files of tensors that processors name; of malformed ones LeRobot says it."""
    try:
        steps = [step for step in read_config(file)["steps"] if "state_file" in step]
        return [file.parent / step["state_file"] for step in steps]
    except (KeyError, TypeError):
        return []


def _without_processors(folder: Path) -> str:
    """What to do about a policy that lies alone."""
    weights = read_file(folder / "model.safetensors")
    if any(name.startswith("normalize_inputs.") for name in weights):
        return (
            "it was saved before LeRobot 0.4; python -m "
            f"lerobot.processor.migrate_policy_normalization --pretrained-path {folder} brings it "
            "up to date"
        )
    return "save the processors beside it, by their save_pretrained"


def _reason(error: BaseException) -> str:
    """What an error says first, what follows a colon, and what was behind it."""
    said = [line.strip() for line in str(error).strip().splitlines()]
    cause = f" ({first_line(error.__cause__)})" if error.__cause__ else ""
    more = f" {said[1]}" if len(said) > 1 and said[0].endswith(":") else ""
    return f"{first_line(error)}{more}{cause}"


def _processors(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """Return the preprocessor and the postprocessor of the policy."""
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.processor import converters as convert

    load = partial(PolicyProcessorPipeline.from_pretrained, folder, local_files_only=True)
    before = load(
        config_filename="policy_preprocessor.json",
        overrides={"device_processor": {"device": str(device)}},
        to_transition=convert.batch_to_transition,
        to_output=convert.transition_to_batch,
    )
    after = load(
        config_filename="policy_postprocessor.json",
        to_transition=convert.policy_action_to_transition,
        to_output=convert.transition_to_policy_action,
    )
    return before, after
