"""Writes the exported file of a checkpoint, under the options of ``dpa export``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpa.export import (
    Around,
    ContinuingLoop,
    ImagePolicy,
    LayeredLoop,
    PackedLoop,
    PackedStep,
    PlainLoop,
    PlainStep,
    export_policy,
)
from dpa.export.checkpoint import Source
from dpa.export.images import encoder_of
from dpa.export.policy import Exported
from dpa.export.schedulers import left_out, make_scheduler
from dpa.library.checks import require
from dpa.schedulers.conversion import from_diffusers
from dpa.schedulers.tables import StepTable


@dataclass(frozen=True)
class Choice:
    """The options of ``dpa export``; None takes the value from the checkpoint."""

    to: str
    device: str = "cpu"
    dtype: str = "float32"
    part: str = "loop"
    layers: bool = False
    scheduler: str | None = None
    steps: int | None = None
    horizon: int | None = None
    batch: int = 1
    first_step: int = 0
    images: bool = False
    trusted: bool = False


def make(
    source: Source,
    path: Path,
    choice: Choice,
    report: Callable[[str], None] = lambda stage: None,
    checkpoint: Path = Path(),
) -> dict[str, Any]:
    """Write the file and return its manifest; ``report`` receives the name of each stage.

    ``checkpoint`` is what the source was read from.

    Raises:
        ValueError: what cannot be exported, with the reason.

    """
    if choice.to == "onnx":
        _check_onnx(choice)
    alone = choice.part == "loop" or not choice.images
    require(alone, "part", "be loop with --images", choice.part)
    report("packing")
    device = _device(choice.device)
    encoder = encoder_of(source, checkpoint, device, choice.trusted) if choice.images else None
    around = source.around if encoder is None else Around(action=source.around.action)
    width, rule = source.unet.local_cond_dim, "have no local_cond to be exported"
    require(not width, "U-Net", rule, f"a width of {width}")
    scheduler = make_scheduler(source.scheduler, choice.scheduler)
    table = _table(source, choice, scheduler)
    assumed = [*source.assumed, *left_out(source.scheduler, scheduler)]
    if choice.scheduler:  # the class was not assumed
        assumed = [line.replace("assumed DDPM, ", "assumed ") for line in assumed]
    horizon = choice.horizon or source.horizon
    multiple = source.unet.horizon_multiple
    options = {"horizon": choice.horizon, "num_inference_steps": choice.steps}
    options["noise_scheduler_type"] = choice.scheduler
    assumed = [line for line in assumed if not options.get(line.partition(":")[0])]
    if horizon is None:
        horizon = -(-16 // multiple) * multiple
        assumed.append(f"horizon: the file does not name it; assumed {horizon} (--horizon)")
    require(horizon % multiple == 0, "horizon", f"be a multiple of {multiple} here", horizon)
    first, rule = source.first_action, "be more than the first action that is executed"
    require(first < horizon, "horizon", f"{rule}, {first} (n_obs_steps)", horizon)
    size = choice.batch, horizon
    policy = _policy(choice, source.unet.to(device), table, around, size)
    shape = (*size, source.unet.final_conv[-1].weight.shape[0])
    inputs = {"observation": torch.zeros(choice.batch, source.observation_dim)}
    if encoder is not None:
        inputs = {one.name: one.example(choice.batch) for one in encoder.observed}
        policy = ImagePolicy(encoder, policy)
        assumed = [line for line in assumed if not line.startswith("observation: the global_cond")]
    inputs |= _inputs_of_loop(choice.part, table, shape)
    facts = {
        "checkpoint": source.kind,
        "scheduler": type(scheduler).__name__,
        "draws_noise": list(table.draws_noise),
        "first_step": choice.first_step,
        "first_action": source.first_action,
        "assumed": assumed,
    }
    if encoder is not None:
        facts["frames"] = encoder.observed[0].shape[0]
    inputs = {name: value.to(device) for name, value in inputs.items()}
    return export_policy(policy.to(device), path, choice.to, inputs, facts, report)


def _table(source: Source, choice: Choice, scheduler: Any) -> StepTable:
    steps = choice.steps or source.steps or scheduler.config.num_train_timesteps
    rule = "take single steps (as DDPM, DDIM and Euler do) to be exported"
    try:
        # The loops of these policies scale nothing.
        loop = {"first_step": choice.first_step, "scaled": False}
        table = from_diffusers(scheduler, steps, **source.step_options, **loop)
    except (AttributeError, TypeError) as error:  # another class, or options of another type
        raise ValueError(f"scheduler must {rule}: {error}") from None
    require(type(table) is StepTable, "scheduler", rule, type(scheduler))
    return table


def _policy(
    choice: Choice, unet: nn.Module, table: StepTable, around: Around, size: tuple[int, int]
) -> Exported:
    """Return the module that is exported."""
    dtype = getattr(torch, choice.dtype)
    if choice.to == "onnx":
        return (PlainLoop if choice.part == "loop" else PlainStep)(unet, table, around)
    if choice.part == "continuing":
        return ContinuingLoop(unet, table, dtype, around, choice.first_step > 0, size)
    if choice.layers:
        return LayeredLoop(unet.to(dtype), table, around)
    return (PackedLoop if choice.part == "loop" else PackedStep)(unet, table, dtype, around, size)


def _inputs_of_loop(part: str, table: StepTable, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return an example of each input besides the observation."""
    if part == "step":
        index = torch.zeros(1, dtype=torch.int64)
        return {"sample": torch.randn(shape), "index": index, "noise": torch.randn(shape)}
    inputs = {"noise": torch.randn(1 + sum(table.draws_noise), *shape)}
    if part == "continuing":
        inputs |= {"last_chunk": torch.zeros(shape), "weights": torch.zeros(shape)}
    return inputs


def _check_onnx(choice: Choice) -> None:
    """Refuse what an ONNX file leaves to the runtime that opens it."""
    one = choice.part != "continuing"
    require(one, "part", "be loop or step with --to onnx", choice.part)
    require(not choice.images, "images", "be left out with --to onnx, which takes the loop", True)
    require(not choice.layers, "layers", "be left out with --to onnx, which has no others", True)
    for name, value in {"device": "cpu", "dtype": "float32"}.items():
        got, rule = getattr(choice, name), "be left out with --to onnx, whose runtime chooses it"
        require(got == value, name, rule, got)


def _device(name: str) -> torch.device:
    kind, colon, number = name.partition(":")
    right = kind in ("cpu", "cuda") and (not colon or number.isdigit())
    require(right, "device", "be cpu, cuda or cuda:N", name)
    here = kind == "cpu" or torch.cuda.is_available()
    require(here, "device", "be cpu here: PyTorch sees no GPU", name)
    return torch.device(name)
