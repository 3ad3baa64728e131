"""A checkpoint's call, plain and accelerated, and where its time goes.

A LeRobot policy, where LeRobot is installed, is measured whole: observation in, actions out, with
its encoders. Of any other checkpoint the denoising loop is, with the scheduler that it names.
Plain and accelerated calls take turns, so that a machine that is busier for a while is so for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dpa
from dpa.bench.timing import latency_us, medians
from dpa.export.checkpoint import read
from dpa.export.schedulers import make_scheduler
from dpa.library.devices import choose_device, device_name

PARTS = ("whole call", "preparation", "network", "rest")
Call = Callable[[], object]


@dataclass(frozen=True)
class Options:
    """The options of ``dpa bench CHECKPOINT``; its ``--help`` explains each."""

    checkpoint: Path
    device: str = "auto"
    dtype: torch.dtype | None = None
    steps: int | None = None
    seconds: float = 20.0
    read: dict[str, Any] = field(default_factory=dict)  # options of dpa.load_checkpoint

    def __post_init__(self) -> None:
        if self.read.get("prefix") is not None and _is_lerobot(self.checkpoint):
            rule = "be left out: LeRobot loads the folder whole"
            raise ValueError(f"{self.checkpoint}: --prefix must {rule}")


@dataclass
class Subject:
    """What is measured: calls of one kind of policy, by what they do.

    Attributes:
        what: in words.
        steps: of the denoising loop.
        whole: from the observation to the actions.
        network: one evaluation of the network, None of an accelerated one.
        loop: the denoising loop alone, None where it is the whole.
        chunk: from the prepared observation to a chunk of actions: encoders and loop.
        prepare: the preprocessing of an observation.
        how: gives notes on how it runs, once it has.

    """

    what: str
    steps: int
    whole: Call
    network: Call | None = None
    loop: Call | None = None
    chunk: Call | None = None
    prepare: Call | None = None
    how: Callable[[], list[str]] = list


def measure(options: Options) -> dict[str, Any]:
    """Plain against accelerated: milliseconds of the call and its parts, ready for JSON.

    ``network`` is an evaluation of the plain network times the number of steps; where the fused
    loop runs, one op is the network and the scheduler's steps, and has the whole loop's time.

    Raises:
        ValueError: the checkpoint, or the device, is refused; the message says why.

    """
    plain, fast = subjects(options)
    with torch.no_grad():
        first = latency_us(fast.whole) / 1e3  # compares, packs, captures
    found = compared(options, plain, fast, ("whole", "loop", "network"), _parts)
    return found | {"first call ms": first}


def _parts(times: dict[str, float], steps: int) -> dict[str, float]:
    """Milliseconds by :data:`PARTS`. No part is below zero, which noise could make it."""
    whole = times["whole"]
    loop = times.get("loop", whole)
    network = min(times["network"] * steps, loop) if "network" in times else loop
    return {
        "whole call": whole,
        "preparation": max(whole - loop, 0.0),
        "network": network,
        "rest": max(loop - network, 0.0),
    }


def compared(
    options: Options,
    plain: Subject,
    fast: Subject,
    calls: Sequence[str],
    parts: Callable[[dict[str, float], int], dict[str, float]],
    warm_up: int = 1,
) -> dict[str, Any]:
    """Measure the calls that there are of both in turns; return what was found, ready for JSON.

    ``parts`` makes a subject's milliseconds by name of those of its calls, and of its steps.
    """
    subjects = {"plain": plain, "dpa": fast}
    found_calls = {
        (name, call): run
        for name, subject in subjects.items()
        for call in calls
        if (run := getattr(subject, call)) is not None
    }
    with torch.no_grad():
        times = medians(found_calls, options.seconds, warm_up)
    ms = {
        name: parts({call: times[who, call] for who, call in times if who == name}, subject.steps)
        for name, subject in subjects.items()
    }
    return {
        "checkpoint": str(options.checkpoint),
        "what": fast.what,
        "steps": fast.steps,
        "device": device_name(choose_device(options.device)),
        "torch": torch.__version__,
        **ms,
        "how": fast.how(),
        "times faster": ms["plain"]["whole call"] / ms["dpa"]["whole call"],
    }


def show(
    found: dict[str, Any], parts: Sequence[str], notes: Sequence[str], shares: bool = False
) -> None:
    """Print the parts of what was found, on request with their shares of the whole call."""
    console = Console(highlight=False)
    console.print(f"{found['what']}, {found['steps']} steps, on {found['device']}", markup=False)
    share = ["of it"] if shares else []
    columns = ("ms, median", "plain", *share, "dpa", *share, "plain / dpa")
    table = Table(*columns, box=None, header_style="bold")
    for part in parts:
        cells = []
        for ms in (found["plain"], found["dpa"]):
            cells.append(f"{ms[part]:.2f}")
            if shares:
                cells.append(f"{ms[part] / ms['whole call']:.0%}")
        plain, fast = found["plain"][part], found["dpa"][part]
        table.add_row(part, *cells, f"{plain / fast:.1f}" if fast else "")
    console.print(table)
    for line in notes:
        console.print(line, markup=False)


@torch.no_grad()
def subjects(options: Options) -> tuple[Subject, Subject]:
    """Return what is measured of a checkpoint: plain, and accelerated."""
    device = choose_device(options.device)
    return (_lerobot if _is_lerobot(options.checkpoint) else _loop)(options, device)


def _is_lerobot(path: Path) -> bool:
    """Whether it is a LeRobot folder that LeRobot, installed here, loads whole."""
    whole = (path / "policy_preprocessor.json").is_file()
    return whole and find_spec("lerobot") is not None


def _lerobot(options: Options, device: torch.device) -> tuple[Subject, Subject]:
    """The policy of a LeRobot folder, and its accelerated copy, on a made-up observation."""
    from dpa.eval.policies import LeRobotPolicy

    plain = _lerobot_subject(LeRobotPolicy(options.checkpoint, device, options.steps))
    policy = LeRobotPolicy(options.checkpoint, device, options.steps)
    dpa.accelerate(policy.policy, options.dtype)

    def how() -> list[str]:
        found = dpa.explain(policy.policy).to_dict()
        return [f"{one['path']} ({one['part']}): {one['how']}" for one in found]

    return plain, replace(_lerobot_subject(policy), network=None, how=how)


def _lerobot_subject(policy: Any) -> Subject:
    model = policy.policy.diffusion
    config = policy.policy.config
    generator = torch.Generator().manual_seed(0)
    observation = {
        name: torch.rand(shape, generator=generator) for name, shape in policy.inputs.items()
    }

    def whole() -> None:
        policy.reset()
        policy.act(observation)

    frames = policy.prepared(observation)
    if config.image_features:
        images = [frames[name] for name in config.image_features]
        frames["observation.images"] = torch.stack(images, dim=-4)
    batch = {
        name: torch.stack([frames[name]] * config.n_obs_steps, dim=1)
        for name in policy.policy._queues
        if name in frames and name.startswith("observation")
    }
    width = model.unet.diffusion_step_encoder[-1].out_features
    cond_dim = model.unet.down_modules[0][0].cond_encoder[-1].in_features - width
    shape = (1, config.horizon, config.action_feature.shape[0])
    weights = next(model.unet.parameters())
    cond = torch.randn(1, cond_dim, dtype=weights.dtype, device=weights.device)
    sample = torch.randn(shape, dtype=weights.dtype, device=weights.device)
    timestep = torch.full((1,), 5, device=weights.device)
    return Subject(
        "LeRobot's policy: preprocessing, encoders, denoising, postprocessing",
        model.num_inference_steps,
        whole,
        lambda: model.unet(sample, timestep, global_cond=cond),
        lambda: model.conditional_sample(1, global_cond=cond),
        lambda: model.generate_actions(batch),
        lambda: policy.prepared(observation),
    )


def _loop(options: Options, device: torch.device) -> tuple[Subject, Subject]:
    """The denoising loop of the checkpoint's U-Net in PyTorch's layers, and dpa's."""
    source = read(options.checkpoint, **options.read)
    scheduler = make_scheduler(source.scheduler, None)
    steps = options.steps or source.steps or scheduler.config.num_train_timesteps
    unet: nn.Module = source.unet.to(device)
    if source.unet.local_cond_dim:
        raise ValueError(
            f"{options.checkpoint}: dpa bench measures networks without local_cond, this one has a "
            f"width of {source.unet.local_cond_dim}"
        )
    multiple = source.unet.horizon_multiple
    horizon = source.horizon or -(-16 // multiple) * multiple
    width = source.unet.down_modules[0][0].blocks[0].block[0].weight.shape[1]
    weights = next(unet.parameters())
    sample = torch.randn(1, horizon, width, dtype=weights.dtype, device=device)
    cond = None
    if cond_dim := source.unet.global_cond_dim:
        cond = torch.randn(1, cond_dim, dtype=weights.dtype, device=device)
    network = dpa.reference.plain(unet)
    timestep = torch.full((1,), 5.0, device=device)

    def plain_loop() -> Tensor:
        scheduler.set_timesteps(steps)
        current = torch.randn_like(sample)
        for t in scheduler.timesteps:
            at = torch.full((1,), int(t), device=device)
            current = scheduler.step(network(current, at, None, cond), t, current).prev_sample
        return current

    sampler = dpa.DiffusionSampler(
        unet,
        make_scheduler(source.scheduler, None),
        steps,
        options.dtype,
        horizon=horizon,
        fallback=True,
    )
    what = f"the denoising loop of a checkpoint of {source.kind}"
    notes = [*source.assumed, "the encoder is not in the file, or not measured"]
    return (
        Subject(what, steps, plain_loop, lambda: network(sample, timestep, None, cond)),
        Subject(what, steps, lambda: sampler(cond, batch_size=1), how=lambda: notes),
    )
